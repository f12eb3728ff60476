"""Data: data sets by name, how a record becomes arrays, and batches of these as grain pipelines.

A record is {"image", "label"}, the image an array (height, width, channels) of uint8 or the bytes
of a JPEG or PNG file; or arrays by name (`in_memory`), or whatever a data set's `decode` reads.

The stream of training batches depends on the seed only, not on the number of processes or workers.
A resumed run continues with the batch of its step.
"""

import contextlib
import glob
import hashlib
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags
from etils import epath
from PIL import Image

from performer.choices import unknown
from vit import config
from vit.config.cli import command
from vit.data import augment, classes
from vit.data.sources import forms
from vit.storage import buckets, machine

Batch = dict[str, Any]
"""Arrays of the examples by name, NumPy or JAX; for evaluation also `mask`."""

THREADS = 16
"""Threads of each worker that read records: more than cores, since they wait for storage."""

ARRAYS = "arrays"
"""Name of the data set of `vit.fit`, which is in no folder."""

READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
"""The next batch is begun before this one is complete."""

SHARED = Path("/dev/shm")
"""Folder of shared memory on Linux."""

# --- Records become arrays


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

    def center(width: int, height: int) -> augment.Box:
        share = data.image_size / (data.eval_resize or data.image_size)
        sides = (width, height) if data.eval_crop == "squash" else (min(width, height),) * 2
        w, h = (share * side for side in sides)
        left, top = (width - w) / 2, (height - h) / 2
        return left, top, left + w, top + h

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
    if data.name == ARRAYS and not data.dir:
        raise ValueError(
            f"config.data.name={ARRAYS!r}: this run was trained by vit.fit on arrays, which its"
            " folder does not hold. The same call of vit.fit resumes it. vit.load, vit.predict and"
            " vit.export work without them, and vit.evaluate --name=NAME --data_dir=DIR evaluates"
            " on a prepared data set"
        )
    dataset = _digits(data) if data.name == "digits" else _from_tfds(data)
    check(dataset, data, f" of {data.name!r}")
    return dataset


KNOWN = {
    "digits": (1_437, 360, 10, 1),
    "fashion_mnist": (60_000, 10_000, 10, 1),
    "imagenet2012": (1_281_167, 50_000, 1_000, 3),
    "imagenette": (9_469, 3_925, 10, 3),
    "places365": (1_803_460, 36_500, 365, 3),
    "inaturalist2021": (2_686_843, 100_000, 10_000, 3),
}
"""Public data sets: training and evaluation examples, classes, channels."""


def sized(data: config.Data, size: Sequence[int] = (), is_absent: bool = False) -> Dataset | None:
    """Return a data set of known size without examples; None to open the one of the config.

    It is opened if its folder exists and neither a size is given nor `is_absent` true.

    Args:
        data: section of the config.
        size: numbers of training examples, evaluation examples, classes and channels.
        is_absent: True to open nothing.

    Raises:
        ValueError: when the size is not known.
    """
    folder = buckets.path(data.dir) / data.name
    is_there = data.name == "digits" or folder.exists()
    if not is_absent and not size and (is_there or data.name not in KNOWN):
        return None
    if not size and data.name not in KNOWN:
        raise ValueError(
            f"the size of config.data.name={data.name!r} is not known (known are"
            f" {', '.join(KNOWN)}): give --data_size=TRAIN,EVALUATION,CLASSES,CHANNELS"
        )
    train, evaluation, classes, channels = size if size else KNOWN[data.name]
    names = tuple(map(str, range(classes)))
    return Dataset(range(train), range(evaluation), names, channels)


def check(dataset: Dataset, data: config.Batches, name: str = "") -> None:
    """Raise ValueError if training has less than a batch, or evaluation nothing."""
    if not len(dataset.evaluation):
        raise ValueError(f"the evaluation split {data.split!r}{name} is empty")
    if len(dataset.train) < data.batch_size:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is larger than the training split{name} with"
            f" {len(dataset.train)} records"
        )


def check_apart(dataset: Dataset) -> None:
    """Raise ValueError if training and evaluation have records in common."""
    if dataset.shared:
        raise ValueError(dataset.shared)


def splits(data: config.Data) -> dict[str, int]:
    """Return the number of records of each split of a TFDS data set.

    Raises:
        ValueError: if the data set does not exist.
    """
    builder = _builder(data)
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

    builder = _builder(data)
    try:
        features, known = builder.info.features, builder.info.splits
        class_names, channels = tuple(features["label"].names), features["image"].shape[-1]
        if not class_names or channels not in (1, 3):
            raise ValueError(f"{len(class_names)} classes, {channels} channels")
    except Exception as error:  # dataset_info.json may hold anything
        raise _unreadable(data, error) from error
    sources = []
    for field, split in [("train_split", data.train_split), ("eval_split", data.eval_split)]:
        try:
            source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
            len(source)
        except Exception as error:  # TFDS raises many kinds for what stands in brackets
            known_name = split.partition("[")[0] in known  # TFDS says what is wrong in brackets
            reason = f" ({str(error).splitlines()[-1]})" if known_name else ""
            raise ValueError(
                f"config.data.{field}={split!r} is no split of {data.name!r}, or part of one, as"
                f" 'train[:500]' or 'train[90%:]'; choices: {', '.join(known)}{reason}"
            ) from error
        sources.append(source)
    folder = epath.Path(builder.data_path)
    files = fingerprint(lambda: _files(folder))
    read = (known[x].file_instructions for x in (data.train_split, data.eval_split))
    number = _shared(*read)
    evaluate = command("evaluate", workdir="RUN", split=data.eval_split)
    shared = (
        f"config.data.train_split={data.train_split!r} and config.data.eval_split"
        f"={data.eval_split!r} have {number} records in common: measured would be what was"
        " memorised. Take parts that do not overlap, such as train[:90%] and train[90%:]. A trained"
        f" run is evaluated on its training examples by {evaluate}"
    )
    return Dataset(
        *sources,
        class_names=class_names,
        channels=channels,
        fingerprint=files,
        shared=shared * (number > 0),
    )


def _shared(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Return the number of records in both lists of TFDS's parts of files."""
    parts: dict[str, list[Any]] = {}
    for part in first:
        parts.setdefault(part.filename, []).append(part)
    ends = ((a, b) for b in second for a in parts.get(b.filename, ()))
    return sum(max(0, min(a.skip + a.take, b.skip + b.take) - max(a.skip, b.skip)) for a, b in ends)


def _files(folder: epath.Path) -> Iterator[Any]:
    """Yield the names and sizes of the files of a data set, and what its description holds."""
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    with ThreadPoolExecutor(THREADS) as pool:  # a bucket has many files, and answers late
        stats = list(pool.map(lambda path: path.stat(), paths))
    for path, stat in zip(paths, stats, strict=True):
        yield f"{path.name} {0 if stat.is_directory else stat.length}"
        if path.suffix in (".json", ".txt"):
            yield path.read_bytes()


def _builder(data: config.Data) -> Any:
    """Return TFDS's builder of the data set; its folder is read, not code that has its name.

    Raises:
        ValueError: if the folder has no data set of that name (the message lists those that it
            has), or its description cannot be read.
    """
    from tensorflow_datasets.core import read_only_builder

    root = epath.Path(buckets.path(data.dir))
    folders = _folders(root) if data.dir else {}
    if data.name in folders:
        try:
            return read_only_builder.builder_from_directory(folders[data.name])
        except Exception as error:  # the files may hold anything
            raise _unreadable(data, error) from error
    for folder in (root / data.name, *([root] * (not folders))) if data.dir else ():
        if forms.is_raw(Path(folder)):
            prepare = command("prepare", source=folder, out="data")
            raise ValueError(f"{folder} holds raw pictures: make a data set of them by {prepare}")
    prepare = command("prepare", source="FOLDER", out=data.dir or "data")
    names = unknown("config.data.name", data.name, ["digits", *folders])
    raise ValueError(
        f"{names} (those in config.data.dir={data.dir!r}; make a data set of pictures by {prepare})"
    )


def _unreadable(data: config.Data, error: Exception) -> ValueError:
    return ValueError(
        f"the description of {data.name!r} in config.data.dir={data.dir!r} cannot be read, or is"
        f" not of images of 1 or 3 channels with a label: {type(error).__name__}: {error}"
    )


def _folders(root: epath.Path) -> dict[str, epath.Path]:
    """Return the newest version of each data set in a folder by name, or name/config."""
    literal = epath.Path(glob.escape(str(root)))  # epath takes the folder for a pattern
    infos = [*literal.glob("*/*/dataset_info.json"), *literal.glob("*/*/*/dataset_info.json")]
    versions = [f.parent for f in infos if re.fullmatch(r"\d+\.\d+\.\d+", f.parent.name)]
    versions.sort(key=lambda folder: tuple(map(int, folder.name.split("."))))
    newest = {str(version.parent.relative_to(root)): version for version in versions}
    return dict(sorted(newest.items()))


# --- Batches


def train_batches(
    dataset: Dataset,
    data: config.Batches,
    seed: int,
    process: int = 0,
    processes: int = 1,
    start: int = 0,
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

    Returns:
        image (b, size, size, c) uint8 and label (b,) int32, or the arrays of the data set's
        `decode`.

    Raises:
        ValueError: if the processes do not divide the batch; and while reading, if a record cannot
            be decoded, or its label is none of the data set's classes.
    """
    size = data.batch_size // processes
    batch = _training(dataset, data, seed, size)
    places = grain.MapDataset.range(start * processes + process, sys.maxsize, processes)
    read = places.map(batch).to_iter_dataset(READ_AHEAD)
    if workers := num_workers(data.num_workers, batch_bytes(dataset, data, processes)):
        if not flags.FLAGS.is_parsed():  # grain reads flags of absl, also in a script without any
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers)
        read = read.mp_prefetch(options, _start_worker)
    return read


def eval_batches(
    dataset: Dataset, data: config.Batches, process: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """Yield every evaluation example once, in order, in batches of the same shape.

    Images come from `evaluated_pixels`.

    Args: as `train_batches`.

    Returns:
        The examples as in `train_batches`, and mask (b,) float32, 0 on the rows that pad the last
        batch.

    Raises:
        ValueError: as `train_batches`.
    """
    batch = _evaluation(dataset, data, data.batch_size // processes)
    end = math.ceil(len(dataset.evaluation) / data.batch_size) * processes
    places = grain.MapDataset.range(process, end, processes)
    return iter(places.map(batch).to_iter_dataset(READ_AHEAD))


def num_workers(requested: int, batch_bytes: int, folder: Path = SHARED) -> int:
    """Return the number of workers of this host for `config.data.num_workers`.

    It is at most the number whose batches fit into the shared memory: otherwise the kernel kills a
    worker (SIGBUS) in the middle of a run. With n workers grain holds up to 4 n + 2 batches, as
    measured.

    Args:
        requested: number of workers; -1 for one per core but one.
        batch_bytes: size of a batch of this host.
        folder: folder of the shared memory.
    """
    number = machine.cores() - 1 if requested < 0 else requested
    if not number or not folder.is_dir():
        return number
    there = os.statvfs(folder)
    return min(number, max(0, there.f_bavail * there.f_frsize // batch_bytes - 2) // 4)


def batch_bytes(dataset: Dataset, data: config.Batches, processes: int = 1) -> int:
    """Return the bytes of a batch of one of so many processes."""
    example = dataset.blank(data, dataset).values()
    return data.batch_size // processes * sum(np.asarray(x).nbytes for x in example)


def _training(
    dataset: Dataset, data: config.Batches, seed: int, size: int
) -> Callable[[int], Batch]:
    """Return (number of a batch) -> the batch of `size` rows."""
    records = dataset.train

    # No functools.partial: grain takes the repr of what it calls, here of all records.
    def example(index: int, rng: np.random.Generator) -> Batch:
        with _named(f"training record {index}"):
            return _decoded(dataset, records[index], rng, data)

    order = grain.MapDataset.range(len(records)).seed(seed).shuffle().repeat()
    examples: Any = order.random_map(example)
    return lambda number: _batch(examples.__getitem__, number, size)


def _evaluation(dataset: Dataset, data: config.Batches, size: int) -> Callable[[int], Batch]:
    """Return (number of a batch) -> the batch of `size` rows."""
    records = dataset.evaluation

    def example(index: int) -> Batch:
        """Return the record at `index`, a blank one beyond the last."""
        if index >= len(records):
            return dataset.blank(data, dataset) | {"mask": np.float32(0)}
        with _named(f"evaluation record {index}"):
            return _decoded(dataset, records[index], None, data) | {"mask": np.float32(1)}

    return lambda number: _batch(example, number, size)


def _decoded(
    dataset: Dataset, record: Any, rng: np.random.Generator | None, data: config.Batches
) -> Batch:
    """Return the example of a record; ValueError if it has an array named "mask"."""
    example = dataset.decode(record, rng, data, dataset)
    if "mask" in example:
        raise ValueError("'mask' is the name of the rows that are no padding: rename the array")
    return example


@contextlib.contextmanager
def _named(record: str) -> Iterator[None]:
    """Raise ValueError that names the record for any error of the block."""
    try:
        yield
    except Exception as error:  # PIL and array_record raise many kinds for broken files
        raise ValueError(f"{record} cannot be decoded: {error}") from error


def _batch(example: Callable[[int], Batch], number: int, size: int) -> Batch:
    """Return the batch of that number, its records read by many threads at once.

    Late storage and slow decoders are waited for in parallel, and the first batch is complete as
    soon as its own records are.
    """
    indices = range(number * size, (number + 1) * size)
    rows = list(_pool().map(example, indices))
    shapes = [{name: np.shape(x) for name, x in row.items()} for row in rows]
    if other := [x for x in shapes if x != shapes[0]]:
        raise ValueError(f"examples of a batch have the shapes {shapes[0]} and {other[0]}")
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the pool of this process, for all batches."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="records")


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
