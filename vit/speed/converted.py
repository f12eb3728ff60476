"""Accuracy and speed of trained runs on the same pictures: a softmax run and its conversions.

    performer-vit benchmark converted --runs=runs/softmax,runs/converted

Parameters do not depend on the attention: a run may be evaluated, converted (`vit.convert`) and
fine-tuned at any resolution. Each run is evaluated on the pictures of its split, all or the first
`images`. The difference from the softmax run of the same size is paired, picture by picture. Its
standard error is the error of a mean of differences -1, 0, 1, as in McNemar's test. Then the
forward passes of `batch_size` pictures take turns, size by size, and passes with all gradients
(training); the best of `repeats` counts.

    converted.csv    pixels, tokens, attention, accuracy, difference, milliseconds and memory
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit import config as configs
from vit.run import runs as run_folders
from vit.study import harness, statistics, timing

Row = harness.Row
Output = Callable[[nnx.Module, Any], Any]


def by_speed(rows: list[Row]) -> list[Row]:
    """Return the softmax runs and the runs with exact keys, the slowest first."""
    kept = [
        row for row in rows if row["attention"] == "softmax" or "exact_keys" in row["attention"]
    ]
    return sorted(kept, key=lambda row: (row["tokens"], row["forward, times as fast"]))


FIGURES: harness.Figures = {
    "converted": dict(
        change=by_speed,
        x="forward, times as fast",
        y="difference",
        line="{tokens} tokens",
        xlabel="forward pass, times as fast as softmax attention",
        ylabel="accuracy minus softmax's",
    )
}


def correct(run: run_folders.Restored, images: int = 0) -> np.ndarray:
    """Return 1 for each of the first pictures of the split whose class is right, else 0."""
    graph, state = nnx.split(run.model())
    classes, hits = jax.jit(partial(predicted, graph)), []
    batches = -(-images // run.config.data.batch_size) or None
    for batch in islice(run.eval_batches(), batches):
        right = np.asarray(classes(state, batch["image"]) == batch["label"])
        hits.append(right[np.asarray(batch["mask"]) > 0])
    return np.concatenate(hits).astype(float)[: images or None]


def attention(config: Any) -> str:
    """Return the attention of a run, with sizes; by the number of its blocks if they differ."""
    if config.attention.kind == "softmax":
        return "softmax"
    counts = Counter(block.text for block in configs.blocks(config))
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{count} x {text}" for text, count in counts.items())


def logits(model: nnx.Module, pixels: Any) -> Any:
    """Return the logits of pictures."""
    return cast("Any", model)(pixels)[0]


def forward(graph: Any, state: Any, pixels: Any) -> Any:
    """Return the logits of pictures, of a model in two parts."""
    return logits(nnx.merge(graph, state), pixels)


def predicted(graph: Any, state: Any, pixels: Any) -> Any:
    """Return the classes of pictures."""
    return jnp.argmax(forward(graph, state, pixels), axis=-1)


def timed(
    models: Sequence[nnx.Module], inputs: Sequence[Any], output: Output, repeats: int
) -> list[Row]:
    """Return milliseconds and memory of forward passes, and of passes with gradients, in turn.

    The gradients are the derivatives of a sum of squared outputs by all parameters.

    Args:
        models: models; times are relative to the first one's.
        inputs: input of each model.
        output: (model, input) -> array.
        repeats: passes of each model; the best counts.
    """

    def outputs(graph: Any, state: Any, x: Any) -> Any:
        return output(nnx.merge(graph, state), x)

    def gradients(graph: Any, state: Any, x: Any) -> Any:
        parameters, others = state.split(nnx.Param, ...)

        def total(parameters: Any) -> Any:
            return jnp.sum(outputs(graph, nnx.merge_state(parameters, others), x) ** 2)

        return jax.grad(total)(parameters)

    rows: list[Row] = [{} for _ in models]
    for name, function in {"forward": outputs, "training": gradients}.items():
        programs = []
        for model, x in zip(models, inputs, strict=True):
            graph, state = nnx.split(model)
            programs.append(timing.compiled(partial(function, graph), state, x))
        best = timing.race({str(i): x.call for i, x in enumerate(programs)}, repeats)
        for i, (row, program) in enumerate(zip(rows, programs, strict=True)):
            row[f"{name}, ms"] = 1e3 * best[str(i)].wall
            row[f"{name}, times as fast"] = best["0"].wall / best[str(i)].wall
            row[f"{name}, MiB"] = program.temporary_bytes / 2**20
    return rows


def compared(folders: Sequence[Path], images: int, batch_size: int, repeats: int) -> list[Row]:
    """Return the rows of runs of one size, the first of which has softmax attention."""
    restored = [run_folders.restore(folder) for folder in folders]
    hits = [correct(run, images) for run in restored]
    models = [run.model() for run in restored]
    inputs = [next(run.eval_batches())["image"][:batch_size] for run in restored]
    times = timed(models, [x.astype(jnp.float32) for x in inputs], logits, repeats)
    rows = []
    for folder, run, hit, costs in zip(folders, restored, hits, times, strict=True):
        config, (accuracy, error) = run.config, statistics.mean_and_error(hit)
        pixels, difference = config.data.image_size, statistics.paired(hit, hits[0])
        row = {"run": folder.name, "pixels": pixels}
        row |= {"tokens": (pixels // config.model.patch_size) ** 2 + 1}
        row |= {"attention": attention(config), "accuracy": accuracy, "accuracy ±": error}
        row |= {"difference": difference.mean, "difference ±": difference.standard_error}
        rows.append(row | {"pictures": len(hit)} | costs)
    return rows


def by_size(runs: Sequence[str], size: Callable[[Any], Any]) -> list[list[Path]]:
    """Return the folders of runs in groups of one size.

    Args:
        runs: folders; the first of each size has softmax attention.
        size: config -> size.

    Raises:
        ValueError: without runs, or if the first run of a size has no softmax attention.
    """
    if not runs:
        raise ValueError("--runs is empty: give folders of runs, the softmax run first")
    groups: dict[Any, list[Path]] = {}
    for folder in map(Path, runs):
        config = configs.of_run(folder)
        group = groups.setdefault(size(config), [])
        if not group and config.attention.kind != "softmax":
            raise ValueError(f"{folder} is the first run of its size: give softmax first")
        group.append(folder)
    return list(groups.values())


def measure(
    runs: Sequence[str], out: Path, images: int = 0, batch_size: int = 8, repeats: int = 20
) -> None:
    """Print the table and write it.

    Args:
        runs: folders of runs. The first of each size, in pixels and patches, has softmax attention;
            those after it are compared with it.
        out: folder of the table.
        images: pictures that are evaluated, 0 for all.
        batch_size: pictures of a timed forward pass.
        repeats: forward passes of each run, in turn.

    Raises:
        ValueError: without runs, or if the first run of a size has no softmax attention.
    """

    def size(config: Any) -> tuple[int, int]:
        return config.data.image_size, config.model.patch_size

    sizes = images, batch_size, repeats
    rows = [row for group in by_size(runs, size) for row in compared(group, *sizes)]
    harness.show(rows, out / "converted", FIGURES, text=timing.hardware())
