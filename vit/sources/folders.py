"""Class folders: train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vit import bounded
from vit.sources.source import SPLITS, Example, Source, check_class_name, is_picture


def splits_found(folder: Path) -> bool:
    """Whether the folder has folders of splits, with class folders in them."""
    return bool(_split_folders(folder))


def classes_found(folder: Path) -> bool:
    """Whether the folder has class folders, and none that is called as a split."""
    return not _named(folder) and bool(_pictures(folder))


def read(source: Path) -> Source:
    """The classes by the names of their folders.

    Raises:
        ValueError: when there is no training split, a class that training has not, or a folder
            without pictures.
    """
    folders = _split_folders(source) or [("train", source)]
    splits = dict(folders)
    if "train" not in splits:
        raise ValueError(f"{source} has no folder train/")
    for split in splits:
        names = [f"{folder.name}/" for other, folder in folders if other == split]
        if len(names) > 1:
            raise ValueError(f"{source} has both {' and '.join(names)}: rename or remove one")
    class_names = {split: _class_names(folder) for split, folder in splits.items()}
    for split, names in class_names.items():
        unknown = sorted(names - class_names["train"])
        if unknown:
            raise ValueError(f"{splits[split]} has classes that train/ has not: {unknown[:5]}")
    examples = {split: partial(_examples, folder) for split, folder in splits.items()}
    return Source(sorted(class_names["train"]), 0, examples)


def _split_folders(source: Path) -> list[tuple[str, Path]]:
    """Split and folder, where at least one of them has class folders with pictures."""
    named = _named(source)
    return named if any(_pictures(folder) for _, folder in named) else []


def _named(source: Path) -> list[tuple[str, Path]]:
    folders = (folder for folder in sorted(source.iterdir()) if folder.is_dir())
    return [(SPLITS[folder.name], folder) for folder in folders if folder.name in SPLITS]


def _pictures(folder: Path) -> list[Path]:
    paths = folder.glob("*/*")
    return sorted(p for p in paths if is_picture(p) and not p.parent.name.startswith("."))


def _class_names(folder: Path) -> set[str]:
    names = {path.parent.name for path in _pictures(folder)}
    if not names:
        raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
    for name in names:
        check_class_name(name, f"folder {str(folder / name)!r}")
    return names


def _examples(folder: Path) -> Iterator[Example]:
    for path in _pictures(folder):
        yield Example(str(path), partial(bounded.content, path), path.parent.name)
