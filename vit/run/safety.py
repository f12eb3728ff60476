"""Unattended runs: stop on a signal, output to a closed pipe, atomic creation of folders.

In `vit.train ... | tee log`, Ctrl-C ends `tee` before the run has saved its last checkpoint;
`lasting` discards output that cannot be written any more.
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

from vit.run import buckets, files

STOPPED = 75
"""Exit code of a run stopped by a signal; the same command resumes it (EX_TEMPFAIL)."""
STOPPING = (
    b"\nstopping: a checkpoint is saved after this step (or compilation); a second Ctrl-C ends at"
    b" once, without it\n"
)

_CALLS = itertools.count()  # over all runs of a process: the numbers must never fall


def check_vacant(folder: Path, flag: str) -> None:
    """Raise ValueError, which names the flag, unless the folder is empty or missing."""
    if folder.exists() and any(folder.iterdir()):
        is_run = any((folder / name).exists() for name in ("config.json", "checkpoints"))
        reason = "holds a run already" if is_run else "is not empty"
        raise ValueError(f"{folder} {reason}; choose another {flag}")


@contextlib.contextmanager
def appearing(folder: Path, flag: str) -> Iterator[Path]:
    """Yield a folder to fill, `folder`.unfinished, which is renamed at the end of the block.

    It is removed when the block raises; remains of a killed process are removed by the next one.
    For a bucket it is a temporary folder on the local disk, which is uploaded, config.json last.

    Raises:
        ValueError: as `check_vacant` and `files.alone`.
        OSError: when it cannot be written; the message names a file or the folder.
    """
    folder = folder.resolve()
    check_vacant(folder, flag)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if isinstance(folder, buckets.Address):
        with files.alone(unfinished / "lock"), buckets.filled(folder, "config.json") as local:
            yield local
        return
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
    """Pipe or terminal that discards output after its reader has gone."""

    unread = False

    def write(self, content: Any) -> int:
        """Write the content, or discard it without a reader."""
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.unread = True
            return len(content)


def lasting(stream: Any) -> Any:
    """Return standard output or error as a stream that does not fail without its reader.

    Other streams (of a notebook, captured ones) are returned as they are. Invalid UTF-8 is escaped.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line)


def unread() -> bool:
    """Return True if the reader of standard output has gone."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, LastingFile) and raw.unread


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
