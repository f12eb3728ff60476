"""Restores a run and reports its accuracy on the evaluation split, and its attention errors.

    python -m vit.evaluate --workdir=runs/pm
    python -m vit.evaluate --workdir=runs/pm --report=attention

The second one writes `attention.csv`, `.md` and `.png` (a heat map) into the folder of the run: for
every layer and head, how far its random-feature attention is from softmax attention on evaluation
images, and whether uniform attention would be nearer. The frequencies are new draws by the run's
coupling: refined ones of `vit.convert` are not measured here.
"""

import itertools
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from flax import nnx

from vit import attention_report, checkpoint, data, metrics
from vit import config as configs
from vit.model import ViT
from vit.train import create, eval_step, evaluate


def restore(workdir: Path) -> tuple[configs.Config, data.Dataset, int, nnx.GraphDef, nnx.State]:
    """Config, data, step, structure and state of (model, optimizer) of a run's last checkpoint.

    Raises:
        ValueError: when the folder holds no run, or no checkpoint yet.
    """
    config = configs.of_run(workdir)
    configs.validate(config)
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        if checkpoints.latest is None:
            raise ValueError(f"{workdir} holds no checkpoint yet")
        dataset = data.load(config.data)
        graph, state = create(config, dataset, lambda step: 0.0)
        state = checkpoint.restore_state(checkpoints, state)
        return config, dataset, checkpoints.latest.step, graph, state


def restore_model(workdir: Path) -> tuple[configs.Config, data.Dataset, ViT]:
    """The model of a run's last checkpoint in evaluation mode, with its config and data.

    Raises:
        ValueError: as `restore`.
    """
    config, dataset, _, graph, state = restore(workdir)
    model, _ = nnx.merge(graph, state)
    model.eval()
    return config, dataset, model


def evaluate_run(workdir: Path) -> metrics.Record:
    """The last checkpoint of a run on its evaluation split.

    Returns:
        step, eval_loss, eval_accuracy, eval_top5, eval_examples.

    Raises:
        ValueError: when the folder holds no run, or no checkpoint yet.
    """
    config, dataset, step, graph, state = restore(workdir)
    count = partial(jax.jit(partial(eval_step, graph)), state)
    return {"step": step, **evaluate(count, data.eval_batches(dataset, config.data))}


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
    except ValueError as error:
        sys.exit(f"ValueError: {error}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _REPORT = flags.DEFINE_enum("report", "", ["", "attention"], "what to write besides")
    app.run(main)
