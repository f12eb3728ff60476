"""Files of a run: atomic writes that follow no links, and locks.

Paths in a bucket (`vit.storage.buckets`) are accepted like local ones.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit.storage import buckets
from vit.storage.buckets import Address


def write(path: Path, content: str | bytes) -> None:
    """Write the file atomically; a link in its place is replaced, not followed."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    if isinstance(path, Address):
        path.write_bytes(data)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with naming(path), temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, line: str) -> None:
    """Add a line to a text file; an object in a bucket is written anew."""
    if isinstance(path, Address):
        write(path, (read(path) if path.exists() else "") + line)
        return
    with naming(path), path.open("a") as file:
        file.write(line)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError in the block: the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:  # without a number the text would be lost
            error.filename = str(path)
        raise


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a file, which is created, until the block or the process ends; also over NFS.

    On a file system without locks a line is printed instead. In a bucket it is `buckets.lock`.

    Args:
        path: file; a link is not followed.

    Raises:
        ValueError: when another process holds the lock.
    """
    if isinstance(path, Address):
        with buckets.lock(path):
            yield
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o666), "r+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path} is in use by {file.read().strip() or 'another process'}; wait for it, stop"
                " it, or choose another folder"
            ) from None
        except OSError as error:
            print(f"{path} is not locked: the file system has no locks ({error.strerror})")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def read(path: Path) -> str:
    """Return the text of a file, with U+FFFD for invalid UTF-8."""
    return path.read_bytes().decode(errors="replace")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON."""
    write(path, json.dumps(record) + "\n")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; ValueError also if it is nested too deeply.

    Args:
        text: the JSON.
        options: of `json.loads`.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the record that `write_json` wrote, or None for a missing or damaged file."""
    try:
        record = parse_json(read(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
