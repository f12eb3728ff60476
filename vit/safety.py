"""Runs that nobody watches: one process to a folder, stopping on a signal, divergence named.

Output outlives its reader (`lasting`): Ctrl-C or a closing terminal ends `tee` in
`vit.train ... | tee log` before the run has saved its last checkpoint.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import os
import shutil
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit import files

STOPPED = 75
"""Exit code of a run that a signal stopped and the same command resumes (EX_TEMPFAIL)."""

_CALLS = itertools.count()  # over all runs of a process: the numbers must never fall


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Makes the folder, and holds it against other runs; ends with the process, even a killed one.

    Where the file system has no locks this is said, and the folder is not held.

    Raises:
        ValueError: when another process has it, with the message saying which; or when what stands
            in the place of the lock is a link or no file.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with _open_lock(workdir / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{workdir} is in use by {file.read().strip() or 'another process'}; wait for it,"
                " stop it, or take another --workdir"
            ) from error
        except OSError as error:
            print(
                f"{workdir} is not held against other runs, for its file system has no locks"
                f" ({error.strerror}); see that there is but one"
            )
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _open_lock(path: Path) -> IO[str]:
    """Opens the file, or makes it; follows no link and waits for nobody."""
    refusal = ValueError(f"{path} is a link or no file; remove it")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refusal from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return os.fdopen(descriptor, "r+", errors="replace")


def check_vacant(folder: Path, flag: str) -> None:
    """Looks whether there is nothing in the folder, or no folder.

    Raises:
        ValueError: when there is; the message names the flag.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder; take another {flag}")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names:
        reason = "holds a run already" if names & {"config.json", "checkpoints"} else "is not empty"
        raise ValueError(f"{folder} {reason}; take another {flag}")
    if os.path.ismount(folder):
        raise ValueError(f"{folder} is where a disk is mounted; take a folder inside as {flag}")


@contextlib.contextmanager
def appearing(folder: Path, flag: str) -> Iterator[Path]:
    """A folder to fill, which takes its final name in one piece when the block has ended well.

    Until then it is `folder`.unfinished. What a killed process left there is removed by the next
    one, which begins anew; so is everything there when the block raises.

    Raises:
        ValueError: as `check_vacant` and `exclusive`.
        OSError: when it cannot be written; the message names a file or the folder.
    """
    folder = folder.resolve()
    check_vacant(folder, flag)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with files.naming(unfinished), exclusive(unfinished):
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
    """A file whose reader may go away: a pipe, or a terminal. Later output is discarded."""

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

    Streams that are no plain files (a notebook's, a captured one) are returned as they are. File
    names that are not UTF-8 are written escaped.
    """
    if type(stream) is not io.TextIOWrapper or type(_raw(stream)) is not io.FileIO:
        return stream
    stream.flush()
    file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line)


def unread() -> bool:
    """Return true once the reader of standard output has gone away."""
    return getattr(_raw(sys.stdout), "unread", False)


def _raw(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C or a signal asked to stop, instead of ending at once.

    SIGTERM, SIGUSR1 and SIGHUP (which nohup keeps away) ask; a second Ctrl-C or SIGTERM does end
    the process at once. Output lasts, as `lasting` says.
    With several processes a signal to any of them, but for Ctrl-C, stops all after the same step:
    every process must call the function equally often.
    """
    event, several = threading.Event(), jax.process_count() > 1

    def agreed() -> bool:
        if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
            event.set()
        return event.is_set()

    def asked(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM) if several else event.set()  # JAX listens to that one

    def first(*_: Any) -> None:
        event.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, previous[number])

    stopping = agreed if several else event.is_set
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main one
        yield stopping
        return
    chosen: dict[int, Any] = {signal.SIGUSR1: asked}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        chosen[signal.SIGHUP] = asked
    if not several:
        chosen |= {signal.SIGINT: first, signal.SIGTERM: first}
    previous = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    try:
        with contextlib.redirect_stdout(lasting(sys.stdout)):
            yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
    stretch: Sequence[dict[str, Any]],
    last_step: int,
    names: Sequence[str],
    learning_rate: float,
    *,
    allowed: int = 0,
    row: int = 0,
) -> int:
    """Looks for the first step that diverged, and may not be passed over.

    Args:
        stretch: of each step `train_loss`, and `finite`: for each parameter whether its gradient
            and new value are.
        last_step: number of the last of them.
        names: of the parameters, in the order of `finite`.
        learning_rate: for the message.
        allowed: steps in a row that were passed over (`config.optim.skip_nonfinite`).
        row: those right before the stretch.

    Returns:
        Those at its end.

    Raises:
        FloatingPointError: naming the step, the loss and the first parameter.
    """
    for step, values in enumerate(stretch, last_step - len(stretch) + 1):
        loss, finite = float(values["train_loss"]), np.asarray(values["finite"])
        row = 0 if np.isfinite(loss) and finite.all() else row + 1
        if row <= allowed:
            continue
        first = "all parameters and gradients are finite"
        if not finite.all():
            count = int((~finite).sum())
            first = (
                f"the first parameter whose gradient or value is not finite is"
                f" {names[int(np.argmin(finite))]} ({count} of {len(names)} are)"
            )
        after = f", after {allowed} such steps that were passed over" if allowed else ""
        raise FloatingPointError(
            f"the loss is {loss} at step {step}{after}; {first}; nothing was saved since. Lower"
            f" config.optim.learning_rate={learning_rate} and start again with another --workdir;"
            f" or, if it is but a few steps, go on with"
            f" --config.optim.skip_nonfinite={max(3, 2 * allowed)}"
        )
    return row
