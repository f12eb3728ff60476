"""Shared set-up: run-time shape checks of annotated functions, compiled programs on disk, devices.

Nearly all the time of the suite is compiling. Programs are therefore compiled in a hurry (a test
that asserts bits, memory or speed says so by the marker `optimised`), and kept in the user's cache
folder from one run, clone and worker to the next.
"""

import gc
import os
from importlib.metadata import version
from pathlib import Path

from vit.storage.compilation import cache_folder

CACHE_LIMIT = 2 * 2**30
"""Bytes; the oldest programs go first."""


# Set before jax is imported, and inherited by workers and by the processes that tests start.
CACHE = Path(os.environ.get("PERFORMER_TEST_CACHE") or cache_folder("performer-tests"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
AS_FOR_USERS = bool(os.environ.get("PERFORMER_TEST_OPTIMISED"))
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not AS_FOR_USERS))
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # lowering is quicker by a fifteenth
# XLA's threads, of which a program on eight devices takes eight. With no more than these, launches
# of a second program can keep the first one from starting on all devices, each of which waits for
# the others until XLA aborts the process (JAX 0.10.2, two busy cores).
os.environ["NPROC"] = "32"
isa = os.environ.get("PERFORMER_TEST_ISA")  # of an older processor, which rounds otherwise
# With few optimisations too, machine code in an eighth of the time (a gradient: 1.53 s, .18 s).
# The first flag ends with JAX 0.10, and an unknown one ends the process.
old = ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
few = [
    *old,
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_prefer_vector_width=128",
]
limit = [f"--xla_cpu_max_isa={isa}"] if isa else []
os.environ["XLA_FLAGS"] = " ".join(limit if AS_FOR_USERS else [*limit, *few])

import jax

jax.config.update("jax_num_cpu_devices", 8)  # not inherited: processes that tests start have one

import pytest
from jaxtyping import install_import_hook

install_import_hook(["performer", "vit"], "checker.check")

gc.set_threshold(100_000, 50, 100)  # tracing makes many objects and next to no cycles: an eighth

ALL_DEVICES = {name: getattr(jax, name) for name in ("devices", "local_devices", "device_count")}


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it again."""
    gc.freeze()


def pytest_sessionfinish(session):
    """Bounds the cache: the oldest programs go. One process does it, after the workers."""
    if hasattr(session.config, "workerinput") or not CACHE.exists():
        return
    entries = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in CACHE.iterdir())
    excess = sum(size for _, size, _ in entries) - CACHE_LIMIT
    for _, size, path in entries:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size


@pytest.fixture(autouse=True, scope="session")
def _one_device():
    """What takes all devices takes the first of the eight; see `eight_devices`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *args, f=ALL_DEVICES[name], **by: f(*args, **by)[:1])
        patch.setattr(jax, "device_count", lambda *_: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def plot_learning_curve():
    """Figure of a run (0.4 s), which only the run of `digits_run` draws; the function itself."""
    from vit.reports import metrics

    original = metrics.plot_learning_curve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot_learning_curve", lambda *_: None)
        yield original


@pytest.fixture
def eight_devices(monkeypatch):
    """All eight virtual devices, for tests of what is split over them."""
    for name, function in ALL_DEVICES.items():
        monkeypatch.setattr(jax, name, function)


@pytest.fixture(autouse=True, scope="module")
def _few_memory_maps():
    """Many hundred compiled programs in one process exhaust its memory maps (65,530) on Linux."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _optimised(request):
    """For tests marked `optimised`: what XLA and LLVM optimise for users (XLA_FLAGS stay)."""
    if request.node.get_closest_marker("optimised") is None:
        yield
        return
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not AS_FOR_USERS)
    jax.clear_caches()


@pytest.fixture
def tiny(monkeypatch):
    """The variant XS shrunk to two layers of width 16."""
    from tests.support.small import TINY
    from vit import config

    monkeypatch.setitem(config.SIZES, "XS", TINY)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory, plot_learning_curve):
    """The folder of a run of three steps on digits, by `small.TRAINED`, and what it returned.

    Its variant XS is SHALLOW; tests leave the folder as it is.
    """
    from tests.support.small import SHALLOW, TRAINED
    from vit import config, train
    from vit.reports import metrics

    workdir = tmp_path_factory.mktemp("digits") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "plot_learning_curve", plot_learning_curve)
        patch.setitem(config.SIZES, "XS", SHALLOW)
        return workdir, train.train(TRAINED, workdir)


@pytest.fixture
def small_chunks(monkeypatch):
    """Attention in chunks of 4 tokens and blocks of 3 chunks: short sequences have many."""
    from performer.attention import sizes

    monkeypatch.setattr(sizes, "chunk_and_block", lambda *_: (4, 12))
