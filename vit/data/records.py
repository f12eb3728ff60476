"""Records, and how they become arrays.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file; or arrays by name (`in_memory`), or whatever a data set's `decode` reads.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit import config
from vit.data import augment, classes

Batch = dict[str, Any]
"""Arrays of the examples by name, NumPy or JAX; for evaluation also `mask`."""


def labelled_image(
    record: Any, rng: np.random.Generator | None, data: config.Data, dataset: "Dataset"
) -> Batch:
    """Return the image and label of a record, augmented if there is a generator.

    Raises:
        ValueError: if the label is none of the data set's classes.
        OSError, SyntaxError, ...: as `evaluated_pixels`.
    """
    image, channels = record["image"], dataset.channels
    if rng is not None and data.crop == "inception":
        box = partial(augment.inception_box, rng=rng)
        image = _pixels(image, data.image_size, channels, box, Image.Resampling.BILINEAR)
    else:
        image = evaluated_pixels(image, data, channels)
    label = int(record["label"])
    if not 0 <= label < dataset.num_classes:
        raise ValueError(
            f"it has the label {label}, but the classes are 0 to {dataset.num_classes - 1}"
            + " (-1 stands for a label that is kept secret)" * (label == -1)
        )
    if rng is not None:
        if data.max_shift:
            image = augment.random_shift(image, rng, data.max_shift)
        if data.flip:
            image = augment.random_flip(image, rng)
        if n := data.randaugment_layers:
            image = augment.randaugment(image, rng, n, data.randaugment_magnitude)
        if data.erase and rng.random() < data.erase:
            image = augment.random_erasing(image, rng)
    return {"image": image, "label": np.int32(label)}


def blank_image(data: config.Data, dataset: "Dataset") -> Batch:
    """Return a black image of the first class."""
    shape = (data.image_size, data.image_size, dataset.channels)
    return {"image": np.zeros(shape, np.uint8), "label": np.int32(0)}


class Dataset(NamedTuple):
    """Random-access sequences of records for training and evaluation, and how they are read."""

    train: Sequence[Any]
    evaluation: Sequence[Any]
    class_names: tuple[str, ...] = ()
    """Names of the labels 0, 1, ... of images with a class."""
    channels: int = 0
    decode: Callable[..., Batch] = labelled_image
    """(record, generator or None in evaluation, section `data`, data set) -> an example:
    arrays by name, of the same shapes for every record. Evaluation uses the name "mask"."""
    blank: Callable[..., Batch] = blank_image
    """(section `data`, data set) -> an example that pads the last batch."""
    fingerprint: Callable[[], str] = str
    """() -> a text that changes with the examples; empty if it is not known."""
    shared: str = ""
    """Message if both sequences have records in common: no run is trained on them."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.class_names)


def in_memory(train: Sequence[Batch], evaluation: Sequence[Batch]) -> Dataset:
    """Return a data set of examples: arrays by name, the same names and shapes in each."""
    return Dataset(
        train,
        evaluation,
        decode=lambda record, rng, data, dataset: record,
        blank=lambda data, dataset: {k: np.zeros_like(x) for k, x in dataset.train[0].items()},
        fingerprint=fingerprint(lambda: _values(train, evaluation)),
    )


def fingerprint(parts: Callable[[], Iterable[Any]]) -> Callable[[], str]:
    """Return a function that hashes bytes, texts and arrays once, when it is called.

    Arrays of objects are not hashed, only their shape.
    """
    known: list[str] = []  # functools.cache cannot be sent to workers

    def hashed() -> str:
        if known:
            return known[0]
        total = hashlib.blake2b(digest_size=16)
        for part in parts():
            x = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else np.asarray(part)
            total.update(f"{x.dtype} {x.shape}".encode())
            total.update(b"" if x.dtype.hasobject else np.ascontiguousarray(x).tobytes())
        known.append(total.hexdigest())
        return known[0]

    return hashed


def _values(*splits: Sequence[Batch]) -> Iterator[Any]:
    """Yield names and values of all examples."""
    for split in splits:
        yield len(split)
        for example in split:
            for name in sorted(example):
                yield name
                yield example[name]


def with_classes(
    dataset: Dataset, class_names: Sequence[str], match: classes.Match = "name"
) -> Dataset:
    """Return a data set of images with the labels of these classes, as `classes.matched`.

    Raises:
        ValueError: as `classes.matched`.
    """
    if list(class_names) == list(dataset.class_names):
        return dataset
    label = classes.matched(class_names, dataset.class_names, match)

    def decode(record: Any, rng: np.random.Generator | None, data: config.Data, _: Any) -> Batch:
        example = dataset.decode(record, rng, data, dataset)
        return example | {"label": np.int32(label[example["label"]])}

    return dataset._replace(class_names=tuple(class_names), decode=decode)


def evaluated_pixels(image: Any, data: config.Data, channels: int) -> np.ndarray:
    """Return an array or encoded image for evaluation: (image_size, image_size, channels) uint8.

    The shorter side, or both sides with `data.eval_crop` "squash", become `data.eval_resize`, or
    `data.image_size` if that is 0, and the centre is cut out, in one resampling. An image of the
    right size is not changed.

    Raises:
        OSError, SyntaxError, ...: as PIL, if the bytes are no image or a truncated one.
    """
    size = data.image_size
    if np.shape(image) == (size, size, channels) and data.eval_resize in (0, size):
        return image

    def center(width: int, height: int) -> augment.Box:
        share = size / (data.eval_resize or size)
        sides = (width, height) if data.eval_crop == "squash" else (min(width, height),) * 2
        w, h = (share * side for side in sides)
        left, top = (width - w) / 2, (height - h) / 2
        return left, top, left + w, top + h

    return _pixels(image, size, channels, center, Image.Resampling.BICUBIC)


def _pixels(
    image: Any,
    size: int,
    channels: int,
    box: Callable[[int, int], augment.Box],
    filter: Image.Resampling,
) -> np.ndarray:
    """Return the part `box(width, height)` of an image, resized: (size, size, channels).

    A JPEG is decoded at a half, a quarter or an eighth if the part remains large enough.
    """
    opened = augment.open_image(image) if isinstance(image, bytes) else augment.to_pil(image)
    mode = "L" if channels == 1 else "RGB"
    width, height = opened.size
    left, top, right, bottom = box(width, height)
    ratio = min(right - left, bottom - top) / size
    reduction = next((r for r in (8, 4, 2) if r <= ratio), 1)
    if not opened.draft(mode, (width // reduction, height // reduction)):
        reduction = 1
    if opened.mode not in ("L", mode):  # grey images are resized before they get three channels
        opened = opened.convert(mode)
    part = (left / reduction, top / reduction, right / reduction, bottom / reduction)
    opened = opened.resize((size, size), filter, box=part).convert(mode)
    return np.asarray(opened).reshape(size, size, channels)
