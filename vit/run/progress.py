"""Progress of a run: its log, and what it shows.

Values of the steps are read, checked and logged while the next ones compute. Shown is a bar on a
terminal; elsewhere a plain line every so often, for a log file.
"""

import contextlib
import dataclasses
import datetime
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich import progress as rich

from vit import config as configs
from vit.reports import metrics
from vit.run import devices, loggers, steps
from vit.task import Task

EVERY = 10.0
"""Seconds between two lines of progress, at least."""


@dataclasses.dataclass
class Display:
    """The bar or the lines, from `display`."""

    bar: rich.Progress
    task: rich.TaskID
    shown: bool
    plain: bool
    """Not on a terminal."""
    last: float = -math.inf
    """When the last line of progress was printed."""

    def advance(self) -> None:
        """Count a step."""
        self.bar.advance(self.task)

    def status(self, text: str) -> None:
        """Show what is being done now: beside the bar, or as a line."""
        self.bar.update(self.task, status=text)
        if self.plain:
            self.line(text)

    def progress(self, text: str, seconds_per_step: float) -> None:
        """Show what was measured: beside the bar; or as a line, if none came for some seconds."""
        self.bar.update(self.task, status=text)
        now = time.monotonic()
        if self.plain and now - self.last >= EVERY:
            self.last, task = now, self.bar.tasks[self.task]
            done, total = int(task.completed), int(task.total or 0)
            left = datetime.timedelta(seconds=round((total - done) * seconds_per_step))
            self.line(f"step {done} of {total}: {text}  {left} left")

    def line(self, text: str) -> None:
        """Print a line."""
        if self.plain:
            print(text, flush=True)  # at once, and however long
        elif self.shown:
            self.bar.console.print(text)


@contextlib.contextmanager
def display(shown: bool, step: int, num_steps: int) -> Iterator[Display]:
    """Give the display of a run at that step; with several processes only one shows it."""
    plain = shown and not metrics.progress_bar().console.is_terminal
    with metrics.progress_bar(shown and not plain) as bar:
        task = bar.add_task("train", total=num_steps, completed=step, status="")
        yield Display(bar, task, shown, plain)


@dataclasses.dataclass
class Progress:
    """The log of a run from some step on."""

    config: configs.Config
    task: Task
    rate: optax.Schedule
    steps_per_epoch: int
    names: Sequence[str]
    """Names of the parameters."""
    write: loggers.Write
    shown: Display
    start: float
    """Time at which the run began, or would have without its interruptions."""
    running: deque[tuple[int, dict[str, Any], float]] = dataclasses.field(default_factory=deque)
    """Steps that may still be computed: number, values, seconds without a batch."""
    ended: list[tuple[int, dict[str, Any], float]] = dataclasses.field(default_factory=list)
    """Computed steps since the last line of the log."""
    mark: float = 0.0
    """Time of the last line of the log, or of the first step after a pause."""
    bad: set[int] = dataclasses.field(default_factory=set)
    """Records that cannot be decoded."""
    skips: int = 0
    """Skipped steps in a row, up to the last line of the log."""

    @property
    def too_many_bad(self) -> bool:
        """True when more records cannot be decoded than the config permits."""
        return len(self.bad) > self.config.data.max_bad_records

    def seconds(self) -> float:
        """Return the duration of the run."""
        return time.perf_counter() - self.start

    def add(self, step: int, values: dict[str, Any], asked: float, waited: float) -> None:
        """Note a step that was given to the devices, and wait for the one `steps.AHEAD` before it.

        Args:
            step: its number.
            values: as of `steps.train_step`.
            asked: time at which its batch was requested.
            waited: seconds until that was there.

        Raises:
            FloatingPointError: as `check_finite`.
        """
        if not self.running and not self.ended:
            self.mark = asked
        self.running.append((step, values, waited))
        if len(self.running) >= steps.AHEAD:
            self._wait()

    def read(self) -> None:
        """Wait for all steps, and log them."""
        while self.running:
            self._wait()
        if self.ended:
            self._log()

    def _wait(self) -> None:
        """Wait for the first of the running steps; log it and those before where a line is due."""
        self.ended.append(self.running.popleft())
        step, values, _ = self.ended[-1]
        jax.block_until_ready(values["train_loss"])
        if step % self.config.log_every == 0:
            self._log()

    def _log(self) -> None:
        numbers, values, waits = zip(*self.ended, strict=True)
        self.ended.clear()
        values, step = jax.device_get(values), numbers[-1]
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.skips = check_finite(self.config.optim, values, step, self.names, self.skips)
        skipped = [i for i, v in zip(numbers, values, strict=True) if v.get("skipped")]
        if skipped:
            self.shown.line(f"loss or gradients are not finite: passed over steps {skipped}")
        bad = {int(i) for each in values for i in each["bad"] if i >= 0} - self.bad
        if bad:
            self.shown.line(f"cannot be decoded: records {sorted(bad)}")
        self.bad |= bad
        config, flops, peak = self.config, self.task.operations, devices.peak_flops()
        record = {"step": step, "epoch": step / self.steps_per_epoch, **means(values)}
        if config.optim.skip_nonfinite:
            record["skipped_steps"] = len(skipped)
        record["learning_rate"] = float(np.asarray(self.rate(step - 1)))
        examples = len(values) * config.data.batch_size
        record[self.task.rate] = examples / seconds
        if flops and peak:
            record["mfu"] = 3 * flops(config) * examples / seconds / peak
        record |= {"bad_records": len(self.bad)} | devices.memory() | {"data_seconds": sum(waits)}
        self.write(record | {"seconds": self.seconds()})
        status = metrics.status(record, self.task.rate, sum(waits) / seconds)
        self.shown.progress(status, seconds / len(values))


def means(values: Sequence[dict[str, Any]]) -> metrics.Record:
    """Return the means of the values over the steps that were not skipped; {} without any."""
    taken = [v for v in values if not v.get("skipped", False)]
    names = [k for k in values[0] if k not in ("finite", "bad", "skipped")] if taken else []
    return {k: np.mean([v[k] for v in taken], axis=0).astype(float).tolist() for k in names}


def check_finite(
    optim: configs.Optim,
    values: Sequence[dict[str, Any]],
    last_step: int,
    names: Sequence[str],
    skips: int = 0,
) -> int:
    """Check the loss, gradients and parameters of each step.

    Args:
        optim: section of the config; so many steps in a row may be skipped.
        values: `train_loss` and `finite`, as of `steps.train_step`, of each step.
        last_step: number of the last of them.
        names: of the parameters, in the order of `finite`.
        skips: skipped steps in a row before these.

    Returns:
        Skipped steps in a row at their end.

    Raises:
        FloatingPointError: for the first step that diverged and may not be skipped; the message
            names the step, the loss and the first parameter.
    """
    for step, each in enumerate(values, last_step - len(values) + 1):
        loss, finite = float(each["train_loss"]), np.asarray(each["finite"])
        skips = 0 if np.isfinite(loss) and finite.all() else skips + 1
        if skips <= optim.skip_nonfinite:
            continue
        first = "all parameters and gradients are finite"
        if not finite.all():
            first = (
                f"the first parameter whose gradient or value is not finite is"
                f" {names[int(np.argmin(finite))]} ({(~finite).sum()} of {len(names)} are)"
            )
        allowed = optim.skip_nonfinite
        after = f", after {allowed} such steps that were passed over" if allowed else ""
        raise FloatingPointError(
            f"the loss is {loss} at step {step}{after}; {first}; nothing was saved since. Lower"
            f" config.optim.learning_rate={optim.learning_rate} and start again with another"
            f" --workdir; or, if it is but a few steps, go on with"
            f" --config.optim.skip_nonfinite={max(3, 2 * allowed)}"
        )
    return skips
