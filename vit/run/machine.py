"""Number of worker processes of a machine."""

import os
from pathlib import Path

HELD = 2
"""Batches of each worker in shared memory: a finished one and the one in progress."""

SHARED = Path("/dev/shm")
"""Folder of shared memory on Linux."""


def workers(requested: int, batch_bytes: int, folder: Path = SHARED) -> int:
    """Return the number of workers of this host for `config.data.num_workers`.

    It is at most the number whose batches fit into the shared memory: otherwise the kernel kills a
    worker (SIGBUS) in the middle of a run.

    Args:
        requested: number of workers; -1 for one per core but one.
        batch_bytes: size of a batch of this host.
        folder: folder of the shared memory.
    """
    number = cores() - 1 if requested < 0 else requested
    if not number or not folder.is_dir():
        return number
    there = os.statvfs(folder)
    return min(number, there.f_bavail * there.f_frsize // (HELD * batch_bytes))


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
