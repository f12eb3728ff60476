"""Data: a source of records, and grain pipelines over it.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file. The stream of training batches depends on the seed alone, not on the number
of processes or workers; a stopped run goes on with the batch of its step.
"""

import io
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import grain
import numpy as np
from etils import epath
from PIL import Image

from performer.choices import unknown
from vit import augment, config, safety

Batch = dict[str, Any]
"""Arrays by name, NumPy or JAX: image, label, bad and for evaluation mask."""

_TRIES = 100


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


def train_batches(
    dataset: Dataset,
    data: config.Data,
    seed: int,
    process: int = 0,
    processes: int = 1,
    start: int = 0,
    threads: int = 16,
) -> grain.IterDataset:
    """Shuffled, augmented batches without end.

    Every global batch of `data.batch_size` rows depends on the seed and its place in the stream
    alone, not on the number of processes, workers or threads.

    Args:
        dataset: what `load` returns.
        data: section of the config.
        seed: of the order and the augmentations.
        process: which of the processes this is; it gets the rows [process b, (process + 1) b).
        processes: how many share a global batch, each b = batch_size / processes rows.
        start: number of the first batch, to go on where a stopped run was.
        threads: how many batches are prepared at a time, over all workers, and held in memory;
            0 prepares each when it is asked for.

    Returns:
        image (b, size, size, c) uint8, label (b,) int32 and bad (b,) int32: -1, or the index of a
        record that cannot be decoded, where the row shows the next one that can.

    Raises:
        ValueError: when the processes do not divide the batch; and while reading, when 100 records
            in a row cannot be decoded.
    """

    # No functools.partial: grain takes the repr of what it calls, here of all records.
    def example(index: int, rng: np.random.Generator) -> Batch:
        return _train_example(index, rng, dataset.train, data, dataset.channels)

    batches = (
        grain.MapDataset.range(len(dataset.train))
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(example)
        .batch(_local_size(data, processes), drop_remainder=True)
        .slice(slice(start * processes + process, None, processes))
        .to_iter_dataset(_read_options(threads // max(1, data.num_workers)))
    )
    if data.num_workers:
        options = grain.MultiprocessingOptions(num_workers=data.num_workers)
        batches = batches.mp_prefetch(options, _start_worker)
    return batches


def eval_batches(
    dataset: Dataset, data: config.Data, process: int = 0, processes: int = 1, threads: int = 16
) -> Iterator[Batch]:
    """Every evaluation example once, in order, in ceil(n / batch_size) batches of the same shape.

    The shorter side becomes `data.eval_resize`, or `data.image_size` where that is 0, and the
    centre is cut out, in one resampling; an image that has the right size passes untouched.

    Args:
        dataset: what `load` returns.
        data: section of the config.
        process: which of the processes this is; it gets the rows [process b, (process + 1) b).
        processes: how many share a global batch, each b = batch_size / processes rows.
        threads: how many batches are prepared at a time, and held in memory.

    Returns:
        image and label as in `train_batches`; mask (b,) float32, 0 on the rows that pad the last
        batch and on records that cannot be decoded; bad (b,) int32, the index of such a record or
        -1.

    Raises:
        ValueError: when the processes do not divide the batch.
    """

    def example(index: int) -> Batch:  # no functools.partial, as above
        return _eval_example(index, dataset, data)

    rows = math.ceil(len(dataset.evaluation) / data.batch_size) * data.batch_size
    batches = (
        grain.MapDataset.range(rows)
        .map(example)
        .batch(_local_size(data, processes))
        .slice(slice(process, None, processes))
        .to_iter_dataset(_read_options(threads))
    )
    return iter(batches)


def _start_worker(index: int, workers: int) -> None:
    """Leaves signals, which a terminal and a scheduler send to all, to the parent; ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    safety.name_shared_memory()
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _local_size(data: config.Data, processes: int) -> int:
    if data.batch_size % processes:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is not divisible by the {processes}"
            " processes"
        )
    return data.batch_size // processes


def _read_options(threads: int) -> grain.ReadOptions:
    """A buffer as long as the threads are many: grain's 500 are meant for single records."""
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)


def _train_example(
    index: int,
    rng: np.random.Generator,
    records: Sequence[dict[str, Any]],
    data: config.Data,
    channels: int,
) -> Batch:
    def decode(image: Any) -> np.ndarray:
        if data.crop == "inception":
            box = partial(augment.inception_box, rng=rng)
            return _pixels(image, data.image_size, channels, box, Image.Resampling.BILINEAR)
        return _pixels(image, data.image_size, channels, partial(_center_box, data=data))

    image, label, bad = _first_readable(records, index, decode)
    if data.max_shift:
        image = augment.random_shift(image, rng, data.max_shift)
    if data.flip:
        image = augment.random_flip(image, rng)
    if data.randaugment_layers:
        image = augment.randaugment(image, rng, data.randaugment_layers, data.randaugment_magnitude)
    return {"image": image, "label": label, "bad": bad}


def _first_readable(
    records: Sequence[dict[str, Any]], index: int, decode: Callable[[Any], np.ndarray]
) -> tuple[np.ndarray, np.int32, np.int32]:
    """Image and label of the record at `index`, or of the next that decodes; -1, or `index`."""
    tried = [(index + i) % len(records) for i in range(min(_TRIES, len(records)))]
    errors: list[Exception] = []
    for i in tried:
        record = records[i]
        try:
            image = decode(record["image"])
        except Exception as error:  # PIL raises many kinds for broken files
            errors.append(error)
            continue
        return image, np.int32(record["label"]), np.int32(index if errors else -1)
    raise ValueError(
        f"{len(tried)} training records in a row cannot be decoded, {tried[0]} to {tried[-1]};"
        f" the last one: {errors[-1]}"
    ) from errors[-1]


def _eval_example(index: int, dataset: Dataset, data: config.Data) -> Batch:
    image = np.zeros((data.image_size, data.image_size, dataset.channels), np.uint8)
    label, mask, bad = 0, 0, -1
    if index < len(dataset.evaluation):
        record = dataset.evaluation[index]
        label, mask = record["label"], 1
        try:
            box = partial(_center_box, data=data)
            image = _pixels(record["image"], data.image_size, dataset.channels, box)
        except Exception:  # PIL raises many kinds for broken files
            mask, bad = 0, index
    return {
        "image": image,
        "label": np.int32(label),
        "mask": np.float32(mask),
        "bad": np.int32(bad),
    }


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
    opened = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else augment.to_pil(image)
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
