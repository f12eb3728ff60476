"""Pictures in class folders, and an account of the files of a folder.

The convention is that of ImageFolder in torchvision and TFDS: `<split>/<class>/*` with the splits
train, validation (or val) and test; or `<class>/*` without splits. The class of a picture is the
folder below the split. Folders below it are allowed if no two classes have one of the same name.
`--classes=DIR` names folders whose folders are the classes.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from vit.data.classes import word
from vit.data.sources.source import Example, Source, Unsaid, by_split, content, is_picture
from vit.data.sources.words import LIKE_SPLITS, SPLITS, Words, with_splits

Classes = dict[str, list[Path]]
"""The pictures of each class."""


_PARTS = re.compile(r"(?<![a-z])(part|batch|fold|images|imgs|photos|pictures|masks)(?![a-z])")
"""Words in names of folders that are no classes, if all have one."""
OF_PROGRAMS = ("__MACOSX", "@eaDir")
"""Folders of copies that macOS and Synology's servers make."""
SHOWN = 40
"""Most classes that are listed one by one."""


def folders(folder: Path) -> list[Path]:
    """Return the folders in a folder but hidden ones and those of programs."""
    paths = (path for path in folder.iterdir() if not is_hidden(path) and path.is_dir())
    return sorted(paths)


def is_hidden(path: Path) -> bool:
    """Detect hidden files and folders, also copies of Apple's Finder (._*), and OF_PROGRAMS."""
    return path.name.startswith(".") or path.name in OF_PROGRAMS


def pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder and in folders below it."""
    return sorted(_walk(folder))


def has_pictures(folder: Path) -> bool:
    """Detect a picture in a folder or in folders below it."""
    return any(True for _ in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    entered = set()
    for place, names, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        is_new = (status.st_dev, status.st_ino) not in entered  # links may form a cycle
        entered.add((status.st_dev, status.st_ino))
        names[:] = [name for name in names if is_new and not is_hidden(Path(name))]
        paths = (Path(place, name) for name in files if is_new)
        yield from (path for path in paths if is_picture(path) and not is_hidden(path))


def classes(folder: Path) -> Classes:
    """Return the pictures of each class folder in a folder.

    Raises:
        ValueError: if two folders are the same class.
    """
    by_class: Classes = {}
    for path in folders(folder):
        if paths := pictures(path):
            if word(path.name) in by_class:
                raise ValueError(f"{folder} holds two folders of the class {word(path.name)!r}")
            by_class[word(path.name)] = paths
    return by_class


def read(source: Path, _: Words) -> Source:
    """Read `<split>/<class>/*` or `<class>/*`.

    Raises:
        Unsaid: if the layout is neither.
        ValueError: if two folders are the same split or class.
    """
    tops = [path for path in folders(source) if has_pictures(path)]
    named = {path.name: classes(path) for path in tops if path.name in SPLITS}
    parts = {name: by_class for name, by_class in named.items() if by_class}
    if named and "train" not in parts:
        first = source / min(parts or named)
        cause = "no train is next to it" if parts else "holds pictures, not class folders"
        raise Unsaid(f"{first} has the name of a split, but {cause}")
    mixed = parts and _holds_pictures(source / "train")
    for path in (path for path in tops if parts and path.name not in SPLITS):
        if mixed or parts["train"].keys() & {word(below.name) for below in folders(path)}:
            raise Unsaid(f"{path} next to {source / 'train'} may be a class, or a split")
    if not parts:
        parts = {"": classes(source)}
        _check_names(source, parts[""])
    for name, by_class in parts.items():
        _check_depth(source / name, by_class)
    splits = by_split(source, ((SPLITS.get(k, "train"), f"{k}/", x) for k, x in parts.items()))
    return of_classes(splits)


def _holds_pictures(folder: Path) -> bool:
    return any(is_picture(path) and not is_hidden(path) for path in folder.iterdir())


def read_said(source: Path, words: Words) -> Source:
    """Read the folders of `--classes`; folders of the same split and class are joined.

    Raises:
        ValueError: if one does not exist, or has no class folders.
    """
    splits: dict[str, Classes] = {}
    for name, split in with_splits("classes", words.classes):
        by_class = classes(source / name) if (source / name).is_dir() else {}
        if not by_class:
            raise ValueError(f"--classes={name}: {source / name} holds no folders with pictures")
        joined = splits.setdefault(split, {})
        for label, paths in by_class.items():
            joined[label] = joined.get(label, []) + paths
    return of_classes(splits)


def _check_names(folder: Path, by_class: Classes) -> None:
    """Raise Unsaid if folders have the names of parts of a data set: they may be no classes."""
    names = [name.lower() for name in by_class]
    is_doubtful = any(map(LIKE_SPLITS.fullmatch, names)) or all(map(is_part, names))
    if len(names) > 1 and is_doubtful:
        raise Unsaid(f"{folder} holds the folders {', '.join(by_class)}, which may be no classes")


def is_part(name: str) -> bool:
    """Detect a folder with the name of a part of a data set, as train_images."""
    return any(words.search(name.lower()) for words in (LIKE_SPLITS, _PARTS))


def _check_depth(folder: Path, by_class: Classes) -> None:
    """Raise Unsaid if a folder below a class has the name of another class, or of one below it."""
    owner = {label: label for label in by_class}
    top = len(folder.parts)
    for label, paths in by_class.items():
        for name in sorted({part for path in paths for part in path.parts[top + 1 : -1]}):
            if (other := owner.setdefault(name, label)) != label:
                both = f"{label}/ and {other}/" if other != name else f"{label}/ and next to it"
                raise Unsaid(
                    f"in {folder} folders of the same name {name} are in {both}, so the level of"
                    " the classes is not clear"
                )


def of_classes(splits: Mapping[str, Classes]) -> Source:
    """Return the source of the pictures of each class of each split."""
    files = [path for by_class in splits.values() for paths in by_class.values() for path in paths]
    return Source(0, {split: partial(_examples, x) for split, x in splits.items()}, files)


def _examples(by_class: Classes) -> Iterator[Example]:
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
    lines = [f"read: {_listed(counts[False])}", *source.notes]
    lines += [f"skipped: {_listed(counts[True])}, unreadable"] * bool(counts[True])
    for (suffix, reason), number in sorted(ignored.items(), key=lambda item: -item[1]):
        lines.append(f"ignored: {number} {suffix}, {reason} ({first[suffix, reason]})")
    return lines


def table(source: Source) -> list[str]:
    """Return lines with the pictures of each class in each split."""
    names = [*source.class_names]
    shown = names if len(names) <= SHOWN else names[: SHOWN // 2]
    rows = [("class", *source.splits)]
    rows += [(name, *(str(x[name]) for x in source.counts.values())) for name in shown]
    if len(shown) < len(names):
        rest = [[x[name] for name in names[len(shown) :]] for x in source.counts.values()]
        rows.append((f"{len(rest[0])} more", *(f"{min(x)} to {max(x)}" for x in rest)))
    rows.append((f"all {len(names)}", *(str(x.total()) for x in source.counts.values())))
    first = max(len(row[0]) for row in rows)
    return [f"{row[0]:{first}}" + "".join(f"{x:>12}" for x in row[1:]) for row in rows]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {suffix}" for suffix, number in counts.most_common())


def _reason(path: Path, folder: Path) -> str:
    """Return why a file is not read."""
    if any(is_hidden(Path(part)) for part in path.relative_to(folder).parts):
        return "hidden, or a copy of macOS or Synology"
    if is_picture(path):
        return "not in a class folder or not named by a table"
    if path.suffix.lower() in (".csv", ".tsv", ".txt", ".jsonl", ".parquet"):
        return "not read; --table names a table"
    if not path.suffix and path.is_file() and _begins_as_picture(path):
        return "a picture without suffix: rename it"
    return "no picture"


def _begins_as_picture(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4)
    return head in (b"\x89PNG", b"RIFF", b"GIF8") or head[:2] == b"\xff\xd8"
