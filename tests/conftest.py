"""Shared set-up: run-time shape checks of annotated functions, and compiled programs on disk."""

import os
from pathlib import Path

# Set before jax is imported, and inherited by workers and by the processes that tests start.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook(["performer", "vit"], "checker.check")


@pytest.fixture(autouse=True, scope="module")
def _clear_compilations():
    """Many hundred compiled programs in one process exhaust its memory maps on CPU."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules where compiling takes nearly all the time: machine code in a hurry."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def tiny(monkeypatch):
    """The variant XS shrunk to two layers of width 16."""
    from tests.small import TINY
    from vit import config

    monkeypatch.setitem(config.SIZES, "XS", TINY)


@pytest.fixture
def small_chunks(monkeypatch):
    """Attention in chunks of 4 tokens and blocks of 3 chunks: short sequences have many."""
    from performer.attention import op

    monkeypatch.setattr(op, "_block_sizes", lambda *_: (4, 12))
