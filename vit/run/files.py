"""Files of a run: atomic writes that follow no links, and locks."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes) -> None:
    """Write the file atomically; a link in its place is replaced, not followed."""
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
    """Add the name of the file to an OSError in the block: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # without a number the text would be lost
            error.filename = str(path)
        raise


@contextlib.contextmanager
def alone(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, or a file that is created, until the block or the process ends.

    Yields False, and prints a line, on a file system without locks. Locks of files work over NFS,
    those of folders do not.

    Args:
        path: folder or file; a link is not followed.
        wait: wait for another process instead of raising.

    Raises:
        ValueError: when another process holds the lock.
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
                f"{path} is in use by {holder or 'another process'}; wait for it, stop it, or"
                " choose another folder"
            ) from None
        except OSError as error:
            held = False
            print(f"{path} is not locked: the file system has no locks ({error.strerror})")
        if not is_folder:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield held
    finally:
        os.close(descriptor)


def read(path: Path) -> str:
    """Return the text of a file, with U+FFFD for invalid UTF-8."""
    return path.read_text("utf-8", errors="replace")


def note(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    write(path, json.dumps(record) + "\n")


def noted(path: Path) -> dict[str, Any] | None:
    """Return the record that `note` wrote, or None for a missing or damaged file."""
    try:
        record = json.loads(read(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
