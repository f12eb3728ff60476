"""Trains a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=digits --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run holds `config.json`, `metrics.jsonl`, `learning_curve.png` and `checkpoints/`.
With --dry_run nothing is trained or written: the steps are compiled, and parameters, memory,
operations and collectives printed; the exit code is 1 where they do not fit. With --topology they
are compiled for devices that are not there (`vit.run.topologies`), and no data are read:

    python -m vit.train --config=imagenet --dry_run --topology=v5e:4x4

On several hosts each runs the same command with --distributed.
"""

import json
import sys
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import config_flags

from vit import config as configs
from vit.config.arguments import from_flag, launch
from vit.config.cli import command
from vit.reports import metrics
from vit.run import devices, dry_run, hosts, loggers, machine, runs
from vit.run.loop import train
from vit.task import SUBJECTS, of_folder
from vit.weights import transfer


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    workdir, given = Path(str(_WORKDIR.value)), flags.FLAGS["config"].present
    if _WORKDIR.value is None and not (given and _DRY_RUN.value):
        sys.exit(f"--workdir is missing: {flags.FLAGS['workdir'].help}")
    for name in ("topology", "data_size", "json"):
        if flags.FLAGS[name].value and not _DRY_RUN.value:
            raise ValueError(f"--{name} is for --dry_run, which is not given")
    of_folder(workdir, *SUBJECTS)
    _JOIN()
    if _INIT_FROM.value and not given and not (workdir / "config.json").exists():
        raise ValueError(f"--init_from={_INIT_FROM.value} begins a new run: give its --config")
    config = from_flag(_CONFIG) if given else configs.of_run(workdir)
    if _DRY_RUN.value:
        topology = _TOPOLOGY.value or ""
        found = dry_run.plan(config, topology, dry_run.dataset(config, topology, _DATA_SIZE.value))
        print(json.dumps(found, indent=2) if _JSON.value else dry_run.text(found))
        sys.exit(found["fits"] is False)
    machine.keep_programs()
    lead = jax.process_index() == 0
    loggers.check(_LOG.value)
    if _INIT_FROM.value:
        for line in transfer.init_from(Path(_INIT_FROM.value), config, workdir):
            print(line)
    if _EXTEND.value is not None:
        if lead:
            runs.extend(workdir, _EXTEND.value, config)
        hosts.agree(lead)  # then all see it
        config = runs.as_extended(config, workdir)
    record = train(config, workdir, profile=_PROFILE.value, log=_LOG.value)
    if lead:
        print(
            f"{config.data.eval_split} {metrics.results(record)}"
            f" ({record['eval_examples']} examples) after {record['epoch']:.0f} epochs,"
            f" {record['seconds']:.0f} s; the run is in {workdir}"
        )
        print(f"on other pictures: {command('predict', workdir=workdir)} FILE_OR_FOLDER ...")


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file(
        "config", help_string="file with get_config(); the run's own config if none is given"
    )
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; made if it does not exist")
    _DRY_RUN = flags.DEFINE_bool("dry_run", False, "print what the run would cost, and stop")
    _TOPOLOGY = flags.DEFINE_string(
        "topology", None, "with --dry_run: compile for these devices, as v5e:4x4 or h100:8"
    )
    _DATA_SIZE = flags.DEFINE_list(
        "data_size", [], "with --dry_run: examples of training and evaluation, classes, channels"
    )
    _JSON = flags.DEFINE_bool("json", False, "with --dry_run: print json")
    _PROFILE = flags.DEFINE_bool("profile", False, "trace five steps, after the first stretch")
    _INIT_FROM = flags.DEFINE_string(
        "init_from", None, "run whose parameters a new run in --workdir starts from"
    )
    _EXTEND = flags.DEFINE_float("extend", None, "epochs by which a finished run is trained longer")
    _LOG = flags.DEFINE_list("log", [], "tensorboard, wandb, mlflow: metrics for these as well")
    _JOIN = devices.define_flags()
    launch(main)
