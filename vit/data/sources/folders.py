"""Class folders: train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vit.data.sources.source import SPLITS, Example, Source, is_picture
from vit.run import bounded


def read_splits(source: Path, _: str = "") -> Source | None:
    """The folders of splits, with class folders in them.

    Raises:
        ValueError: when there is no training split, a class that training has not, or a folder
            without pictures.
    """
    parts = _parts(source)
    if not any(map(_classes, parts)):
        return None
    folders: dict[str, Path] = {}
    for part in parts:
        first = folders.setdefault(SPLITS[part.name], part)
        if first != part:
            raise ValueError(
                f"{source} has both {first.name}/ and {part.name}/: rename or remove one"
            )
    if "train" not in folders:
        raise ValueError(f"{source} has no folder train/")
    classes = {split: _classes(folder) for split, folder in folders.items()}
    for split, folder in folders.items():
        if not classes[split]:
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
        if unknown := sorted(classes[split] - classes["train"]):
            raise ValueError(f"{folder} has classes that train/ has not: {unknown[:5]}")
    examples = {split: partial(_examples, folder) for split, folder in folders.items()}
    return Source(sorted(classes["train"]), 0, examples)


def read_classes(source: Path, _: str = "") -> Source | None:
    """Class folders, where none is called as a split."""
    classes = set() if _parts(source) else _classes(source)
    return Source(sorted(classes), 0, {"train": partial(_examples, source)}) if classes else None


def _parts(source: Path) -> list[Path]:
    """The folders that are called as splits."""
    return sorted(path for path in source.iterdir() if path.is_dir() and path.name in SPLITS)


def _classes(folder: Path) -> set[str]:
    return {path.parent.name for path in _pictures(folder)}


def _pictures(folder: Path) -> list[Path]:
    paths = folder.glob("*/*")
    return sorted(p for p in paths if is_picture(p) and not p.parent.name.startswith("."))


def _examples(folder: Path) -> Iterator[Example]:
    for path in _pictures(folder):
        yield Example(str(path), partial(bounded.content, path), path.parent.name)
