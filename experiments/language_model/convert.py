"""A softmax language model with a Performer's attention: what is lost, by window and features.

    python -m experiments.language_model convert --workdir=runs/lm --out=results/convert

The model's own parameters stay. Near keys are exact (those of the own chunk of --windows tokens and
of the one before, and the first key; 0 for none), far ones are estimated with m features:

    none         frequencies as they are drawn
    calibrated   a shift and a scale of each head, fitted to far pairs
    far weight   and a weight of the far part of each head, fitted by attention transfer
    transfer     and all of it moved: frequencies of queries and of keys, bias of each feature

The loss is that of held-out windows of the text, in nats a character, less that of softmax on the
same windows. With m = 0 it is the window alone; so it is in a layer whose features make the loss on
the training windows higher: what is fitted is never worse there than its window. With
--finetune_steps softmax, window and transfer (--m of --window) are trained on, all parameters, in
folders in --out. The same command goes on.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import harness, launch, statistics
from experiments.language_model import config as configs
from experiments.language_model import conversion, rows
from experiments.language_model.model import Decoder
from experiments.language_model.task import NAME, task
from performer.refinement import Sample
from vit import checkpoint, loop, report, runs
from vit.conversion import of_softmax

Row = rows.Row


class Subject(NamedTuple):
    """A softmax model, its losses, and what its layers see."""

    run: runs.Restored
    model: Decoder
    held_out: jax.Array
    losses: np.ndarray
    tokens: jax.Array
    """Of the training text."""
    layers: list[Sample]


def subject(workdir: Path, windows: int, held_out: int) -> Subject:
    """The model of a run, seen on windows of the training text, and its held-out losses.

    Raises:
        ValueError: as `vit.conversion.of_softmax`.
    """
    of_softmax(workdir, NAME)
    run = runs.restore(workdir)
    model = run.model()
    batches = [batch["tokens"] for batch in runs.training_examples(run, windows)]
    tokens = runs.evaluation_examples(run.dataset, run.config, held_out)["tokens"]
    seen = jnp.concatenate(batches)
    layers = conversion.samples(model, seen[:, :-1])
    losses = conversion.held_out_losses(model, tokens)
    return Subject(run, model, jnp.asarray(tokens), losses, seen, layers)


def cases(
    windows: Sequence[int], num_features: Sequence[int], methods: Sequence[str]
) -> list[tuple]:
    """Window, m and method of each row: a window alone stands before its features."""
    found = []
    for window in windows:
        found += [(window, 0, "window alone")] if window else []
        found += itertools.product([window], num_features, methods)
    return found


FITTED = ("far weight", "transfer")
DOTTED = dict(color="black", linestyle=":", marker="", zorder=3)
SILENT = -1e4
"""Far weight of a head of the window alone in training: e^SILENT = 0, and weight decay makes NaN of
-inf."""


def hybrids(
    of: Subject, steps: int, seed: int, window: int, m: int, method: str
) -> list[conversion.Hybrid]:
    """The attention of each layer; what was fitted beside a window is no worse than the window."""
    found = conversion.hybrids(of.layers, window, m, method, steps=steps, seed=seed)
    beside = window and m and method in FITTED
    return conversion.no_worse(of.model, found, of.tokens) if beside else found


def measured(of: Subject, steps: int, seed: int, window: int, m: int, method: str) -> Row:
    """What is lost."""
    attention = hybrids(of, steps, seed, window, m, method)
    model = conversion.exchanged(of.model, attention)
    losses = conversion.held_out_losses(model, of.held_out)
    lost, error = statistics.mean_and_error((losses - of.losses).tolist())
    off = [int(jnp.sum(jnp.isneginf(x.far["weight"][...]))) for x in attention if x.far]
    return {
        "loss": float(losses.mean()),
        "lost": lost,
        "standard error": error,
        "heads of the window alone": sum(off),
    }


def finetuned(
    of: Subject, out: Path, options: dict[str, Any], window: int, m: int, method: str
) -> Row:
    """The loss after training on, of the whole held-out text; the run lies in a folder in `out`."""
    kind = "softmax" if method == "softmax" else "both" if m else "window"
    own, near = configs.attention(kind, m, window)
    model, steps = of.model, options["finetune_steps"]
    if kind != "softmax":
        attention = hybrids(of, options["steps"], options["seed"], window, m, method)
        for weight in (layer.far["weight"] for layer in attention if layer.far):
            weight[...] = jnp.maximum(weight[...], SILENT)
        model = conversion.exchanged(model, attention)
    rate, config = options["finetune_rate"], of.run.config
    new = configs.of_run(
        own,
        of.run.dataset,
        size=config.model.size,
        optim=configs.optim(rate, steps),
        steps=steps,
        dir=config.data.dir,
        batch_size=config.data.batch_size,
    )
    workdir, dataset = out / f"{kind}_{window}_{m}", of.run.dataset
    settings = of.run.task.settings
    settings = settings._replace(window=near, first=int(near > 0), transferred=m > 0)
    learned = task(dataset.num_classes, settings)
    if not checkpoint.found(workdir):
        runs.begin(workdir, model, new, dataset, learned)
    return {"loss": loop.train(new, workdir, dataset, learned)["eval_loss"]}


def figure(table: list[Row], out: Path) -> None:
    """Write `out`.png: loss against m, a panel for each window, whose own loss is dotted."""
    sizes = sorted({row["m"] for row in table if row["m"]})
    points = [row | {"m": m} for row in table for m in ([row["m"]] if row["m"] else sizes)]

    def finish(axis: Any, own: list[Row]) -> None:
        report.log_sizes(axis, sizes)
        axis.axhline(0, color="grey", lw=0.5)

    harness.figure(
        sorted(points, key=lambda row: row["window"]),
        out,
        x="m",
        y="lost",
        error="standard error",
        line="{method}",
        panel="window {window}",
        columns=3,
        style=lambda name: DOTTED if name == "window alone" else {},
        finish=finish,
        ylabel="nats lost a character",
    )


def main(
    workdir: Path,
    windows: Sequence[int] = (0, 16, 32, 64, 128),
    num_features: Sequence[int] = (16, 32, 64, 128, 256),
    methods: Sequence[Literal["none", "calibrated", "far weight", "transfer"]] = conversion.METHODS,
    steps: int = 200,
    examples: int = 64,
    held_out: int = 64,
    finetune_steps: int = 0,
    finetune_rate: float = 3e-4,
    window: int = 16,
    m: int = 64,
    seed: int = 0,
    out: Path = Path("results/language_model/convert"),
) -> None:
    """Prints the tables.

    Args:
        workdir: run with softmax attention.
        windows: tokens of a chunk; 0 is none.
        num_features: each m.
        methods: rows of each m.
        steps: of transfer, for each layer.
        examples: windows of the text it is done with.
        held_out: windows that losses are of.
        finetune_steps: of all parameters; 0 is none.
        finetune_rate: the highest one.
        window: that is fine-tuned.
        m: that is fine-tuned.
        seed: of the draws.
        out: folder of tables, figure and runs.
    """
    launch.at_least(0, windows=min(windows), finetune_steps=finetune_steps)
    launch.at_least(1, steps=steps, window=window)
    launch.at_least(2, num_features=min(num_features), examples=examples, held_out=held_out, m=m)
    asked: dict[str, Any] = {
        "workdir": str(workdir),
        "steps": steps,
        "seed": seed,
        "examples": examples,
        "held_out": held_out,
    }
    of = cache(lambda: subject(workdir, examples, held_out))
    names = ("window", "m", "method")
    rows.grown(
        out / "convert",
        asked,
        cases(windows, num_features, methods),
        names,
        lambda *case: measured(of(), steps, seed, *case),
    )
    figure(rows.whole(out / "convert"), out / "convert")
    if finetune_steps:
        asked |= {"finetune_steps": finetune_steps, "finetune_rate": finetune_rate}
        rows.grown(
            out / "finetuned",
            asked,
            [(0, 0, "softmax"), (window, 0, "window alone"), (window, m, "transfer")],
            names,
            lambda *case: finetuned(of(), out, asked, *case),
        )


if __name__ == "__main__":
    FEW = {"windows": (0, 16), "num_features": (16,), "steps": 20, "examples": 8, "held_out": 8}
    launch.run(main, quick=FEW)
