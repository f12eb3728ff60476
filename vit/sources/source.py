"""What a source of raw pictures is, and how a part of it is held out."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
"""The split that a folder, a file or an array is of, by its name."""

READ = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
SUFFIXES = (*READ, ".tif", ".tiff", ".heic", ".avif")
"""Of pictures, in lower case; those that cannot be read are named and counted, not passed over."""


LABELS = ("label", "labels", "class_name", "class", "category", "target", "species", "class_label")
"""Usual names of the column of classes in a table, the likeliest first."""


class Example(NamedTuple):
    """A raw example: a name that says where it came from, its bytes, its class."""

    name: str
    read: Callable[[], bytes]
    """Raises what it likes for a file that is none, or too large."""
    label: str


class Source(NamedTuple):
    """What a folder holds: class names in order, and for each split its examples."""

    class_names: list[str]
    channels: int
    """1 or 3; 0 where the pictures must say."""
    splits: dict[str, Callable[[], Iterator[Example]]]
    """Each gives the same examples in the same order again, and opens them only when read."""


def is_picture(path: Path) -> bool:
    """By its suffix."""
    return path.suffix.lower() in SUFFIXES


def png(image: np.ndarray) -> bytes:
    """An image (height, width), or with 1 or 3 channels behind, of uint8, as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, "PNG")
    return buffer.getvalue()


def split_of(name: str, otherwise: str = "train") -> str:
    """The split that a word of a file's or array's name says."""
    words = name.lower().replace("-", "_").replace(".", "_").split("_")
    return next((SPLITS[word] for word in words if word in SPLITS), otherwise)


def check_class_name(name: str, where: str) -> None:
    """The names are kept as the lines of a text file, from which outer blanks are taken off.

    Raises:
        ValueError: for one that would come back as another.
    """
    if name.splitlines() != [name.strip()] or not name.isprintable():
        raise ValueError(
            f"the class {where} has a line break, an outer blank or an unprintable character in its"
            " name, or none: rename it"
        )


def column_of_labels(
    path: Path,
    columns: Sequence[str],
    named: str,
    same: Callable[[Sequence[str]], bool] = lambda usual: False,
) -> str:
    """Which of the columns that may be is that of the classes.

    Args:
        path: of the table.
        columns: that may be.
        named: by the user, or empty.
        same: whether these columns say the same.

    Raises:
        ValueError: when that cannot be told; the message lists the columns.
    """
    there = ", ".join(columns)
    if named and named not in columns:
        raise ValueError(f"--labels_column={named}: that of {path} is one of {there}")
    usual = [column for name in LABELS for column in columns if column.lower() == name]
    likely = [named] if named else usual or columns
    if not likely or not (len(likely) == 1 or (usual and same(likely))):
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
    """Which examples are held out: a share of all, spread evenly over the classes.

    The examples are ordered by class, in each class by chance, the first of each put aside, since
    it stays; from the rest every so manieth is taken.

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
