"""Files of a run: written in one piece, never through a link; and locks."""

import contextlib
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes) -> None:
    """Write the file in one piece; a link in its place is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with naming(path), temporary.open("xb") as file:
        is_text = isinstance(content, str)
        file.write(content.encode(errors="surrogateescape") if is_text else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an OSError in the block name the file: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # without a number its text would be lost
            error.filename = str(path)
        raise


@contextlib.contextmanager
def alone(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a folder, or a file, which is made, against other processes; it ends with the process.

    Locks of files work over NFS, those of folders do not. A link is not followed. Gives whether it
    is held: where the file system has no locks a line is printed instead.

    Args:
        path: of the folder or file.
        wait: for another process to end, instead of raising.

    Raises:
        ValueError: when another process holds it.
    """
    is_folder = path.is_dir()
    flags = os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor, held = os.open(path, flags, 0o666), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = "" if is_folder else os.read(descriptor, 200).decode(errors="replace").strip()
            raise ValueError(
                f"{path} is in use by {holder or 'another process'}; wait for it, stop it, or take"
                " another folder"
            ) from None
        except OSError as error:
            held = False
            print(f"{path} is not held against other processes: no locks here ({error.strerror})")
        if not is_folder:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield held
    finally:
        os.close(descriptor)


def read(path: Path) -> str:
    """Return the text of a file, U+FFFD for bytes that are not UTF-8; ValueError for a pipe."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no file; move it away")
    return path.read_text("utf-8", errors="replace")


def note(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    write(path, json.dumps(record) + "\n")


def noted(path: Path) -> dict[str, Any] | None:
    """Return the record of such a file, or None where it is missing or none."""
    try:
        record = json.loads(read(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
