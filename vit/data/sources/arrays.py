"""Pictures as arrays of uint8: IDX files (MNIST and its family), and .npz files.

IDX: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... alike, each plain or as .gz. npz:
arrays `images` (n, height, width[, 1 or 3]) and `labels` (n,) of integers or text, or `x` and `y`;
`train_images`, `x_test`, ... for splits; `class_names` of each file if the labels are
integers and have names.
"""

import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit.data.classes import placeholders
from vit.data.sources.source import (
    Example,
    Labels,
    Source,
    by_split,
    class_names,
    reading,
    split_of,
)

IMAGES, LABELS = {"images", "image", "x", "imgs"}, {"labels", "label", "y", "targets", "target"}
"""Names of the arrays of an npz file."""
MOST_CLASSES = 2**16
SHAPES = ((), (1,), (3,))
"""Shapes of a pixel."""


class Arrays(NamedTuple):
    """The pictures of a split, and their classes: numbers or text."""

    name: str
    images: np.ndarray
    labels: np.ndarray
    class_names: Sequence[str] = ()
    """Names of the numbers, by the file that has them."""

    @property
    def names(self) -> Labels:
        """Names of the classes."""
        if self.class_names or self.labels.dtype.kind != "U":
            return self.class_names or None
        return frozenset(map(str, np.unique(self.labels)))

    def name_of(self, label: Any) -> str:
        """Return the name of a label."""
        if self.class_names and self.labels.dtype.kind != "U":
            return str(self.class_names[label])
        return str(label)


def read_idx_folder(source: Path, _: str = "") -> Source | None:
    """Read the IDX files of a folder.

    Raises:
        ValueError: if files are damaged or contradict one another.
    """
    by_file, files = [], []
    for path in sorted(source.glob("*-images-idx3-ubyte*")):
        prefix = path.name.split("-images-idx3-ubyte")[0]
        labels = sorted(source.glob(f"{prefix}-labels-idx1-ubyte*"))
        if not labels:
            raise ValueError(f"{path} has no labels next to it ({prefix}-labels-idx1-ubyte)")
        split = "train" if prefix.endswith("train") else "test"
        by_file.append((split, Arrays(str(path), read_idx(path, 3), read_idx(labels[0], 1))))
        files += [path, labels[0]]
    return _source(source, by_file, files)


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the values.

    Raises:
        ValueError: if the file has another format, is damaged or empty.
    """
    with reading(path, "", EOFError, zlib.error, ValueError):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        if content[:4] != bytes([0, 0, 8, num_dimensions]):
            raise ValueError(f"no IDX file of {num_dimensions} dimensions of bytes")
        sizes = np.frombuffer(content, ">u4", num_dimensions, 4)
        return np.frombuffer(content, np.uint8, offset=4 + sizes.nbytes).reshape(sizes)


def read_npz(source: Path, _: str = "") -> Source | None:
    """Read the .npz files of a folder; nothing in them is executed.

    Raises:
        ValueError: if an array cannot be used; the message lists the arrays.
    """
    by_file: list[tuple[str, Arrays]] = []
    paths = sorted(source.glob("*.npz"))
    for path in paths:
        # TypeError: a broken header. ValueError: an array of Python objects. MemoryError: a header
        # of more than there is.
        errors = (TypeError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
        with reading(path, "", *errors), np.load(path, allow_pickle=False) as file:
            # Some keep labels as (n, 1).
            arrays = {k: np.asarray(x) for k, x in file.items()}  # bytes for what is no array
            arrays = {k: x[:, 0] if x.shape[1:] == (1,) else x for k, x in arrays.items()}
        names = [str(name) for name in np.atleast_1d(arrays.pop("class_names", []))]
        images = _by_split(path, arrays, IMAGES)
        shapes = {split: arrays[key].shape[:1] for split, key in images.items()}
        labels = _by_split(path, arrays, LABELS, shapes)
        if not images or images.keys() != labels.keys():
            there = ", ".join(f"{key} {x.dtype}{list(x.shape)}" for key, x in arrays.items())
            raise ValueError(
                f"{path} must hold images and labels, or x and y, as train_images or x_test of a"
                f" split; it holds {there}"
            )
        for split, key in images.items():
            member = Arrays(f"{path}:{key}", arrays[key], arrays[labels[split]], names)
            by_file.append((split, member))
    return _source(source, by_file, paths)


def _by_split(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    words: set[str],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, str]:
    """Return the names of arrays with one of these words, by the split in their or the file's.

    Args:
        path: the file.
        arrays: its arrays.
        words: words of the names.
        shapes: shape that an array of the split should have; None for three axes or more.

    Raises:
        ValueError: if several arrays of a split have such a name and fit.
    """
    keys: dict[str, list[str]] = {}
    for key in arrays:
        if words & set(key.lower().split("_")):
            keys.setdefault(split_of(key, split_of(path.stem)), []).append(key)
    for split, there in keys.items():
        fitting = [
            key
            for key in there
            if (arrays[key].ndim > 2 if shapes is None else arrays[key].shape == shapes.get(split))
        ]
        if len(fitting) > 1:
            raise ValueError(
                f"{path} holds {' and '.join(fitting)} for the split {split!r}: rename or remove"
                " all but one"
            )
        keys[split] = fitting or there
    return {split: there[0] for split, there in keys.items()}


def _source(
    folder: Path, by_file: list[tuple[str, Arrays]], files: Sequence[Path]
) -> Source | None:
    """Return the source of arrays by split; ValueError if they are no pictures with classes."""
    if not by_file:
        return None
    splits = by_split(folder, ((split, arrays.name, arrays) for split, arrays in by_file))
    for arrays in splits.values():
        _check(arrays)
    ordered = [splits[name] for name in sorted(splits, key=lambda name: name != "train")]
    names = class_names(folder, {x.name: x.names for x in ordered})
    if not names:
        names = placeholders(1 + max(int(arrays.labels.max()) for arrays in splits.values()))
    channels = 3 if any(x.images.shape[3:] == (3,) for x in splits.values()) else 1
    examples = {split: partial(_examples, x) for split, x in splits.items()}
    return Source(names, channels, examples, files)


def _check(arrays: Arrays) -> None:
    """Raise ValueError if arrays are no pictures with classes."""
    name, images, labels, names = arrays
    shape, kind = images.shape, labels.dtype.kind
    if images.dtype != np.uint8 or len(shape) < 3 or not shape[0] or shape[3:] not in SHAPES:
        raise ValueError(
            f"{name} is {images.dtype}{list(shape)}: images are uint8, 0 to 255, of shape (n,"
            " height, width[, 1 or 3]) with n > 0"
        )
    if labels.shape != shape[:1] or kind not in "iuU" or (kind == "i" and labels.min() < 0):
        raise ValueError(
            f"{name} has {len(images)} images, its labels are {labels.dtype}{list(labels.shape)}: a"
            " text or an integer from 0 on for each is needed"
        )
    most = len(names) or MOST_CLASSES
    if kind != "U" and labels.max() >= most:
        raise ValueError(f"{name}: labels up to {labels.max()} for at most {most} class_names")
    if kind == "U" and names and (foreign := {*labels.tolist()} - {*names}):
        raise ValueError(f"{name}: the label {min(foreign)!r} is none of its class_names")


def _examples(arrays: Arrays) -> Iterator[Example]:
    for number, (image, label) in enumerate(zip(arrays.images, arrays.labels, strict=True)):
        name = arrays.name_of(label)
        yield Example(f"{arrays.name}[{number}]", partial(_png, image), name)


def _png(image: np.ndarray) -> bytes:
    """Return an image (height, width[, 1 or 3]) of uint8 as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, "PNG")
    return buffer.getvalue()
