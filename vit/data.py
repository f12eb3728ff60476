"""Data: batches of a data set's examples, as grain pipelines.

The stream of training batches depends on the seed alone, not on the number of processes or workers;
a stopped run goes on with the batch of its step.
"""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import grain
import numpy as np

from vit import config, machine
from vit.catalogue import check as check
from vit.catalogue import load as load
from vit.catalogue import splits as splits
from vit.examples import Batch as Batch
from vit.examples import Dataset as Dataset
from vit.examples import WrongLabelError as WrongLabelError
from vit.examples import evaluated_pixels as evaluated_pixels
from vit.examples import in_memory as in_memory

THREADS = 16
"""That read records, in each worker: more than it has cores, since they wait for storage."""


_TRIES = 100


def train_batches(
    dataset: Dataset,
    data: config.Data,
    seed: int,
    process: int = 0,
    processes: int = 1,
    start: int = 0,
    threads: int = THREADS,
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
        threads: how many records a worker reads and decodes at a time, of this batch and the next;
            0 reads each when its batch is asked for.

    Returns:
        image (b, size, size, c) uint8 and label (b,) int32, or what the data set decodes; and bad
        (b,) int32: -1, or the index of a record that cannot be decoded, where the row shows the
        next one that can.

    Raises:
        ValueError: when the processes do not divide the batch; and while reading, when 100 records
            in a row cannot be decoded, or a label is none of the data set's classes.
    """

    whole = _training(dataset, data, seed, _local_size(data, processes), threads)
    own = grain.MapDataset.source(whole).slice(slice(start * processes + process, None, processes))
    return _ahead(own, dataset, data, processes, threads)


class Schedule(NamedTuple):
    """Which batches a run reads, in order: those of `every` steps, then all of evaluation, ...

    Evaluation stands after the last step, too. So the same workers read both, and the next ones of
    either kind are read while the devices are busy with the other.
    """

    every: int
    """Steps between evaluations."""
    num_steps: int
    evaluation_length: int
    """Batches of an evaluation."""

    def training(self, step: int) -> int:
        """The place of the batch that leads from that step to the next."""
        return step + self.evaluation_length * (step // self.every)

    def evaluation(self, step: int) -> int:
        """The place of the first batch of the evaluation after that step."""
        return step + self.evaluation_length * ((step - 1) // self.every)

    def at(self, place: int) -> tuple[bool, int]:
        """Whether a batch of training stands there, and its number; else that in the evaluation."""
        block, offset = divmod(place, self.every + self.evaluation_length)
        steps = min(self.every, self.num_steps - block * self.every)
        return (True, block * self.every + offset) if offset < steps else (False, offset - steps)

    @property
    def length(self) -> int:
        """Of the whole run."""
        return self.evaluation(self.num_steps) + self.evaluation_length


class _Scheduled(Sequence[Batch]):
    """The batches of a run by their place."""

    def __init__(self, schedule: Schedule, train: "_Batches", evaluation: "_Batches", share: tuple):
        self._schedule, self._share = schedule, share
        self._train, self._evaluation = train, evaluation

    def __len__(self) -> int:
        return self._schedule.length

    def __getitem__(self, place: Any) -> Batch:
        training, number = self._schedule.at(place)
        process, processes = self._share
        return (self._train if training else self._evaluation)[number * processes + process]


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
    """The batches of `train_batches` and `eval_batches` as a run needs them.

    Args:
        dataset: as `train_batches`, as all others.
        data: likewise.
        seed: likewise.
        schedule: says when evaluation is due.
        first: the place in it to begin with.
        process: as `train_batches`.
        processes: likewise.
        threads: likewise.

    Raises:
        ValueError: as these.
    """
    size = _local_size(data, processes)
    train = _training(dataset, data, seed, size, threads)
    evaluation = _evaluation(dataset, data, size, threads)
    whole = _Scheduled(schedule, train, evaluation, (process, processes))
    own = grain.MapDataset.source(whole).slice(slice(first, None))
    return _ahead(own, dataset, data, processes, threads)


def _training(
    dataset: Dataset, data: config.Data, seed: int, size: int, threads: int
) -> "_Batches":
    # No functools.partial: grain takes the repr of what it calls, here of all records.
    def example(index: int, rng: np.random.Generator) -> Batch:
        return _train_example(index, rng, dataset, data)

    order = grain.MapDataset.range(len(dataset.train)).seed(seed).shuffle().repeat()
    return _Batches(order.random_map(example), size, threads)


def _evaluation(dataset: Dataset, data: config.Data, size: int, threads: int) -> "_Batches":
    def example(index: int) -> Batch:  # no functools.partial, as above
        return _eval_example(index, dataset, data)

    rows = evaluation_length(dataset, data) * data.batch_size
    return _Batches(grain.MapDataset.range(rows).map(example), size, threads)


def evaluation_length(dataset: Dataset, data: config.Data) -> int:
    """Batches of an evaluation."""
    return math.ceil(len(dataset.evaluation) / data.batch_size)


def _ahead(
    own: grain.MapDataset, dataset: Dataset, data: config.Data, processes: int, threads: int
) -> grain.IterDataset:
    """The batches, read by the workers before they are asked for."""
    batches = own.to_iter_dataset(_read_ahead(threads))
    workers = data.num_workers
    if workers < 0:
        workers = machine.workers(workers, batch_bytes(dataset, data, processes))
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options, _start_worker)
    return batches


def eval_batches(
    dataset: Dataset,
    data: config.Data,
    process: int = 0,
    processes: int = 1,
    threads: int = THREADS,
) -> Iterator[Batch]:
    """Every evaluation example once, in order, in ceil(n / batch_size) batches of the same shape.

    Images are those of `evaluated_pixels`.

    Args:
        dataset: what `load` returns.
        data: section of the config.
        process: which of the processes this is; it gets the rows [process b, (process + 1) b).
        processes: how many share a global batch, each b = batch_size / processes rows.
        threads: as `train_batches`.

    Returns:
        The examples as in `train_batches`; mask (b,) float32, 0 on the rows that pad the last
        batch and on records that cannot be decoded; bad (b,) int32, the index of such a record or
        -1.

    Raises:
        ValueError: when the processes do not divide the batch; and while reading, when a label is
            none of the data set's classes.
    """

    whole = _evaluation(dataset, data, _local_size(data, processes), threads)
    own = grain.MapDataset.source(whole).slice(slice(process, None, processes))
    return iter(own.to_iter_dataset(_read_ahead(threads)))


class _Batches(Sequence[Batch]):
    """Batches of examples, a `grain.MapDataset`, the records of each read by many threads at once.

    Storage that answers late and slow decoders are waited for side by side, and the first batch is
    there as soon as its own records are.
    """

    def __init__(self, examples: Any, size: int, threads: int):
        self._examples, self._size, self._threads = examples, size, threads

    def __len__(self) -> int:
        return len(self._examples) // self._size

    def __getitem__(self, number: Any) -> Batch:
        indices = range(number * self._size, (number + 1) * self._size)
        read = _pool(self._threads).map if self._threads else map
        rows: list[Batch] = list(read(self._examples.__getitem__, indices))
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """One in a process, for all batches that it reads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="records")


def _start_worker(index: int, workers: int) -> None:
    """Leaves signals, which a terminal and a scheduler send to all, to the parent; ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def batch_bytes(dataset: Dataset, data: config.Data, processes: int = 1) -> int:
    """Of the batches that one of so many processes reads."""
    example = dataset.blank(data, dataset)
    return _local_size(data, processes) * sum(np.asarray(x).nbytes for x in example.values())


def _local_size(data: config.Data, processes: int) -> int:
    if data.batch_size % processes:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is not divisible by the {processes}"
            " processes"
        )
    return data.batch_size // processes


def _read_ahead(threads: int) -> grain.ReadOptions:
    """The next batch is begun while this one is still missing records."""
    ahead = 2 if threads else 0
    return grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)


def _train_example(
    index: int, rng: np.random.Generator, dataset: Dataset, data: config.Data
) -> Batch:
    """The record at `index`, or the next that decodes; bad is -1, or `index`."""
    records = dataset.train
    tried = [(index + i) % len(records) for i in range(min(_TRIES, len(records)))]
    errors: list[Exception] = []
    for i in tried:
        try:
            example = dataset.decode(records[i], rng, data, dataset)
        except WrongLabelError as error:
            raise ValueError(f"training record {i} {error}") from None
        except Exception as error:  # PIL and array_record raise many kinds for broken files
            errors.append(error)
            continue
        return example | {"bad": np.int32(index if errors else -1)}
    raise ValueError(
        f"{len(tried)} training records in a row cannot be decoded, {tried[0]} to {tried[-1]};"
        f" the last one: {errors[-1]}"
    ) from errors[-1]


def _eval_example(index: int, dataset: Dataset, data: config.Data) -> Batch:
    """The record at `index`; a blank one where it cannot be decoded, or there is none."""
    mask, bad = 0, -1
    if index < len(dataset.evaluation):
        try:
            example, mask = dataset.decode(dataset.evaluation[index], None, data, dataset), 1
        except WrongLabelError as error:
            raise ValueError(f"evaluation record {index} {error}") from None
        except Exception:  # PIL and array_record raise many kinds for broken files
            bad = index
    if not mask:
        example = dataset.blank(data, dataset)
    return example | {"mask": np.float32(mask), "bad": np.int32(bad)}
