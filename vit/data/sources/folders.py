"""Pictures in class folders, and an account of the files of a folder.

Class folders are train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once. Pictures
may be in folders below that of the class. A folder with the name of a split that holds pictures and
no class folders is a class.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from vit.data.classes import in_order
from vit.data.sources.source import SPLITS, Example, Source, by_split, content, is_picture

SHOWN = 10
"""Classes that are listed."""


def folders(folder: Path) -> list[Path]:
    """Return the folders in a folder but hidden ones and those of macOS."""
    paths = (path for path in folder.iterdir() if not is_hidden(path) and path.is_dir())
    return sorted(paths)


def is_hidden(path: Path) -> bool:
    """Detect hidden files and folders, copies of Apple's Finder (._*) among them, and __MACOSX."""
    return path.name.startswith(".") or path.name == "__MACOSX"


def pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder and in folders below it."""
    paths_below, entered = [], set()
    for place, names, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        is_new = (status.st_dev, status.st_ino) not in entered  # links may form a cycle
        entered.add((status.st_dev, status.st_ino))
        names[:] = [name for name in names if is_new and not is_hidden(Path(name))]
        paths = (Path(place, name) for name in files if is_new)
        paths_below += [path for path in paths if is_picture(path) and not is_hidden(path)]
    return sorted(paths_below)


def classes(folder: Path) -> dict[str, list[Path]]:
    """Return the pictures of each class folder in a folder."""
    by_class = {path.name: pictures(path) for path in folders(folder)}
    return {name: paths for name, paths in by_class.items() if paths}


def split_folders(source: Path) -> list[Path]:
    """Return the folders with the name of a split that are no classes.

    Classes hold pictures. A folder that holds both pictures and class folders is a split if no
    other class is next to it.
    """
    named = [path for path in folders(source) if path.name.lower() in SPLITS]
    holding = [path for path in named if _holds_pictures(path)]
    others = holding and any(pictures(path) for path in folders(source) if path not in named)
    classes_of = [path for path in holding if others or not classes(path)]
    return [path for path in named if path not in classes_of]


def _holds_pictures(folder: Path) -> bool:
    return any(is_picture(path) and not is_hidden(path) for path in folder.iterdir())


def read_splits(source: Path, _: str = "") -> Source | None:
    """Read the folders of splits, with class folders in them.

    Raises:
        ValueError: if there is no training split, or training lacks a class of another split.
    """
    named = ((folder, classes(folder)) for folder in split_folders(source))
    given_splits = [
        (SPLITS[folder.name.lower()], f"{folder.name}/", by_class)
        for folder, by_class in named
        if by_class
    ]
    splits = by_split(source, given_splits)
    if not splits:
        return None
    for _, folder, by_class in given_splits:
        if unknown := sorted(by_class.keys() - splits.get("train", {}).keys()):
            raise ValueError(f"{source / folder} has classes that train/ lacks: {unknown[:5]}")
    return _source(in_order(splits["train"]), splits)


def read_classes(source: Path, _: str = "") -> Source | None:
    """Read class folders."""
    by_class = classes(source)
    return _source(in_order(by_class), {"train": by_class}) if by_class else None


def _source(names: Sequence[str], splits: dict[str, dict[str, list[Path]]]) -> Source:
    files = [path for by_class in splits.values() for paths in by_class.values() for path in paths]
    examples = {split: partial(_examples, by_class) for split, by_class in splits.items()}
    return Source(names, 0, examples, files)


def _examples(by_class: dict[str, list[Path]]) -> Iterator[Example]:
    for name, paths in by_class.items():
        for path in paths:
            yield Example(str(path), partial(content, path), name)


def account(folder: Path, source: Source, skipped: Collection[str] = ()) -> list[str]:
    """Return lines on the files of a folder: those that are read, the others with the reason.

    Args:
        folder: folder of the source.
        source: its examples.
        skipped: names of the files that could not be read.
    """
    used = {*map(os.path.abspath, source.files)}
    ignored: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for place, names, files in os.walk(folder):
        names.sort()
        for path in (Path(place, name) for name in sorted(files)):
            if os.path.abspath(path) not in used:
                kind = path.suffix.lower() or "without suffix", _reason(path, folder)
                ignored[kind] += 1
                first.setdefault(kind, str(path.relative_to(folder)))
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for path in source.files:
        counts[str(path) in skipped][path.suffix.lower() or "without suffix"] += 1
    known = [*source.class_names[:SHOWN], *["..."] * (len(source.class_names) > SHOWN)]
    named = f"{len(source.class_names)} classes: {', '.join(known)}"
    lines = [f"read: {_listed(counts[False])}; {named}"]
    lines += [f"skipped: {_listed(counts[True])}, unreadable"] * bool(counts[True])
    for (suffix, reason), number in sorted(ignored.items(), key=lambda item: -item[1]):
        lines.append(f"ignored: {number} {suffix}, {reason} ({first[suffix, reason]})")
    return lines


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {suffix}" for suffix, number in counts.most_common())


def _reason(path: Path, folder: Path) -> str:
    """Return why a file is not read."""
    if any(is_hidden(Path(part)) for part in path.relative_to(folder).parts):
        return "hidden, or a copy of macOS"
    if is_picture(path):
        return "not in a class folder or not named by the table"
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl"):
        return "not read as a table of pictures"
    if not path.suffix and path.is_file() and _begins_as_picture(path):
        return "a picture without suffix: rename it"
    return "no picture"


def _begins_as_picture(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return head in (b"\x89PNG", b"RIFF", b"GIF8") or head[:2] == b"\xff\xd8"
