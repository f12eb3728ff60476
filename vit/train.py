"""Trains a Vision Transformer; the same command resumes a stopped run.

    python -m vit.train --config=experiments/configs/digits.py --workdir=runs/pm \\
        --config.attention.coupling=pm

The folder of the run holds `config.json`, `metrics.jsonl`, `learning_curve.png` and `checkpoints/`.
With --dry_run nothing is trained or written: parameters, operations, memory and the shapes of a
batch are printed. On several hosts each runs the same command with --distributed.
"""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import Mesh
from ml_collections import config_flags

from vit import checkpoint, costs, data, devices, files, metrics, safety, steps
from vit import config as configs

AHEAD = 3
"""Steps that may wait for the devices: their batches lie in the devices' memory."""


def train(
    config: configs.Config, workdir: Path, *, profile: bool = False, tensorboard: bool = False
) -> metrics.Record:
    """Trains to the end, from the newest readable checkpoint in `workdir` if there is one.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A resumed run ends with the same parameters as an uninterrupted one (on CPU bit for
    bit), wherever it was stopped or killed.

    Args:
        config: of the run.
        workdir: its folder; on several hosts one that all of them see.
        profile: traces the second stretch of steps into `workdir`/profile.
        tensorboard: writes the metrics to `workdir`/tensorboard, too; needs tensorboardX.

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss, eval_accuracy, ...

    Raises:
        ValueError: for a config that cannot work, a workdir that holds another run, is in use or
            has lost its checkpoints, or more unreadable records than
            `config.data.max_bad_records`.
        FloatingPointError: when loss, gradients or parameters are not finite; nothing is saved.
        vit.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # What is asked for, checked before anything is written.
    configs.validate(config)
    checkpoint.check_path(workdir)
    board = metrics.summary_writer() if tensorboard else None
    mesh = devices.mesh(config)
    dataset = data.load(config.data)
    steps_per_epoch, num_steps = length(config, dataset)
    program = steps.build(config, steps.sizes(dataset), num_steps, mesh)
    names = list(costs.parameters(program.abstract))
    step_flops = 3 * config.data.batch_size * costs.forward_flops(config, **steps.sizes(dataset))
    peak_flops = devices.peak_flops()
    lead, log = jax.process_index() == 0, workdir / "metrics.jsonl"

    with contextlib.ExitStack() as stack:
        if lead:
            stack.enter_context(safety.exclusive(workdir))
            claim(workdir, config)
        stopping = stack.enter_context(safety.interruption())

        # Where the run stands.
        resumed = devices.agree(checkpoint.exists(workdir))
        safety.own_shared_memory(workdir)  # after all know that process 0 holds the folder
        if resumed:
            step, state = checkpoint.restore(workdir, program.abstract)
            checkpoint.set_aside(workdir, step)
            if lead:
                print(f"{workdir}: at step {step} of {num_steps}")
        else:
            checkpoint.check_not_lost(workdir, last_step(log))
            step, state = 0, program.initial()
        checkpoints = stack.enter_context(checkpoint.open_checkpoints(workdir, write=True))
        past = metrics.keep_up_to(log, step) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(metrics.writer(log, board)) if lead else lambda record: None
        batches = stack.enter_context(
            contextlib.closing(train_batches(dataset, config, mesh, step))
        )

        def due(step: int) -> bool:
            return step == num_steps or (step > 0 and step % config.eval_every == 0)

        evaluate_now = due(step) and not devices.agree(
            bool(past) and past[-1]["step"] == step and "eval_accuracy" in past[-1]
        )
        saved, bad_records, number = step, set(), 0

        # The loop: an evaluation if it is due, else a stretch of steps; then a checkpoint if due.
        bar = stack.enter_context(metrics.progress_bar(lead))
        task = bar.add_task(
            "train", total=num_steps, completed=step, status="compiling" if step < num_steps else ""
        )
        while evaluate_now or step < num_steps:
            record = {"step": step, "epoch": step / steps_per_epoch}
            if evaluate_now:
                evaluation = safety.until(stopping, eval_batches(dataset, config, mesh))
                with contextlib.suppress(safety.Stopped):
                    record |= steps.evaluate(partial(program.evaluate, state), evaluation)
                    write(record | {"seconds": time.perf_counter() - start})
                    evaluate_now = False
                    bar.console.print(
                        f"step {step}: {config.data.eval_split} accuracy"
                        f" {record['eval_accuracy']:.4f}, loss {record['eval_loss']:.4f}"
                    )
            else:
                end = min(step - step % config.log_every + config.log_every, num_steps)
                stretch, stretch_start = [], time.perf_counter()
                with profiler(workdir, profile and number == 1):
                    while step < end and not (stretch and stopping()):
                        state, values = program.train(state, next(batches))
                        stretch.append(values)
                        jax.block_until_ready(stretch[-AHEAD:][0]["train_loss"])
                        step += 1
                        bar.advance(task)
                    stretch = jax.device_get(stretch)
                number += 1
                seconds = time.perf_counter() - stretch_start
                safety.check_finite(stretch, step, names, config.optim.learning_rate)
                bad = {int(i) for values in stretch for i in values["bad"] if i >= 0}
                if bad - bad_records:
                    bar.console.print(f"cannot be decoded: records {sorted(bad - bad_records)}")
                bad_records |= bad
                record = {"step": step, "epoch": step / steps_per_epoch, **_mean(stretch)}
                record["images_per_second"] = len(stretch) * config.data.batch_size / seconds
                if peak_flops:
                    record["mfu"] = len(stretch) * step_flops / seconds / peak_flops
                record |= {"bad_records": len(bad_records)} | devices.memory()
                write(record | {"seconds": time.perf_counter() - start})
                bar.update(task, status=metrics.status(record))
                evaluate_now = due(step)
            stop, too_many = stopping(), len(bad_records) > config.data.max_bad_records
            if step != saved and (
                stop or too_many or step == num_steps or step % config.checkpoint_every == 0
            ):
                checkpoint.save(checkpoints, step, state)
                saved = step
            if too_many:
                raise ValueError(
                    f"{len(bad_records)} records of {config.data.train_split!r} cannot be decoded,"
                    f" more than config.data.max_bad_records={config.data.max_bad_records}; their"
                    f" numbers are {sorted(bad_records)[:20]}"
                )
            if stop and (evaluate_now or step < num_steps):
                checkpoint.finish(checkpoints)
                print(f"stopped at step {step} of {num_steps}; the same command resumes")
                sys.exit(safety.STOPPED)
        checkpoint.finish(checkpoints)

    if lead:
        metrics.plot_learning_curve(log, workdir / "learning_curve.png")
    return metrics.read(log)[-1]


def last_step(log: Path) -> int:
    """Of the log; 0 where there is none."""
    return max((record["step"] for record in metrics.read(log)), default=0)


def length(config: configs.Config, dataset: data.Dataset) -> tuple[int, int]:
    """Steps of an epoch, and of the run.

    Raises:
        ValueError: when the run has none, or more than an int32 counts.
    """
    steps_per_epoch = len(dataset.train) // config.data.batch_size
    num_steps = config.num_epochs * steps_per_epoch
    if not 0.5 < num_steps <= configs.LARGEST:
        raise ValueError(
            f"config.num_epochs={config.num_epochs} are {num_steps:.3g} steps, of which an epoch"
            f" has {steps_per_epoch}: a run has 1 to {configs.LARGEST}"
        )
    return steps_per_epoch, round(num_steps)


def train_batches(
    dataset: data.Dataset, config: configs.Config, mesh: Mesh, start: int
) -> Generator[data.Batch]:
    """The training batches from step `start` on, on the devices; this process reads its rows."""
    index, count = jax.process_index(), jax.process_count()
    batches = iter(data.train_batches(dataset, config.data, config.seed, index, count, start))
    with contextlib.closing(batches):  # ends the workers
        for batch in batches:
            yield devices.put(mesh, batch)


def eval_batches(dataset: data.Dataset, config: configs.Config, mesh: Mesh) -> Iterator[data.Batch]:
    """The evaluation batches on the devices."""
    batches = data.eval_batches(dataset, config.data, jax.process_index(), jax.process_count())
    return (devices.put(mesh, batch) for batch in batches)


def claim(workdir: Path, config: configs.Config) -> None:
    """Makes the folder of the run; refuses one that holds a run of another config."""
    path = workdir / "config.json"
    if path.exists():
        files.check(path)
        different = configs.differences(configs.load(path), config)
        if different:
            raise ValueError(
                f"{workdir} holds a run with another config; take another --workdir, or the run's"
                " own config:\n  " + "\n  ".join(different)
            )
    workdir.mkdir(parents=True, exist_ok=True)
    configs.save(config, path)


def profiler(workdir: Path, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Traces what runs inside, if wanted; for TensorBoard, xprof or Perfetto."""
    return jax.profiler.trace(str(workdir / "profile")) if wanted else contextlib.nullcontext()


def dry_run(config: configs.Config) -> str:
    """Parameters, operations, memory and the first batch of a run; nothing is written.

    Raises:
        ValueError: as `train`, before anything is compiled.
    """
    configs.validate(config)
    mesh = devices.mesh(config)
    dataset = data.load(config.data)
    steps_per_epoch, num_steps = length(config, dataset)
    program = steps.build(config, steps.sizes(dataset), num_steps, mesh)
    batch = next(train_batches(dataset, config, mesh, 0))
    compiled = program.train.lower(program.abstract, batch).compile()
    flops = costs.forward_flops(config, **steps.sizes(dataset))
    lines = [
        costs.parameter_table(program.abstract),
        f"devices: {jax.device_count()} x {jax.devices()[0].device_kind},"
        f" mesh {dict(mesh.shape)}, {jax.process_count()} processes",
        f"steps: {num_steps:,} ({steps_per_epoch:,} an epoch)",
        f"operations: {flops / 1e9:.3f} GFLOP an image forward,"
        f" {3 * flops * config.data.batch_size / 1e12:.4g} TFLOP a training step",
        "memory on each device: "
        + ", ".join(f"{k} {v / 2**20:,.1f} MiB" for k, v in costs.memory_of(compiled).items()),
        *(f"batch: {k} {x.shape} {x.dtype}, {x.sharding.spec}" for k, x in batch.items()),
    ]
    return "\n".join(lines)


def _mean(stretch: list[dict[str, np.ndarray]]) -> dict[str, float]:
    scalars = [name for name, value in stretch[0].items() if np.ndim(value) == 0]
    return {name: float(np.mean([values[name] for values in stretch])) for name in scalars}


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.FATAL)  # a failed save is raised: Orbax logs it a dozen times
    workdir = Path(str(_WORKDIR.value))
    try:
        processes = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
        if _DISTRIBUTED.value or processes != (None, None, None):
            devices.initialize(*processes)
        given = flags.FLAGS["config"].present
        config = configs.from_flag(_CONFIG) if given else configs.of_run(workdir)
        if _DRY_RUN.value:
            print(dry_run(config))
            return
        record = train(config, workdir, profile=_PROFILE.value, tensorboard=_TENSORBOARD.value)
    except (ValueError, FloatingPointError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if jax.process_index() == 0:
        print(
            f"{config.data.eval_split} accuracy {record['eval_accuracy']:.4f}"
            f" ({record['eval_examples']} images) after {record['epoch']:.0f} epochs,"
            f" {record['seconds']:.0f} s; the run is in {workdir}"
        )


if __name__ == "__main__":
    _CONFIG = config_flags.DEFINE_config_file(
        "config", help_string="file with get_config(); the run's own config if none is given"
    )
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run; made if it does not exist")
    _DRY_RUN = flags.DEFINE_bool("dry_run", False, "print what the run would cost, and stop")
    _PROFILE = flags.DEFINE_bool("profile", False, "trace the second stretch of steps")
    _TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "metrics for TensorBoard as well")
    _DISTRIBUTED = flags.DEFINE_bool("distributed", False, "one of several processes")
    _COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
    _NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "how many there are")
    _PROCESS_ID = flags.DEFINE_integer("process_id", None, "the number of this one, from 0")
    flags.mark_flags_as_required(["workdir"])
    app.run(main, flags_parser=configs.parse_flags)
