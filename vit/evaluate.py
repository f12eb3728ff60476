"""Restores a run and reports its accuracy on the evaluation split, and its attention errors.

    python -m vit.evaluate --workdir=runs/pm
    python -m vit.evaluate --workdir=runs/pm --report=attention
    python -m vit.evaluate --workdir=runs/pm --report=classes

The second one writes `attention.csv`, `.md` and `.png` (a heat map) into the folder of the run: for
every layer and head, how far its random-feature attention is from softmax attention on evaluation
images, and whether uniform attention would be nearer. The frequencies are new draws by the run's
coupling: refined ones of `vit.convert` are not measured here.

The third one goes through the evaluation split once more, writes `classes.csv`, `classes.md` and
`confusion.csv` into the folder of the run (see `vit.class_report`) and prints the worst classes.
The first one runs on several hosts, too: on each the same command with --distributed.
"""

import sys
from functools import partial
from pathlib import Path

import jax
from absl import app, flags, logging

from performer.choices import moved
from vit import class_report, data, devices, machine, metrics, runs
from vit.arguments import parse_flags
from vit.attention_report import report_attention
from vit.steps import evaluate
from vit.task import Task

__getattr__ = moved(
    __name__,
    Restored="vit.runs.Restored",
    restore="vit.runs.restore",
    restore_model="vit.runs.restore(workdir).model()",
    evaluation_images="vit.runs.evaluation_examples",
)


def evaluate_run(
    workdir: Path,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
    step: int | str | None = None,
) -> metrics.Record:
    """A checkpoint of a run on its evaluation split.

    Args:
        workdir: of the run.
        dataset: as `runs.restore`.
        task: likewise.
        step: likewise.

    Returns:
        step, eval_loss, eval_accuracy, eval_top5 or what else the task measures, eval_examples,
        eval_bad_records.

    Raises:
        ValueError: as `runs.restore`.
    """
    run = runs.restore(workdir, dataset, task, step)
    count = partial(run.program.evaluate, run.state)
    return {"step": run.step, **evaluate(run.task, count, run.batches())}


def report_classes(workdir: Path, step: int | str | None = None) -> str:
    """Writes the accuracy of each class and the confusion matrix into the folder of the run.

    Returns:
        Overall top-1 and top-5 accuracy and the worst classes, as text.

    Raises:
        ValueError: as `runs.restore`.
    """
    run = runs.restore(workdir, step=step)
    counted = class_report.tally(run.model(), run.batches(), run.dataset.num_classes)
    records = class_report.write(counted, run.dataset.class_names, workdir)
    return class_report.summary(counted, records)


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    workdir = Path(str(_WORKDIR.value))
    try:
        _JOIN()
        machine.keep_programs()
        lead = jax.process_index() == 0
        if _REPORT.value and jax.process_count() > 1:
            raise ValueError(f"--report={_REPORT.value} is written by one process: start but one")
        if _REPORT.value == "attention" and _STEP.value:
            raise ValueError("--report=attention is of the newest checkpoint: leave out --step")
        record = evaluate_run(workdir, step=_STEP.value)
        for name, value in record.items() if lead else ():
            print(f"{name:14} {value}")
        if _REPORT.value == "attention":
            print(report_attention(workdir, workdir / "attention"))
        elif _REPORT.value == "classes":
            print(report_classes(workdir, _STEP.value))
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _JOIN = devices.define_flags()
    _STEP = flags.DEFINE_string("step", None, "of the checkpoint, or best; else the newest")
    _REPORT = flags.DEFINE_enum("report", "", ["", "attention", "classes"], "what to write besides")
    app.run(main, flags_parser=parse_flags)
