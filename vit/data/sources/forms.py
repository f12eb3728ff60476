"""The sources of raw pictures: what a published convention says, or the user in words.

A folder that follows no convention is refused, with the command that may be meant
(`vit.data.sources.hints`).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vit.data.sources import arrays, folders, hints, ilsvrc2012, parquet, tables
from vit.data.sources.source import Example, Source, Unsaid, checked, is_picture
from vit.data.sources.words import NONE, Words, check

INSPECTED = 10_000
"""Files that are looked at for a hint."""
METADATA = "Hugging Face's metadata"


def _folders(folder: Path) -> bool:
    return any(map(folders.has_pictures, folders.folders(folder)))


CONVENTIONS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Words], Source]]] = {
    "ILSVRC2012's tar files": (ilsvrc2012.has_archives, ilsvrc2012.read),
    "IDX files": (lambda x: [*x.glob("*-images?idx3-ubyte*")], arrays.read_idx_folder),
    "npz files": (lambda x: [*x.glob("*.npz")], arrays.read_npz),
    "parquet files": (parquet.paths, parquet.read),
    METADATA: (tables.metadata, tables.read_metadata),
    "class folders": (_folders, folders.read),
}
"""Name -> detection, and the reader of a folder."""


def read(folder: Path, words: Words = NONE) -> Source:
    """Return the source of a folder, with its class names and counts.

    Raises:
        ValueError: if the folder follows no convention and nothing is said, or several; if the
            words do not fit; or if files are inconsistent or damaged.
    """
    if not folder.is_dir():
        raise ValueError(
            ". ".join(filter(None, (f"--source={folder} is no folder", hints.unpack(folder))))
        )
    try:
        return read_as(folder, words)
    except Unsaid as reason:
        raise ValueError(f"{reason}{hints.hint(folder, read_as)}") from None


def read_as(folder: Path, words: Words) -> Source:
    """Read a folder as the words or the conventions say; raise Unsaid if neither do."""
    check(words)
    described = words._replace(bits=NONE.bits, max_missing=0.0) != NONE
    return checked(folder, _said(folder, words) if described else _conventional(folder, words))


def _conventional(folder: Path, words: Words) -> Source:
    shown = [name for name, (shows, _) in CONVENTIONS.items() if shows(folder)]
    if len(shown) > 1 and shown[-2] == METADATA and _folders(folder):
        shown.pop()  # the folders of its pictures are no classes
    if len(shown) > 1:
        raise Unsaid(f"{folder} holds {' and '.join(shown)}, so the data set is not clear")
    if not shown:
        number = sum(is_picture(path) for path in folder.iterdir())
        alone = f" ({number} pictures without classes)" * bool(number)
        raise Unsaid(f"{folder} holds none of these{alone}: {', '.join(CONVENTIONS)}")
    if words.max_missing and shown[0] != METADATA:
        raise ValueError(f"--max_missing is for tables, and {folder} holds {shown[0]}")
    return CONVENTIONS[shown[0]][1](folder, words)


def _said(folder: Path, words: Words) -> Source:
    if words.images:
        reader = arrays.read_npz if any(folder.glob("*.npz")) else parquet.read
        return reader(folder, words)
    readers = {folders.read_said: words.classes, tables.read_said: words.table}
    return _union([reader(folder, words) for reader, said in readers.items() if said])


def _union(sources: Iterable[Source]) -> Source:
    """Return the source with the examples of all."""
    first, *others = sources
    for other in others:
        if twice := {*map(str, first.files)} & {*map(str, other.files)}:
            raise ValueError(f"{min(twice)} is named by --classes and by --table")
        splits = {
            split: partial(_chained, [x.splits[split] for x in (first, other) if split in x.splits])
            for split in {**first.splits, **other.splits}
        }
        first = Source(0, splits, [*first.files, *other.files], notes=[*first.notes, *other.notes])
    return first


def _chained(parts: Sequence[Callable[[], Iterator[Example]]]) -> Iterator[Example]:
    return itertools.chain.from_iterable(examples() for examples in parts)


def is_raw(folder: Path) -> bool:
    """Detect pictures, or files of many, among the first `INSPECTED` files near a folder."""
    paths = itertools.chain.from_iterable(map(folder.glob, ("*", "*/*", "*/*/*")))
    return any(
        is_picture(path) or path.suffix in (".npz", ".parquet", ".tar") or "-ubyte" in path.name
        for path in itertools.islice(paths, INSPECTED)
    )
