"""Class folders: train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vit.data.sources.source import SPLITS, Example, Source, by_split, is_picture


def read_splits(source: Path, _: str = "") -> Source | None:
    """Read the folders of splits, with class folders in them.

    Raises:
        ValueError: if there is no training split, training lacks a class of another split, or a
            folder has no pictures.
    """
    parts = _split_folders(source)
    if not any(map(_classes, parts)):
        return None
    folders = by_split(source, ((SPLITS[part.name], f"{part.name}/", part) for part in parts))
    if "train" not in folders:
        raise ValueError(f"{source} has no folder train/")
    classes = {split: _classes(folder) for split, folder in folders.items()}
    for split, folder in folders.items():
        if not classes[split]:
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
        if unknown := sorted(classes[split] - classes["train"]):
            raise ValueError(f"{folder} has classes that train/ lacks: {unknown[:5]}")
    examples = {split: partial(_examples, folder) for split, folder in folders.items()}
    return Source(sorted(classes["train"]), 0, examples)


def read_classes(source: Path, _: str = "") -> Source | None:
    """Read class folders, if none has the name of a split."""
    classes = set() if _split_folders(source) else _classes(source)
    return Source(sorted(classes), 0, {"train": partial(_examples, source)}) if classes else None


def _split_folders(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_dir() and path.name in SPLITS)


def _classes(folder: Path) -> set[str]:
    return {path.parent.name for path in _pictures(folder)}


def _pictures(folder: Path) -> list[Path]:
    paths = folder.glob("*/*")
    return sorted(p for p in paths if is_picture(p) and not p.parent.name.startswith("."))


def _examples(folder: Path) -> Iterator[Example]:
    for path in _pictures(folder):
        yield Example(str(path), path.read_bytes, path.parent.name)
