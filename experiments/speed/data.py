"""Images per second of the input pipeline on one core, beside tf.data where tensorflow is there.

JPEG bytes to batches of uint8. `training`: inception crop to 224 x 224 and flip; `evaluation`:
shorter side to 256, centre crop of 224. Ours is `vit.data` with one thread of grain, the other
tf.data with one thread and `tf.io.decode_and_crop_jpeg`. They differ in:

    resampling   ours filters before it takes fewer pixels, as tf.image.resize(antialias=True) does
                 ("antialiased"); tf's usual resizing reads four pixels for each new one
    crops        ours draws the logarithm of the aspect uniformly, tf the aspect
    small parts  ours decodes a JPEG at 1/2, 1/4 or 1/8 where the crop remains large enough, to its
                 last byte; tf decodes at full size, and only the crop
    broken files ours names and replaces them; tf stops

`waiting` measures ours alone on records that storage hands out 30 ms after they are requested, as
a network file system may, with and without the threads that read them side by side.
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import timing
from vit import config, data
from vit.run import bounded

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
    """The folder of scikit-learn's two photographs."""
    from sklearn import datasets

    return Path(datasets.__file__).parent / "images"


def read(folder: Path) -> list[bytes]:
    """The JPEG files of a folder, as they are.

    Raises:
        ValueError: when there are none.
    """
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise ValueError(f"{folder} holds no JPEG file (*.jpg, *.jpeg)")
    return [bounded.content(path) for path in paths]


def rates(files: list[bytes]) -> tuple[list[dict[str, Any]], bool]:
    """One row for each pipeline and implementation, and whether tensorflow is installed.

    They take turns in one process, and the best repeat is kept (`experiments.common.timing`).
    """
    try:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        others = {"tf.data": False, "tf.data, antialiased": True}
    except ImportError:
        others = {}
    size = min(len(files), 50)
    images = size * -(-IMAGES // size)
    rows = []
    for name in ("training", "evaluation"):
        streams = {"ours": _ours(files, size, name)}
        for kind, antialias in others.items():
            streams[kind] = _tensorflow(files, size, name, antialias)
        calls = {kind: partial(_take, stream, images // size) for kind, stream in streams.items()}
        best = timing.race(calls, REPEATS)
        for kind, seconds in best.items():
            row = {"pipeline": name, "implementation": kind}
            row |= {"images/s": images / seconds.wall, "images/CPU s": images / seconds.cpu}
            row["ours / this, wall"] = seconds.wall / best["ours"].wall
            row["ours / this, CPU"] = seconds.cpu / best["ours"].cpu
            rows.append(row)
    return rows, bool(others)


def waiting(files: list[bytes]) -> list[dict[str, Any]]:
    """One row for each number of threads: seconds to the first batch, and images/s after it."""

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


def _ours(files: list[bytes], batch_size: int, pipeline: str) -> Iterator[Any]:
    section = config.Data(image_size=SIZE, eval_resize=RESIZE, batch_size=batch_size)
    if pipeline == "training":
        section = config.Data(image_size=SIZE, crop="inception", flip=True, batch_size=batch_size)
        batches = data.train_batches(_dataset(files), section, seed=0, threads=1)
    else:
        batches = data.eval_batches(_dataset(files), section, threads=1)
    return (batch["image"] for batch in batches)


def _tensorflow(files: list[bytes], batch_size: int, pipeline: str, antialias: bool) -> Iterator:
    import tensorflow as tf

    def distorted(shape: Any) -> Any:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            bounding_boxes=tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], 0)

    def center(shape: Any) -> Any:
        side = tf.cast(tf.reduce_min(shape[:2]) * SIZE / RESIZE, tf.int32)
        return tf.concat([(shape[:2] - side) // 2, [side, side]], 0)

    def example(jpeg: Any) -> Any:
        window = (distorted if training else center)(tf.io.extract_jpeg_shape(jpeg))
        image = tf.io.decode_and_crop_jpeg(jpeg, window, channels=3)
        image = tf.image.resize(image, [SIZE, SIZE], "bilinear", antialias=antialias)
        image = tf.image.random_flip_left_right(image) if training else image
        return tf.cast(image, tf.uint8)

    training = pipeline == "training"
    batches = tf.data.Dataset.from_tensor_slices(files).repeat()
    batches = batches.shuffle(len(files)) if training else batches
    batches = batches.map(example).batch(batch_size, drop_remainder=True)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return batches.with_options(options).as_numpy_iterator()
