"""Workers by the machine."""

import os
from types import SimpleNamespace

from vit import data


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
