"""Trains a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=digits --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run holds `config.json`, `metrics.jsonl`, `learning_curve.png` and `checkpoints/`.
With --dry_run nothing is trained or written: parameters, operations, memory and the shapes of a
batch are printed. On several hosts each runs the same command with --distributed.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from performer.choices import moved
from vit import config as configs
from vit import costs, data, devices, extension, hosts, loggers, machine, metrics, runs, transfer
from vit.arguments import from_flag, parse_flags
from vit.cli import command
from vit.loop import train
from vit.task import Task

RUNS = ("claim", "eval_batches", "last_step", "length", "train_batches")
__getattr__ = moved(__name__, AHEAD="vit.loop.AHEAD", **{name: f"vit.runs.{name}" for name in RUNS})


def dry_run(
    config: configs.Config, dataset: data.Dataset | None = None, task: Task | None = None
) -> str:
    """Parameters, operations, memory and the first batch of a run; nothing is written.

    Raises:
        ValueError: as `train`, before anything is compiled.
    """
    configs.validate(config)
    mesh = devices.mesh(config)
    dataset, task = runs.subject(config, dataset, task)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    program = runs.program(config, dataset, task, mesh)
    batch = next(runs.train_batches(dataset, config, mesh, 0))
    compiled = program.train.lower(program.abstract, batch).compile()
    flops = task.operations(config) if task.operations else 0.0
    lines = [
        costs.parameter_table(program.abstract),
        f"devices: {jax.device_count()} x {jax.devices()[0].device_kind},"
        f" mesh {dict(mesh.shape)}, {jax.process_count()} processes",
        f"steps: {num_steps:,} ({steps_per_epoch:,} an epoch)",
        f"operations: {flops / 1e9:.3f} GFLOP an {task.noun} forward,"
        f" {3 * flops * config.data.batch_size / 1e12:.4g} TFLOP a training step"
        if flops
        else "operations: not counted",
        "memory on each device: "
        + ", ".join(f"{k} {v / 2**20:,.1f} MiB" for k, v in costs.memory_of(compiled).items()),
        *(f"batch: {k} {x.shape} {x.dtype}, {x.sharding.spec}" for k, x in batch.items()),
    ]
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    workdir = Path(str(_WORKDIR.value))
    try:
        _JOIN()
        machine.keep_programs()
        lead = jax.process_index() == 0
        given = flags.FLAGS["config"].present
        if _INIT_FROM.value and not given and not (workdir / "config.json").exists():
            raise ValueError(f"--init_from={_INIT_FROM.value} begins a new run: give its --config")
        config = from_flag(_CONFIG) if given else configs.of_run(workdir)
        if _DRY_RUN.value:
            print(dry_run(config))
            return
        loggers.check(_LOG.value)
        if _INIT_FROM.value:
            for line in transfer.init_from(Path(_INIT_FROM.value), config, workdir):
                print(line)
        if _EXTEND.value is not None:
            if lead:
                extension.extend(workdir, _EXTEND.value, config)
            hosts.agree(lead)  # then all see it
            config = extension.as_extended(config, workdir)
        record = train(config, workdir, profile=_PROFILE.value, log=_LOG.value)
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
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
    _PROFILE = flags.DEFINE_bool("profile", False, "trace five steps, after the first stretch")
    _INIT_FROM = flags.DEFINE_string(
        "init_from", None, "run whose parameters a new run in --workdir starts from"
    )
    _EXTEND = flags.DEFINE_float("extend", None, "epochs by which a finished run is trained longer")
    _LOG = flags.DEFINE_list("log", [], "tensorboard, wandb, mlflow: metrics for these as well")
    _JOIN = devices.define_flags()
    flags.mark_flags_as_required(["workdir"])
    app.run(main, flags_parser=parse_flags)
