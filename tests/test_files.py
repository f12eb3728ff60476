"""Files in one piece, links that are not followed, and files that are missing or damaged."""

import errno
import os

import pytest

from vit import files


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target = tmp_path / "thesis.tex"
    target.write_text("years of work")
    for name in ("config.json", "config.json.tmp"):
        (tmp_path / name).symlink_to(target)
    files.write(tmp_path / "config.json", "{}")
    assert (tmp_path / "config.json").read_text() == "{}"
    assert target.read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "thesis.tex"]


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    files.write(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"


def test_notes(tmp_path):
    path, record = tmp_path / "memory.json", {"temporary": 12, "rate": 1 / 3}
    assert files.noted(path) is None
    files.note(path, record)
    assert files.noted(path) == record
    for damaged in (path.read_text()[:-3], "[1, 2]", ""):
        path.write_text(damaged)
        assert files.noted(path) is None
    path.unlink()
    os.mkfifo(path)
    assert files.noted(path) is None


def test_what_is_neither_file_nor_folder_is_named(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    files.check(tmp_path)
    os.mkfifo(tmp_path / "a" / "pipe")
    with pytest.raises(ValueError, match="a/pipe is neither a file nor a folder"):
        files.check(tmp_path)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*table.csv'"):
        files.write(tmp_path / "table.csv", "a row")


def test_an_error_without_a_number_keeps_its_words(tmp_path):
    with (
        pytest.raises(OSError, match="^a checkpoint could not be written$"),
        files.naming(tmp_path),
    ):
        raise OSError("a checkpoint could not be written")
