"""Examples: how a record of a data set becomes arrays.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file; or arrays by name (`in_memory`), or what else a data set's `decode` reads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit import augment, bounded, config

Batch = dict[str, Any]
"""Arrays by name, NumPy or JAX: those of the examples, bad and for evaluation mask."""


class WrongLabelError(ValueError):
    """A record that can be read, but not used: no other one may stand in for it."""


def labelled_image(
    record: Any, rng: np.random.Generator | None, data: config.Data, dataset: "Dataset"
) -> Batch:
    """The image and label of a record; with a generator as training sees them."""
    image, channels = record["image"], dataset.channels
    if rng is not None and data.crop == "inception":
        box = partial(augment.inception_box, rng=rng)
        image = _pixels(image, data.image_size, channels, box, Image.Resampling.BILINEAR)
    else:
        image = evaluated_pixels(image, data, channels)
    label = _label(record, dataset)
    return {"image": image if rng is None else _augmented(image, rng, data), "label": label}


def blank_image(data: config.Data, dataset: "Dataset") -> Batch:
    """A black image of the first class."""
    shape = (data.image_size, data.image_size, dataset.channels)
    return {"image": np.zeros(shape, np.uint8), "label": np.int32(0)}


class Dataset(NamedTuple):
    """Random-access sources of records for training and evaluation, and how they are read."""

    train: Sequence[Any]
    evaluation: Sequence[Any]
    class_names: tuple[str, ...] = ()
    """Of the labels 0, 1, ...: of images with a class."""
    channels: int = 0
    decode: Callable[..., Batch] = labelled_image
    """(record, generator or None in evaluation, section of the config, data set) -> an example:
    arrays by name, always of the same shapes."""
    blank: Callable[..., Batch] = blank_image
    """(section of the config, data set) -> an example that pads the last batch."""

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.class_names)


def in_memory(train: Sequence[Batch], evaluation: Sequence[Batch]) -> Dataset:
    """A data set of examples: arrays by name, the same names and shapes in each."""
    return Dataset(
        train,
        evaluation,
        decode=lambda record, rng, data, dataset: record,
        blank=lambda data, dataset: {k: np.zeros_like(x) for k, x in dataset.train[0].items()},
    )


def _augmented(image: np.ndarray, rng: np.random.Generator, data: config.Data) -> np.ndarray:
    if data.max_shift:
        image = augment.random_shift(image, rng, data.max_shift)
    if data.flip:
        image = augment.random_flip(image, rng)
    if data.randaugment_layers:
        image = augment.randaugment(image, rng, data.randaugment_layers, data.randaugment_magnitude)
    if data.erase and rng.random() < data.erase:
        image = augment.random_erasing(image, rng)
    return image


def _label(record: dict[str, Any], dataset: Dataset) -> np.int32:
    label = int(record["label"])
    if not 0 <= label < dataset.num_classes:
        raise WrongLabelError(
            f"has the label {label}, but the classes are 0 to {dataset.num_classes - 1}"
            + " (-1 stands for a label that is kept secret)" * (label == -1)
        )
    return np.int32(label)


def evaluated_pixels(image: Any, data: config.Data, channels: int) -> np.ndarray:
    """What evaluation sees of an array or encoded image, (image_size, image_size, channels) uint8.

    The shorter side becomes `data.eval_resize`, or `data.image_size` where that is 0, and the
    centre is cut out, in one resampling; an image that has the right size passes untouched.

    Raises:
        OSError, SyntaxError, ...: what PIL raises when the bytes are no image or a truncated one.
    """
    return _pixels(image, data.image_size, channels, partial(_center_box, data=data))


def _center_box(width: int, height: int, data: config.Data) -> augment.Box:
    """What evaluation sees of an image, in its own pixels."""
    side = min(width, height) * data.image_size / (data.eval_resize or data.image_size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _pixels(
    image: Any,
    size: int,
    channels: int,
    box: Callable[[int, int], augment.Box],
    filter: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
    """The part `box(width, height)` of an array or encoded image, resized: (size, size, channels).

    A JPEG is decoded at a half, a quarter or an eighth where the part remains large enough.

    Raises:
        OSError, SyntaxError, ...: what PIL raises when the bytes are no image or a truncated one.
    """
    opened = bounded.image(image) if isinstance(image, bytes) else augment.to_pil(image)
    mode = "L" if channels == 1 else "RGB"
    width, height = opened.size
    left, top, right, bottom = box(width, height)
    room = min(right - left, bottom - top) / size
    reduction = next((r for r in (8, 4, 2) if r <= room), 1)
    if not opened.draft(mode, (width // reduction, height // reduction)):
        reduction = 1
    if opened.mode not in ("L", mode):
        opened = opened.convert(mode)
    part = (left / reduction, top / reduction, right / reduction, bottom / reduction)
    opened = opened.resize((size, size), filter, box=part)
    if opened.mode != mode:  # grey images are resized before they get three channels
        opened = opened.convert(mode)
    return np.asarray(opened).reshape(size, size, channels)
