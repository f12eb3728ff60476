"""Pictures as arrays of uint8: IDX files (MNIST and its family), and .npz files.

IDX: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... alike, each plain or as .gz. npz:
the names of Keras (x_train, y_train, x_test, ...) or of MedMNIST (train_images, train_labels,
val_images, ...), or those of `--images` and `--labels`. Labels are whole numbers or text. An array
`class_names` has the names of the numbers of its file.
"""

import gzip
import io
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit.data.classes import in_order, word
from vit.data.sources.source import Example, Source, Unsaid, by_split, ordered, reading
from vit.data.sources.words import Words, with_splits

SHAPES = ((), (1,), (3,))
"""Shapes of a pixel."""
IDX = {"train": "train", "t10k": "test", "test": "test"}
"""Split of the last word before "-images-idx3-ubyte"."""


class Arrays(NamedTuple):
    """The pictures of a split, and the class of each in words."""

    name: str
    images: np.ndarray
    labels: Sequence[str]
    names: Sequence[str]
    """Names of the classes in order; () for numbers without names."""


def read_idx_folder(source: Path, _: Words) -> Source:
    """Read the IDX files of a folder.

    Raises:
        ValueError: if files are damaged or contradict one another.
    """
    parts, files = [], []
    for path in sorted(source.glob("*-images?idx3-ubyte*")):
        prefix = path.name.split("-images")[0]
        labels = sorted(source.glob(f"{prefix}-labels?idx1-ubyte*"))
        if not labels or (split := IDX.get(prefix.split("-")[-1])) is None:
            raise ValueError(
                f"{path} must be named train-images-idx3-ubyte or t10k-images-idx3-ubyte, with its"
                " labels next to it, as train-labels-idx1-ubyte"
            )
        arrays = _arrays(str(path), read_idx(path, 3), read_idx(labels[0], 1))
        parts.append((split, str(path), arrays))
        files += [path, labels[0]]
    return _source(source, parts, files)


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


def read_npz(source: Path, words: Words) -> Source:
    """Read the .npz files of a folder; nothing in them is executed.

    Raises:
        Unsaid: if the arrays have other names, and none are said.
        ValueError: if an array does not exist or cannot be used.
    """
    paths = sorted(source.glob("*.npz"))
    members = {f"{path.name}/{key}": x for path in paths for key, x in loaded(path).items()}
    pairs = _said(source, members, words) if words.images else [*_conventional(members)]
    if not pairs:
        raise Unsaid(
            f"the arrays of {source} have neither the names of Keras (x_train, y_train, x_test,"
            f" ...) nor of MedMNIST (train_images, train_labels, ...); it holds {shown(members)}"
        )
    parts = []
    for split, image, label in pairs:
        names = members.get(f"{label.split('/')[0]}/class_names", ())
        arrays = _arrays(f"{source}/{image}", members[image], members[label], names)
        parts.append((split, image, arrays))
    return _source(source, parts, paths)


def loaded(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file; bytes for what is no array."""
    # TypeError: a broken header. ValueError: an array of Python objects. MemoryError: a header of
    # more than there is.
    errors = (TypeError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
    with reading(path, "", *errors), np.load(path, allow_pickle=False) as file:
        arrays = {key: np.asarray(x) for key, x in file.items()}
    return {key: x[:, 0] if x.shape[1:] == (1,) else x for key, x in arrays.items()}


def _conventional(members: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the split, images and labels of arrays with the names of Keras or MedMNIST."""
    for file in dict.fromkeys(member.split("/")[0] for member in members):
        for part, split in (("train", "train"), ("val", "validation"), ("test", "test")):
            for names in ("x_{}", "y_{}"), ("{}_images", "{}_labels"):
                image, label = (f"{file}/{name.format(part)}" for name in names)
                if image in members and label in members:
                    yield split, image, label


def _said(
    source: Path, members: Mapping[str, np.ndarray], words: Words
) -> list[tuple[str, str, str]]:
    """Return the split, images and labels of the arrays that the words name."""
    labels = {split: name for name, split in with_splits("labels", words.labels)}
    images = with_splits("images", words.images)
    if labels.keys() != {split for _, split in images} or len(labels) != len(images):
        raise ValueError("--images and --labels must name one array for each split")
    member = partial(_member, source, members)
    return [(split, member(name), member(labels[split])) for name, split in images]


def _member(source: Path, members: Mapping[str, np.ndarray], name: str) -> str:
    """Return the array of a name, "imgs" or "train.npz/imgs"."""
    there = [x for x in members if name in (x, x.split("/", 1)[1])]
    if len(there) != 1:
        raise ValueError(
            f"{source} holds {len(there)} arrays {name!r}; there are {shown(members)}; of several"
            " files one is train.npz/x"
        )
    return there[0]


def shown(members: Mapping[str, np.ndarray]) -> str:
    """Return the names, types and shapes of arrays."""
    return ", ".join(f"{key} {x.dtype}{list(x.shape)}" for key, x in members.items())


def _source(
    folder: Path, parts: Sequence[tuple[str, str, Arrays]], files: Sequence[Path]
) -> Source:
    """Return the source of arrays by split, the classes of training first."""
    splits = by_split(folder, parts)
    first = sorted(splits.values(), key=lambda x: x is not splits.get("train"))
    channels = 3 if any(x.images.shape[3:] == (3,) for x in first) else 1
    examples = {split: partial(_examples, x) for split, x in splits.items()}
    return Source(channels, examples, files, ordered({x.name: x.names for x in first}))


def _arrays(name: str, images: np.ndarray, labels: np.ndarray, names: Any = ()) -> Arrays:
    """Return pictures and their classes in words; ValueError if they are none."""
    shape, kind, names = images.shape, labels.dtype.kind, [word(x) for x in np.atleast_1d(names)]
    if images.dtype != np.uint8 or len(shape) < 3 or not shape[0] or shape[3:] not in SHAPES:
        raise ValueError(
            f"{name} is {images.dtype}{list(shape)}: images are uint8, 0 to 255, of shape (n,"
            " height, width[, 1 or 3]) with n > 0"
        )
    if labels.shape[:1] == shape[:1] and labels.ndim > 1:
        raise ValueError(
            f"{name}: labels {labels.dtype}{list(labels.shape)} are several numbers for each"
            " picture, but a picture has one class; store numpy.argmax(labels, 1) if one is 1"
        )
    is_whole = kind in "iuUS" or (kind == "f" and (labels == labels.round()).all())
    if labels.shape != shape[:1] or not is_whole:
        raise ValueError(
            f"{name} has {len(images)} images, its labels are {labels.dtype}{list(labels.shape)}: a"
            " text or a whole number for each is needed"
        )
    if kind in "US":
        found = [word(x) for x in labels.tolist()]
        if names and (foreign := in_order({*found} - {*names})):
            raise ValueError(f"{name}: the label {foreign[0]!r} is none of its class_names")
        return Arrays(name, images, found, names or in_order(found))
    if labels.min() < 0 or (names and labels.max() >= len(names)):
        raise ValueError(
            f"{name} has labels {labels.min()} to {labels.max()}; they must be from 0"
            f"{f' to {len(names) - 1}, for there are {len(names)} class_names' * bool(names)}"
        )
    numbers = labels.astype(int).tolist()
    return Arrays(name, images, [names[x] if names else str(x) for x in numbers], names)


def _examples(arrays: Arrays) -> Iterator[Example]:
    for number, (image, label) in enumerate(zip(arrays.images, arrays.labels, strict=True)):
        yield Example(f"{arrays.name}[{number}]", partial(_png, image), label)


def _png(image: np.ndarray) -> bytes:
    """Return an image (height, width[, 1 or 3]) of uint8 as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(buffer, "PNG")
    return buffer.getvalue()
