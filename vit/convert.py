"""Replace the attention of a trained softmax model by a Performer's, without retraining.

    performer-vit convert --workdir=runs/softmax --out=runs/converted
    performer-vit convert --workdir=runs/softmax --coupling=pm-antithetic,orf --calibration=full \\
        --num_features=32,64,128 --refine_steps=100 --out=runs/compared

Queries and keys of a few hundred training images calibrate the estimate (`performer.calibration`);
parameters stay as they are. Without sizes each layer gets the numbers of features, exact keys and
exact rows with which its attention is fastest on this device and accurate, or stays exact
(`performer.linearize`). With --num_features these sizes are compared. The folder `--out` then holds

    conversion.csv, .md         accuracy and attention error against m for every coupling, with and
                                without calibration, over several draws of the frequencies, with
                                softmax and uniform attention (the mean of all values)
    heads.csv                   times and attention errors of the converted run, head by head
    the converted run           of the first coupling, calibrated (and refined), with the most
                                features and the largest window

`performer-vit evaluate --workdir=OUT` evaluates the run, and `performer-vit train --workdir=OUT`
fine-tunes it, for `--num_epochs` at the peak rate `--learning_rate`. `--out` is complete or does
not exist: work in progress is in `OUT.unfinished`, and after a kill the same command begins anew.

--refine_steps moves the frequencies themselves, by gradient descent on the attention error of the
same images: estimates are no longer unbiased, and much closer with few features. Beside a window
features of far keys are learned also, and the way with the lower error on held-out images is used.
--keep=1 keeps softmax attention in the layer with the largest error. With --exact_window=0,16
patches are in the order of a Z-order curve: a square of 16 and both neighbours are exact for each
other, and class token and registers for all. The window alone is a row of the table. With
--exact_keys=16 --exact_rows=1 the 16 keys with the largest weights are exact for all queries, and
all keys for the class token. With --tolerance=0.1 layers of a larger attention error stay exact.
All others are replaced, also where that is no faster, and sizes that are given are upper limits.
--time=gpu is for a run that is used on a GPU, if there is none here: nothing is timed, costs are
looked up. --time=none times nothing either.

--task=MODULE converts a run of another task than images. Its loss is reported if it has no
accuracy, and with it the task's measures loss_..., such as the loss of the second half of a text.
Causal layers have windows instead of exact keys and rows.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from absl import logging
from flax import nnx
from rich.progress import Progress

from performer import couplings
from vit import config as configs
from vit import data
from vit.config import Block, TrainConfig, arguments
from vit.config.cli import command
from vit.reports import attention_report, metrics, report
from vit.run import devices, runs
from vit.run.steps import evaluate_model
from vit.storage import buckets, folders
from vit.task import Model, random_streams
from vit.weights import conversion
from vit.weights.conversion import Case


def metric_of(record: metrics.Record) -> str:
    """Return the name of the column by which a conversion is judged."""
    return "accuracy" if "accuracy" in record else "loss"


def compare(
    run: runs.Restored,
    model: Model,
    replaced: Callable[[Case], tuple[Model, Any]],
    cases: Sequence[Case],
    draws: int,
) -> Iterator[metrics.Record]:
    """Yield one record for each case: accuracy (or loss) over draws, and attention errors.

    The first records, with m = 0, are for softmax and uniform attention, and of softmax over
    the exact keys of each window alone. Attention errors are means over heads, on the inputs that
    the layers have with softmax attention on evaluation examples.

    Args:
        run: with softmax attention; its data are used for the evaluation.
        model: of the run, in evaluation mode.
        replaced: as `vit.weights.conversion.linearized` returns.
        cases: with features.
        draws: number of draws of the frequencies of each case.
    """
    examples = run.evaluation_examples(conversion.ERROR_EXAMPLES)
    held_out = conversion.samples(run.task, model, [examples])

    def record(
        coupling: str, method: str, window: int, m: int | str, *models: Model
    ) -> metrics.Record:
        measured = [
            evaluate_model(run.task, new, data.eval_batches(run.dataset, run.config.data))
            for new in models
        ]
        metric = metric_of({name.removeprefix("eval_"): x for name, x in measured[0].items()})
        values = [each[f"eval_{metric}"] for each in measured]
        partial_values = {
            name.removeprefix("eval_"): float(np.mean([each[name] for each in measured]))
            for name in measured[0]
            if name.startswith(f"eval_{metric}_")
        }
        spread = np.std(values, ddof=1) / len(values) ** 0.5 if values[1:] else 0.0
        errors = [conversion.errors(run.task, model, new, held_out) for new in models]
        layers = np.mean(errors, axis=0)
        return {
            "coupling": coupling,
            "calibration": method,
            "window": window,
            "m": m,
            metric: float(np.mean(values)),
            "standard error": float(spread),
            **partial_values,
            "attention error": float(np.mean(layers)),
            **{f"error layer {i}": float(e) for i, e in enumerate(layers)},
        }

    yield record("softmax", "", 0, 0, model)
    uniform = [conversion.uniform] * len(run.task.layers(model))
    yield record("uniform", "", 0, 0, conversion.exchanged(run.task, model, uniform))
    for window in filter(None, dict.fromkeys(case.block.exact_window for case in cases)):
        alone = Block(num_features=0, calibration="none", exact_window=window)
        yield record("window alone", "", window, 0, replaced(Case(cases[0].coupling, alone))[0])
    for case in cases:
        block = case.block
        method = block.calibration + ", refined" * (case.refine_steps > 0)
        models = [replaced(case._replace(seed=draw))[0] for draw in range(draws)]
        m = block.num_features if case.is_sized else "by layer"
        yield record(case.coupling, method, block.exact_window, m, *models)


def cases_of(
    *,
    coupling: Sequence[str],
    calibration: str,
    num_features: Sequence[int],
    refine_steps: int,
    exact_window: Sequence[int],
    **same: Any,
) -> tuple[list[Case], Case]:
    """Return the attention to compare, and the attention of the converted run.

    Args:
        coupling: couplings; the first is the run's.
        calibration: of the run; sizes are compared also without.
        num_features: numbers of features; the largest is the run's, if any is given.
        refine_steps: steps of a further case and of the run, if not 0.
        exact_window: windows; the largest is the run's.
        same: fields of `Block` and of `Case` that are the same in all cases.
    """
    both = {name: same.pop(name) for name in ("exact_keys", "exact_rows")}

    def case(name: str, method: tuple[str, int], window: int, m: int | None) -> Case:
        block = Block(calibration=method[0], exact_window=window, **both)
        block = block if m is None else block._replace(num_features=m)
        return Case(name, block, method[1], is_sized=m is not None, **same)

    best = (calibration, refine_steps)
    methods = dict.fromkeys([("none", 0)] * bool(num_features) + [(calibration, 0), best])
    product = itertools.product(coupling, methods, exact_window, num_features or (None,))
    chosen = case(coupling[0], best, max(exact_window), max(num_features, default=None))
    return list(itertools.starmap(case, product)), chosen


def with_case(config: Any, case: Case) -> Any:
    """Return the config of a run with the attention of a case."""
    fields: Any = {name: x for name, x in case.block._asdict().items() if name != "transferred"}
    return dataclasses.replace(
        config, attention=configs.Attention(coupling=case.coupling, **fields)
    )


def with_window(run: runs.Restored, exact_window: int) -> runs.Restored:
    """Return a run with another `config.attention.exact_window`."""
    config = configs.with_values(run.config, {"attention.exact_window": exact_window})
    configs.validate(config)
    return dataclasses.replace(run, config=config)


def converted_config(
    run: runs.Restored, case: Case, new: Model, num_epochs: float, learning_rate: float
) -> TrainConfig:
    """Return the config of the converted run, with the records of blocks that are not the case's.

    Args:
        run: run with softmax attention.
        case: attention of the new model.
        new: new model.
        num_epochs: epochs of fine-tuning.
        learning_rate: its peak learning rate.
    """
    config = with_case(dataclasses.replace(run.config, num_epochs=num_epochs), case)
    blocks = conversion.blocks_of(run.task, new, case)
    if blocks != configs.blocks(config):
        config.attention.blocks = blocks
    _ = dataclasses.replace(run, config=config).length  # raises what cannot be
    config.optim = dataclasses.replace(
        config.optim,
        learning_rate=learning_rate,
        final_learning_rate=min(learning_rate, config.optim.final_learning_rate),
        warmup_steps=0.1,
        constant_steps=0.0,
    )
    configs.validate(config)
    return config


def convert(
    workdir: Path,
    out: Path | None = None,
    *,
    task: str = "",
    coupling: Sequence[str] = (couplings.DEFAULT,),
    calibration: str = "full",
    num_features: Sequence[int] = (),
    refine_steps: int = 0,
    keep: int = 0,
    exact_window: Sequence[int] = (0,),
    exact_keys: int = 0,
    exact_rows: int = 0,
    tolerance: float | None = None,
    time: Literal["forward", "train", "cpu", "gpu", "tpu", "none"] = "forward",
    draws: int = 4,
    images: int = 256,
    eval_images: int = 0,
    num_epochs: float = 1.0,
    learning_rate: float = 1e-4,
) -> str:
    """Write the report and the converted run, and return the table and the verdict of `linearize`.

    Args:
        workdir: folder of a run with softmax attention.
        out: folder of the report and the converted run; WORKDIR-performer if none.
        task: module or file that defines the task of the run, if it is not one of vit.
        coupling: couplings to compare (`performer.couplings.names()`); the first is the
            converted run's.
        calibration: shift, shift+scale or full (`performer.calibration`); "none" is always
            compared also if sizes are given.
        num_features: numbers of features m to compare; the largest is the converted run's.
            None are given: each layer has sizes of its own.
        refine_steps: steps of refinement after the calibration; if not 0, refined frequencies are a
            further row, and the converted run has them.
        keep: number of layers that stay exact, those with the largest attention errors.
        exact_window: tokens of a window, exact for itself and its neighbours; 0 for none;
            the largest is the converted run's.
        exact_keys: keys of a head that are exact, those with the largest weights, in all cases.
        exact_rows: first tokens whose attention is exact, in all cases: 1 for a class token.
        tolerance: largest attention error of a layer on held-out training examples; layers that do
            not reach it stay exact. `num_features` and `exact_keys`, if given, are then limits. The
            config of the converted run has the numbers of each block.
        time: what is timed to choose sizes: forward, train (forward and backward pass) or none.
            cpu, gpu and tpu use the costs of that platform.
        draws: draws of the frequencies, for each coupling, calibration, window and m.
        images: training examples for the calibration.
        eval_images: evaluation examples; 0 for all.
        num_epochs: epochs of fine-tuning with vit.train, in the config of the converted run.
        learning_rate: peak learning rate of fine-tuning.

    Raises:
        ValueError: before any work, if the run has another task or no softmax attention, a coupling
            or calibration is unknown, a coupling does not admit a size, or `out` is not empty.
        vit.run.checkpoint.SaveError: if the run cannot be written.
    """
    configs.use(task)
    out = out or buckets.path(f"{workdir}-performer")
    config = configs.of_run(workdir)
    attention_report.check_attention(workdir, config)
    if config.attention.kind != "softmax":
        raise ValueError(
            f"{workdir} was trained with config.attention.kind={config.attention.kind!r}; only a"
            " run with 'softmax' can be converted"
        )
    if min(images, draws) < 1 or min(refine_steps, eval_images, keep) < 0:
        raise ValueError(
            f"images={images} and draws={draws} must be positive, refine_steps={refine_steps},"
            f" eval_images={eval_images} and keep={keep} not negative"
        )
    if not (coupling and exact_window):
        raise ValueError("give at least one coupling and one window (or 0)")
    if not num_features and (exact_keys or exact_rows or any(exact_window)):
        raise ValueError("exact keys, rows and windows are sizes: give num_features also")
    cases, chosen = cases_of(
        coupling=coupling,
        calibration=calibration,
        num_features=num_features,
        refine_steps=refine_steps,
        exact_window=exact_window,
        exact_keys=exact_keys,
        exact_rows=exact_rows,
        keep=keep,
        tolerance=tolerance,
        time=None if time == "none" else time,
    )
    for each in cases:
        configs.validate(with_case(config, each))
    folders.check_vacant(out, "--out")
    run = with_window(runs.restore(workdir), max(exact_window))
    if run.task.is_causal and (exact_keys or exact_rows):
        raise ValueError("exact keys and rows are of attention to all keys: give --exact_window")
    model = run.model()
    batches = list(run.training_examples(images))
    replaced = conversion.linearized(run.task, run.config, model, batches)
    converted, heads = replaced(chosen)
    new_config = converted_config(run, chosen, converted, num_epochs, learning_rate)
    new = run.task.create(new_config, rngs=random_streams(config.seed))
    nnx.update(new, nnx.state(converted))
    whole = run.dataset
    if eval_images:
        split = whole.evaluation
        first = [split[i] for i in range(min(eval_images, len(split)))]
        run = dataclasses.replace(run, dataset=whole._replace(evaluation=first))
    records, table = [], ""
    with folders.atomic(out, "--out") as folder, Progress() as bar:
        runs.begin(folder, new, dataclasses.replace(run, config=new_config, dataset=whole))
        total = 2 + sum(map(bool, exact_window)) + len(cases)
        progress = bar.add_task("convert", total=total)
        for record in compare(run, model, replaced, cases, draws):
            records.append(record)
            table = report.table(records, folder / "conversion")
            status = f"{record['coupling']} {record[metric_of(record)]:.4f}"
            bar.update(progress, advance=1, description=status)
        heads.to_csv(folder / "heads.csv")
    return f"{table}\n{heads.verdict()}"


@functools.wraps(convert)
def main(workdir: Path, out: Path | None, images: int, **options: Any) -> None:
    """Run the command."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs a failed save, which is raised
    out = out or buckets.path(f"{workdir}-performer")
    devices.check_alone()
    print(f"loading {workdir}, calibrating on {images} examples", file=sys.stderr)
    start = time.monotonic()
    table = convert(workdir, out, images=images, **options)
    report.record(out, time.monotonic() - start)
    print(table)
    for number, block in enumerate(configs.of_run(out).attention.blocks):
        print(f"block {number}: {block.text}")
    print(f"The report and the converted run are in {out}.")
    given = {"task": options["task"]} if options["task"] else {}
    print(f"next: {command('train', workdir=out, **given)}")


if __name__ == "__main__":
    arguments.run(main)
