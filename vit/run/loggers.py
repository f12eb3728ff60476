"""Loggers in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

    performer-vit train --config=digits --workdir=runs/pm --log=wandb,mlflow

A logger is a context manager (folder of the run, config) -> function of a record. It is configured
by its own environment variables and files (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, ...). A
resumed run continues the same run of W&B and MLflow, whose id is saved in the folder.
"""

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from performer.choices import unknown
from vit import config as configs
from vit.reports import metrics
from vit.storage import buckets, files

Write = Callable[[metrics.Record], object]
"""Function of a record of the log."""


@contextlib.contextmanager
def tensorboard(workdir: Path, config: configs.TrainConfig) -> Iterator[Write]:
    """Log to the folder `workdir`/tensorboard; records after the last checkpoint are hidden."""
    del config
    buckets.check_local(workdir, "with --log=tensorboard, --workdir=")
    records = metrics.read(workdir / "metrics.jsonl")
    ahead = records[-1]["step"] + 1 if records else 0
    writer = _module("tensorboard").SummaryWriter
    with writer(str(workdir / "tensorboard"), purge_step=ahead) as board:

        def write(record: metrics.Record) -> None:
            for name, value in record.items():
                board.add_scalar(name, value, record["step"])

        yield write


@contextlib.contextmanager
def wandb(workdir: Path, config: configs.TrainConfig) -> Iterator[Write]:
    """Log to a W&B run with the name of the folder; steps that it already has are ignored."""
    path = workdir / "wandb.json"
    saved = files.read_json(path) or {"id": uuid.uuid4().hex[:8]}
    files.write_json(path, saved)
    run = _module("wandb").init(
        id=saved["id"],
        name=workdir.resolve().name,
        dir=None if isinstance(workdir, buckets.Address) else str(workdir),
        config=configs.flatten(config),
        resume="allow",
        allow_val_change=True,  # of the fields that a resumed run may change
    )
    with run:
        yield lambda record: run.log(record, step=record["step"])


@contextlib.contextmanager
def mlflow(workdir: Path, config: configs.TrainConfig) -> Iterator[Write]:
    """Log to an MLflow run with the name of the folder."""
    package, path = _module("mlflow"), workdir / "mlflow.json"
    saved = files.read_json(path) or {"id": None}
    with package.start_run(run_id=saved["id"], run_name=workdir.resolve().name) as run:
        if saved["id"] is None:  # parameters cannot be changed later
            package.log_params(configs.flatten(config))
            files.write_json(path, {"id": run.info.run_id})
        yield lambda record: package.log_metrics(record, step=record["step"])


LOGGERS: dict[str, Callable[[Path, configs.TrainConfig], Any]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def check(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown logger, or one that is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(unknown("--log", name, LOGGERS))
        _module(name)


@contextlib.contextmanager
def writer(
    names: Sequence[str], workdir: Path, config: configs.TrainConfig, lead: bool = True
) -> Iterator[Write]:
    """Yield a function that adds a record to the log of the run and to the loggers.

    With several processes only the `lead` writes.
    """
    if not lead:
        yield lambda record: None
        return
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(LOGGERS[name](workdir, config)) for name in names]

        def write(record: metrics.Record) -> None:
            metrics.append(workdir / "metrics.jsonl", record)
            for each in writers:
                each(record)

        yield write


def _module(name: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise ValueError(
            f"--log={name} requires {PACKAGES[name]}: pip install {PACKAGES[name].lower()}"
        ) from error
