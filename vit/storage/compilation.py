"""Compiled programs on disk: a command does not compile what an earlier one has compiled.

They are kept in the user's cache folder, `$XDG_CACHE_HOME/performer` or `~/.cache/performer`, at
most 2 GiB, the oldest removed first. JAX's own variable chooses another folder, or none:

    JAX_COMPILATION_CACHE_DIR=/scratch/programs performer-vit train ...
    JAX_COMPILATION_CACHE_DIR= performer-vit train ...
"""

import hashlib
import os
import platform
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
LIMIT = 2 * 2**30
"""Bytes."""
PROCESSOR = Path("/proc/cpuinfo")
"""Description of the processor, on Linux alone."""


def cache_folder(name: str = "performer") -> Path:
    """Return a folder of the user's for programs of this kind of processor.

    JAX's own key of a program has its text, the flags and the version of the compiler, not the
    instructions that the processor has: a home directory may be shared by several kinds.
    """
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else [platform.processor()]
    flags = [line for line in lines if line.startswith(("flags", "Feat"))] or lines
    kind = "\n".join([platform.machine(), *flags[:1]])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / name / hashlib.sha256(kind.encode()).hexdigest()[:12]


def keep_programs() -> None:
    """Keep compiled programs, unless the user's environment names another folder or none."""
    if VARIABLE in os.environ:
        return
    import jax  # late: some commands never import it

    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_compilation_cache_max_size", LIMIT)
