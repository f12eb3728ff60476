"""Data: data sets by name, how a record becomes arrays, and batches of these as grain pipelines.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file; or arrays by name (`in_memory`), or whatever a data set's `decode` reads.

The stream of training batches depends on the seed only, not on the number of processes or workers.
A resumed run continues with the batch of its step.
"""

import math
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from etils import epath
from PIL import Image

from performer.choices import unknown
from vit import config
from vit.config.cli import command
from vit.data import augment
from vit.data.sources import forms
from vit.data.sources.source import reading
from vit.run import bounded, machine

Batch = dict[str, Any]
"""Arrays by name, NumPy or JAX: those of the examples, `bad`, and for evaluation `mask`."""

THREADS = 16
"""Threads of each worker that read records: more than cores, since they wait for storage."""

_TRIES = 100
"""Records in a row that may fail to decode."""

# --- Records become arrays


class WrongLabelError(ValueError):
    """A record that can be read but not used: it stops the run instead of being replaced."""


def labelled_image(
    record: Any, rng: np.random.Generator | None, data: config.Data, dataset: "Dataset"
) -> Batch:
    """Return the image and label of a record, augmented if there is a generator.

    Raises:
        WrongLabelError: if the label is none of the data set's classes.
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
        raise WrongLabelError(
            f"has the label {label}, but the classes are 0 to {dataset.num_classes - 1}"
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
    """(record, generator or None in evaluation, section of the config, data set) -> an example:
    arrays by name, of the same shapes for every record."""
    blank: Callable[..., Batch] = blank_image
    """(section of the config, data set) -> an example that pads the last batch."""

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
    )


def evaluated_pixels(image: Any, data: config.Data, channels: int) -> np.ndarray:
    """Return an array or encoded image for evaluation: (image_size, image_size, channels) uint8.

    The shorter side becomes `data.eval_resize`, or `data.image_size` if that is 0, and the centre
    is cut out, in one resampling. An image of the right size is not changed.

    Raises:
        OSError, SyntaxError, ...: as PIL, if the bytes are no image or a truncated one.
    """

    def center(width: int, height: int) -> augment.Box:
        side = min(width, height) * data.image_size / (data.eval_resize or data.image_size)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return _pixels(image, data.image_size, channels, center, Image.Resampling.BICUBIC)


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
    opened = bounded.image(image) if isinstance(image, bytes) else augment.to_pil(image)
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


# --- Data sets by name: scikit-learn's digits, and those of TFDS in a folder


def load(data: config.Data) -> Dataset:
    """Open the data set that the config names, without decoding anything.

    Raises:
        ValueError: if the name, the directory or a split is unknown (the message lists the
            choices), the data set is damaged or not one of labelled grey or RGB images, the
            training split is smaller than one batch, or the evaluation split is empty.
    """
    if not data.name:
        raise ValueError(
            "config.data.name='' must name a data set: a run of vit.pretrained without data only"
            " predicts; make one of the same weights with --config=CONFIG"
        )
    dataset = _digits(data) if data.name == "digits" else _from_tfds(data)
    check(dataset, data, f" of {data.name!r}")
    return dataset


def check(dataset: Dataset, data: config.Data, name: str = "") -> None:
    """Raise ValueError if training has less than a batch, or evaluation nothing."""
    if not len(dataset.evaluation):
        raise ValueError(f"config.data.eval_split={data.eval_split!r}{name} is empty")
    if len(dataset.train) < data.batch_size:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is larger than the training split"
            f" {data.train_split!r}{name} with {len(dataset.train)} records"
        )


def splits(data: config.Data) -> dict[str, int]:
    """Return the number of records of each split of a TFDS data set.

    Raises:
        ValueError: if the data set does not exist.
    """
    from tensorflow_datasets.core import read_only_builder

    _check_named(data)
    builder = read_only_builder.builder_from_files(data.name, data_dir=data.dir)
    return {name: split.num_examples for name, split in builder.info.splits.items()}


def _digits(data: config.Data) -> Dataset:
    """Return scikit-learn's digits: 1,797 images of 8 x 8, always the same fifth held out."""
    for field, only in {"train_split": "train", "eval_split": "test", "dir": ""}.items():
        if getattr(data, field) != only:
            raise ValueError(
                f"config.data.{field}={getattr(data, field)!r} must be {only!r} for 'digits', which"
                " comes with scikit-learn"
            )
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    records = [{"image": i, "label": label} for i, label in zip(images, labels, strict=True)]
    train, evaluation = train_test_split(records, test_size=0.2, random_state=0, stratify=labels)
    return Dataset(list(train), list(evaluation), tuple(map(str, range(10))), channels=1)


def _from_tfds(data: config.Data) -> Dataset:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    _check_named(data)
    try:
        builder: Any = read_only_builder.builder_from_files(data.name, data_dir=data.dir)
        features, known = builder.info.features, builder.info.splits
        class_names, channels = tuple(features["label"].names), features["image"].shape[-1]
        if not class_names or channels not in (1, 3):
            raise ValueError(f"{len(class_names)} classes, {channels} channels")
    except Exception as error:  # dataset_info.json may hold anything
        raise ValueError(
            f"the description of {data.name!r} in config.data.dir={data.dir!r} cannot be read, or"
            f" is not of images of 1 or 3 channels with a label: {type(error).__name__}: {error}"
        ) from error
    sources, files = [], 0
    for field, split in [("train_split", data.train_split), ("eval_split", data.eval_split)]:
        for name in (part.split("[")[0] for part in split.split("+")):
            if name not in known:
                raise ValueError(
                    f"config.data.{field}={split!r} is no split of {data.name!r};"
                    f" choices: {', '.join(known)}"
                )
            files += len(known[name].filepaths)
            machine.allow_open_files(files)
            _check_shards(known[name])
        try:
            source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
            len(source)
        except Exception as error:  # TFDS raises many kinds for what stands in brackets
            raise ValueError(
                f"config.data.{field}={split!r} is no part of {data.name!r}, as 'train[:500]' or"
                f" 'train[90%:]' would be: {str(error).splitlines()[-1]}"
            ) from error
        sources.append(source)
    return Dataset(*sources, class_names=class_names, channels=channels)


def _check_named(data: config.Data) -> None:
    """Raise ValueError if the folder has no data set of that name, with those that it has."""
    root, given = epath.Path(data.dir), f"config.data.dir={data.dir!r}"
    names = _names(root) if data.dir else []
    if data.name in names:
        return
    if data.dir and not root.exists():
        raise ValueError(f"{given} does not exist")
    for folder in (root / data.name, root) if data.dir else ():
        if folder.is_dir() and (form := forms.find(Path(folder))):
            prepare = command("prepare", source=folder, out="data")
            raise ValueError(
                f"{folder} holds raw pictures ({form[0]}): make a data set of them by {prepare}"
            )
    if root.name in _names(root.parent):
        raise ValueError(
            f"{given} is a data set itself: give --config.data.dir={root.parent}"
            f" --config.data.name={root.name}"
        )
    if data.dir and not names:
        prepare = command("prepare", source="FOLDER", out=data.dir)
        raise ValueError(f"{given} holds no data set; make one of pictures by {prepare}")
    raise ValueError(
        f"{unknown('config.data.name', data.name, ['digits', *names])} (in {given};"
        " vit.prepare makes a data set of raw pictures)"
    )


def _names(root: epath.Path) -> list[str]:
    """Return the data sets in a folder: name, or name/config."""
    infos = [*root.glob("*/*/dataset_info.json"), *root.glob("*/*/*/dataset_info.json")]
    versions = [f.parent for f in infos if re.fullmatch(r"\d+\.\d+\.\d+", f.parent.name)]
    return sorted({str(version.parent.relative_to(root)) for version in versions})


def _check_shards(split: Any) -> None:
    """Raise ValueError for a file that is damaged or has another number of records."""
    from array_record.python.array_record_module import (  # pyright: ignore[reportMissingImports]
        ArrayRecordReader,
    )

    def check(path: Any, announced: int) -> None:
        with reading(path, " as an array_record file", Exception):
            reader = ArrayRecordReader(os.fspath(path))
            held = reader.num_records()
            reader.close()
            if held != announced:
                raise ValueError(f"it holds {held} records, and dataset_info.json says {announced}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, split.filepaths, split.shard_lengths))


# --- Batches


def train_batches(
    dataset: Dataset,
    data: config.Data,
    seed: int,
    process: int = 0,
    processes: int = 1,
    start: int = 0,
    threads: int = THREADS,
) -> grain.IterDataset:
    """Return shuffled, augmented batches without end.

    Each global batch of `data.batch_size` rows depends on the seed and its place in the stream
    only, not on the number of processes, workers or threads.

    Args:
        dataset: result of `load`.
        data: section of the config.
        seed: seed of the order and the augmentations.
        process: index of this process, which gets the rows [process b, (process + 1) b).
        processes: number of processes that share a global batch, each b = batch_size / processes
            rows.
        start: number of the first batch, to resume a run.
        threads: number of records that a worker reads and decodes at a time, of this batch and the
            next; 0 reads each when its batch is requested.

    Returns:
        image (b, size, size, c) uint8 and label (b,) int32, or the arrays of the data set's
        `decode`; and bad (b,) int32: -1, or the index of a record that cannot be decoded, whose
        row has the next one that can.

    Raises:
        ValueError: if the processes do not divide the batch; and while reading, if 100 records in a
            row cannot be decoded, or a label is none of the data set's classes.
    """
    batch = _training(dataset, data, seed, _local_size(data, processes), threads)
    places = grain.MapDataset.range(start * processes + process, sys.maxsize, processes)
    return _ahead(places.map(batch), dataset, data, processes, threads)


def eval_batches(
    dataset: Dataset,
    data: config.Data,
    process: int = 0,
    processes: int = 1,
    threads: int = THREADS,
) -> Iterator[Batch]:
    """Yield every evaluation example once, in order, in batches of the same shape.

    Images are those of `evaluated_pixels`.

    Args: as `train_batches`.

    Returns:
        The examples as in `train_batches`; mask (b,) float32, 0 on the rows that pad the last
        batch and on records that cannot be decoded; bad (b,) int32, the index of such a record or
        -1.

    Raises:
        ValueError: if the processes do not divide the batch; and while reading, if a label is none
            of the data set's classes.
    """
    batch = _evaluation(dataset, data, _local_size(data, processes), threads)
    end = evaluation_length(dataset, data) * processes
    places = grain.MapDataset.range(process, end, processes)
    return iter(places.map(batch).to_iter_dataset(_read_ahead(threads)))


def evaluation_length(dataset: Dataset, data: config.Data) -> int:
    """Return the number of batches of an evaluation."""
    return math.ceil(len(dataset.evaluation) / data.batch_size)


class Schedule(NamedTuple):
    """Order of the batches of a run: those of `every` steps, then all of evaluation, ...

    Evaluation follows the last step, too. The same workers read both kinds, and read ahead while
    the devices are busy.
    """

    every: int
    """Steps between evaluations."""
    num_steps: int
    evaluation_length: int
    """Batches of an evaluation."""

    def training(self, step: int) -> int:
        """Return the place of the batch that leads from that step to the next."""
        return step + self.evaluation_length * (step // self.every)

    def evaluation(self, step: int) -> int:
        """Return the place of the first batch of the evaluation after that step."""
        return step + self.evaluation_length * ((step - 1) // self.every)

    def at(self, place: int) -> tuple[bool, int]:
        """Return (True, number of the training batch) or (False, number in the evaluation)."""
        block, offset = divmod(place, self.every + self.evaluation_length)
        steps = min(self.every, self.num_steps - block * self.every)
        return (True, block * self.every + offset) if offset < steps else (False, offset - steps)

    @property
    def length(self) -> int:
        """Number of batches of the whole run."""
        return self.evaluation(self.num_steps) + self.evaluation_length


def run_batches(
    dataset: Dataset,
    data: config.Data,
    seed: int,
    schedule: Schedule,
    first: int = 0,
    process: int = 0,
    processes: int = 1,
    threads: int = THREADS,
) -> grain.IterDataset:
    """Return the batches of `train_batches` and `eval_batches` in the order of a run.

    Args: as `train_batches`, and
        schedule: places of training and evaluation.
        first: the place to begin with.

    Raises:
        ValueError: as these.
    """
    size = _local_size(data, processes)
    train = _training(dataset, data, seed, size, threads)
    evaluation = _evaluation(dataset, data, size, threads)

    def batch(place: int) -> Batch:
        training, number = schedule.at(place)
        return (train if training else evaluation)(number * processes + process)

    places = grain.MapDataset.range(first, schedule.length)
    return _ahead(places.map(batch), dataset, data, processes, threads)


def batch_bytes(dataset: Dataset, data: config.Data, processes: int = 1) -> int:
    """Return the bytes of a batch of one of so many processes."""
    example = dataset.blank(data, dataset).values()
    return _local_size(data, processes) * sum(np.asarray(x).nbytes for x in example)


def _local_size(data: config.Data, processes: int) -> int:
    if data.batch_size % processes:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is not divisible by the {processes}"
            " processes"
        )
    return data.batch_size // processes


def _training(
    dataset: Dataset, data: config.Data, seed: int, size: int, threads: int
) -> Callable[[int], Batch]:
    """Return (number of a batch) -> the batch of `size` rows."""
    records = dataset.train

    # No functools.partial: grain takes the repr of what it calls, here of all records.
    def example(index: int, rng: np.random.Generator) -> Batch:
        """Return the record at `index`, or the next that decodes; bad is -1, or `index`."""
        tried = [(index + i) % len(records) for i in range(min(_TRIES, len(records)))]
        error = None
        for i in tried:
            try:
                decoded = dataset.decode(records[i], rng, data, dataset)
                return decoded | {"bad": np.int32(index if error else -1)}
            except WrongLabelError as wrong:
                raise ValueError(f"training record {i} {wrong}") from None
            except Exception as broken:  # PIL and array_record raise many kinds for broken files
                error = broken
        raise ValueError(
            f"{len(tried)} training records in a row cannot be decoded, {tried[0]} to {tried[-1]};"
            f" the last one: {error}"
        ) from error

    order = grain.MapDataset.range(len(records)).seed(seed).shuffle().repeat()
    examples: Any = order.random_map(example)
    return lambda number: _batch(examples.__getitem__, number, size, threads)


def _evaluation(
    dataset: Dataset, data: config.Data, size: int, threads: int
) -> Callable[[int], Batch]:
    """Return (number of a batch) -> the batch of `size` rows."""
    records = dataset.evaluation

    def example(index: int) -> Batch:
        """Return the record at `index`; a blank one if it cannot be decoded or does not exist."""
        bad = -1
        try:
            if index < len(records):
                decoded = dataset.decode(records[index], None, data, dataset)
                return decoded | {"mask": np.float32(1), "bad": np.int32(-1)}
        except WrongLabelError as wrong:
            raise ValueError(f"evaluation record {index} {wrong}") from None
        except Exception:  # PIL and array_record raise many kinds for broken files
            bad = index
        return dataset.blank(data, dataset) | {"mask": np.float32(0), "bad": np.int32(bad)}

    return lambda number: _batch(example, number, size, threads)


def _batch(example: Callable[[int], Batch], number: int, size: int, threads: int) -> Batch:
    """Return the batch of that number, its records read by many threads at once.

    Late storage and slow decoders are waited for in parallel, and the first batch is complete as
    soon as its own records are.
    """
    indices = range(number * size, (number + 1) * size)
    read = _pool(threads).map if threads else map
    rows = list(read(example, indices))
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of this process, for all batches."""
    return ThreadPoolExecutor(threads, thread_name_prefix="records")


def _ahead(
    batches: grain.MapDataset, dataset: Dataset, data: config.Data, processes: int, threads: int
) -> grain.IterDataset:
    """Return the batches, read by the workers before they are requested."""
    read = batches.to_iter_dataset(_read_ahead(threads))
    workers = data.num_workers
    if workers < 0:
        workers = machine.workers(workers, batch_bytes(dataset, data, processes))
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers)
        read = read.mp_prefetch(options, _start_worker)
    return read


def _read_ahead(threads: int) -> grain.ReadOptions:
    """Return options by which the next batch is begun before this one is complete."""
    ahead = 2 if threads else 0
    return grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)


def _start_worker(index: int, workers: int) -> None:
    """Ignore signals that a terminal or scheduler sends to all processes; end with the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
