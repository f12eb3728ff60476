"""Evaluate a run: accuracy on the evaluation split, errors of its attention and of its classes.

    performer-vit evaluate --workdir=runs/pm
    performer-vit evaluate --workdir=runs/pm --report=attention
    performer-vit evaluate --workdir=runs/pm --report=classes
    performer-vit evaluate --workdir=runs/pm --name=imagenet_v2 --data_dir=data --split=test

--report=attention writes `attention.csv`, `.md` and `.png` (a heat map) into the folder of the run:
the error of the random-feature attention of each layer and head on evaluation images, and the error
of uniform attention. The frequencies are new draws by the run's coupling; refined frequencies of
`vit.convert` are not measured.

--report=classes writes `classes.csv`, `classes.md` and `confusion.csv` into the folder of the run
(`vit.reports.class_report`) and prints the worst classes.

--split, --name, --data_dir and --batch_size evaluate on other data: another split, or another data
set with the same classes or some of them, matched by name; with --match=number in the order of the
labels. Nothing is written.

Without --report the command also runs on several hosts: on each with --distributed.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from vit import config as configs
from vit import data, use
from vit.config import arguments
from vit.data.classes import Match
from vit.model import classification
from vit.reports import metrics
from vit.reports.attention_report import check_attention, report_attention
from vit.reports.class_report import report_classes
from vit.run import devices, runs
from vit.run.steps import evaluate, evaluate_model


def evaluate_run(
    workdir: Path,
    dataset: data.Dataset | None = None,
    step: int | str | None = None,
) -> metrics.Record:
    """Evaluate a checkpoint of a run on its evaluation split.

    Args:
        workdir: folder of the run.
        dataset: as in `runs.restore`.
        step: as in `runs.restore`.

    Returns:
        step, eval_loss, eval_accuracy, eval_top5 or the other measures of the task, and
        eval_examples.

    Raises:
        ValueError: as `runs.restore`.
    """
    run = runs.restore(workdir, dataset, step)
    count = partial(run.program.evaluate, run.state)
    return {"step": run.step, **evaluate(run.task, count, run.eval_batches())}


def evaluate_on(
    workdir: Path,
    fields: Mapping[str, Any],
    step: int | str | None = None,
    match: Match = "name",
) -> metrics.Record:
    """Evaluate a run on other data than its evaluation split.

    A predicted class that does not occur in the data is an error.

    Args:
        workdir: folder of the run.
        fields: fields of the section `data` of the config to replace.
        step: as in `vit.load`.
        match: how classes are matched, as `vit.data.classes.matched`.

    Returns:
        As `evaluate_run`.

    Raises:
        ValueError: as `vit.use.load` and `vit.data.load`; or when the data have a class that the
            run does not have.
    """
    alone = {"fsdp": 1, "seq": 1, "optim.accumulate": 1}
    config = configs.of_run(workdir)
    classification.check_images(workdir, config)
    config = configs.with_values(config, alone | dict(fields))
    configs.check_fields(config)
    mesh = devices.mesh(config)
    trained = use.load(workdir, step, sharding=devices.everywhere(mesh))
    opened: dict[str, Any] = {"data.batch_size": 1}  # a training split of any length will do
    if fields.get("data.name") == "digits":  # which has no folder, and one training split
        opened |= {"data.train_split": "train", "data.dir": ""}
    elif {"data.name", "data.dir"} & set(fields):
        opened["data.train_split"] = config.data.eval_split
    try:
        dataset = data.load(configs.with_values(config, opened).data)
    except ValueError as error:  # the split that was given is opened as one of training
        message = str(error).replace("config.data.train_split", "config.data.eval_split")
        raise ValueError(message) from error
    dataset = dataset._replace(channels=trained.channels)
    dataset = data.with_classes(dataset, trained.class_names, match)
    sizes = dataset.num_classes, dataset.channels
    task = classification.task(*sizes, config.optim.loss, config.task)
    batches = runs.Run(config, dataset, task, mesh).eval_batches()
    record = evaluate_model(task, trained.model, batches)
    return {"step": trained.step, **record}


def main(
    workdir: Path,
    task: str = "",
    step: str | None = None,
    report: Literal["attention", "classes"] | None = None,
    split: str | None = None,
    name: str | None = None,
    data_dir: str | None = None,
    batch_size: int | None = None,
    match: Match = "name",
    hosts: devices.Hosts = devices.ALONE,
) -> None:
    """Run the command.

    Args:
        report: report to write.
        split: split to evaluate, as test or train[99%:].
        name: data set with the same classes, or some of them.
        data_dir: folder of that data set.
        batch_size: images per batch; the run's if none.
        match: match the classes of that data set by name, or by number: in the order of the labels.
    """
    given = {"eval_split": split, "name": name, "dir": data_dir, "batch_size": batch_size}
    fields = {f"data.{field}": value for field, value in given.items() if value is not None}
    if fields and report:
        raise ValueError(
            f"--report={report} uses the run's own evaluation split: remove --split, --name,"
            " --data_dir and --batch_size"
        )
    if match == "number" and not fields:
        raise ValueError("--match=number is for another data set: give --name and --data_dir")
    configs.use(task)
    devices.join(hosts)
    if report and jax.process_count() > 1:
        raise ValueError(f"--report={report} requires a single process")
    if report == "attention":
        check_attention(workdir, configs.of_run(workdir))
    elif report == "classes":
        classification.check_images(workdir, configs.of_run(workdir))
    if jax.process_index() == 0:
        print(f"loading {workdir} and compiling its evaluation", file=sys.stderr)
    if fields:
        record = evaluate_on(workdir, fields, step, match)
    else:
        record = evaluate_run(workdir, step=step)
    if jax.process_index() == 0:
        print(metrics.evaluation(record))
    if report == "attention":
        print(report_attention(workdir, workdir / "attention", step=step))
    elif report == "classes":
        print(report_classes(workdir, step))


if __name__ == "__main__":
    arguments.run(main)
