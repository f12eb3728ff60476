"""A softmax language model with a Performer's attention: what is lost, by window and features.

    python -m experiments.language_model convert --workdir=runs/lm --out=results/convert

The model's own parameters stay. Near keys are exact (those of the own chunk of --windows tokens and
of the one before, and the first key; 0 for none), far ones are estimated with m features:

    none         frequencies as they are drawn
    calibrated   a shift and a scale of each head, fitted to far pairs
    far weight   and a weight of the far part of each head, fitted by attention transfer
    transfer     and all of it moved: frequencies of queries and of keys, bias of each feature

The loss is that of held-out windows of the text, in nats a character, less that of softmax on the
same windows. With m = 0 it is the window alone; so it is for a head with the far weight -inf, which
one gets that no features make better. With --finetune_steps softmax, window and transfer (--m of
--window) are trained on, all parameters, in folders in --out. The same command goes on.
"""

import itertools
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import launch, statistics
from experiments.language_model import conversion, rows, runs
from experiments.language_model.model import Decoder
from performer.refinement import Sample
from vit import report
from vit import runs as of_vit

Row = rows.Row


class Subject(NamedTuple):
    """A softmax model, its losses, and what its layers see."""

    run: of_vit.Restored
    settings: runs.Settings
    model: Decoder
    held_out: jax.Array
    losses: np.ndarray
    layers: list[Sample]


def subject(workdir: Path, windows: int, held_out: int) -> Subject:
    """Of a run.

    Args:
        workdir: of the run.
        windows: of the training text, from which attention is transferred.
        held_out: windows on which losses are measured.

    Raises:
        ValueError: for a run that has no softmax attention.
    """
    run, settings = runs.restore(workdir)
    if run.config.attention.kind != "softmax":
        raise ValueError(f"{workdir} has no softmax attention: train one with --attention=softmax")
    model = run.model()
    batches = [batch["tokens"] for batch in of_vit.training_examples(run, windows)]
    tokens = of_vit.evaluation_examples(run.dataset, run.config, held_out)["tokens"]
    layers = conversion.samples(model, jnp.concatenate(batches)[:, :-1])
    losses = conversion.held_out_losses(model, tokens)
    return Subject(run, settings, model, jnp.asarray(tokens), losses, layers)


def cases(windows: list[int], num_features: list[int], methods: list[str]) -> list[tuple]:
    """Window, m and method of each row: a window alone stands before its features."""
    found = []
    for window in windows:
        found += [(window, 0, "window alone")] if window else []
        found += itertools.product([window], num_features, methods)
    return found


def measured(of: Subject, steps: int, seed: int, window: int, m: int, method: str) -> Row:
    """What is lost."""
    attention = conversion.hybrids(of.layers, window, m, method, steps=steps, seed=seed)
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
    own, near = runs.attention(kind, m, window)
    own.num_features = m or own.num_features
    model, steps = of.model, options["finetune_steps"]
    if kind != "softmax":
        number = dict(steps=options["steps"], seed=options["seed"])
        attention = conversion.hybrids(of.layers, window, m, method, **number)
        model = conversion.exchanged(model, attention)
    rate, config = options["finetune_rate"], of.run.config
    new = runs.config(
        own,
        of.run.dataset,
        size=config.model.size,
        optim=runs.optim(rate, steps),
        steps=steps,
        dir=config.data.dir,
        batch_size=config.data.batch_size,
    )
    workdir = out / f"{kind}_{window}_{m}"
    settings = of.settings._replace(window=near, first=int(near > 0))
    runs.begin(workdir, model, new, settings, of.run.dataset)
    record = runs.train(workdir, new, settings, of.run.dataset)
    return {"loss": record["eval_loss"]}


STYLES = dict(zip(conversion.METHODS, ("--", "-.", (0, (1, 3)), "-"), strict=True))


def figure(table: list[Row], out: Path) -> None:
    """What is lost against m: a colour for each window, a style for each method."""
    drawn, axis = report.figure(out)
    for i, window in enumerate(sorted({row["window"] for row in table})):
        of = [row for row in table if row["window"] == window]
        for method in dict.fromkeys(row["method"] for row in of):
            shown = sorted(
                (row["m"], max(row["lost"], 1e-5)) for row in of if row["method"] == method
            )
            label = f"window {window}, {method}" if window else f"features alone, {method}"
            if shown[0][0] == 0:
                axis.axhline(
                    shown[0][1], color=f"C{i}", linestyle=":", label=f"window {window} alone"
                )
            else:
                axis.plot(
                    *zip(*shown, strict=True),
                    "o",
                    ls=STYLES[method],
                    color=f"C{i}",
                    ms=3,
                    label=label,
                )
    report.log_log(axis, sorted({row["m"] for row in table if row["m"]}))
    axis.set(xlabel="features m", ylabel="nats lost a character")
    report.save(drawn, out)


def main() -> None:
    """Prints the tables."""
    out, quick = Path(str(_OUT.value)), bool(_QUICK.value)
    windows, sizes = ([int(x) for x in flag.value] for flag in (_WINDOWS, _NUM_FEATURES))
    if quick:
        windows, sizes = windows[:2], sizes[:1]
    if unknown := set(_METHODS.value) - set(conversion.METHODS):
        raise ValueError(f"--methods: {sorted(unknown)} are none of {conversion.METHODS}")
    asked = {
        "workdir": _WORKDIR.value,
        "steps": min(20, _STEPS.value) if quick else _STEPS.value,
        "seed": _SEED.value,
        "examples": 8 if quick else _EXAMPLES.value,
        "held_out": 8 if quick else _HELD_OUT.value,
    }
    of = cache(lambda: subject(Path(_WORKDIR.value), asked["examples"], asked["held_out"]))
    names = ("window", "m", "method")
    table = rows.grown(
        out / "convert",
        asked,
        cases(windows, sizes, _METHODS.value),
        names,
        lambda *case: measured(of(), asked["steps"], asked["seed"], *case),
    )
    figure(table, out / "convert")
    if _FINETUNE_STEPS.value:
        more = {"finetune_steps": _FINETUNE_STEPS.value, "finetune_rate": _FINETUNE_RATE.value}
        window, m = windows[-1] if quick else _WINDOW.value, sizes[0] if quick else _M.value
        asked |= more
        rows.grown(
            out / "finetuned",
            asked,
            [(0, 0, "softmax"), (window, 0, "window alone"), (window, m, "transfer")],
            names,
            lambda *case: finetuned(of(), out, asked, *case),
        )


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "run with softmax attention", required=True)
    _OUT = flags.DEFINE_string("out", "results/convert", "folder of tables, figure and runs")
    _WINDOWS = flags.DEFINE_list("windows", ["0", "16", "32", "64", "128"], "tokens of a chunk")
    _NUM_FEATURES = flags.DEFINE_list("num_features", ["16", "32", "64", "128", "256"], "each m")
    _METHODS = flags.DEFINE_list("methods", list(conversion.METHODS), "rows of each m")
    _STEPS = flags.DEFINE_integer("steps", 200, "of transfer, for each layer", lower_bound=1)
    _EXAMPLES = flags.DEFINE_integer("examples", 64, "windows it is done with", lower_bound=2)
    _HELD_OUT = flags.DEFINE_integer("held_out", 64, "windows losses are of", lower_bound=2)
    _FINETUNE_STEPS = flags.DEFINE_integer("finetune_steps", 0, "of all parameters", lower_bound=0)
    _FINETUNE_RATE = flags.DEFINE_float("finetune_rate", 3e-4, "the highest one", lower_bound=0)
    _WINDOW = flags.DEFINE_integer("window", 16, "that is fine-tuned", lower_bound=1)
    _M = flags.DEFINE_integer("m", 64, "that is fine-tuned", lower_bound=2)
    _SEED = flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0)
    _QUICK = flags.DEFINE_bool("quick", False, "a few rows in a minute, of fewer windows and steps")
    launch.run(main)
