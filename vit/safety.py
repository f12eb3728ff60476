"""Runs that nobody watches: one process to a folder, stopping on a signal, divergence named."""

import contextlib
import fcntl
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

STOPPED = 75
"""Exit code of a run that a signal stopped and the same command resumes (EX_TEMPFAIL)."""

_CALLS = itertools.count()  # over all runs of a process: the numbers must never fall


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Makes the folder, and holds it against other runs; ends with the process, even a killed one.

    Raises:
        ValueError: when another process has it; the message says which.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ValueError(
                f"{workdir} is in use by {file.read().strip() or 'another process'}; wait for it,"
                " stop it, or take another --workdir"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C or SIGTERM asked to stop, instead of ending at once.

    A second signal does end the process at once. With several processes SIGTERM to any of them
    stops all after the same step: every process must call the function equally often.
    """
    event = threading.Event()
    if jax.process_count() > 1:

        def agreed() -> bool:
            if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
                event.set()
            return event.is_set()

        yield agreed
        return
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main one
        yield event.is_set
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def first(*_: Any) -> None:
        event.set()
        restore()

    def restore() -> None:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)

    previous = [signal.signal(number, first) for number in numbers]
    try:
        yield event.is_set
    finally:
        restore()


class Stopped(Exception):
    """What `until` raises."""


def until(stopping: Callable[[], bool], items: Iterable[Any]) -> Iterator[Any]:
    """The items, as long as nobody asks to stop.

    Raises:
        Stopped: when somebody does.
    """
    for item in items:
        if stopping():
            raise Stopped
        yield item


def check_finite(
    stretch: Sequence[dict[str, Any]], last_step: int, names: Sequence[str], learning_rate: float
) -> None:
    """Looks for the first step that diverged.

    Args:
        stretch: of each step `train_loss`, and `finite`: for each parameter whether its gradient
            and new value are.
        last_step: number of the last of them.
        names: of the parameters, in the order of `finite`.
        learning_rate: for the message.

    Raises:
        FloatingPointError: naming the step, the loss and the first parameter.
    """
    for step, values in enumerate(stretch, last_step - len(stretch) + 1):
        loss, finite = float(values["train_loss"]), np.asarray(values["finite"])
        if np.isfinite(loss) and finite.all():
            continue
        first = "all parameters and gradients are finite"
        if not finite.all():
            count = int((~finite).sum())
            first = (
                f"the first parameter whose gradient or value is not finite is"
                f" {names[int(np.argmin(finite))]} ({count} of {len(names)} are)"
            )
        raise FloatingPointError(
            f"the loss is {loss} at step {step}; {first}; nothing was saved since. Lower"
            f" config.optim.learning_rate={learning_rate} and start again with another --workdir"
        )
