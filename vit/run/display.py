"""Progress of a run: a bar on a terminal; elsewhere a plain line every so often, for a log file."""

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import Iterator

from rich.progress import Progress, TaskID

from vit.reports import metrics

EVERY = 10.0
"""Seconds between two lines of progress, at least."""


@dataclasses.dataclass
class Display:
    """The bar or the lines, from `display`."""

    bar: Progress
    task: TaskID
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
