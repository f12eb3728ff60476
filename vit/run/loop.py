"""Training loop of any `Task`: steps, evaluations, checkpoints, and the log of their values."""

import contextlib
import dataclasses
import datetime
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit import config as configs
from vit import data
from vit.reports import metrics
from vit.run import checkpoint, devices, loggers, runs, safety, steps
from vit.storage import buckets, files
from vit.task import opened

PROFILED = 5
"""Number of traced steps; viewers fail on files of many more."""


EVERY = 10.0
"""Minimum seconds between two printed lines of progress."""


@dataclasses.dataclass
class Progress:
    """Log of a run from some step on, and a printed line every `EVERY` seconds.

    Values of a step are read, checked and logged while the next steps are computed.
    """

    run: runs.Run
    names: Sequence[str]
    """Names of the parameters."""
    write: loggers.Write
    shown: bool
    """True in the process that prints."""
    start: float
    """Start time of the run, as if it had not been interrupted."""
    running: deque[tuple[int, dict[str, Any], float]] = dataclasses.field(default_factory=deque)
    """Steps that may be unfinished: number, values, seconds of waiting for the batch."""
    ended: list[tuple[int, dict[str, Any], float]] = dataclasses.field(default_factory=list)
    """Finished steps since the last line of the log."""
    printed: float = -math.inf
    """Time of the last printed line of progress."""
    mark: float = 0.0
    """Time of the last line of the log, or of the first step after a pause."""
    spent: float = 0.0
    """Seconds of the logged steps of this process, without evaluations and checkpoints."""
    logged: int = 0
    """Number of these steps."""

    def line(self, text: str) -> None:
        """Print a line."""
        if self.shown:
            print(text, flush=True)

    def seconds(self) -> float:
        """Return the duration of the run in seconds."""
        return time.perf_counter() - self.start

    def seconds_left(self, num_steps: int) -> int:
        """Return the seconds of further steps at the mean rate of this process so far."""
        return round(num_steps * self.spent / self.logged)

    def add(self, step: int, values: dict[str, Any], requested: float, waited: float) -> None:
        """Add a dispatched step, and wait for the one `steps.AHEAD` before it.

        Args:
            step: number of the step.
            values: values of `steps.train_step`.
            requested: time at which its batch was requested.
            waited: seconds until the batch arrived.

        Raises:
            FloatingPointError: as `check_finite`.
        """
        if not self.running and not self.ended:
            self.mark = requested
        self.running.append((step, values, waited))
        if len(self.running) >= steps.AHEAD:
            self._wait()

    def read(self) -> None:
        """Wait for all steps, and log them."""
        while self.running:
            self._wait()
        if self.ended:
            self._log()

    def evaluated(self, step: int, results: metrics.Record) -> None:
        """Log the results of an evaluation after a step."""
        record = {"step": step, "epoch": step / self.run.length[0]} | results
        self.write(record | {"seconds": self.seconds()})
        split = self.run.config.data.split
        self.line(f"step {step}: {split} {metrics.results(record)}")

    def _wait(self) -> None:
        """Wait for the first running step; write a line of the log if one is due."""
        self.ended.append(self.running.popleft())
        step, values, _ = self.ended[-1]
        jax.block_until_ready(values["train_loss"])
        if step % self.run.config.log_every == 0:
            self._log()

    def _log(self) -> None:
        numbers, values, waits = zip(*self.ended, strict=True)
        self.ended.clear()
        values, step = jax.device_get(values), numbers[-1]
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.spent, self.logged = self.spent + seconds, self.logged + len(values)
        config, task, (steps_per_epoch, num_steps) = self.run.config, self.run.task, self.run.length
        check_finite(config.optim, values, step, self.names)
        flops, peak = task.operations, devices.peak_flops()
        record = {"step": step, "epoch": step / steps_per_epoch, **means(values)}
        record["learning_rate"] = float(np.asarray(self.run.rate(step - 1)))
        examples = len(values) * config.data.batch_size
        record[task.rate] = examples / seconds
        if flops and peak:
            record["mfu"] = 3 * flops(config) * examples / seconds / peak
        record |= devices.memory() | {"data_seconds": sum(waits)}
        self.write(record | {"seconds": self.seconds()})
        if now - self.printed >= EVERY:
            self.printed = now
            status = metrics.status(record, task.rate, sum(waits) / seconds)
            left = datetime.timedelta(seconds=self.seconds_left(num_steps - step))
            self.line(f"step {step} of {num_steps}: {status}  {left} left")


def means(values: Sequence[dict[str, Any]]) -> metrics.Record:
    """Return the means of the values over the steps."""
    names = [k for k in values[0] if k != "finite"]
    return {k: np.mean([v[k] for v in values], axis=0).astype(float).tolist() for k in names}


def check_finite(
    optim: configs.Optimizer,
    values: Sequence[dict[str, Any]],
    last_step: int,
    names: Sequence[str],
) -> None:
    """Check the loss, gradients and parameters of each step.

    Args:
        optim: section of the config.
        values: `train_loss` and `finite` of `steps.train_step`, for each step.
        last_step: number of the last of these steps.
        names: names of the parameters, in the order of `finite`.

    Raises:
        FloatingPointError: for the first diverged step; the message names the step, the loss and
            the first parameter.
    """
    for step, each in enumerate(values, last_step - len(values) + 1):
        loss, finite = float(each["train_loss"]), np.asarray(each["finite"])
        if np.isfinite(loss) and finite.all():
            continue
        first = "all parameters and gradients are finite"
        if not finite.all():
            first = (
                f"the first parameter whose gradient or value is not finite is"
                f" {names[int(np.argmin(finite))]} ({(~finite).sum()} of {len(names)} are)"
            )
        raise FloatingPointError(
            f"the loss is {loss} at step {step}; {first}; nothing was saved since. Lower"
            f" config.optim.learning_rate={optim.learning_rate} and start again with another"
            " --workdir"
        )


def compiled(function: Any, state: Any, batch: Any, progress: Progress) -> None:
    """Compile a function of state and batch, arrays or shapes; report how long it takes."""
    progress.line(f"compiling {function.__name__}")
    start = time.perf_counter()
    function.lower(state, batch).compile()
    progress.line(f"compiled {function.__name__} in {time.perf_counter() - start:.1f} s")


def due(step: int, every: int, num_steps: int) -> bool:
    """Return True at the last step and at multiples of `every`."""
    return step == num_steps or (step > 0 and step % every == 0)


def train(
    config: configs.TrainConfig,
    workdir: Path,
    dataset: data.Dataset | None = None,
    *,
    profile: bool = False,
    log: Sequence[str] = (),
) -> metrics.Record:
    """Train to the end, from the newest readable checkpoint in `workdir` if any.

    Ctrl-C and SIGTERM finish the step, save and exit with code `safety.STOPPED`; the same call
    resumes. A run that was stopped or killed and resumed ends with the parameters of an
    uninterrupted run (on CPU bit for bit).

    Args:
        config: config of the run, whose class declares the task.
        workdir: folder of the run; with several hosts on a shared file system or in a bucket
            (`vit.storage.buckets.path`).
        dataset: data set that is not opened; None for the config's.
        profile: trace `PROFILED` steps after the first line of the log into `workdir`/profile.
        log: further loggers: "tensorboard", "wandb", "mlflow".

    Returns:
        The last record of the log: step, epoch, seconds, train_loss, eval_loss and other measures
        of the task.

    Raises:
        ValueError: for an invalid config; a workdir that is a file, or with another run, in use or
            without its checkpoints; a record that cannot be decoded; or hosts with different
            settings.
        FloatingPointError: when loss, gradients or parameters are not finite; nothing is saved.
        vit.run.checkpoint.SaveError: when a checkpoint cannot be written; earlier ones are intact.
    """
    # Check everything before anything is written.
    configs.validate(config)
    workdir = buckets.path(workdir)
    if not isinstance(workdir, buckets.Address) and workdir.is_file():
        raise ValueError(f"--workdir={workdir} is a file: give a folder")
    loggers.check(log)
    if profile:
        buckets.check_local(workdir, "with --profile, --workdir=")
    is_new = not (workdir / "config.json").exists()
    if is_new:
        config.check_new()
    dataset, task = opened(config, workdir, dataset)
    if is_new:
        data.check_apart(dataset)
    devices.check_same(runs.shared_settings(config, dataset))
    run = runs.Run(config, dataset, task, devices.mesh(config))
    (_, num_steps), _ = run.length, run.rate
    lead, path = jax.process_index() == 0, workdir / "metrics.jsonl"
    if lead:
        print("building the model", flush=True)
    program = run.program

    with contextlib.ExitStack() as stack:
        if lead:
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.lock(workdir / "lock"))
            runs.create_folder(workdir, config, dataset)
        stopping = stack.enter_context(safety.interruption())

        # Resume from the newest readable checkpoint.
        first, state = runs.resume(workdir, program.abstract)
        if lead and state is not None:
            print(f"{workdir}: at step {first} of {num_steps}")
        state = program.initial() if state is None else state
        checkpoints = stack.enter_context(
            checkpoint.open_checkpoints(workdir, keep_every=config.keep_every)
        )
        past = metrics.keep_up_to(path, first) if lead else []
        start = time.perf_counter() - sum(record["seconds"] for record in past[-1:])
        write = stack.enter_context(loggers.writer(log, workdir, config, lead))
        names = list(steps.parameters(program.abstract))
        progress = Progress(run, names, write, lead, start)
        if devices.peak_flops() and not task.operations:
            progress.line("MFU is not logged: the task does not count its operations")
        # The evaluation that a run was stopped or killed in.
        owed = due(first, config.eval_every, num_steps) and not devices.agree(
            bool(past) and past[-1]["step"] == first and "eval_loss" in past[-1]
        )

        def evaluate(step: int, state: Any) -> None:
            """Log the results; raise `safety.Stopped` between two batches."""
            batches = safety.until(stopping, run.eval_batches())
            results = steps.evaluate(task, partial(program.evaluate, state), batches)
            progress.evaluated(step, results)
            if lead:
                metrics.plot_learning_curve(path, workdir / "learning_curve.png")

        # Programs that do not compile, or do not fit, end the run before its first step.
        batches = iter(())
        if first < num_steps:
            batches = stack.enter_context(run.batches(first))
            compiled(program.train, state, run.abstract_batch(), progress)
        if first < num_steps or owed:
            masked = run.abstract_batch(mask=True)
            compiled(program.evaluate, state, masked, progress)
        tracing = stack.enter_context(contextlib.ExitStack())
        # The step before the traced ones; the last step has none after it.
        traced = first + config.log_every if profile else num_steps

        step = saved = first
        try:
            if owed:
                evaluate(step, state)
            while step < num_steps:
                # Step.
                if step == traced:
                    progress.read()
                    tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
                requested = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter() - requested
                state, values = program.train(state, batch)
                step += 1

                # Log. Values that are not finite raise here, before anything is saved.
                progress.add(step, values, requested, waited)
                saves = due(step, config.checkpoint_every, num_steps)
                evaluates = due(step, config.eval_every, num_steps)
                if saves or evaluates or step == traced + PROFILED:
                    progress.read()
                if step == traced + PROFILED:
                    tracing.close()

                # Save.
                if saves:
                    checkpoint.save(checkpoints, step, state)
                    saved = step
                if stopping():
                    progress.read()
                    raise safety.Stopped

                # Evaluate.
                if evaluates:
                    evaluate(step, state)
        except safety.Stopped:
            if step != saved:
                checkpoint.save(checkpoints, step, state)
            checkpoint.finish(checkpoints)
            print(f"stopped at step {step} of {num_steps}; the same command resumes")
            sys.exit(safety.STOPPED)
        checkpoint.finish(checkpoints)

    if lead:
        metrics.plot_learning_curve(path, workdir / "learning_curve.png")
    return metrics.last(path)
