"""What a run needs of its machine: said before the work starts, not by a crash in the middle."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.small import small_config
from vit.run import loop, machine


@pytest.mark.parametrize(
    ("soft", "hard", "set_to"), [(1024, 4096, 4096), (2000, 4096, 2000), (1024, 1100, None)]
)
def test_as_many_files_as_the_data_set_has(monkeypatch, soft, hard, set_to):
    """ImageNet's 1,024 shards under the usual limit of 1,024."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    if set_to is None:
        with pytest.raises(ValueError, match="requires 1,280 descriptors, and this machine allows"):
            machine.allow_open_files(1024)
    else:
        machine.allow_open_files(1024)
        assert limits[-1] == (set_to, hard)
        assert len(limits) == (1 if set_to == soft else 2)


def test_room_for_the_batches_of_all_workers(tmp_path, monkeypatch):
    """16 workers with batches of 4,096 images: 18.4 GiB, where Docker gives 64 MiB."""
    batch = 4096 * 224 * 224 * 3
    room = SimpleNamespace(f_bavail=2**14, f_frsize=2**12)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    with pytest.raises(ValueError, match=r"up to 18\.4 GiB .* 0\.06 GiB are free.*num_workers=0"):
        machine.check_shared_memory(batch, 16, tmp_path)
    machine.check_shared_memory(batch, 0, tmp_path)
    machine.check_shared_memory(batch, 16, tmp_path / "elsewhere")  # no Linux
    room.f_bavail = 2 * 16 * batch // 2**12 - 1
    with pytest.raises(ValueError, match="num_workers=15"):
        machine.check_shared_memory(batch, 16, tmp_path)
    room.f_bavail += 2
    machine.check_shared_memory(batch, 16, tmp_path)


def test_workers_by_the_machine(tmp_path, monkeypatch):
    """One for each core but one, as far as their batches have room; a number is that number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    room = SimpleNamespace(f_bavail=2 * 20 * 1000, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    assert machine.workers(-1, 1000, tmp_path) == 11
    room.f_bavail = 2 * 3 * 1000 + 1
    assert machine.workers(-1, 1000, tmp_path) == 3
    assert machine.workers(-1, 10_000, tmp_path) == 0
    assert machine.workers(-1, 1000, tmp_path / "elsewhere") == 11
    assert [machine.workers(n, 1000, tmp_path) for n in (0, 7)] == [0, 7]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert machine.workers(-1, 1, tmp_path) == 0


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket/run"])
def test_a_bucket_is_no_folder(address, tmp_path, monkeypatch):
    """`Path` would make of it a folder `gs:` beside the user's own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"bucket/run is an address, .* Mount the bucket"):
        loop.train(small_config(), Path(address))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [
        ("gpu", (None, -1), ("{home}/performer-vit", machine.PROGRAMS)),
        ("tpu", (None, 99), ("{home}/performer-vit", 99)),
        ("gpu", ("/mine", -1), ("/mine", -1)),
        ("cpu", (None, -1), (None, -1)),
    ],
)
def test_programs_are_kept_but_those_of_cpus(tmp_path, monkeypatch, backend, given, expected):
    """What the user has said stays."""
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = [jax.config.values[name] for name in names]
    try:
        for name, value in zip(names, given, strict=True):
            jax.config.update(name, value)
        machine.keep_programs()
        folder, size = (jax.config.values[name] for name in names)
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
    assert folder == (expected[0] and expected[0].format(home=tmp_path))
    assert size == expected[1]


@pytest.mark.thorough
def test_a_bounded_cache_of_programs_works(tmp_path):
    """JAX needs filelock for it, and else goes on without a cache and a warning."""
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"
    environment = {
        "JAX_COMPILATION_CACHE_MAX_SIZE": "99999999",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True)
    assert any(path.name.endswith("-cache") for path in tmp_path.iterdir())
