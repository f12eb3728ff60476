"""Trained models from Python: prediction and features without the data set; training on arrays.

    import vit

    model = vit.load("runs/photos")
    model.predict(["cat.jpg", "dog.jpg"]).top(3)
    model = vit.fit(images, labels, config="digits", workdir="runs/mine")

Images are read as in the evaluation of the run: resized by the shorter side, then cropped to the
centre.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps

from performer.choices import unknown
from vit import config as configs
from vit import data
from vit.config import recipe
from vit.data import augment
from vit.data.classes import in_order, word
from vit.data.sources.source import content as read
from vit.data.sources.source import holdout
from vit.model import classification
from vit.run import checkpoint, loop, steps
from vit.storage import buckets
from vit.task import description_of

LARGEST = 64
"""Maximum number of images per batch."""

ORIENTATION = 0x0112
"""EXIF tag."""


class Prediction(NamedTuple):
    """Class probabilities of n images."""

    probabilities: Float[np.ndarray, "n classes"]
    """With a sigmoid loss they need not sum to one."""
    class_names: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """Most likely class of each image."""
        return [self.class_names[i] for i in np.argmax(self.probabilities, axis=-1)]

    def top(self, number: int = 5) -> list[list[tuple[str, float]]]:
        """Return the most likely classes of each image with their probabilities."""
        order = np.argsort(-self.probabilities, axis=-1, kind="stable")[:, :number]
        return [
            [(self.class_names[i], float(row[i])) for i in indices]
            for row, indices in zip(self.probabilities, order, strict=True)
        ]


@dataclasses.dataclass(frozen=True, repr=False)
class Trained:
    """Trained model of a run, as returned by `load`."""

    workdir: Path
    config: Any
    step: int
    class_names: tuple[str, ...]
    channels: int
    model: Any
    """Model in evaluation mode, with the running mean of the parameters if the run keeps one."""

    def __repr__(self) -> str:
        """Run, step, architecture, input and output in one line."""
        side = self.config.data.image_size
        return (
            f"Trained({str(self.workdir)!r} at step {self.step}: {self.config.summary},"
            f" {side} x {side} x {self.channels} -> {len(self.class_names)} classes)"
        )

    def predict(self, images: Any) -> Prediction:
        """Return the class probabilities of images.

        Args:
            images: sequence of images, each a file name or an array of uint8 of any size,
                (height, width) or (height, width, 1 or 3), or an image of Pillow; or one array (n,
                height, width, c), or one file name. Transparent pixels are shown on white.

        Raises:
            ValueError: for an input that is no image; the message names it.
        """
        return self.prediction(self.outputs(images)[0])

    def prediction(self, logits: Float[np.ndarray, "n classes"]) -> Prediction:
        """Return the probabilities of logits, with the class names."""
        link = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[self.config.optim.loss]
        return Prediction(np.asarray(link(logits)), self.class_names)

    def features(self, images: Any) -> Float[np.ndarray, "n width"]:
        """Return the input of the head, pooled by `config.model.pooling`.

        It is taken after the last norm, and after the tanh layer of a model with `pre_logits`.

        Args:
            images: as in `predict`.
        """
        return self.outputs(images)[1]

    def outputs(
        self, images: Any
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n width"]]:
        """Return logits and features, in batches of at most `LARGEST`; images as in `predict`."""
        images = listed(images)
        batches = (images[i : i + LARGEST] for i in range(0, len(images), LARGEST))
        results = [self.forward(np.stack(list(map(self.pixels, batch)))) for batch in batches]
        logits, features = (np.concatenate(x) for x in zip(*results, strict=True))
        return logits, features

    def forward(
        self, pixels: UInt8[np.ndarray, "n size size c"]
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n width"]]:
        """Return logits and features of one batch of images from `pixels`."""
        size = 1 << (len(pixels) - 1).bit_length()  # powers of two: few shapes to compile
        padding = [(0, size - len(pixels)), *[(0, 0)] * 3]
        logits, features = _outputs(self.model, np.pad(pixels, padding))
        return np.asarray(logits)[: len(pixels)], np.asarray(features)[: len(pixels)]

    def pixels(self, image: Any, bits: int = 16) -> UInt8[np.ndarray, "size size c"]:
        """Return the input of the model for one image, given as in `predict`.

        Args:
            image: as in `predict`.
            bits: bits of the grey values of a file that stores them in 16.

        Raises:
            ValueError: for an input that is no image; the message names it.
        """
        is_file = isinstance(image, str | os.PathLike)
        try:
            if is_file and bits < 16:
                content = checked(augment.open_image(read(Path(image)), bits))
            else:
                content = upright(read(Path(image))) if is_file else checked(image)
            return data.evaluated_pixels(content, self.config.data, self.channels)
        except Exception as error:  # PIL raises many kinds for broken files
            name = image if is_file else "an array"
            raise ValueError(f"{name} cannot be read as an image: {error}") from error


def load(
    workdir: str | os.PathLike,
    step: int | str | None = None,
    *,
    sharding: Sharding | None = None,
) -> Trained:
    """Load the model of a run, as it is evaluated.

    Args:
        workdir: folder of the run.
        step: step of the checkpoint, or "best" for the best evaluation; None for the newest
            readable checkpoint.
        sharding: placement of the arrays; None for the first device of this process.

    Raises:
        ValueError: when the folder holds no run, a run of another task than image classification,
            no checkpoint of that step, or no readable checkpoint.
    """
    workdir = buckets.path(workdir)
    config = configs.of_run(workdir)
    configs.validate(config)
    classification.check_images(workdir, config)
    described = description_of(workdir, config)
    if not described:
        raise ValueError(f"{workdir} has no task.json, which names the classes")
    class_names, channels = tuple(described["class_names"]), described["channels"]
    task = classification.task(len(class_names), channels, config.optim.loss, config.task)
    graph, arrays = steps.shapes(config, task)
    place = sharding or SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays
    )
    number, state = checkpoint.restore(workdir, abstract, step)
    model = steps.evaluated_model(graph, state)
    return Trained(workdir, config, number, class_names, channels, model)


def listed(images: Any) -> list[Any]:
    """Return the images as a list.

    Raises:
        ValueError: for an array of a single image, or for no images.
    """
    if isinstance(images, str | os.PathLike):
        return [images]
    shape = getattr(images, "shape", ())
    if len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3)):
        raise ValueError(
            f"images have the shape {shape}: give (n, height, width) or (n, height, width,"
            " channels), one image as [image]"
        )
    if not (listed := list(images)):
        raise ValueError("no images are given")
    return listed


def checked(image: Any) -> np.ndarray:
    """Return an image as an array (height, width, 1 or 3) of uint8; ValueError if it is none."""
    if isinstance(image, Image.Image):  # its array may be of numbers of a palette
        image = augment.opaque(ImageOps.exif_transpose(image))
        image = image if image.mode in ("L", "RGB", "F") else image.convert("RGB")
    image = np.asarray(image)
    if image.dtype != np.uint8:
        raise ValueError(f"it is an array of {image.dtype}: give uint8, 0 to 255")
    shape = image.shape
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[-1] not in (1, 3) or not image.size:
        raise ValueError(f"its shape is {shape}: give (height, width) or (height, width, 1|3)")
    return image


def upright(content: bytes) -> Any:
    """Return an encoded image, or its upright pixels if an EXIF tag rotates it."""
    with augment.open_image(content) as opened:
        if opened.getexif().get(ORIENTATION) in range(2, 9):
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    return content


@nnx.jit
def _outputs(model: Any, images: Any) -> tuple[Any, Any]:
    logits, intermediates = model(images)
    return logits, intermediates["pooled"].astype(logits.dtype)


def fit(
    images: Any,
    labels: Any,
    *,
    workdir: str | os.PathLike,
    config: Any = None,
    values: Mapping[str, Any] | None = None,
    evaluation: float | Sequence[Any] = 0.1,
) -> Trained:
    """Train on images and labels, as `vit.train` does; the same call resumes a stopped run.

    Args:
        images: n images, one array (n, height, width[, c]) or a sequence of arrays (height, width)
            or (height, width, 1 or 3) of any size, uint8, or of images of Pillow.
        labels: n names or numbers of classes; the classes 0, 1, ... are the numbers by their size,
            then the names in order. Bytes are names in UTF-8. 1, 1.0 and "01" are the same class.
        workdir: folder of the run; made if it does not exist.
        config: a `vit.config.Config`, the name of a bundled one, or None for one that is derived
            from the images and `values` by `vit.config.recipe.for_images`. Its data set is not
            read, and `data.num_workers` is 0: the arrays are in memory.
        values: fields with other values, as {"num_epochs": 3, "attention.coupling": "pm"}.
        evaluation: (images, labels) to evaluate on; or the share of the images that is held out,
            evenly over the classes, by the seed of the config.

    Returns:
        The result of `vit.load(workdir)`.

    Raises:
        ValueError: before anything is written, if images and labels do not fit, the config or a
            field is unknown, or the config cannot work; and as `vit.run.loop.train`.
    """
    records, class_names = examples(images, labels)
    if len({*class_names}) < 2:
        raise ValueError(f"all labels are {class_names[0]!r}: there is nothing to classify")
    channels = max(record["image"].shape[-1] for record in records)
    side = int(median(min(record["image"].shape[:2]) for record in records))
    config = configs.bundled(config) if isinstance(config, str) else config
    given = {**(values or {}), "data.name": data.ARRAYS, "data.dir": "", "data.num_workers": 0}
    fields = configs.flag_types(type(config) if config else configs.Config)
    for name in given:
        if name not in fields:
            raise ValueError(unknown("field of the config", name, tuple(fields)))
    if config is None:
        config = recipe.for_images(len(records), len(class_names), side, channels, given)
    else:
        config = config.overridden(given)
    if not isinstance(evaluation, int | float) and len(evaluation) == 2:
        held_out, _ = examples(evaluation[0], evaluation[1], class_names)
    elif not isinstance(evaluation, int | float) or not 0 < evaluation < 1:
        shown = evaluation if isinstance(evaluation, int | float) else f"{len(evaluation)} values"
        raise ValueError(f"evaluation={shown}: give (images, labels), or a share between 0 and 1")
    else:
        names = [class_names[record["label"]] for record in records]
        held = holdout(names, evaluation, config.seed)
        held_out = [record for record, out in zip(records, held, strict=True) if out]
        records = [record for record, out in zip(records, held, strict=True) if not out]
    dataset = data.in_memory(records, held_out)
    dataset = data.Dataset(
        records, held_out, class_names, channels, fingerprint=dataset.fingerprint
    )
    loop.train(config, buckets.path(workdir), dataset)
    return load(workdir)


def examples(
    images: Any, labels: Any, class_names: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return records {"image", "label"} with numbers for the labels, and the class names.

    Args:
        images: as `fit`.
        labels: as `fit`.
        class_names: existing names; those of the labels if None.

    Raises:
        ValueError: if arrays are no images, the number of labels differs, a label is missing (None
            or NaN) or not among the names.
    """
    images, values = listed(images), np.asarray(labels)
    if any(isinstance(image, str | os.PathLike) for image in images):
        raise ValueError(
            "images are file names, but vit.fit takes arrays: read them (PIL.Image.open), or make a"
            " data set of the files with vit.prepare"
        )
    if values.shape != (len(images),):
        raise ValueError(f"{len(images)} images need as many labels, got shape {values.shape}")
    # NumPy makes the word "nan" of a NaN in a list of words.
    for i, label in enumerate(labels if isinstance(labels, list | tuple) else values):
        if label is None or label != label:
            raise ValueError(f"the label of image {i} is {label}: leave out images without a label")
    words = list(map(word, values.tolist()))
    names = tuple(in_order(words) if class_names is None else class_names)
    number = {word(name): i for i, name in enumerate(names)}
    others = in_order({*words} - {*number})
    if others:
        raise ValueError(f"the labels {others[:5]} are not among those of training, {names[:20]}")
    return [
        {"image": checked(image), "label": number[label]}
        for image, label in zip(images, words, strict=True)
    ], names
