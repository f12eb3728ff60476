"""Accuracy and speed of trained runs on the same pictures: a softmax run and its conversions.

    performer-vit benchmark converted --runs=runs/softmax,runs/converted

Parameters do not depend on the attention: a run may be evaluated, converted (`vit.convert`) and
fine-tuned at any resolution. Each run is evaluated on all pictures of its split. The difference
from the softmax run of the same size is paired, picture by picture. Its standard error is the error
of a mean of differences -1, 0, 1, as in McNemar's test. Then the forward passes of `batch_size`
pictures take turns, size by size; the best of 20 counts.

    converted.csv    pixels, tokens, attention, accuracy, difference, milliseconds and memory
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit import config as configs
from vit.run import runs as run_folders
from vit.study import harness, statistics, timing

Row = harness.Row


def by_speed(rows: list[Row]) -> list[Row]:
    """Return the softmax runs and the runs with exact keys, the slowest first."""
    kept = [
        row for row in rows if row["attention"] == "softmax" or "exact_keys" in row["attention"]
    ]
    return sorted(kept, key=lambda row: (row["tokens"], row["times as fast"]))


FIGURES: harness.Figures = {
    "converted": dict(
        change=by_speed,
        x="times as fast",
        y="difference",
        line="{tokens} tokens",
        xlabel="forward pass, times as fast as softmax attention",
        ylabel="accuracy minus softmax's",
    )
}


def correct(run: run_folders.Restored) -> np.ndarray:
    """Return 1 for each picture of the split whose class is right, else 0."""
    graph, state = nnx.split(run.model())
    classes, hits = jax.jit(partial(predicted, graph)), []
    for batch in run.eval_batches():
        right = np.asarray(classes(state, batch["image"]) == batch["label"])
        hits.append(right[np.asarray(batch["mask"]) > 0])
    return np.concatenate(hits).astype(float)


def attention(config: configs.Config) -> str:
    """Return the attention of a run, with sizes; by the number of its blocks if they differ."""
    if config.attention.kind == "softmax":
        return "softmax"
    counts = Counter(block.text for block in configs.blocks(config))
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{count} x {text}" for text, count in counts.items())


def forward(graph: Any, state: Any, pixels: Any) -> Any:
    """Return the logits of pictures."""
    return nnx.merge(graph, state)(pixels)[0]


def predicted(graph: Any, state: Any, pixels: Any) -> Any:
    """Return the classes of pictures."""
    return jnp.argmax(forward(graph, state, pixels), axis=-1)


def timed(runs: Sequence[run_folders.Restored], batch_size: int, repeats: int) -> list[Row]:
    """Return milliseconds and memory of a forward pass, the runs in turn."""
    programs = []
    for run in runs:
        pixels = next(run.eval_batches())["image"][:batch_size].astype(jnp.float32)
        graph, state = nnx.split(run.model())
        programs.append(timing.compiled(partial(forward, graph), state, pixels))
    best = timing.race({str(i): x.call for i, x in enumerate(programs)}, repeats)
    first, *_ = seconds = [best[str(i)].wall for i in range(len(programs))]
    return [
        {"forward, ms": 1e3 * x, "times as fast": first / x}
        | {"memory, MiB": program.temporary_bytes / 2**20}
        for x, program in zip(seconds, programs, strict=True)
    ]


def compared(folders: Sequence[Path], batch_size: int, repeats: int) -> list[Row]:
    """Return the rows of runs of one number of pixels, the first of which has softmax attention."""
    restored = [run_folders.restore(folder) for folder in folders]
    hits = list(map(correct, restored))
    times, rows = timed(restored, batch_size, repeats), []
    for folder, run, hit, costs in zip(folders, restored, hits, times, strict=True):
        config, (accuracy, error) = run.config, statistics.mean_and_error(hit)
        pixels, difference = config.data.image_size, statistics.paired(hit, hits[0])
        row = {"run": folder.name, "pixels": pixels}
        row |= {"tokens": (pixels // config.model.patch_size) ** 2 + 1}
        row |= {"attention": attention(config), "accuracy": accuracy, "accuracy ±": error}
        row |= {"difference": difference.mean, "difference ±": difference.standard_error}
        rows.append(row | {"pictures": len(hit)} | costs)
    return rows


def measure(runs: Sequence[str], out: Path, batch_size: int = 8, repeats: int = 20) -> None:
    """Print the table and write it.

    Args:
        runs: folders of runs. The first of each number of pixels has softmax attention; those
            after it are compared with it.
        out: folder of the table.
        batch_size: pictures of a timed forward pass.
        repeats: forward passes of each run, in turn.

    Raises:
        ValueError: without runs, or if the first run of a size has no softmax attention.
    """
    if not runs:
        raise ValueError("--runs is empty: give folders of runs, the softmax run first")
    groups: dict[int, list[Path]] = {}
    for folder in map(Path, runs):
        config = configs.of_run(folder)
        group = groups.setdefault(config.data.image_size, [])
        if not group and config.attention.kind != "softmax":
            raise ValueError(f"{folder} is the first run of its size: give softmax first")
        group.append(folder)
    rows = [row for group in groups.values() for row in compared(group, batch_size, repeats)]
    harness.show(rows, out / "converted", FIGURES, text=timing.hardware())
