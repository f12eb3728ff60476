"""Class folders: train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vit import bounded
from vit.sources.source import SPLITS, Example, Source, is_picture


def splits_found(folder: Path) -> bool:
    """Whether the folder has folders of splits, with class folders in them."""
    return any(_pictures(part) for part in _parts(folder))


def classes_found(folder: Path) -> bool:
    """Whether the folder has class folders, and none that is called as a split."""
    return not _parts(folder) and bool(_pictures(folder))


def read(source: Path) -> Source:
    """The classes by the names of their folders.

    Raises:
        ValueError: when there is no training split, a class that training has not, or a folder
            without pictures.
    """
    folders: dict[str, Path] = {}
    for part in _parts(source):
        first = folders.setdefault(SPLITS[part.name], part)
        if first != part:
            raise ValueError(
                f"{source} has both {first.name}/ and {part.name}/: rename or remove one"
            )
    folders = folders or {"train": source}
    if "train" not in folders:
        raise ValueError(f"{source} has no folder train/")
    classes = {split: {p.parent.name for p in _pictures(f)} for split, f in folders.items()}
    for split, folder in folders.items():
        if not classes[split]:
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
        if unknown := sorted(classes[split] - classes["train"]):
            raise ValueError(f"{folder} has classes that train/ has not: {unknown[:5]}")
    examples = {split: partial(_examples, folder) for split, folder in folders.items()}
    return Source(sorted(classes["train"]), 0, examples)


def _parts(source: Path) -> list[Path]:
    """The folders that are called as splits."""
    return sorted(path for path in source.iterdir() if path.is_dir() and path.name in SPLITS)


def _pictures(folder: Path) -> list[Path]:
    paths = folder.glob("*/*")
    return sorted(p for p in paths if is_picture(p) and not p.parent.name.startswith("."))


def _examples(folder: Path) -> Iterator[Example]:
    for path in _pictures(folder):
        yield Example(str(path), partial(bounded.content, path), path.parent.name)
