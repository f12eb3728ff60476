"""Train a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=digits --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run contains `config.json`, `metrics.jsonl`, `learning_curve.png` and
`checkpoints/`. --dry_run only compiles the steps and prints parameters, memory, operations and
collectives; the exit code is 1 if they do not fit into memory. --topology compiles for absent
devices (`vit.run.dry_run`) without reading data:

    python -m vit.train --config=imagenet --dry_run --topology=v5e:4x4

With several hosts, run the same command on each with --distributed.
"""

import sys
from pathlib import Path

import jax
from absl import flags, logging

from vit import config as configs
from vit.config.arguments import chosen_config, define_config, launch
from vit.config.cli import command
from vit.reports import metrics
from vit.run import devices, dry_run, loggers
from vit.run.loop import train
from vit.task import SUBJECTS, of_folder
from vit.weights import transfer


def main(_: list[str]) -> None:
    """Run the command."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs a failed save, which is raised, many times
    workdir, given = Path(str(_WORKDIR.value)), flags.FLAGS["config"].present
    if _WORKDIR.value is None and not (given and _DRY_RUN.value):
        sys.exit(f"--workdir is missing: {flags.FLAGS['workdir'].help}")
    for name in ("topology", "data_size"):
        if flags.FLAGS[name].value and not _DRY_RUN.value:
            raise ValueError(f"--{name} requires --dry_run")
    of_folder(workdir, *SUBJECTS)
    _JOIN()
    if _INIT_FROM.value and not given and not (workdir / "config.json").exists():
        raise ValueError(f"--init_from={_INIT_FROM.value} starts a new run: give its --config")
    config = chosen_config() or configs.of_run(workdir)
    if _DRY_RUN.value:
        topology = _TOPOLOGY.value or ""
        found = dry_run.plan(config, topology, dry_run.dataset(config, topology, _DATA_SIZE.value))
        print(dry_run.text(found))
        sys.exit(found["fits"] is False)
    lead = jax.process_index() == 0
    loggers.check(_LOG.value)
    if _INIT_FROM.value:
        for line in transfer.init_from(Path(_INIT_FROM.value), config, workdir):
            print(line)
    record = train(config, workdir, profile=_PROFILE.value, log=_LOG.value)
    if lead:
        print(
            f"{config.data.eval_split} {metrics.results(record)}"
            f" ({record['eval_examples']} examples) after {record['epoch']:.0f} epochs,"
            f" {record['seconds']:.0f} s; the run is in {workdir}"
        )
        print(f"on other pictures: {command('predict', workdir=workdir)} FILE_OR_FOLDER ...")


if __name__ == "__main__":
    define_config("bundled config or file with get_config(); that of the run if none")
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; created if missing")
    _DRY_RUN = flags.DEFINE_bool("dry_run", False, "compile the run, print its cost and stop")
    _TOPOLOGY = flags.DEFINE_string(
        "topology", None, "with --dry_run: devices to compile for, as v5e:4x4 or h100:8"
    )
    _DATA_SIZE = flags.DEFINE_list(
        "data_size", [], "with --dry_run: training examples, evaluation examples, classes, channels"
    )
    _PROFILE = flags.DEFINE_bool(
        "profile", False, "trace five steps after the first line of the log"
    )
    _INIT_FROM = flags.DEFINE_string(
        "init_from", None, "run whose parameters initialise a new run in --workdir"
    )
    _LOG = flags.DEFINE_list("log", [], "further loggers: tensorboard, wandb, mlflow")
    _JOIN = devices.define_flags()
    launch(main)
