"""Batches of a data set, as grain pipelines.

The stream of training batches depends on the seed only, not on the number of processes or workers.
A resumed run continues with the batch of its step.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from vit import config
from vit.data.records import Batch, Dataset
from vit.storage import machine

THREADS = 16
"""Threads of each worker that read records: more than cores, since they wait for storage."""

READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
"""The next batch is begun before this one is complete."""

SHARED = Path("/dev/shm")
"""Folder of shared memory on Linux."""


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
