"""Progress of a run: its log, and a printed line every `EVERY` seconds.

Values of a step are read, checked and logged while the next steps are computed.
"""

import dataclasses
import datetime
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from vit import config as configs
from vit.reports import metrics
from vit.run import devices, loggers, steps
from vit.task import Task

EVERY = 10.0
"""Minimum seconds between two lines of progress."""


@dataclasses.dataclass
class Progress:
    """Log of a run from some step on."""

    config: configs.Config
    task: Task
    rate: optax.Schedule
    steps_per_epoch: int
    num_steps: int
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

    def line(self, text: str) -> None:
        """Print a line."""
        if self.shown:
            print(text, flush=True)

    def seconds(self) -> float:
        """Return the duration of the run in seconds."""
        return time.perf_counter() - self.start

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

    def _wait(self) -> None:
        """Wait for the first running step; write a line of the log if one is due."""
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
        check_finite(self.config.optim, values, step, self.names)
        config, flops, peak = self.config, self.task.operations, devices.peak_flops()
        record = {"step": step, "epoch": step / self.steps_per_epoch, **means(values)}
        record["learning_rate"] = float(np.asarray(self.rate(step - 1)))
        examples = len(values) * config.data.batch_size
        record[self.task.rate] = examples / seconds
        if flops and peak:
            record["mfu"] = 3 * flops(config) * examples / seconds / peak
        record |= devices.memory() | {"data_seconds": sum(waits)}
        self.write(record | {"seconds": self.seconds()})
        if now - self.printed >= EVERY:
            self.printed, left = now, round((self.num_steps - step) * seconds / len(values))
            status = metrics.status(record, self.task.rate, sum(waits) / seconds)
            left = datetime.timedelta(seconds=left)
            self.line(f"step {step} of {self.num_steps}: {status}  {left} left")


def means(values: Sequence[dict[str, Any]]) -> metrics.Record:
    """Return the means of the values over the steps."""
    names = [k for k in values[0] if k != "finite"]
    return {k: np.mean([v[k] for v in values], axis=0).astype(float).tolist() for k in names}


def check_finite(
    optim: configs.Optim,
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
