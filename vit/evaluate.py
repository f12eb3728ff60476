"""Restores a run and reports its accuracy on the evaluation split, and its attention errors.

    python -m vit.evaluate --workdir=runs/pm
    python -m vit.evaluate --workdir=runs/pm --report=attention
    python -m vit.evaluate --workdir=runs/pm --report=classes
    python -m vit.evaluate --workdir=runs/pm --name=imagenet_v2 --data_dir=data --split=test

The second one writes `attention.csv`, `.md` and `.png` (a heat map) into the folder of the run: for
every layer and head, how far its random-feature attention is from softmax attention on evaluation
images, and whether uniform attention would be nearer. The frequencies are new draws by the run's
coupling: refined ones of `vit.convert` are not measured here.

The third one goes through the evaluation split once more, writes `classes.csv`, `classes.md` and
`confusion.csv` into the folder of the run (see `vit.reports.class_report`) and prints the worst
classes.

With --split, --name, --data_dir or --batch_size the evaluation is on other data than the run's own:
another part of its data set, or another data set of the same classes or some of them, told by their
names. Nothing is written then.

    python -m vit.evaluate --workdir=runs/pm --real=real.json

gives the accuracy by the reassessed labels of ImageNet's validation pictures besides (Beyer et al.
2020, `vit.data.real_labels`), over those that have any.

The first one runs on several hosts, too: on each the same command with --distributed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

from vit import config as configs
from vit import data, use
from vit.config.arguments import launch
from vit.data import real_labels
from vit.model import classification
from vit.reports import class_report, metrics
from vit.reports.attention_report import report_attention
from vit.run import devices, machine, runs, steps
from vit.run.steps import evaluate
from vit.task import Task, of_folder

FLAGS = {
    "data.eval_split": "split",
    "data.name": "name",
    "data.dir": "data_dir",
    "data.batch_size": "batch_size",
}
"""Fields of the config that a flag replaces for one evaluation."""


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


def evaluate_on(
    workdir: Path,
    fields: Mapping[str, Any],
    real: Path | None = None,
    step: int | str | None = None,
) -> metrics.Record:
    """The evaluated model of a run on other data than its own evaluation split.

    Args:
        workdir: of the run.
        fields: of its config that are others, of those in `FLAGS`.
        real: file of the reassessed labels of ImageNet's validation pictures; then the accuracy is
            that by these, over the pictures that have any.
        step: as `vit.load`.

    Returns:
        As `evaluate_run`, or eval_real_accuracy. Classes that the data have not count as wrong
        answers where they are given.

    Raises:
        ValueError: as `vit.use.load`, `vit.data.load` and `vit.data.real_labels.read`; or when the
            data have a class that the run has not.
    """
    trained = use.load(workdir, step)
    config = configs.with_values(trained.config, {"fsdp": 1, "optim.accumulate": 1, **fields})
    opened: dict[str, Any] = {"data.batch_size": 1}  # however few are there to train on
    if {"data.name", "data.dir"} & set(fields):
        opened["data.train_split"] = config.data.eval_split
    try:
        dataset = data.load(configs.with_values(config, opened).data)
    except ValueError as error:  # in the words of the flags that are given
        message = str(error).replace("config.data.train_split", "config.data.eval_split")
        for field in fields:
            message = message.replace(f"config.{field}", f"--{FLAGS[field]}")
        raise ValueError(message) from error
    label, classes = numbers(trained.class_names, dataset.class_names), len(trained.class_names)
    task = classification.task(classes, trained.channels, config.optim.loss)
    if real is not None:
        labels = real_labels.read(real, dataset.num_classes)
        dataset = real_labels.with_labels(dataset, labels)
        task = task._replace(count=real_labels.count, results=real_labels.results)
    mesh = devices.mesh(config)
    graph, state = nnx.split(trained.model)
    state = jax.device_put(state, devices.everywhere(mesh))
    count = jax.jit(lambda state, batch: steps.count(task, nnx.merge(graph, state), batch))

    def of_run(batch: data.Batch) -> data.Batch:
        own = batch | {"label": label[batch["label"]]}
        if real is not None:
            rows = batch["real"] @ jax.nn.one_hot(label, classes, dtype=bool)
            own |= {"real": rows, "mask": batch["mask"] * rows.any(axis=-1)}
        return own

    batches = runs.eval_batches(dataset._replace(channels=trained.channels), config, mesh)
    return {"step": trained.step, **evaluate(task, partial(count, state), map(of_run, batches))}


def numbers(of_run: Sequence[str], of_data: Sequence[str]) -> jax.Array:
    """The run's number of each class of the data, by name; in order where names are numbers.

    Raises:
        ValueError: when the run has not all of them.
    """
    plain = [str(i) for i in range(len(of_data))]
    if len(of_run) == len(of_data) and plain in (list(of_run), list(of_data)):
        return jnp.arange(len(of_data))
    index = {name: i for i, name in enumerate(of_run)}
    foreign = [name for name in of_data if name not in index]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the {len(of_data)} classes of the data are none of the"
            f" {len(of_run)} of the run: {', '.join(foreign[:5])}; the run's begin with"
            f" {', '.join(of_run[:5])}"
        )
    return jnp.asarray([index[name] for name in of_data], jnp.int32)


def report_classes(workdir: Path, step: int | str | None = None) -> str:
    """Writes the accuracy of each class and the confusion matrix into the folder of the run.

    Returns:
        Overall top-1 and top-5 accuracy and the worst classes, as text.

    Raises:
        ValueError: as `runs.restore`, or for a run that does not classify images.
    """
    of_folder(workdir, classification.NAME)
    run = runs.restore(workdir, step=step)
    counted = class_report.tally(run.model(), run.batches(), run.dataset.num_classes)
    records = class_report.write(counted, run.dataset.class_names, workdir)
    return class_report.summary(counted, records)


def main(_: list[str]) -> None:
    """The command line."""
    workdir, wanted, step = Path(str(_WORKDIR.value)), _REPORT.value, _STEP.value
    given = {field: flags.FLAGS[flag].value for field, flag in FLAGS.items()}
    fields = {name: value for name, value in given.items() if value is not None}
    if (fields or _REAL.value) and wanted:
        raise ValueError(
            f"--report={wanted} is of the run's own evaluation split: give it without"
            " --split, --name, --data_dir, --batch_size and --real"
        )
    _JOIN()
    machine.keep_programs()
    if wanted and jax.process_count() > 1:
        raise ValueError(f"--report={wanted} is written by one process: start but one")
    record = evaluate_on(workdir, fields, step=step) if fields else evaluate_run(workdir, step=step)
    if _REAL.value:
        found = evaluate_on(workdir, fields, Path(_REAL.value), step)
        record["real_accuracy"] = found["eval_real_accuracy"]
        record["real_examples"] = found["eval_examples"]
    if jax.process_index() == 0:
        print("\n".join(f"{name:14} {value}" for name, value in record.items()))
    if wanted == "attention":
        print(report_attention(workdir, workdir / "attention", step=step))
    elif wanted == "classes":
        print(report_classes(workdir, step))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _JOIN = devices.define_flags()
    _STEP = flags.DEFINE_string("step", None, "of the checkpoint, or best; else the newest")
    _REPORT = flags.DEFINE_enum("report", "", ["", "attention", "classes"], "what to write besides")
    flags.DEFINE_string("split", None, "evaluate this, as test or train[99%:]")
    flags.DEFINE_string("name", None, "of a data set of the same classes, or some of them")
    flags.DEFINE_string("data_dir", None, "where it lies")
    flags.DEFINE_integer("batch_size", None, "images at once; the run's if not given", 1)
    _REAL = flags.DEFINE_string("real", None, "ImageNet's reassessed labels, a real.json")
    launch(main)
