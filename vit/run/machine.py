"""Limits of the machine, checked before the work starts."""

import os
import resource
from pathlib import Path

import jax

SPARE = 256
"""Descriptors for everything but data files: logs, sockets, libraries, the terminal."""

HELD = 2
"""Batches of each worker in shared memory: a finished one and the one in progress."""

GIB = 2.0**30

PROGRAMS = 4 * 2**30
"""Bytes of compiled programs in the cache; the least recently used are deleted."""


def keep_programs() -> None:
    """Cache compiled programs in the user's cache folder; call it before compiling.

    JAX_COMPILATION_CACHE_DIR takes precedence. Programs of CPUs are not cached: they depend on the
    processor, which is not part of JAX's key, and several machines may share a home directory.
    """
    if jax.default_backend() == "cpu" or jax.config.values["jax_compilation_cache_dir"]:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "performer-vit"))
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        jax.config.update("jax_compilation_cache_max_size", PROGRAMS)


def allow_open_files(number: int) -> None:
    """Raise the soft limit of open files for that many data files; workers inherit it.

    Raises:
        ValueError: when the hard limit is too low.
    """
    need = number + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or need <= soft:
        return
    if hard != unlimited and hard < need:
        raise ValueError(
            f"the data set has {number:,} files, which every worker opens: that requires"
            f" {need:,} descriptors, and this machine allows {hard:,}. Raise the hard limit"
            f" (`ulimit -Hn`; docker run --ulimit nofile={2 * need}; LimitNOFILE= of a service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != unlimited else 2 * need, hard))


SHARED = Path("/dev/shm")
"""Folder of shared memory on Linux."""


def workers(requested: int, batch_bytes: int, folder: Path = SHARED) -> int:
    """Return the number of workers of this host for `config.data.num_workers`.

    Args:
        requested: number of workers; -1 for one per core but one, limited by the shared memory.
        batch_bytes: size of a batch of this host.
        folder: folder of the shared memory.
    """
    if requested >= 0:
        return requested
    room = _room(folder) // (HELD * batch_bytes) if folder.is_dir() else cores()
    return max(0, min(cores() - 1, room))


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _room(folder: Path) -> int:
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def check_shared_memory(batch_bytes: int, workers: int, folder: Path = SHARED) -> None:
    """Raise ValueError unless the batches of the workers fit into the shared memory.

    Otherwise the kernel kills a worker (SIGBUS) in the middle of a run.
    """
    if not workers or not folder.is_dir():
        return
    room, need = _room(folder), HELD * workers * batch_bytes
    if need > room:
        raise ValueError(
            f"config.data.num_workers={workers} processes pass batches of"
            f" {batch_bytes / 2**20:,.0f} MiB through {folder}: up to {need / GIB:,.1f} GiB at a"
            f" time, and {room / GIB:,.2f} GiB are free. Enlarge it (docker run"
            f" --shm-size={need // 2**30 + 2}g, or --ipc=host; mount -o remount,size=...), or set"
            f" --config.data.num_workers={int(room // (HELD * batch_bytes))}"
        )
