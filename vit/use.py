"""A trained run as a thing to use: no data set is needed.

    import vit

    model = vit.load("runs/photos")
    model.predict(["cat.jpg", "dog.jpg"]).top(3)

Pictures are read as in the evaluation of the run: the shorter side is resized, the centre cut out.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float, UInt8
from PIL import ImageOps

from vit import config as configs
from vit import data
from vit.model import ViT, classification
from vit.run import bounded, checkpoint, steps
from vit.task import of_folder

LARGEST = 64
"""Images that go through the model at once, at most."""

ORIENTATION = 0x0112
"""The EXIF tag."""


class Prediction(NamedTuple):
    """Probabilities of the classes of n images."""

    probabilities: Float[np.ndarray, "n classes"]
    """With a sigmoid loss each class is on its own, and they need not sum to one."""
    class_names: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """The likeliest class of each image."""
        return [self.class_names[i] for i in np.argmax(self.probabilities, axis=-1)]

    def top(self, number: int = 5) -> list[list[tuple[str, float]]]:
        """Likeliest classes of each image, by name, with their probabilities."""
        order = np.argsort(-self.probabilities, axis=-1, kind="stable")[:, :number]
        return [
            [(self.class_names[i], float(row[i])) for i in indices]
            for row, indices in zip(self.probabilities, order, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, and what its run says of it; made by `load`."""

    config: configs.Config = dataclasses.field(repr=False)
    step: int
    class_names: tuple[str, ...]
    channels: int
    model: ViT = dataclasses.field(repr=False)
    """In evaluation mode, with the running mean of its parameters if the run kept one."""

    def predict(self, images: Any) -> Prediction:
        """Probabilities of the classes.

        Args:
            images: a sequence of images, each the name of a file or an array of uint8,
                (height, width) or (height, width, 1 or 3), of any size; as one array
                (n, height, width, c), too. One name of a file is one image.

        Raises:
            ValueError: for what is no image, naming it.
        """
        return self.prediction(self.outputs(images)[0])

    def prediction(self, logits: Float[np.ndarray, "n classes"]) -> Prediction:
        """Probabilities and names of logits."""
        of_classes = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[self.config.optim.loss]
        return Prediction(np.asarray(of_classes(logits)), self.class_names)

    def features(self, images: Any) -> Float[np.ndarray, "n width"]:
        """Input of the head (`config.model.pooling`): the class token, or the mean over the
        patches, after the last norm, and after the tanh layer of a model with `pre_logits`.

        Args:
            images: as `predict`.
        """
        return self.outputs(images)[1]

    def outputs(
        self, images: Any
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n width"]]:
        """Logits and features, in batches of at most `LARGEST`; arguments as `predict`."""
        images = listed(images)
        batches = (images[i : i + LARGEST] for i in range(0, len(images), LARGEST))
        results = [self.forward(np.stack(list(map(self.pixels, batch)))) for batch in batches]
        logits, features = (np.concatenate(x) for x in zip(*results, strict=True))
        return logits, features

    def forward(
        self, pixels: UInt8[np.ndarray, "n size size c"]
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n width"]]:
        """Logits and features of one batch, as `pixels` gives its images."""
        size = 1 << (len(pixels) - 1).bit_length()  # 1, 2, 4, ...: few shapes are few programs
        padding = [(0, size - len(pixels)), *[(0, 0)] * 3]
        logits, features = _outputs(self.model, np.pad(pixels, padding))
        return np.asarray(logits)[: len(pixels)], np.asarray(features)[: len(pixels)]

    def pixels(self, image: Any) -> UInt8[np.ndarray, "size size c"]:
        """Input of the model for an image, as `predict` takes it.

        Raises:
            ValueError: for what is no image, naming it.
        """
        is_file = isinstance(image, str | os.PathLike)
        try:
            content = upright(bounded.content(Path(image))) if is_file else checked(image)
            return data.evaluated_pixels(content, self.config.data, self.channels)
        except Exception as error:  # PIL raises many kinds for broken files
            name = image if is_file else "an array"
            raise ValueError(f"{name} cannot be read as an image: {error}") from error


def load(workdir: str | os.PathLike, step: int | str | None = None) -> Trained:
    """The model of a run, as its evaluation has it.

    Args:
        workdir: folder of the run.
        step: of the checkpoint, or "best", that of the best evaluation; the newest that can be read
            if None.

    Raises:
        ValueError: when the folder holds no run, one that has learned something else than to
            classify images, no checkpoint of that step, or none that can be read.
    """
    workdir = Path(workdir)
    config = configs.of_run(workdir)
    configs.validate(config)
    found = of_folder(workdir, classification.NAME)
    if not found:
        raise ValueError(f"{workdir} has no task.json, which names the classes")
    class_names, channels = tuple(found["class_names"]), found["channels"]
    task = classification.task(len(class_names), channels, config.optim.loss)
    graph, arrays = steps.shapes(config, task)
    here = SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arrays)
    number, state = checkpoint.restore(workdir, abstract, step)
    return Trained(config, number, class_names, channels, steps.evaluated_model(graph, state))


def listed(images: Any) -> list[Any]:
    """The images one by one.

    Raises:
        ValueError: for a single array of an image, or none.
    """
    if isinstance(images, str | os.PathLike):
        return [images]
    shape = getattr(images, "shape", ())
    if len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3)):
        raise ValueError(f"one image of shape {shape}: put it into a list, [image]")
    if not (listed := list(images)):
        raise ValueError("no images are given")
    return listed


def checked(image: Any) -> np.ndarray:
    """An array (height, width, 1 or 3) of uint8.

    Raises:
        ValueError: for anything else.
    """
    image = np.asarray(image)
    if image.dtype != np.uint8:
        raise ValueError(f"it is an array of {image.dtype}: give uint8, 0 to 255")
    shape = image.shape
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[-1] not in (1, 3) or not image.size:
        raise ValueError(f"its shape is {shape}: give (height, width) or (height, width, 1|3)")
    return image


def upright(content: bytes) -> Any:
    """An encoded image, or where EXIF says that it is turned its pixels the right way up."""
    with bounded.image(content) as opened:
        if opened.getexif().get(ORIENTATION) in range(2, 9):
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    return content


@nnx.jit
def _outputs(model: ViT, images: Any) -> tuple[Any, Any]:
    logits, intermediates = model(images)
    return logits, intermediates["pooled"].astype(logits.dtype)
