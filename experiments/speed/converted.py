"""Accuracy and speed of trained runs on the same pictures: a softmax run and its conversions.

    python -m experiments.speed.converted --runs=runs/softmax,runs/converted --out=results/converted

Parameters do not depend on the attention: a run may be evaluated, converted (`vit.convert`) and
fine-tuned at any resolution. Each run is evaluated on all pictures of its split. The difference
from the softmax run of the same size is paired, picture by picture. Its standard error is that of
a mean of differences -1, 0, 1, as in McNemar's test. Then the forward passes of --batch_size
pictures take turns, size by size; the best of --repeats counts.

    converted.csv    pixels, tokens, attention, accuracy, difference, milliseconds and memory
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.common import harness, launch, statistics, timing
from vit import config as configs
from vit import data, use
from vit.run import runs as restored

Row = harness.Row


def correct(run: restored.Restored, trained: use.Trained) -> np.ndarray:
    """Return 1 for each picture of the split whose class is right, else 0."""
    hits: list[np.ndarray] = []
    for batch in data.eval_batches(run.dataset, run.config.data):
        logits, _ = trained.forward(np.asarray(batch["image"]))
        right = np.argmax(logits, axis=-1) == np.asarray(batch["label"])
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


def timed(models: Iterable[use.Trained], batch_size: int, repeats: int) -> list[Row]:
    """Return milliseconds and memory of a forward pass, the models in turn."""
    programs = {}
    for i, trained in enumerate(models):
        side = trained.config.data.image_size
        pixels = jnp.zeros((batch_size, side, side, trained.channels), jnp.float32)
        graph, state = nnx.split(trained.model)
        programs[i] = timing.compiled(partial(forward, graph), state, pixels)
    best = timing.race({str(i): x.call for i, x in programs.items()}, repeats)
    return [
        {
            "forward, ms": 1e3 * best[str(i)].wall,
            "times as fast": best["0"].wall / best[str(i)].wall,
            "memory, MiB": x.temporary_bytes / 2**20,
        }
        for i, x in programs.items()
    ]


def compared(folders: Sequence[Path], batch_size: int, repeats: int) -> list[Row]:
    """Return the rows of runs of one number of pixels, the first of which has softmax attention.

    Raises:
        ValueError: if it has not.
    """
    models = [use.load(folder) for folder in folders]
    if models[0].config.attention.kind != "softmax":
        raise ValueError(f"{models[0]} is the first run of its size: give softmax first")
    hits = [correct(restored.restore(x), model) for x, model in zip(folders, models, strict=True)]
    times, rows = timed(models, batch_size, repeats), []
    for trained, hit, costs in zip(models, hits, times, strict=True):
        pixels, (accuracy, error) = trained.config.data.image_size, statistics.mean_and_error(hit)
        difference = statistics.paired(hit, hits[0])
        row = {"run": trained.workdir.name, "pixels": pixels}
        row |= {"tokens": (pixels // trained.config.model.patch_size) ** 2 + 1}
        row |= {"attention": attention(trained.config), "accuracy": accuracy, "accuracy ±": error}
        row |= {"difference": difference.mean, "difference ±": difference.standard_error}
        rows.append(row | {"pictures": len(hit)} | costs)
    return rows


def main(
    runs: Sequence[str] = (),
    batch_size: int = 8,
    repeats: int = 10,
    out: Path = Path("results/converted"),
) -> None:
    """Print the table.

    Args:
        runs: folders of runs. The first of each number of pixels has softmax attention; those
            after it are compared with it.
        batch_size: pictures of a timed forward pass.
        repeats: forward passes of each run, in turn.
        out: folder of the table.
    """
    if not runs:
        raise ValueError("--runs is empty: give folders of runs, the softmax run first")
    folders = [Path(folder) for folder in runs]
    pixels = [configs.of_run(folder).data.image_size for folder in folders]
    rows: list[Row] = []
    for size in dict.fromkeys(pixels):
        same = [x for x, y in zip(folders, pixels, strict=True) if y == size]
        rows += compared(same, batch_size, repeats)
    harness.show(rows, out / "converted", text=timing.hardware())


if __name__ == "__main__":
    launch.run(main)
