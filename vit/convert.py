"""Replaces the attention of a trained softmax ViT by a Performer's, without retraining.

    python -m vit.convert --workdir=runs/softmax --coupling=orf-antithetic,pm --calibration=full \\
        --num_features=32,64,128 --refine_steps=100 --out=runs/converted

Queries and keys of a few hundred training images calibrate the estimate (`performer.calibration`);
parameters stay as they are. The folder `--out` then holds `conversion.csv`, `.md` and `.png`:
accuracy and attention error against m for every coupling, with and without the calibration, over
several draws of the frequencies, between the softmax original and uniform attention, which looks
at nothing; and `heads.csv`, the attention errors of the converted run, head by head. Until all is
done `--out` does not exist: it takes shape in `OUT.unfinished`, and after a kill the same command
begins anew.

With --refine_steps the frequencies themselves then move, by gradient descent on the attention error
of the same images: estimates are no longer unbiased, and a good deal nearer with few features. With
--keep=1 the layer with the largest error stays softmax attention. With --exact_window=0,16 patches
are in the order of a Z-order curve, a square of 16 of them and both neighbours are exact for each
other, and so are class token and registers for all; the window alone, without any features, stands
beside.

The folder is also a run: the first coupling, calibrated (and refined), with the most features and
the largest window.
`python -m vit.evaluate --workdir=OUT` takes it, and `python -m vit.train --workdir=OUT` fine-tunes
it, for `--num_epochs` at the peak rate `--learning_rate`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging
from flax import nnx

from performer.nnx import linearize
from performer.nnx.layer import Window
from vit import checkpoint, classification, devices, metrics, report, runs, safety
from vit import config as configs
from vit.arguments import launch
from vit.conversion import compare, measured_layers, of_softmax
from vit.task import random_streams


def plot(records: Sequence[metrics.Record], out: Path) -> None:
    """Accuracy and attention error against m, a line for each coupling, window and method."""
    drawn, axes = report.figure(out, columns=2)
    (softmax, uniform, *alone), rest = ([r for r in records if (r["m"] > 0) == x] for x in (0, 1))
    names = list(dict.fromkeys((r["coupling"], r["window"]) for r in rest))
    styles = dict(
        zip(dict.fromkeys(r["calibration"] for r in rest), ("--", "-", ":"), strict=False)
    )
    lines = dict.fromkeys((r["coupling"], r["window"], r["calibration"]) for r in rest)
    for coupling, window, method in lines:
        line = coupling, window, method
        points = [r for r in rest if (r["coupling"], r["window"], r["calibration"]) == line]
        words = [coupling, method * (method != "none"), f"window {window}" * (window > 0)]
        style = {
            "label": ", ".join(filter(None, words)),
            "color": f"C{names.index((coupling, window))}",
            "linestyle": styles[method],
            "marker": "o",
            "markersize": 4,
        }
        sizes = [r["m"] for r in points]
        axes[0].errorbar(
            sizes, [r["accuracy"] for r in points], [r["standard error"] for r in points], **style
        )
        axes[1].plot(sizes, [r["attention error"] for r in points], **style)
    for end, style in [(softmax, "-"), (uniform, ":")]:
        axes[0].axhline(end["accuracy"], color="black", linestyle=style, label=end["coupling"])
    axes[1].axhline(uniform["attention error"], color="black", linestyle=":", label="uniform")
    for number, end in enumerate(alone):
        label, color = f"window {end['window']} alone", f"{0.4 + 0.15 * number:.2f}"
        for axis, column in zip(axes, ("accuracy", "attention error"), strict=True):
            axis.axhline(end[column], color=color, linestyle="-.", label=label)
    report.log_log(axes[1], sorted({r["m"] for r in rest}))
    axes[0].set(xscale="log", xlabel="m", ylabel="accuracy, not retrained")
    axes[0].set_xticks(sorted({r["m"] for r in rest}), sorted({r["m"] for r in rest}))
    axes[0].minorticks_off()
    axes[1].set(ylabel="relative attention error")
    axes[1].get_legend().remove()
    axes[0].get_figure().legend(
        *axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small"
    )
    report.save(drawn, out)


def convert(
    workdir: Path,
    out: Path,
    *,
    names: Sequence[str],
    method: str,
    num_features: Sequence[int],
    refine_steps: int = 0,
    keep: int = 0,
    exact_window: Sequence[int] = (0,),
    draws: int = 4,
    images: int = 256,
    eval_images: int = 0,
    num_epochs: float = 1.0,
    learning_rate: float = 1e-4,
) -> str:
    """Writes the report and the converted run, and returns the table.

    Args:
        workdir: of a run with softmax attention.
        out: folder of the report and the converted run; it appears in one piece, last.
        names: couplings that are compared; the first is that of the converted run.
        method: of calibration; "none" stands beside it.
        num_features: each m; the largest is that of the converted run.
        keep: so many layers, those with the largest attention errors, stay exact everywhere.
        refine_steps: if not 0, calibrated and refined frequencies are a further row, and the
            converted run has them.
        exact_window: tokens of a chunk whose keys are exact for it and its neighbours, each such
            number; the largest is that of the converted run.
        draws: of the frequencies, for each coupling, method, window and m.
        images: training images to calibrate with.
        eval_images: how many to measure accuracy on; 0 for all.
        num_epochs: of fine-tuning, for the config of the converted run.
        learning_rate: likewise.

    Raises:
        ValueError: before any work, for a run of another task or without softmax attention, an
            unknown coupling or method, sizes that a coupling does not admit, or an `out` that is
            not empty.
        vit.checkpoint.SaveError: when the run cannot be written.
    """
    config = of_softmax(workdir, classification.NAME)
    if min(images, draws) < 1 or min(refine_steps, eval_images, keep) < 0:
        raise ValueError(
            f"images={images} and draws={draws} must be positive, refine_steps={refine_steps},"
            f" eval_images={eval_images} and keep={keep} not negative"
        )
    steps = dict.fromkeys([("none", 0), (method, 0), (method, refine_steps)])
    for name, m, window in itertools.product(names, num_features, exact_window):
        attention = configs.Attention(
            coupling=name, num_features=m, calibration=method, exact_window=window
        )
        configs.validate(dataclasses.replace(config, attention=attention))
    checkpoint.check_path(out)
    safety.check_vacant(out, "--out")
    run = runs.restore(workdir).with_window(max(exact_window))
    model = run.model()
    windows = [Window(w, config.model.num_prefix if w else 0) for w in exact_window]
    new_config = dataclasses.replace(
        config,
        attention=configs.Attention(
            coupling=names[0],
            num_features=max(num_features),
            calibration=method,
            exact_window=max(exact_window),
        ),
        num_epochs=num_epochs,
    )
    _, num_steps = runs.length(new_config, run.dataset)
    new_config.optim = dataclasses.replace(
        config.optim,
        learning_rate=learning_rate,
        final_learning_rate=min(learning_rate, config.optim.final_learning_rate),
        warmup_steps=num_steps // 10,
        constant_steps=0,
    )
    configs.validate(new_config)
    batches = list(runs.training_examples(run, images))
    linear, linearized = linearize(
        model,
        batches,
        coupling=names[0],
        num_features=max(num_features),
        calibration=method,
        refine_steps=refine_steps,
        keep=keep,
        **max(windows)._asdict(),
        call=run.task.count,
        measured=measured_layers(run.task, model, batches),
    )
    exact = [row["layer"] for row in linearized.rows if row["attention"] == "exact"]
    new_config.attention.exact_layers = ",".join(map(str, dict.fromkeys(exact)))
    new = run.task.create(new_config, rngs=random_streams(config.seed))
    nnx.update(new, nnx.state(linear))
    run = runs.evaluated_on(run, eval_images)
    records, table = [], ""
    with safety.appearing(out, "--out") as folder, metrics.progress_bar() as bar:
        runs.begin(folder, new, new_config, run.dataset, run.task)
        rows = len(names) * len(steps) * len(windows) * len(num_features)
        total = 2 + sum(map(any, windows)) + rows
        progress = bar.add_task("convert", total=total, status="")
        for record in compare(
            run,
            model,
            batches,
            names=names,
            methods=list(steps),
            num_features=num_features,
            draws=draws,
            keep=keep,
            windows=windows,
        ):
            records.append(record)
            table = report.table(records, folder / "conversion")
            bar.update(progress, advance=1, status=f"{record['coupling']} {record['accuracy']:.4f}")
        plot(records, folder / "conversion")
        linearized.to_csv(folder / "heads.csv")
    return table


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs a failed save, which is raised
    workdir = Path(str(_WORKDIR.value))
    out = Path(_OUT.value or f"{workdir}-performer")
    for name, words in ("num_features", _NUM_FEATURES.value), ("exact_window", _WINDOW.value):
        if not words or not all(word.isdecimal() for word in words):
            raise ValueError(f"--{name}={','.join(words)}: give integers, as in 32,64")
    devices.check_alone()
    table = convert(
        workdir,
        out,
        names=_COUPLING.value,
        method=str(_CALIBRATION.value),
        num_features=[int(m) for m in _NUM_FEATURES.value],
        refine_steps=_REFINE_STEPS.value,
        exact_window=[int(w) for w in _WINDOW.value],
        keep=_KEEP.value,
        draws=_DRAWS.value,
        images=_IMAGES.value,
        eval_images=_EVAL_IMAGES.value,
        num_epochs=_NUM_EPOCHS.value,
        learning_rate=_LEARNING_RATE.value,
    )
    print(f"{table}\nThe report and the converted run are in {out}.")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "run with softmax attention", required=True)
    _OUT = flags.DEFINE_string("out", "", "converted run; <workdir>-performer if none")
    _COUPLING = flags.DEFINE_list("coupling", ["orf-antithetic"], "names; the run takes the first")
    _CALIBRATION = flags.DEFINE_string("calibration", "full", "none, shift, shift+scale, full, ...")
    _NUM_FEATURES = flags.DEFINE_list("num_features", ["32", "64", "128"], "each m")
    _REFINE_STEPS = flags.DEFINE_integer("refine_steps", 0, "also refined", lower_bound=0)
    _KEEP = flags.DEFINE_integer("keep", 0, "layers that stay exact: the worst", lower_bound=0)
    _WINDOW = flags.DEFINE_list("exact_window", ["0"], "each; the run takes the largest")
    _DRAWS = flags.DEFINE_integer("draws", 4, "draws of the frequencies", lower_bound=1)
    _IMAGES = flags.DEFINE_integer("images", 256, "to calibrate with", lower_bound=1)
    _EVAL_IMAGES = flags.DEFINE_integer("eval_images", 0, "0: all", lower_bound=0)
    _NUM_EPOCHS = flags.DEFINE_float("num_epochs", 1.0, "of fine-tuning with vit.train")
    _LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-4, "likewise")
    launch(main)
