"""The training loop: an evaluation if it is due, else a stretch of steps; then a checkpoint.

It knows no more of what is learned than its `Task` says.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from vit import (
    checkpoint,
    costs,
    data,
    devices,
    extension,
    hosts,
    loggers,
    machine,
    metrics,
    runs,
    safety,
    steps,
)
from vit import config as configs
from vit.display import Display, display
from vit.task import Task

AHEAD = 3
"""Steps that may wait for the devices: their batches lie in the devices' memory."""

PROFILED = 5
"""Steps that are traced: more make files that no viewer opens."""


class Stretch(NamedTuple):
    """What `stretch` gives."""

    state: Any
    values: list[dict[str, np.ndarray]]
    """Of each step."""
    seconds: float
    waited: float
    """Seconds of them in which the next batch was not there yet."""


def stretch(
    train_step: Callable[[Any, data.Batch], tuple[Any, Any]],
    state: Any,
    batches: Iterator[data.Batch],
    number: int,
    stopping: Callable[[], bool] = lambda: False,
    advance: Callable[[], object] = lambda: None,
) -> Stretch:
    """That many steps; fewer, but one at least, when somebody asks to stop.

    Args:
        train_step: (state, batch) -> (state, values of the step), as `steps.Program.train`.
        state: is given up.
        batches: the next ones.
        number: of steps.
        stopping: asked between two steps.
        advance: called after each.
    """
    values, waited, start = [], 0.0, time.perf_counter()
    while len(values) < number and not (values and stopping()):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        state, new = train_step(state, batch)
        values.append(new)
        jax.block_until_ready(values[-AHEAD:][0]["train_loss"])
        advance()
    values = jax.device_get(values)
    return Stretch(state, values, time.perf_counter() - start, waited)


def compiled(
    function: Any, state: Any, batches: Iterator[data.Batch], shown: Display
) -> Iterator[data.Batch]:
    """The batches, when the function of state and batch is compiled; shows how long that took."""
    first = next(batches)
    shown.status(f"compiling {function.__name__}")
    start = time.perf_counter()
    function.lower(state, first).compile()
    shown.status(f"compiled {function.__name__} in {time.perf_counter() - start:.1f} s")
    return itertools.chain([first], batches)


def means(values: Sequence[dict[str, np.ndarray]]) -> metrics.Record:
    """Of what is a number in each step, or one for each seed: the means over the steps.

    Steps that were passed over do not count; where there is no other, nothing is said.
    """
    taken = [v for v in values if not v.get("skipped", False)]
    names = (
        [name for name in values[0] if name not in ("finite", "bad", "skipped")] if taken else []
    )
    return {k: np.mean([v[k] for v in taken], axis=0).astype(float).tolist() for k in names}


def until_log(step: int, config: configs.Config, num_steps: int) -> int:
    """Steps to the next line of the log."""
    return min(config.log_every - step % config.log_every, num_steps - step)


def due(step: int, every: int, num_steps: int) -> bool:
    """Whether it is time for what is done at the end, and after each so many steps."""
    return step == num_steps or (step > 0 and step % every == 0)


def train(
    config: configs.Config,
    workdir: Path,
    dataset: data.Dataset | None = None,
    task: Task | None = None,
    *,
    profile: bool = False,
    log: Sequence[str] = (),
) -> metrics.Record:
    """Trains to the end, from the newest readable checkpoint in `workdir` if there is one.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A resumed run ends with the same parameters as an uninterrupted one (on CPU bit for
    bit), wherever it was stopped or killed.

    Args:
        config: of the run.
        workdir: its folder; on several hosts one that all of them see.
        dataset: what is learned from; the data set that the config names if None.
        task: what is learned; to classify the images if None. Fields of the config that mean
            nothing to it must be valid all the same.
        profile: traces the first `PROFILED` steps after the first stretch into `workdir`/profile.
        log: other loggers for the metrics, of `loggers.LOGGERS`: "tensorboard", "wandb", "mlflow".

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss and what else
        the task measures.

    Raises:
        ValueError: for a config that cannot work, a workdir that holds another run, is in use or
            has lost its checkpoints, more unreadable records than `config.data.max_bad_records`,
            or hosts that were not started alike or do not see one folder.
        FloatingPointError: when loss, gradients or parameters are not finite, in more steps in a
            row than `config.optim.skip_nonfinite` passes over; nothing is saved.
        vit.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # What is asked for, checked before anything is written.
    config = extension.as_extended(config, workdir)
    configs.validate(config)
    checkpoint.check_path(workdir)
    loggers.check(log)
    dataset, task = runs.subject(config, dataset, task)
    hosts.check_same(runs.said_by_all(config, dataset, task))
    mesh = devices.mesh(config)
    batch_bytes = data.batch_bytes(dataset, config.data, jax.process_count())
    workers = machine.workers(config.data.num_workers, batch_bytes)
    machine.check_shared_memory(batch_bytes, workers)
    steps_per_epoch, num_steps = runs.length(config, dataset)
    program, rate = runs.program(config, dataset, task, mesh), runs.rate(config, dataset)
    names = list(costs.parameters(program.abstract))
    flops = task.operations(config) if task.operations else 0.0
    step_flops, peak_flops = 3 * config.data.batch_size * flops, devices.peak_flops()
    lead, path = jax.process_index() == 0, workdir / "metrics.jsonl"

    with contextlib.ExitStack() as stack:
        if lead:
            stack.enter_context(safety.exclusive(workdir))
            runs.claim(workdir, config, dataset, task)
        stopping = stack.enter_context(safety.interruption())

        # Where the run stands.
        hosts.check_same_folder(workdir)  # then all know that process 0 holds it
        safety.own_shared_memory(workdir)
        step, state = runs.resume(workdir, program.abstract)
        if lead and state is not None:
            print(f"{workdir}: at step {step} of {num_steps}")
        state = program.initial() if state is None else state
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(workdir, write=True, keep_every=config.keep_every)
        )
        past = metrics.keep_up_to(path, step) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(loggers.writer(log, workdir, config, lead))
        batches = stack.enter_context(
            contextlib.closing(runs.train_batches(dataset, config, mesh, step))
        )

        evaluate_now = due(step, config.eval_every, num_steps) and not hosts.agree(
            bool(past) and past[-1]["step"] == step and "eval_loss" in past[-1]
        )
        saved, bad_records, number, evaluated, skips = step, set(), 0, False, 0

        # The loop.
        shown = stack.enter_context(display(lead, step, num_steps))
        if step < num_steps:
            batches = compiled(program.train, state, batches, shown)
        while evaluate_now or step < num_steps:
            record = {"step": step, "epoch": step / steps_per_epoch}
            if evaluate_now:
                evaluation = safety.until(stopping, runs.eval_batches(dataset, config, mesh))
                with contextlib.suppress(safety.Stopped):
                    if not evaluated:
                        evaluation = compiled(program.evaluate, state, evaluation, shown)
                        evaluated = True
                    record |= steps.evaluate(task, partial(program.evaluate, state), evaluation)
                    write(record | {"seconds": time.perf_counter() - start})
                    evaluate_now = False
                    shown.line(f"step {step}: {config.data.eval_split} {metrics.results(record)}")
            else:
                remaining, traced = until_log(step, config, num_steps), profile and number == 1
                if traced:
                    remaining = min(remaining, PROFILED)
                with profiler(workdir, traced):
                    state, values, seconds, waited = stretch(
                        program.train, state, batches, remaining, stopping, shown.advance
                    )
                step += len(values)
                number += 1
                skips = safety.check_finite(
                    values,
                    step,
                    names,
                    config.optim.learning_rate,
                    allowed=config.optim.skip_nonfinite,
                    row=skips,
                )
                skipped = [i for i, v in enumerate(values, 1 - len(values)) if v.get("skipped")]
                if skipped:
                    numbers = [step + i for i in skipped]
                    shown.line(f"loss or gradients are not finite: passed over steps {numbers}")
                bad = {int(i) for each in values for i in each["bad"] if i >= 0}
                if bad - bad_records:
                    shown.line(f"cannot be decoded: records {sorted(bad - bad_records)}")
                bad_records |= bad
                record |= {"step": step, "epoch": step / steps_per_epoch, **means(values)}
                if config.optim.skip_nonfinite:
                    record["skipped_steps"] = len(skipped)
                record["learning_rate"] = float(np.asarray(rate(step - 1)))
                record[task.rate] = len(values) * config.data.batch_size / seconds
                record["data_seconds"] = waited
                if peak_flops and step_flops:
                    record["mfu"] = len(values) * step_flops / seconds / peak_flops
                record |= {"bad_records": len(bad_records)} | devices.memory()
                write(record | {"seconds": time.perf_counter() - start})
                status = metrics.status(record, task.rate, waited / seconds)
                shown.progress(status, seconds / len(values))
                evaluate_now = due(step, config.eval_every, num_steps)
            stop, too_many = stopping(), len(bad_records) > config.data.max_bad_records
            if step != saved and (
                stop or too_many or due(step, config.checkpoint_every, num_steps)
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
        metrics.plot_learning_curve(path, workdir / "learning_curve.png")
    return metrics.read(path)[-1]


def profiler(workdir: Path, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Traces what runs inside, if wanted; for TensorBoard, xprof or Perfetto."""
    return jax.profiler.trace(str(workdir / "profile")) if wanted else contextlib.nullcontext()
