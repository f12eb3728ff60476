"""Needs of a run that its machine must meet, checked before the work starts."""

import os
import resource
from pathlib import Path

import jax

SPARE = 256
"""Descriptors for all else than data files: logs, sockets, libraries, the terminal."""

HELD = 2
"""Batches of each worker in shared memory: one that waits to be taken, one that is being made."""

GIB = 2.0**30

PROGRAMS = 4 * 2**30
"""Bytes of compiled programs that are kept; those not used for longest go."""


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder; to be called before any is compiled.

    JAX_COMPILATION_CACHE_DIR goes before. Those of CPUs are not kept: they are of one kind of
    processor, which JAX's name of a program lacks, and several may share a home directory.
    """
    if jax.default_backend() == "cpu" or jax.config.values["jax_compilation_cache_dir"]:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "performer-vit"))
    if jax.config.values["jax_compilation_cache_max_size"] == -1:
        jax.config.update("jax_compilation_cache_max_size", PROGRAMS)


def allow_open_files(number: int) -> None:
    """Raise the soft limit of descriptors, which workers inherit, for so many data files.

    Raises:
        ValueError: when the hard limit is lower.
    """
    need = number + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or need <= soft:
        return
    if hard != unlimited and hard < need:
        raise ValueError(
            f"the data set lies in {number:,} files, which every worker holds open: that takes"
            f" {need:,} descriptors, and this machine allows {hard:,}. Raise the hard limit"
            f" (`ulimit -Hn`; docker run --ulimit nofile={2 * need}; LimitNOFILE= of a service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != unlimited else 2 * need, hard))


SHARED = Path("/dev/shm")
"""Where processes share memory, on Linux."""


def workers(asked: int, batch_bytes: int, folder: Path = SHARED) -> int:
    """Return the number of processes that read on this host, for `config.data.num_workers`.

    Args:
        asked: that number; or -1, one for each core but one, as far as their batches have room.
        batch_bytes: of one batch of this host.
        folder: of the shared memory.
    """
    if asked >= 0:
        return asked
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
    """Raise ValueError unless the workers' batches, of so many bytes, fit into the shared memory.

    Else the kernel would end a worker that writes (SIGBUS), in the middle of a run.
    """
    if not workers or not folder.is_dir():
        return
    room, need = _room(folder), HELD * workers * batch_bytes
    if need > room:
        raise ValueError(
            f"config.data.num_workers={workers} processes hand over batches of"
            f" {batch_bytes / 2**20:,.0f} MiB through {folder}: up to {need / GIB:,.1f} GiB at a"
            f" time, and {room / GIB:,.2f} GiB are free. Make it larger (docker run"
            f" --shm-size={need // 2**30 + 2}g, or --ipc=host; mount -o remount,size=...), or take"
            f" --config.data.num_workers={int(room // (HELD * batch_bytes))}"
        )
