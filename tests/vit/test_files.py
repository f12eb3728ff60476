"""Files in one piece, links that are not followed, damaged files, and locks."""

import errno
import os
import subprocess
import sys

import pytest

from vit.storage import files


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    for name in ("config.json", "config.json.tmp"):
        (tmp_path / name).symlink_to(target)
    files.write(tmp_path / "config.json", "{}")
    assert (tmp_path / "config.json").read_text() == "{}"
    assert target.read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "thesis.tex"]


def test_notes(tmp_path):
    path, record = tmp_path / "memory.json", {"temporary": 12, "rate": 1 / 3}
    assert files.read_json(path) is None
    files.write_json(path, record)
    assert files.read_json(path) == record
    for damaged in (path.read_text()[:-3], "[1, 2]", "", '{"a":' * 100_000):
        path.write_text(damaged)
        assert files.read_json(path) is None


def test_a_full_disk_names_the_file_which_stays_as_it_was(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "table.csv"
    files.write(path, "old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*table.csv'"):
        files.write(path, "a row")
    assert path.read_text() == "old"
    with pytest.raises(OSError, match="^no number$"), files.naming(tmp_path):
        raise OSError("no number")


def test_a_lock_follows_no_link(tmp_path):
    """It would empty the file that the link names."""
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="lock"), files.lock(tmp_path / "lock"):
        pass
    assert target.read_text() == "years of work"


HOLD = """
import sys, time
from pathlib import Path
from vit.storage import files
with files.lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_held_until_the_process_ends_even_if_killed(tmp_path):
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(ValueError, match=f"is in use by process {holder.pid} on .*; wait for it"),
        files.lock(lock),
    ):
        pass
    holder.kill()
    holder.communicate()
    with files.lock(lock):
        assert f"process {os.getpid()} on" in lock.read_text()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with files.lock(tmp_path / "lock"):
        assert "is not locked: the file system has no locks" in capsys.readouterr().out
