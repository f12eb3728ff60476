"""Runs that nobody watches: stopping on a signal, output that outlives its reader, new folders.

Ctrl-C ends `tee` in `vit.train ... | tee log` before the run has saved its last checkpoint, and a
closed terminal ends its output: `lasting` discards what cannot be written any more.
"""

import contextlib
import errno
import io
import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from vit.run import files

STOPPED = 75
"""Exit code of a run that a signal stopped and the same command resumes (EX_TEMPFAIL)."""

_CALLS = itertools.count()  # over all runs of a process: the numbers must never fall


def check_vacant(folder: Path, flag: str) -> None:
    """Raise ValueError, which names the flag, unless the folder is empty or does not exist."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names:
        reason = "holds a run already" if names & {"config.json", "checkpoints"} else "is not empty"
        raise ValueError(f"{folder} {reason}; take another {flag}")
    if os.path.ismount(folder):
        raise ValueError(f"{folder} is where a disk is mounted; take a folder inside as {flag}")


@contextlib.contextmanager
def appearing(folder: Path, flag: str) -> Iterator[Path]:
    """Give a folder to fill, which takes its final name in one piece at the end of the block.

    Until then it is `folder`.unfinished. It is removed when the block raises; what a killed process
    left there, by the next one.

    Raises:
        ValueError: as `check_vacant` and `files.alone`.
        OSError: when it cannot be written; the message names a file or the folder.
    """
    folder = folder.resolve()
    check_vacant(folder, flag)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    with files.naming(unfinished), files.alone(unfinished / "lock"):
        for path in unfinished.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        try:
            yield unfinished
        except Exception:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        unfinished.rename(folder)


class LastingFile(io.FileIO):
    """File whose reader may go away, a pipe or a terminal: later output is discarded."""

    unread = False

    def write(self, content: Any) -> int:
        """Write, or discard."""
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.unread = True
            return len(content)


def lasting(stream: Any) -> Any:
    """Return standard output or error as a stream that outlives its reader.

    Streams of other kinds (a notebook's, a captured one) are returned as they are. File names that
    are not UTF-8 are written escaped.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line)


def unread() -> bool:
    """Return true once the reader of standard output has gone away."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, LastingFile) and raw.unread


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Give a function that is true once Ctrl-C or a signal asked to stop.

    SIGTERM, SIGUSR1 and SIGHUP (unless nohup ignores it) ask; a second Ctrl-C or SIGTERM ends the
    process at once. With several processes a signal to any of them, except Ctrl-C, stops all after
    the same step: every process must call the function equally often.
    """
    event, several = threading.Event(), jax.process_count() > 1

    def agreed() -> bool:
        if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
            event.set()
        return event.is_set()

    def asked(number: int, _: Any) -> object:
        if several:
            return signal.raise_signal(signal.SIGTERM)  # JAX listens to that one, for `agreed`
        event.set()
        if number in (signal.SIGINT, signal.SIGTERM):  # the second one ends the process
            signal.signal(number, previous[number])

    numbers = [signal.SIGUSR1] if several else [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main one
        numbers = []
    previous: dict[int, Any] = {number: signal.signal(number, asked) for number in numbers}
    try:
        yield agreed if several else event.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Stopped(Exception):
    """Raised by `until`."""


def until(stopping: Callable[[], bool], items: Iterable[Any]) -> Iterator[Any]:
    """Give the items; raise Stopped when asked to stop."""
    for item in items:
        if stopping():
            raise Stopped
        yield item
