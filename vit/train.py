"""Train a Vision Transformer; the same command resumes a stopped run.

    performer-vit train --config=digits --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run contains `config.json`, `metrics.jsonl`, `learning_curve.png` and
`checkpoints/`. --dry_run only compiles the steps and prints parameters, memory, operations and
collectives; the exit code is 1 if they do not fit into memory. --topology compiles for absent
devices (`vit.run.dry_run`) without reading data:

    performer-vit train --config=imagenet --dry_run --topology=v5e:4x4

With several hosts, run the same command on each with --distributed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import logging

from vit import config as configs
from vit.config import arguments
from vit.config.cli import command
from vit.data.classes import Match
from vit.model.classification import ARCHITECTURES
from vit.reports import metrics
from vit.run import devices, loggers
from vit.run import dry_run as dry
from vit.run.loop import train
from vit.weights import transfer


def main(
    config: configs.TrainConfig | None = None,
    workdir: Path | None = None,
    task: str = "",
    dry_run: bool = False,
    topology: str = "",
    data_size: Sequence[int] = (),
    profile: bool = False,
    init_from: Path | None = None,
    match: Match = "name",
    log: Sequence[str] = (),
    hosts: devices.Hosts = devices.ALONE,
) -> None:
    """Run the command.

    Args:
        config: bundled config or file with get_config(); the run's if none.
        workdir: folder of the run; created if missing.
        dry_run: compile the run, print its cost and stop.
        topology: with --dry_run: devices to compile for, as v5e:4x4 or h100:8.
        data_size: with --dry_run: training examples, evaluation examples, classes, channels.
        profile: trace five steps after the first line of the log.
        init_from: run whose parameters initialise a new run in --workdir.
        match: with --init_from: match the classes of the head by name, or by number.
        log: further loggers: tensorboard, wandb, mlflow.
    """
    logging.set_verbosity(logging.FATAL)  # Orbax logs a failed save, which is raised, many times
    if (topology or data_size) and not dry_run:
        raise ValueError(f"--{'topology' if topology else 'data_size'} requires --dry_run")
    if workdir is None:
        if not (config and dry_run):
            sys.exit("--workdir is missing: folder of the run; created if missing")
        workdir = Path("none")  # a dry run needs no folder
    configs.use(task)
    devices.join(hosts)
    if init_from and config is None and not (workdir / "config.json").exists():
        raise ValueError(f"--init_from={init_from} starts a new run: give its --config")
    config = config or configs.of_run(workdir)
    assert config
    if dry_run:
        plan = dry.plan(config, topology, data_size)
        print(dry.text(plan))
        sys.exit(plan["fits"] is False)
    loggers.check(log)
    if init_from:
        for line in transfer.init_from(init_from, config, workdir, match=match):
            print(line)
    record = train(config, workdir, profile=profile, log=log)
    if jax.process_index() == 0:
        print(
            f"{config.data.split} {metrics.results(record)}"
            f" ({record['eval_examples']} examples) after {record['epoch']:g} epochs,"
            f" {record['seconds']:.0f} s; the run is in {workdir}"
        )
        if config.task in ARCHITECTURES:
            print(f"on other pictures: {command('predict', workdir=workdir)} FILE_OR_FOLDER ...")


if __name__ == "__main__":
    arguments.run(main)
