"""What is known of the steps of a run: read, checked and logged while the next ones compute."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from vit import config as configs
from vit import costs, devices, loggers, metrics, safety
from vit.display import Display
from vit.task import Task


@dataclasses.dataclass
class Progress:
    """The log of a run from some step on, and what decides whether it goes on."""

    config: configs.Config
    task: Task
    rate: optax.Schedule
    steps_per_epoch: int
    abstract: Any
    """The state, as `steps.Program.abstract`."""
    write: loggers.Write
    shown: Display
    start: float
    """When the run began, or would have without its interruptions."""
    started: tuple[int, list[dict[str, jax.Array]], float] | None = None
    """The last step that was given to the devices, the values of the stretch that it ends, and the
    seconds in which there was no batch; None where all is read."""
    mark: float = 0.0
    """When the stretch before was read, or when this one began, if nothing was running then."""
    bad: set[int] = dataclasses.field(default_factory=set)
    """Records that cannot be decoded."""
    skips: int = 0
    """Steps in a row that were passed over, up to the last one that is read."""

    @property
    def too_many_bad(self) -> bool:
        """Whether there are more of these records than the config admits."""
        return len(self.bad) > self.config.data.max_bad_records

    def begin(self) -> None:
        """A stretch begins; to be called before its first step."""
        if self.started is None:
            self.mark = time.perf_counter()

    def seconds(self) -> float:
        """Of the run."""
        return time.perf_counter() - self.start

    def read(self) -> None:
        """Waits for the stretch that was started; checks and logs it.

        Raises:
            FloatingPointError: as `safety.check_finite`.
        """
        if self.started is None:
            return
        (step, values, waited), self.started = self.started, None
        values = jax.device_get(values)
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.skips = safety.check_finite(
            values,
            step,
            list(costs.parameters(self.abstract)),
            self.config.optim.learning_rate,
            allowed=self.config.optim.skip_nonfinite,
            row=self.skips,
        )
        record = self._record(step, values, seconds) | {"data_seconds": waited}
        self.write(record | {"seconds": self.seconds()})
        status = metrics.status(record, self.task.rate, waited / seconds)
        self.shown.progress(status, seconds / len(values))

    def _record(
        self, step: int, values: Sequence[dict[str, np.ndarray]], seconds: float
    ) -> metrics.Record:
        """Of the stretch that ends with the step; what is unusual in it gets a line of its own."""
        skipped = [i for i, v in enumerate(values, step - len(values) + 1) if v.get("skipped")]
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
        return record | {"bad_records": len(self.bad)} | devices.memory()


def means(values: Sequence[dict[str, np.ndarray]]) -> metrics.Record:
    """Of what is a number in each step, or one for each seed: the means over the steps.

    Steps that were passed over do not count; where there is no other, nothing is said.
    """
    taken = [v for v in values if not v.get("skipped", False)]
    names = (
        [name for name in values[0] if name not in ("finite", "bad", "skipped")] if taken else []
    )
    return {k: np.mean([v[k] for v in taken], axis=0).astype(float).tolist() for k in names}
