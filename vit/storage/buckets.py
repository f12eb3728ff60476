"""Runs in a bucket of Google Cloud Storage: paths gs://BUCKET/NAME, and locks.

An object appears whole and cannot be appended to. A folder is the common beginning of names, and
renaming one copies its objects. So the log of a run is written whole at each line, a checkpoint of
Orbax is complete when it has a last object, and a folder that must be complete or absent is filled
on the local disk and uploaded.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import pathlib
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PACKAGE = "gcsfs"
"""Package of the extra `gcs`; it requires google-cloud-storage, which locks and Orbax use."""
CLIENTS = (PACKAGE, "google", "aiohttp", "requests")
"""Packages whose errors are raised as OSError."""
RENEWED = 20.0
"""Seconds between two renewals of a lock."""
LEASE = 60.0
"""Seconds without a renewal after which a lock belongs to nobody."""
UPLOADS = 8
"""Files that are uploaded at once."""


class Address(pathlib.PosixPath):
    """Path gs://BUCKET/NAME, with the methods of `pathlib.Path` that a run uses.

    Raises:
        OSError: when the bucket cannot be reached; the message names the path. Also for a method
            that would use the local disk instead (`LOCAL`).
    """

    def __str__(self) -> str:
        """Return the address; pathlib has removed one of its slashes."""
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        """Return the address."""
        return str(self)

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        with _as_os_error(self):
            return getattr(_epath(self), method)(*args, **options)

    def _listed(self, method: str, *args: Any) -> Iterator["Address"]:
        with _as_os_error(self):
            matches = list(getattr(_epath(self), method)(*args))
        return (Address(str(each)) for each in matches)

    def exists(self, **_: Any) -> bool:
        """Return True for an object, or for the beginning of the names of some."""
        return self._call("exists")

    def is_dir(self, **_: Any) -> bool:
        """Return True for the beginning of the names of objects."""
        return self._call("is_dir")

    def is_file(self, **_: Any) -> bool:
        """Return True for an object."""
        return self._call("is_file")

    def iterdir(self) -> Iterator["Address"]:
        """Yield the objects and folders in a folder."""
        return self._listed("iterdir")

    def glob(self, pattern: str, **_: Any) -> Iterator["Address"]:  # pyright: ignore
        """Yield the objects and folders of a pattern without `**`."""
        return self._listed("glob", pattern)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder exists with its first object."""

    def resolve(self, strict: bool = False) -> "Address":
        """Return the address."""
        return self

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        """Open an object, text as UTF-8; a written one appears whole when it is closed."""
        if set(mode) - set("rwbt"):
            raise io.UnsupportedOperation(f"{self}: an object can be read or written, not {mode!r}")
        return self._call("open", mode.replace("t", ""))

    def read_text(self, *_: Any, **__: Any) -> str:
        """Return the content of an object in UTF-8."""
        return self.read_bytes().decode()

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        """Write an object in UTF-8; it appears whole."""
        return self.write_bytes(data.encode())

    def absolute(self) -> "Address":
        """Return the address."""
        return self

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        return self._call("read_bytes")

    def write_bytes(self, data: Any) -> int:
        """Write an object; it appears whole."""
        return self._call("write_bytes", data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        self._call("unlink", missing_ok=missing_ok)


LOCAL = (
    *("chmod", "copy", "copy_into", "group", "hardlink_to", "is_block_device", "is_char_device"),
    *("is_fifo", "is_junction", "is_mount", "is_socket", "is_symlink", "lchmod", "link_to"),
    *("lstat", "move", "move_into", "owner", "readlink", "rename", "replace", "rglob", "rmdir"),
    *("samefile", "stat", "symlink_to", "touch", "walk"),
)
"""Methods of `pathlib.Path` that would use a folder "gs:" of the local disk."""


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Address, *_: Any, **__: Any) -> Any:
        raise io.UnsupportedOperation(f"{self}: a bucket has no {name}()")

    return refuse


for _name in LOCAL:
    setattr(Address, _name, _refused(_name))


def _epath(path: Path) -> Any:
    from etils import epath  # with the extra `vit`; the console script runs without it

    return epath.Path(str(path))


@contextlib.contextmanager
def _as_os_error(address: Path) -> Iterator[None]:
    """Raise errors of Google's packages as OSError with the address."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] not in CLIENTS:
            raise
        text = " ".join(str(error).split())[:500]
        raise OSError(f"{address}: {type(error).__name__}: {text}") from error


def path(name: str | os.PathLike[str]) -> Path:
    """Return a local path, or the `Address` of a name gs://...

    Raises:
        ValueError: for an address of another kind or with special characters, or if the extra `gcs`
            is not installed.
    """
    if isinstance(name, Address):
        return name
    scheme = re.match(r"(\w\w+):/", os.fspath(name))
    if not scheme:
        return Path(name)
    if scheme[1] in ("http", "https"):
        raise ValueError(
            f"{name}: web addresses are not read. Give a local path; vit.pretrained also reads"
            " --weights=OWNER/NAME, a repository of the Hugging Face Hub"
        )
    if scheme[1] != "gs":
        raise ValueError(
            f"{name}: of buckets only gs:// is supported. Elsewhere Orbax completes a checkpoint by"
            " renaming a folder, which a bucket can only copy. Mount it, and give its folder"
        )
    if not re.fullmatch(r"gs:/[\w/.,=+@~-]+", os.fspath(name)):  # Orbax would read a pattern
        raise ValueError(f"{name}: after gs:// only letters, digits and /.,=+@~- are supported")
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ValueError(f"{name} requires {PACKAGE}: pip install {PACKAGE}") from error
    defaults = importlib.import_module("fsspec.config").conf.setdefault("gcs", {})
    defaults["use_listings_cache"] = False  # a list that is kept lacks what others write
    return Address(name)


def check_local(name: Path, flag: str = "") -> None:
    """Raise ValueError, which begins with the flag, for an `Address`."""
    if isinstance(name, Address):
        raise ValueError(f"{flag}{name} must be on a local disk")


@dataclasses.dataclass
class Lock:
    """A lock, an object that only one process can create; see `lock`."""

    address: Address
    generation: int = 0
    """Number of the version of the object that this process wrote; 0 if it has no lock."""
    content: str = dataclasses.field(
        default_factory=lambda: (
            f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})"
        )
    )

    @functools.cached_property
    def _bucket(self) -> Any:
        client = importlib.import_module("google.cloud.storage").Client()
        return client.bucket(self.address.parts[1])

    def _blob(self) -> Any:
        return self._bucket.blob("/".join(self.address.parts[2:]))

    def read(self) -> tuple[int, str]:
        """Return generation and content of the object; 0 and "" for none."""
        try:
            content = (blob := self._blob()).download_as_bytes()
        except _errors().NotFound:
            return 0, ""
        return blob.generation, content.decode(errors="replace")

    def write(self, replaced: int) -> bool:
        """Write the object if it has that generation, 0 for none; return True if it did."""
        blob = self._blob()
        try:
            blob.upload_from_string(self.content, if_generation_match=replaced)
            self.generation = blob.generation
        except _errors().PreconditionFailed:  # or the answer to an earlier attempt was lost
            generation, content = self.read()
            self.generation = generation if content == self.content else 0
        return self.generation > 0

    def acquire(self) -> bool:
        """Return True if it is this process's now; wait for a sign of life of another holder."""
        if self.write(0):
            return True
        (generation, holder), end = self.read(), time.monotonic() + LEASE
        print(f"{self.address} is held by {holder}: waiting {LEASE:.0f} s for it to be renewed")
        while time.monotonic() < end:
            time.sleep(RENEWED / 10)
            now, _ = self.read()
            if now == 0 or now != generation:
                return now == 0 and self.write(0)
        return self.write(generation)

    def release(self) -> None:
        """Remove the object if it is still this process's."""
        if self.generation:
            self._blob().delete(if_generation_match=self.generation)

    def renew(self, ended: threading.Event) -> None:
        """Renew it until the event; without it, end the process as by SIGTERM."""
        while not ended.wait(RENEWED):
            try:
                is_kept = self.write(self.generation)
            except Exception as error:  # tried again
                print(f"{self.address} could not be renewed: {error}")
                continue
            if not is_kept:
                print(f"{self.address} was taken over by another process: this one stops")
                return os.kill(os.getpid(), signal.SIGTERM)


def _errors() -> Any:
    return importlib.import_module("google.api_core.exceptions")


@contextlib.contextmanager
def lock(address: Address) -> Iterator[None]:
    """Hold a lock until the block ends.

    A thread renews it every `RENEWED` seconds. The lock of a killed process stays as it is, and the
    next process takes it over after `LEASE` seconds. No clocks are compared. A process that could
    not renew its lock for so long and lost it ends as by SIGTERM.

    Raises:
        ValueError: when another process holds the lock.
        OSError: when the bucket cannot be reached.
    """
    lock = Lock(address)
    with _as_os_error(address):
        if not lock.acquire():
            holder = lock.read()[1] or "another process"
            raise ValueError(
                f"{address} is in use by {holder}; wait for it, stop it, or choose another folder"
            )
    ended = threading.Event()
    renewal = threading.Thread(target=lock.renew, args=[ended], daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        with contextlib.suppress(Exception):  # another process takes it over after the lease
            lock.release()


@contextlib.contextmanager
def filled(folder: Path, last: str) -> Iterator[Path]:
    """Yield the folder to fill; for an `Address` a temporary one, uploaded if the block succeeds.

    Args:
        folder: local folder or address.
        last: name of the files that are uploaded last, by which a folder is known to be complete.
    """
    if not isinstance(folder, Address):
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        yield Path(local)
        files = [path for path in Path(local).rglob("*") if path.is_file()]
        with _as_os_error(folder), ThreadPoolExecutor(UPLOADS) as pool:
            for is_last in (False, True):
                chosen = [path for path in files if (path.name == last) == is_last]
                targets = [str(folder / path.relative_to(local)) for path in chosen]
                list(pool.map(_upload, chosen, targets))


def _upload(source: Path, target: str) -> None:
    _epath(source).copy(target, overwrite=True)


def move(source: Path, target: Path) -> None:
    """Move a folder, in a bucket object by object; a folder in its place is removed."""
    if not isinstance(source, Address):
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        source.rename(target)
        return
    with _as_os_error(source):
        system, _ = importlib.import_module("fsspec.core").url_to_fs(str(source))
        if target.exists():
            system.rm(str(target), recursive=True)
        system.mv(str(source), str(target), recursive=True)
