"""A source of raw pictures with a class each, and how a part of it is held out."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from vit.data.classes import in_order

Part = TypeVar("Part")

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "testing": "test",
}
"""Split of a folder, a file or an array, by its name."""

READ = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp")
SUFFIXES = (*READ, ".tif", ".tiff", ".heic", ".avif")
"""Suffixes of pictures; those that cannot be read are named and counted, not ignored."""

LABELS = ("label", "labels", "class_name", "class", "category", "target", "species", "class_label")
"""Usual names of the column of classes in a table."""


class Example(NamedTuple):
    """A raw example: a name that shows its origin, its bytes, its class."""

    name: str
    read: Callable[[], bytes]
    """Function without arguments, which raises any exception if the bytes cannot be read."""
    label: str


class Source(NamedTuple):
    """Class names in order, and for each split the examples of a folder."""

    class_names: Sequence[str]
    channels: int
    """1 or 3; 0 if the pictures must show it."""
    splits: dict[str, Callable[[], Iterator[Example]]]
    """Functions that give the same examples in the same order, opened only when read."""
    files: Sequence[Path] = ()
    """Files that are read."""


def is_picture(path: Path) -> bool:
    """Detect a picture by its suffix."""
    return path.suffix.lower() in SUFFIXES


def content(path: Path) -> bytes:
    """Return the bytes of a picture.

    Raises:
        OSError: if it cannot be read, or is no file: a pipe would be waited for, and a device may
            have no end.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file, but a folder, a pipe or a device")
    return path.read_bytes()


@contextlib.contextmanager
def reading(path: os.PathLike | str, form: str, *errors: type[Exception]) -> Iterator[None]:
    """Make errors of the block, OSError among them, a ValueError that names the file."""
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise OSError("it is no file, but a folder, a pipe or a device")
        yield
    except (OSError, *errors) as error:
        raise ValueError(f"{path} cannot be read{form}: {error}") from error


def split_of(name: str, otherwise: str = "train") -> str:
    """Return the split that a word of a file's or array's name stands for."""
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    return next((SPLITS[word] for word in words if word in SPLITS), otherwise)


def by_split(folder: Path, parts: Iterable[tuple[str, str, Part]]) -> dict[str, Part]:
    """Return the parts (split, name, part) of a folder by their splits.

    Raises:
        ValueError: if two parts are of the same split.
    """
    splits: dict[str, tuple[str, Part]] = {}
    for split, name, part in parts:
        if split in splits:
            raise ValueError(
                f"{folder} holds both {splits[split][0]} and {name} for the split {split!r}: rename"
                " or remove one"
            )
        splits[split] = name, part
    return {split: part for split, (_, part) in splits.items()}


def column_of_labels(path: Path, columns: Sequence[str], named: str) -> str:
    """Return the column of the classes: the named one, else the only usual name or column.

    Raises:
        ValueError: if the column does not exist or is ambiguous; the message lists the columns.
    """
    there = ", ".join(columns)
    if named and named not in columns:
        raise ValueError(f"--labels_column={named}: {path} has the columns {there}")
    usual = [column for column in columns if column.lower() in LABELS]
    likely = [named] if named else usual or columns
    if len(likely) != 1:
        raise ValueError(
            f"{path}: which column holds the classes? Give --labels_column=NAME; there are {there}"
        )
    return likely[0]


Labels = Sequence[str] | frozenset[str] | None
"""Names of the labels of a file: in order; of unknown order; None for numbers without names."""


def class_names(folder: Path, files: Mapping[str, Labels]) -> list[str]:
    """Return the names of the classes of all files, each once; empty for numbers without names.

    Names in order come first, those of the first file before others.

    Raises:
        ValueError: if labels have names in one file and are numbers without names in another.
    """
    if unnamed := [file for file, names in files.items() if names is None]:
        if named := [file for file, names in files.items() if names is not None]:
            raise ValueError(
                f"{folder}: the labels of {unnamed[0]} are numbers without names, those of"
                f" {named[0]} have names: give the names of both, or numbers alone in both"
            )
        return []
    ordered = [x for x in files.values() if not isinstance(x, frozenset)]
    others = in_order(x for names in files.values() if isinstance(names, frozenset) for x in names)
    return list(dict.fromkeys([*itertools.chain(*ordered), *others]))  # pyright: ignore


def with_validation(source: Source, share: float, seed: int) -> Source:
    """Return the source with a part of its split "train" as split "validation".

    Raises:
        ValueError: if it has such a split already, or nothing can be held out.
    """
    if "validation" in source.splits:
        raise ValueError(f"--validation={share}: there is a validation split already; leave it out")
    train = source.splits["train"]
    held = holdout([example.label for example in train()], share, seed)
    splits = {
        "train": lambda: itertools.compress(train(), ~held),
        "validation": lambda: itertools.compress(train(), held),
    }
    return source._replace(splits=source.splits | splits)


LEAST = 5
"""Examples of a class from which one at least is held out."""


def holdout(labels: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Mark the examples that are held out: a share of all, spread evenly over the classes.

    The examples are ordered by class and randomly within a class. The first of each class stays;
    from the rest examples at equal distances are held out, and one more of each class of at least
    `LEAST` that would have none.

    Returns:
        n bools, max(1, round(share n)) of them true, or more with such classes, if the rest is as
        large.

    Raises:
        ValueError: if the share is not between 0 and 1, or no class has a second example.
    """
    if not 0 < share < 1:
        raise ValueError(f"--validation={share} must be a share between 0 and 1")
    _, classes = np.unique(np.asarray(labels, str), return_inverse=True)
    rng = np.random.default_rng(seed)
    order = np.lexsort([rng.random(len(classes)), classes])
    first = np.diff(classes[order], prepend=-1) > 0
    rest = order[~first]
    if not len(rest):
        raise ValueError("no class has a second picture: nothing can be held out for evaluation")
    number = min(len(rest), max(1, round(share * len(classes))))
    taken = rest[((np.arange(number) + rng.random()) * (len(rest) / number)).astype(int)]
    held = np.zeros(len(classes), bool)
    held[taken] = True
    sizes = np.bincount(classes)
    held_sizes = np.bincount(classes[held], minlength=len(sizes))
    missed = np.flatnonzero((held_sizes == 0) & (sizes >= LEAST))
    held[rest[np.searchsorted(classes[rest], missed)]] = True
    return held
