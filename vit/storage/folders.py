"""Folders that are complete or absent."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from vit.storage import buckets, files


def check_vacant(folder: Path, flag: str) -> None:
    """Raise ValueError, which names the flag, unless the folder is empty or missing."""
    if folder.exists() and any(folder.iterdir()):
        is_run = any((folder / name).exists() for name in ("config.json", "checkpoints"))
        reason = "holds a run already" if is_run else "is not empty"
        raise ValueError(f"{folder} {reason}; choose another {flag}")


@contextlib.contextmanager
def atomic(folder: Path, flag: str) -> Iterator[Path]:
    """Yield a folder to fill, `folder`.unfinished, which is renamed at the end of the block.

    It is removed when the block raises; remains of a killed process are removed by the next one.
    For a bucket it is a temporary folder on the local disk, which is uploaded, config.json last.

    Raises:
        ValueError: as `check_vacant` and `files.lock`.
        OSError: when it cannot be written; the message names a file or the folder.
    """
    folder = folder.resolve()
    check_vacant(folder, flag)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if isinstance(folder, buckets.Address):
        with files.lock(unfinished / "lock"), buckets.filled(folder, "config.json") as local:
            yield local
        return
    unfinished.mkdir(parents=True, exist_ok=True)
    with files.naming(unfinished), files.lock(unfinished / "lock"):
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
