"""Data: a source of records, and grain pipelines over it.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file. The stream of training batches depends on the seed alone, not on the number
of workers, and its position is saved in checkpoints.
"""

import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import grain
import numpy as np
from etils import epath
from PIL import Image, ImageOps

from performer.choices import unknown
from vit import augment, config

Batch = dict[str, Any]
"""Arrays by name, NumPy or JAX: image, label and for evaluation mask."""


class Dataset(NamedTuple):
    """Random-access sources of records for training and evaluation."""

    train: Sequence[dict[str, Any]]
    evaluation: Sequence[dict[str, Any]]
    num_classes: int
    channels: int


def load(data: config.Data) -> Dataset:
    """Opens the data set that the config names; nothing is decoded yet.

    Raises:
        ValueError: when the name, the directory or a split is unknown, with the choices; or when
            the training split is smaller than one batch.
    """
    dataset = _digits() if data.name == "digits" else _from_tfds(data)
    if len(dataset.train) < data.batch_size:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is larger than the training split"
            f" {data.train_split!r} of {data.name!r} with {len(dataset.train)} images"
        )
    return dataset


def train_batches(dataset: Dataset, data: config.Data, seed: int) -> grain.IterDataset:
    """Shuffled, augmented batches without end: image (b, size, size, c) uint8, label (b,) int32."""
    batches = (
        grain.MapDataset.source(dataset.train)
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(partial(_train_example, data=data, channels=dataset.channels))
        .batch(data.batch_size, drop_remainder=True)
        .to_iter_dataset()
    )
    if data.num_workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=data.num_workers))
    return batches


def eval_batches(dataset: Dataset, data: config.Data) -> Iterator[Batch]:
    """Every evaluation image once, in order. The last batch is padded; "mask" is 0 on the padding.

    All batches have the same shape: image, label as in `train_batches`, mask (b,) float32.
    """
    batches = (
        grain.MapDataset.source(dataset.evaluation)
        .map(partial(_example, data=data, channels=dataset.channels))
        .batch(data.batch_size, drop_remainder=False)
        .to_iter_dataset()
    )
    for batch in batches:
        missing = data.batch_size - len(batch["label"])
        batch = {"mask": np.ones(len(batch["label"]), np.float32), **batch}
        yield {
            name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
            for name, array in batch.items()
        }


def _example(record: dict[str, Any], data: config.Data, channels: int) -> Batch:
    image = record["image"]
    if isinstance(image, bytes) or image.shape[:2] != (data.image_size, data.image_size):
        opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else _to_pil(image)
        opened = opened.convert("L" if channels == 1 else "RGB")
        size = (data.image_size, data.image_size)
        if opened.size != size:  # the largest square in the centre, resized
            opened = ImageOps.fit(opened, size, Image.Resampling.BICUBIC)
        image = np.asarray(opened).reshape(*size, channels)
    return {"image": image, "label": np.int32(record["label"])}


def _train_example(
    record: dict[str, Any], rng: np.random.Generator, data: config.Data, channels: int
) -> Batch:
    example = _example(record, data, channels)
    if data.max_shift:
        example["image"] = augment.random_shift(example["image"], rng, data.max_shift)
    if data.flip:
        example["image"] = augment.random_flip(example["image"], rng)
    return example


def _to_pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def _digits() -> Dataset:
    """scikit-learn's digits: 1,797 images of 8 x 8, one in five held out, the same ones always."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    records = [{"image": i, "label": label} for i, label in zip(images, labels, strict=True)]
    train, evaluation = train_test_split(records, test_size=0.2, random_state=0, stratify=labels)
    return Dataset(list(train), list(evaluation), num_classes=10, channels=1)


def _from_tfds(data: config.Data) -> Dataset:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    found = ["digits"]
    if data.dir:
        root = epath.Path(data.dir)  # name/version or name/config/version
        infos = [f for depth in ("*/*", "*/*/*") for f in root.glob(f"{depth}/dataset_info.json")]
        found += sorted({str(info.parent.parent.relative_to(root)) for info in infos})
    if data.name not in found:
        raise ValueError(
            f"{unknown('config.data.name', data.name, found)} (in config.data.dir={data.dir!r};"
            " python -m vit.prepare makes a data set of raw images)"
        )
    builder = read_only_builder.builder_from_files(data.name, data_dir=data.dir)
    for field, split in [("train_split", data.train_split), ("eval_split", data.eval_split)]:
        if split.split("[")[0] not in builder.info.splits:
            raise ValueError(
                f"config.data.{field}={split!r} is no split of {data.name!r};"
                f" choices: {', '.join(builder.info.splits)}"
            )
    open_split: Any = builder.as_data_source
    train, evaluation = (
        open_split(split, decoders={"image": tfds.decode.SkipDecoding()})
        for split in (data.train_split, data.eval_split)
    )
    features: Any = builder.info.features
    return Dataset(train, evaluation, features["label"].num_classes, features["image"].shape[-1])
