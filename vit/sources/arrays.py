"""Pictures as arrays of uint8: IDX files (MNIST and its family), and .npz files.

IDX: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... alike, each plain or as .gz. npz:
arrays `images` (n, height, width), or with 1 or 3 channels behind, and `labels` (n,) of integers or
text, or `x` and `y`; `train_images`, `x_test`, ... for splits; `class_names` if the labels are
integers and have names.
"""

import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit import bounded
from vit.sources.source import Example, Source, split_of

IMAGES, LABELS = {"images", "image", "x", "imgs"}, {"labels", "label", "y", "targets", "target"}
"""Names of the arrays of an npz file."""
MOST_CLASSES = 2**16


class Arrays(NamedTuple):
    """The pictures of a split, and their classes: numbers or text."""

    split: str
    name: str
    images: np.ndarray
    labels: np.ndarray


def idx_files(folder: Path) -> list[Path]:
    """The IDX files of images in a folder."""
    return sorted(folder.glob("*-images-idx3-ubyte*"))


def read_idx(source: Path) -> Source:
    """The IDX files of a folder.

    Raises:
        ValueError: when files are damaged or do not fit together.
    """
    found = []
    for path in idx_files(source):
        prefix = path.name.split("-images-idx3-ubyte")[0]
        label_paths = sorted(source.glob(f"{prefix}-labels-idx1-ubyte*"))
        if not label_paths:
            raise ValueError(f"{path} has no labels beside it ({prefix}-labels-idx1-ubyte)")
        images, labels = bounded.read_idx(path, 3), bounded.read_idx(label_paths[0], 1)
        split = "train" if prefix.endswith("train") else "test"
        found.append(Arrays(split, str(path), images, labels))
    return _source(source, found, [])


def npz_files(folder: Path) -> list[Path]:
    """The .npz files of a folder."""
    return sorted(folder.glob("*.npz"))


def read_npz(source: Path) -> Source:
    """The .npz files of a folder; nothing in them is executed.

    Raises:
        ValueError: for an array that cannot be used; the message lists what there is.
    """
    found: list[Arrays] = []
    names: list[str] = []
    for path in npz_files(source):
        bounded.check_npz(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        except (TypeError, ValueError) as error:  # a broken header, an array of Python objects
            raise ValueError(f"{path} cannot be read: {error}") from error
        names = [str(name) for name in arrays.pop("class_names", names)]
        found += _pairs(path, arrays)
    return _source(source, found, names)


def _pairs(path: Path, arrays: dict[str, np.ndarray]) -> list[Arrays]:
    """Images and labels of each split in a file, by the names of its arrays."""

    def by_split(meant: set[str]) -> dict[str, str]:
        keys = [key for key in arrays if meant & set(key.lower().split("_"))]
        return {split_of(key, split_of(path.stem)): key for key in keys}

    images, labels = by_split(IMAGES), by_split(LABELS)
    if not images or images.keys() != labels.keys():
        there = ", ".join(f"{key} {x.dtype}{list(x.shape)}" for key, x in arrays.items())
        raise ValueError(
            f"{path} must hold images and labels, or x and y, as train_images or x_test of a split;"
            f" it holds {there}"
        )
    return [
        Arrays(split, f"{path}:{key}", arrays[key], _flat(arrays[labels[split]]))
        for split, key in images.items()
    ]


def _flat(labels: np.ndarray) -> np.ndarray:
    """Labels (n, 1), as some keep them, as (n,)."""
    return labels[:, 0] if labels.shape[1:] == (1,) else labels


def _source(folder: Path, found: list[Arrays], names: list[str]) -> Source:
    splits: dict[str, Arrays] = {}
    for arrays in found:
        first = splits.setdefault(arrays.split, arrays)
        if first is not arrays:
            raise ValueError(
                f"{folder} holds {first.name} and {arrays.name} for the split {arrays.split!r}:"
                " remove one"
            )
        _check(arrays)
    implied = _class_names([arrays.labels for arrays in found])
    if names and len(names) < len(implied):
        raise ValueError(f"{folder}: {len(names)} class_names, but labels up to {implied[-1]}")
    channels = 3 if any(arrays.images.shape[3:] == (3,) for arrays in found) else 1
    examples = {x.split: partial(_examples, x, names or implied) for x in found}
    return Source(names or implied, channels, examples)


def _check(arrays: Arrays) -> None:
    """Raises ValueError for what are no pictures with a class each."""
    _, name, images, labels = arrays
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[3:] not in ((), (1,), (3,)):
        raise ValueError(
            f"{name} is {images.dtype}{list(images.shape)}: images are uint8, 0 to 255, of shape"
            " (n, height, width), or with 1 or 3 channels behind"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iuU":
        raise ValueError(
            f"{name} has {len(images)} images, its labels are {labels.dtype}{list(labels.shape)}:"
            " a whole number or a text for each is needed"
        )
    if not len(images):
        raise ValueError(f"{name} is empty: remove this split, or give it images")
    if labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise ValueError(
            f"{name} has labels from {labels.min()} to {labels.max()}: they must be 0 to"
            f" {MOST_CLASSES - 1}"
        )


def _class_names(labels: Sequence[np.ndarray]) -> list[str]:
    """0, 1, ... to the largest; or the words in order."""
    if all(x.dtype.kind in "iu" for x in labels):
        return [str(number) for number in range(max(int(x.max()) for x in labels) + 1)]
    return sorted({str(label) for x in labels for label in x})


def _examples(arrays: Arrays, class_names: Sequence[str]) -> Iterator[Example]:
    for number, (image, label) in enumerate(zip(arrays.images, arrays.labels, strict=True)):
        name = label if arrays.labels.dtype.kind == "U" else class_names[label]
        yield Example(f"{arrays.name}[{number}]", partial(_png, image), str(name))


def _png(image: np.ndarray) -> bytes:
    """An image (height, width), or with 1 or 3 channels behind, of uint8, as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, "PNG")
    return buffer.getvalue()
