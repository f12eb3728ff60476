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
"""

import itertools
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from flax import nnx
from jax.sharding import Mesh

from vit import attention_report, checkpoint, class_report, data, devices, files, metrics
from vit import config as configs
from vit.model import ViT
from vit.steps import Program, build, evaluate, evaluated_model, sizes
from vit.train import eval_batches, length


class Restored(NamedTuple):
    """A run as its newest readable checkpoint has it."""

    config: configs.Config
    dataset: data.Dataset
    mesh: Mesh
    program: Program
    step: int
    state: nnx.State

    def batches(self) -> Iterator[data.Batch]:
        """Its evaluation batches, on the devices."""
        return eval_batches(self.dataset, self.config, self.mesh)


def restore(workdir: Path) -> Restored:
    """Reads a run, on any number of devices; nothing in its folder changes.

    Raises:
        ValueError: when the folder holds no run, or no checkpoint that can be read.
    """
    if (workdir / "config.json").exists():
        files.check(workdir / "config.json")
    config = configs.of_run(workdir)
    configs.validate(config)
    config.fsdp = math.gcd(config.fsdp, jax.device_count())
    if not checkpoint.exists(workdir):
        raise ValueError(f"{workdir} holds no checkpoint yet")
    mesh, dataset = devices.mesh(config), data.load(config.data)
    program = build(config, sizes(dataset), length(config, dataset)[1], mesh)
    step, state = checkpoint.restore(workdir, program.abstract)
    return Restored(config, dataset, mesh, program, step, state)


def restore_model(workdir: Path) -> tuple[configs.Config, data.Dataset, ViT]:
    """The model of a run's last checkpoint in evaluation mode, with its config and data.

    Raises:
        ValueError: as `restore`.
    """
    run = restore(workdir)
    return run.config, run.dataset, evaluated_model(run.program.graph, run.state)


def evaluate_run(workdir: Path) -> metrics.Record:
    """The last checkpoint of a run on its evaluation split.

    Returns:
        step, eval_loss, eval_accuracy, eval_top5, eval_examples, eval_bad_records.

    Raises:
        ValueError: as `restore`.
    """
    run = restore(workdir)
    count = partial(run.program.evaluate, run.state)
    return {"step": run.step, **evaluate(count, run.batches())}


def evaluation_images(dataset: data.Dataset, config: configs.Config, number: int) -> jax.Array:
    """The first images of the evaluation split, (number, size, size, channels)."""
    batches = data.eval_batches(dataset, config.data)
    counts = (batch["image"][batch["mask"] > 0] for batch in batches)
    taken = itertools.islice(itertools.chain.from_iterable(counts), number)
    return jnp.stack([jnp.asarray(image) for image in taken])


def report_attention(
    workdir: Path,
    out: Path,
    *,
    coupling: str = "",
    num_features: int = 0,
    images: int = 8,
    draws: int = 16,
) -> str:
    """Attention errors of a run's layers and heads on its evaluation images; returns the table.

    Args:
        workdir: of the run. A softmax run is measured without a calibration.
        out: name of the files, without suffix.
        coupling: of the frequencies; that in the run's config if empty.
        num_features: m; likewise if 0.
        images: how many.
        draws: of the frequencies.

    Raises:
        ValueError: when there is no such run, or for an unknown coupling.
    """
    config, dataset, model = restore_model(workdir)
    coupling = coupling or config.attention.coupling
    num_features = num_features or config.attention.num_features
    records = attention_report.rows(
        model,
        evaluation_images(dataset, config, images),
        coupling=coupling,
        num_features=num_features,
        draws=draws,
    )
    calibration = config.attention.calibration
    if config.attention.kind == "softmax":
        calibration = "none"
    title = f"{workdir.name}: {coupling}, m = {num_features}, calibration {calibration}"
    return attention_report.write(records, out, title)


def report_classes(workdir: Path) -> str:
    """Writes the accuracy of each class and the confusion matrix into the folder of the run.

    Returns:
        Overall top-1 and top-5 accuracy and the worst classes, as text.

    Raises:
        ValueError: as `restore`.
    """
    run = restore(workdir)
    model = evaluated_model(run.program.graph, run.state)
    counted = class_report.tally(model, run.batches(), run.dataset.num_classes)
    names = class_report.class_names(run.config.data, run.dataset.num_classes)
    return class_report.summary(counted, class_report.write(counted, names, workdir))


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    workdir = Path(str(_WORKDIR.value))
    try:
        record = evaluate_run(workdir)
        for name, value in record.items():
            print(f"{name:14} {value}")
        if _REPORT.value == "attention":
            print(report_attention(workdir, workdir / "attention"))
        elif _REPORT.value == "classes":
            print(report_classes(workdir))
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _REPORT = flags.DEFINE_enum("report", "", ["", "attention", "classes"], "what to write besides")
    app.run(main, flags_parser=configs.parse_flags)
