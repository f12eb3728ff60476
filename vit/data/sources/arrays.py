"""Pictures as arrays of uint8: IDX files (MNIST and its family), and .npz files.

IDX: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... alike, each plain or as .gz. npz:
arrays `images` (n, height, width), or with 1 or 3 channels behind, and `labels` (n,) of integers or
text, or `x` and `y`; `train_images`, `x_test`, ... for splits; `class_names` if the labels are
integers and have names.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit.data.sources.source import Example, Source, split_of
from vit.run import bounded

IMAGES, LABELS = {"images", "image", "x", "imgs"}, {"labels", "label", "y", "targets", "target"}
"""Names of the arrays of an npz file."""
MOST_CLASSES = 2**16


class Arrays(NamedTuple):
    """The pictures of a split, and their classes: numbers or text."""

    split: str
    name: str
    images: np.ndarray
    labels: np.ndarray


def read_idx(source: Path, _: str = "") -> Source | None:
    """The IDX files of a folder.

    Raises:
        ValueError: when files are damaged or do not fit together.
    """
    found = []
    for path in sorted(source.glob("*-images-idx3-ubyte*")):
        prefix = path.name.split("-images-idx3-ubyte")[0]
        labels = sorted(source.glob(f"{prefix}-labels-idx1-ubyte*"))
        if not labels:
            raise ValueError(f"{path} has no labels beside it ({prefix}-labels-idx1-ubyte)")
        split = "train" if prefix.endswith("train") else "test"
        arrays = bounded.read_idx(path, 3), bounded.read_idx(labels[0], 1)
        found.append(Arrays(split, str(path), *arrays))
    return _source(source, found, [])


def read_npz(source: Path, _: str = "") -> Source | None:
    """The .npz files of a folder; nothing in them is executed.

    Raises:
        ValueError: for an array that cannot be used; the message lists what there is.
    """
    found: list[Arrays] = []
    names: list[str] = []
    for path in sorted(source.glob("*.npz")):
        bounded.check_npz(path)
        try:
            with np.load(path, allow_pickle=False) as file:  # some keep labels as (n, 1)
                arrays = {k: x[:, 0] if x.shape[1:] == (1,) else x for k, x in file.items()}
        except (TypeError, ValueError) as error:  # a broken header, an array of Python objects
            raise ValueError(f"{path} cannot be read: {error}") from error
        names = [str(name) for name in arrays.pop("class_names", names)]
        images, labels = (_by_split(path, arrays, meant) for meant in (IMAGES, LABELS))
        if not images or images.keys() != labels.keys():
            there = ", ".join(f"{key} {x.dtype}{list(x.shape)}" for key, x in arrays.items())
            raise ValueError(
                f"{path} must hold images and labels, or x and y, as train_images or x_test of a"
                f" split; it holds {there}"
            )
        for split, key in images.items():
            found.append(Arrays(split, f"{path}:{key}", arrays[key], arrays[labels[split]]))
    return _source(source, found, names)


def _by_split(path: Path, arrays: Iterable[str], meant: set[str]) -> dict[str, str]:
    """The names of arrays that have one of these words, by the split that they or the file name."""
    keys = [key for key in arrays if meant & set(key.lower().split("_"))]
    return {split_of(key, split_of(path.stem)): key for key in keys}


def _source(folder: Path, found: list[Arrays], names: list[str]) -> Source | None:
    if not found:
        return None
    splits: dict[str, Arrays] = {}
    for arrays in found:
        first = splits.setdefault(arrays.split, arrays)
        if first is not arrays:
            raise ValueError(
                f"{folder} holds {first.name} and {arrays.name} for the split {arrays.split!r}:"
                " remove one"
            )
        _check(arrays)
    if all(arrays.labels.dtype.kind in "iu" for arrays in found):
        largest = max(int(arrays.labels.max()) for arrays in found)
        implied = [str(number) for number in range(largest + 1)]
    else:
        implied = sorted({str(label) for arrays in found for label in arrays.labels})
    if names and len(names) < len(implied):
        raise ValueError(f"{folder}: {len(names)} class_names, but labels up to {implied[-1]}")
    channels = 3 if any(arrays.images.shape[3:] == (3,) for arrays in found) else 1
    examples = {x.split: partial(_examples, x, names or implied) for x in found}
    return Source(names or implied, channels, examples)


def _check(arrays: Arrays) -> None:
    """Raise ValueError for arrays that are no pictures with a class each."""
    _, name, images, labels = arrays
    shape = images.shape
    fits = len(shape) > 2 and shape[0] and shape[3:] in ((), (1,), (3,))
    if images.dtype != np.uint8 or not fits:
        raise ValueError(
            f"{name} is {images.dtype}{list(shape)}: images are uint8, 0 to 255, of shape (n,"
            " height, width) with n > 0, or with 1 or 3 channels behind"
        )
    if labels.shape != shape[:1] or labels.dtype.kind not in "iuU":
        raise ValueError(
            f"{name} has {len(images)} images, its labels are {labels.dtype}{list(labels.shape)}:"
            " a whole number or a text for each is needed"
        )
    if labels.dtype.kind in "iu" and not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise ValueError(
            f"{name} has labels from {labels.min()} to {labels.max()}: they must be 0 to"
            f" {MOST_CLASSES - 1}"
        )


def _examples(arrays: Arrays, class_names: Sequence[str]) -> Iterator[Example]:
    for number, (image, label) in enumerate(zip(arrays.images, arrays.labels, strict=True)):
        name = label if arrays.labels.dtype.kind == "U" else class_names[label]
        yield Example(f"{arrays.name}[{number}]", partial(_png, image), str(name))


def _png(image: np.ndarray) -> bytes:
    """An image (height, width), or with 1 or 3 channels behind, of uint8, as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, "PNG")
    return buffer.getvalue()
