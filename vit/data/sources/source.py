"""A source of raw pictures with a class each, its checks, and how a part of it is held out."""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from vit.data.classes import in_order

Part = TypeVar("Part")

ORDER = "train", "validation", "test"
"""The splits in order."""
READ = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp")
SUFFIXES = (*READ, ".tif", ".tiff", ".heic", ".avif")
"""Suffixes of pictures; those that cannot be read are named and counted, not ignored."""


class Unsaid(ValueError):
    """A source that follows no convention; the message gets the command that may be meant."""


class Example(NamedTuple):
    """A raw example: a name that shows its origin, its bytes, its class."""

    name: str
    read: Callable[[], bytes]
    """Function without arguments, which raises any exception if the bytes cannot be read."""
    label: str
    """Name of the class, as `classes.word`."""
    group: str = ""
    """Pictures of the same group stay on one side of the hold-out; "" for none."""


class Source(NamedTuple):
    """The examples of each split of a folder."""

    channels: int
    """1 or 3; 0 if the pictures must show it."""
    splits: dict[str, Callable[[], Iterator[Example]]]
    """Functions that give the same examples in the same order, opened only when read."""
    files: Sequence[Path] = ()
    """Files that are read."""
    class_names: Sequence[str] = ()
    """Names in order; if none, those that occur in training, numbers before words."""
    notes: Sequence[str] = ()
    """Lines on what is left out."""
    counts: Mapping[str, Counter[str]] = {}
    """Pictures of each class of each split; counted by `checked`."""


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


def ordered(files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the class names of all files, each once, those of the first file first.

    Raises:
        ValueError: if labels have names in one file and none in another, or a file has a name
            twice.
    """
    for file, names in files.items():
        if doubled := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{file}: {doubled[0]!r} is the name of several classes")
    named = [file for file, names in files.items() if names]
    if named and len(named) < len(files):
        raise ValueError(
            f"the labels of {min({*files} - {*named})} have no names, those of {named[0]} have"
            " names: give the names of both, or of none"
        )
    return list(dict.fromkeys(itertools.chain(*files.values())))


def checked(folder: Path, source: Source) -> Source:
    """Return the source with its class names and counts.

    Raises:
        ValueError: if there is no training split or only one class, if training lacks a class of
            another split, or if names of classes cannot be written, or name several classes.
    """
    splits = {split: source.splits[split] for split in ORDER if split in source.splits}
    counts = {split: Counter(x.label for x in f()) for split, f in splits.items()}
    if not counts.get("train"):
        raise ValueError(f"{folder} has no training split, but {', '.join(counts) or 'none'}")
    names = source.class_names or in_order(counts["train"])
    for name in names:
        if name.splitlines() != [name.strip()] or not name.isprintable():
            raise ValueError(
                f"the class {name!r} in {folder} is empty, or has a line break, an outer blank or"
                " an unprintable character in its name: rename it"
            )
        if _is_several(name, {*names}):
            raise ValueError(
                f"the label {name!r} in {folder} names several classes: a picture has one class;"
                " rename it if it is one"
            )
    for split, number in counts.items():
        if unknown := in_order(number.keys() - counts["train"].keys()):
            raise ValueError(f"{folder}: {split} has classes that train lacks: {unknown[:5]}")
    if len(names) < 2:
        raise Unsaid(
            f"{folder} has pictures of one class only, {names[0]!r}: there is nothing to classify"
        )
    return source._replace(splits=splits, class_names=names, counts=counts)


def _is_several(name: str, names: set[str]) -> bool:
    """Detect "a|b", and "a b" or "a,b" if a and b are classes."""
    if "|" in name.strip("|"):
        return True
    parts = (name.replace(mark, " ").split() for mark in " ,;")
    return any(len(each) > 1 and {*each} <= names for each in parts)


def with_validation(source: Source, share: float, seed: int) -> Source:
    """Return the source with a part of its split "train" as split "validation".

    Raises:
        ValueError: if it has such a split already, or nothing can be held out.
    """
    if "validation" in source.splits:
        raise ValueError(f"--validation={share}: there is a validation split already; leave it out")
    train = source.splits["train"]
    pairs = [(example.label, example.group) for example in train()]
    labels, groups = [label for label, _ in pairs], [group for _, group in pairs]
    held = holdout(labels, share, seed, groups if any(groups) else None)
    splits = {
        "train": lambda: itertools.compress(train(), ~held),
        "validation": lambda: itertools.compress(train(), held),
    }
    parts = (("train", ~held), ("validation", held))
    counts = {split: Counter(itertools.compress(labels, kept)) for split, kept in parts}
    if lost := counts["validation"].keys() - counts["train"].keys():
        raise ValueError(
            f"--group leaves no picture of {in_order(lost)[0]!r} in training: give another --seed,"
            " or a smaller --validation"
        )
    return source._replace(splits=source.splits | splits, counts={**source.counts, **counts})


LEAST = 5
"""Examples of a class from which one at least is held out."""


def holdout(
    labels: Sequence[str], share: float, seed: int, groups: Sequence[str] | None = None
) -> np.ndarray:
    """Mark the examples that are held out: a share of all, spread evenly over the classes.

    The examples are ordered by class and randomly within a class. The first of each class stays;
    from the rest examples at equal distances are held out, and one more of each class of at least
    `LEAST` that would have none. With groups the same is done to groups, each with the class of its
    first example: an example is held out if its group is.

    Returns:
        n bools, max(1, round(share n)) of them true, or more with such classes, if the rest is as
        large.

    Raises:
        ValueError: if the share is not between 0 and 1, or no class has a second example.
    """
    if groups is not None:
        _, first, group = np.unique(np.asarray(groups, str), return_index=True, return_inverse=True)
        return holdout([labels[int(i)] for i in first], share, seed)[group]
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
