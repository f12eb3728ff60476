"""A source of raw pictures with a class each, and how a part of it is held out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
"""Split of a folder, a file or an array, by its name."""

READ = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
SUFFIXES = (*READ, ".tif", ".tiff", ".heic", ".avif")
"""Suffixes of pictures; those that cannot be read are named and counted, not passed over."""

LABELS = ("label", "labels", "class_name", "class", "category", "target", "species", "class_label")
"""Usual names of the column of classes in a table."""


class Example(NamedTuple):
    """A raw example: a name that says where it came from, its bytes, its class."""

    name: str
    read: Callable[[], bytes]
    """Function of no argument, which raises any exception where the bytes cannot be read."""
    label: str


class Source(NamedTuple):
    """Class names in order, and for each split the examples of a folder."""

    class_names: Sequence[str]
    channels: int
    """1 or 3; 0 where the pictures must say."""
    splits: dict[str, Callable[[], Iterator[Example]]]
    """Each gives the same examples in the same order again, and opens them only when read."""


def is_picture(path: Path) -> bool:
    """Detect a picture by its suffix."""
    return path.suffix.lower() in SUFFIXES


def split_of(name: str, otherwise: str = "train") -> str:
    """The split that a word of a file's or array's name says."""
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    return next((SPLITS[word] for word in words if word in SPLITS), otherwise)


def column_of_labels(path: Path, columns: Sequence[str], named: str) -> str:
    """The column of the classes: the named one, else the only one of a usual name, else of any.

    Raises:
        ValueError: when the column is not there or ambiguous; the message lists the columns.
    """
    there = ", ".join(columns)
    if named and named not in columns:
        raise ValueError(f"--labels_column={named}: that of {path} is one of {there}")
    usual = [column for column in columns if column.lower() in LABELS]
    likely = [named] if named else usual or columns
    if len(likely) != 1:
        raise ValueError(
            f"{path}: which column holds the classes? Say --labels_column=NAME; there are {there}"
        )
    return likely[0]


def in_order(labels: Iterable[str]) -> list[str]:
    """Each once: numbers by their size, then words."""
    return sorted(set(labels), key=lambda x: (not x.isdecimal(), len(x) * x.isdecimal(), x))


def with_validation(source: Source, share: float, seed: int) -> Source:
    """The source with a part of its split "train" as split "validation".

    Raises:
        ValueError: when it has such a split already, or nothing can be spared.
    """
    if "validation" in source.splits:
        raise ValueError(f"--validation={share}: there is a validation split already; leave it out")
    train = source.splits["train"]
    held = holdout([example.label for example in train()], share, seed)
    splits = {
        "train": lambda: compress(train(), ~held),
        "validation": lambda: compress(train(), held),
    }
    return source._replace(splits=source.splits | splits)


def holdout(labels: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Mark the examples that are held out: a share of all, spread evenly over the classes.

    The examples are ordered by class, in each class by chance, the first of each put aside, since
    it stays; from the rest examples at equal distances are taken.

    Returns:
        n bools, max(1, round(share n)) of them true if there are as many to spare.

    Raises:
        ValueError: when the share is not between 0 and 1, or no class has a second example.
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
    return held
