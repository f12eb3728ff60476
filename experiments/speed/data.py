"""Images per second of the input pipeline on one core.

JPEG bytes to batches of uint8 by `vit.data` with one thread. `training`: inception crop to
224 x 224 and flip; `evaluation`: shorter side to 256, centre crop of 224.

`waiting` measures storage that answers after 30 ms, as a network file system may, with and without
threads that read records in parallel.
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import timing
from vit import config, data

SIZE, RESIZE = 224, 256
REPEATS = 5
IMAGES = 200
"""Images of one repeat, at least."""
RECORDS = 50_000
"""Records of a data set: the files again and again. Grain's shuffle of a handful would cost as much
as decoding, since it walks through numbers of at least 16 bits until one is small enough."""
DELAY, LATE_BATCH, LATE_BATCHES = 0.03, 128, 4
"""Parameters of `waiting`: seconds a record, images of a batch, batches after the first."""


def sample_images() -> Path:
    """Return the folder of scikit-learn's two photographs."""
    from sklearn import datasets

    return Path(datasets.__file__).parent / "images"


def read(folder: Path) -> list[bytes]:
    """Read the JPEG files of a folder, not decoded.

    Raises:
        ValueError: for a folder without JPEG files.
    """
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise ValueError(f"{folder} holds no JPEG file (*.jpg, *.jpeg)")
    return [path.read_bytes() for path in paths]


def rates(files: list[bytes]) -> list[dict[str, Any]]:
    """Time each pipeline; a row for each with the best repeat (`experiments.common.timing`)."""
    size = min(len(files), 50)
    images = size * -(-IMAGES // size)
    streams = {name: _stream(files, size, name) for name in ("training", "evaluation")}
    calls = {name: partial(_take, stream, images // size) for name, stream in streams.items()}
    return [
        {"pipeline": name, "images/s": images / best.wall, "images/CPU s": images / best.cpu}
        for name, best in timing.race(calls, REPEATS).items()
    ]


def waiting(files: list[bytes]) -> list[dict[str, Any]]:
    """Time each number of threads: seconds to the first batch, and images/s after it."""

    def late(*arguments: Any) -> data.Batch:
        time.sleep(DELAY)
        return data.labelled_image(*arguments)

    rows, dataset = [], _dataset(files)._replace(decode=late)
    section = config.Data(image_size=SIZE, crop="inception", flip=True, batch_size=LATE_BATCH)
    for threads in (0, data.THREADS, 4 * data.THREADS):
        start = time.perf_counter()
        stream = iter(data.train_batches(dataset, section, seed=0, threads=threads))
        next(stream)
        first = time.perf_counter()
        for _ in range(LATE_BATCHES):
            next(stream)
        rate = LATE_BATCH * LATE_BATCHES / (time.perf_counter() - first)
        rows.append({"threads": threads, "first batch, s": first - start, "images/s": rate})
    return rows


def _take(stream: Iterator[Any], number: int) -> None:
    for batch in itertools.islice(stream, number):
        assert (batch.shape[1:], batch.dtype) == ((SIZE, SIZE, 3), "uint8")


def _dataset(files: list[bytes]) -> data.Dataset:
    records = [{"image": file, "label": 0} for file in files]
    records *= -(-RECORDS // len(records))
    return data.Dataset(records, records, ("a",), channels=3)


def _stream(files: list[bytes], batch_size: int, pipeline: str) -> Iterator[Any]:
    section = config.Data(image_size=SIZE, eval_resize=RESIZE, batch_size=batch_size)
    if pipeline == "training":
        section = config.Data(image_size=SIZE, crop="inception", flip=True, batch_size=batch_size)
        batches = data.train_batches(_dataset(files), section, seed=0, threads=1)
    else:
        batches = data.eval_batches(_dataset(files), section, threads=1)
    return (batch["image"] for batch in batches)
