"""Restores a run and reports its accuracy on the evaluation split.

python -m vit.evaluate --workdir=runs/pm
"""

import sys
from functools import partial
from pathlib import Path

import jax
from absl import app, flags, logging

from vit import checkpoint, data, metrics
from vit import config as configs
from vit.train import create, eval_step, evaluate


def evaluate_run(workdir: Path) -> metrics.Record:
    """The last checkpoint of a run on its evaluation split.

    Returns:
        step, eval_loss, eval_accuracy, eval_top5, eval_examples.

    Raises:
        ValueError: when the folder holds no run, or no checkpoint yet.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no run (no config.json); train one with vit.train")
    config = configs.load(path)
    configs.validate(config)
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        if checkpoints.latest is None:
            raise ValueError(f"{workdir} holds no checkpoint yet")
        dataset = data.load(config.data)
        graph, state = create(config, dataset, lambda step: 0.0)
        state = checkpoint.restore_state(checkpoints, state)
        step = checkpoints.latest.step
    count = partial(jax.jit(partial(eval_step, graph)), state)
    return {"step": step, **evaluate(count, data.eval_batches(dataset, config.data))}


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    try:
        record = evaluate_run(Path(_WORKDIR.value))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
    for name, value in record.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    app.run(main)
