"""Workers by the machine, and folders of runs that are none."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.small import small_config
from vit import data
from vit.run import loop


def test_workers_by_the_machine(tmp_path, monkeypatch):
    """One for each core but one, or the given number, as far as their batches have room."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    room = SimpleNamespace(f_bavail=(4 * 20 + 2) * 1000, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    assert data.num_workers(-1, 1000, tmp_path) == 11
    room.f_bavail = (4 * 3 + 2) * 1000 + 1
    assert data.num_workers(-1, 1000, tmp_path) == 3
    assert data.num_workers(-1, 10_000, tmp_path) == 0
    assert data.num_workers(-1, 1000, tmp_path / "elsewhere") == 11
    assert [data.num_workers(n, 1000, tmp_path) for n in (0, 2, 7)] == [0, 2, 3]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert data.num_workers(-1, 1, tmp_path) == 0


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket/run"])
def test_a_bucket_is_no_folder(address, tmp_path, monkeypatch):
    """`Path` would make of it a folder `gs:` beside the user's own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"bucket/run is an address, .* Mount the bucket"):
        loop.train(small_config(), Path(address))
    assert not list(tmp_path.iterdir())
