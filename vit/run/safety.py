"""Unattended runs: stop on a signal."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED = 75
"""Exit code of a run stopped by a signal; the same command resumes it (EX_TEMPFAIL)."""
STOPPING = (
    b"\nstopping: a checkpoint is saved after this step (or compilation); a second Ctrl-C ends at"
    b" once, without it\n"
)

_CALLS = itertools.count()  # over all runs of a process: the numbers must never fall


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C or a signal to stop.

    The signals are SIGTERM, SIGUSR1 and SIGHUP (unless ignored by nohup); a second Ctrl-C or
    SIGTERM ends the process at once. With several processes a signal to any of them, except
    Ctrl-C, stops all after the same step: all must call the function equally often.
    """
    event, several = threading.Event(), jax.process_count() > 1

    def agreed() -> bool:
        if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
            event.set()
        return event.is_set()

    def stop(number: int, _: Any) -> object:
        if several:
            return signal.raise_signal(signal.SIGTERM)  # JAX handles it, for `agreed`
        event.set()
        if number in (signal.SIGINT, signal.SIGTERM):  # the second one ends the process
            signal.signal(number, previous[number])
        os.write(2, STOPPING)  # not print: its buffer may be locked by the code that is interrupted

    numbers = [signal.SIGUSR1] if several else [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main one
        numbers = []
    previous: dict[int, Any] = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield agreed if several else event.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Stopped(Exception):
    """Raised after a signal to stop, by `until` for example."""


def until(stopping: Callable[[], bool], items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items; raise Stopped when `stopping()` is True."""
    for item in items:
        if stopping():
            raise Stopped
        yield item
