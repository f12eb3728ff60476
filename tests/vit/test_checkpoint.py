"""Checkpoints: what damage is noticed, what is passed over, and what a full disk leaves."""

import os
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.small import PATIENCE
from vit.reports import metrics
from vit.run import checkpoint


def state(seed=0):
    numbers = np.random.default_rng(seed).normal(size=(64, 65))
    return {
        "kernel": jnp.asarray(numbers, jnp.float32),
        "half": jnp.asarray(numbers[0], jnp.bfloat16),
        "key": jax.random.key(seed),
        "step": jnp.uint32(seed),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2; tests work on copies."""
    workdir = tmp_path_factory.mktemp("checkpoints")
    checkpoints = checkpoint.open_checkpoints(workdir)
    for step in (0, 1, 2):
        checkpoint.save(checkpoints, step, state(step))
    checkpoint.finish(checkpoints)
    return workdir


def test_a_checkpoint_of_parameters_alone_is_named(tmp_path):
    """As Flax's recipe makes it, nnx.state(model, nnx.Param)."""
    parameters = {"kernel": jnp.ones(3)}
    with checkpoint.open_checkpoints(tmp_path) as checkpoints:
        checkpoint.save(checkpoints, 1, parameters)
    whole = parameters | {"attention_fn": {"frequencies": jnp.ones((4, 2))}}
    with pytest.raises(ValueError, match="lacks the frequencies of attention, 1 arrays such as .*"):
        checkpoint.restore(tmp_path, whole)
    with pytest.raises(ValueError, match="cannot be read .(?!it lacks)"):
        checkpoint.restore(tmp_path, parameters | {"bias": jnp.ones(3)})


@pytest.mark.parametrize("name", ["a[1] *?é", "a\\b", "gs:", "a\nb", "\udcff", "x" * 250])
def test_any_name_of_a_folder_works(tmp_path, monkeypatch, name):
    """Nothing is written elsewhere but a link; it is made again when temporary files are gone."""
    link = tmp_path / "link"
    monkeypatch.setattr("tempfile.tempdir", str(link))
    link.mkdir()
    with checkpoint.open_checkpoints(tmp_path / name) as checkpoints:
        checkpoint.save(checkpoints, 1, state(1))
        checkpoints.saving.result()
        shutil.rmtree(link)
        link.mkdir()
        checkpoint.save(checkpoints, 2, state(2))
    assert restored(tmp_path / name) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"link", name}
    if links := list(link.iterdir()):
        links[0].unlink()
        links[0].symlink_to(tmp_path)
        with pytest.raises(ValueError, match="must be a link to .*: remove it"):
            restored(tmp_path / name)


def restored(workdir):
    step, found = checkpoint.restore(workdir, state())
    assert jax.random.key_data(found["key"]).tolist() == [0, step]
    np.testing.assert_array_equal(found["kernel"], state(step)["kernel"])
    np.testing.assert_array_equal(found["half"], state(step)["half"])
    return step


def damaged(saved, folder, change):
    """A copy in which the largest file of step 2, which holds the arrays, is changed."""
    shutil.copytree(saved, folder)
    files = (folder / "checkpoints" / "2").rglob("*")
    path = max((p for p in files if p.is_file()), key=lambda p: p.stat().st_size)
    change(path)
    return folder


def test_the_newest_two_are_kept_and_read(saved):
    assert checkpoint.complete_steps(saved) == [1, 2]
    assert restored(saved) == 2


def test_the_best_and_milestones_are_kept_beside_the_newest_two(tmp_path):
    """Accuracy rules; equal ones differ by their loss, and where there is none the loss rules."""
    log = tmp_path / "metrics.jsonl"
    accuracies = {1: 0.5, 2: 0.7, 3: 0.7, 5: 0.6}
    with checkpoint.open_checkpoints(tmp_path, keep_every=4) as checkpoints:
        for step in range(1, 9):
            checkpoint.save(checkpoints, step, state(step))
            metrics.append(log, {"step": step, "train_loss": 1.0})
            if step in accuracies:
                results = {"eval_accuracy": accuracies[step], "eval_loss": 9.0 - step}
                metrics.append(log, {"step": step, **results})
    assert checkpoint.complete_steps(tmp_path) == [3, 4, 7, 8]
    assert checkpoint.restore(tmp_path, state())[0] == 8
    assert checkpoint.restore(tmp_path, state(), "best")[0] == 3
    assert checkpoint.restore(tmp_path, state(), "4")[0] == 4
    assert metrics.best(log, range(3)) == 2
    assert metrics.best(log, [4, 7, 8]) is None
    with pytest.raises(ValueError, match="step=beste: give the number of a checkpoint, or best"):
        checkpoint.restore(tmp_path, state(), "beste")
    log.write_text("")
    metrics.append(log, {"step": 4, "eval_loss": 1.0})
    metrics.append(log, {"step": 7, "eval_loss": 0.5})
    assert checkpoint.restore(tmp_path, state(), "best")[0] == 7
    log.unlink()
    with pytest.raises(ValueError, match="has no checkpoint of an evaluated step"):
        checkpoint.restore(tmp_path, state(), "best")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: shutil.rmtree(path.parents[1]),
    ],
    ids=["half", "empty", "file missing", "folder missing"],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(saved, tmp_path, capsys, change):
    workdir = damaged(saved, tmp_path / "run", change)
    assert restored(workdir) == 1
    output = capsys.readouterr().out
    assert "checkpoints/2 cannot be read" in output
    assert "going back to step 1" in output
    assert (workdir / "checkpoints" / "2").exists()  # reading changes nothing
    checkpoint.set_aside(workdir, 1)
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["1"]
    assert (workdir / "unreadable" / "2").exists()


def test_damage_of_an_earlier_checkpoint_does_not_stand_in_the_way(saved, tmp_path):
    """Orbax would fail on it."""
    workdir = shutil.copytree(saved, tmp_path / "run")
    path = workdir / "checkpoints" / "1" / "_CHECKPOINT_METADATA"
    path.write_text("0")
    assert restored(workdir) == 2
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        checkpoint.save(checkpoints, 3, state(3))
    assert restored(workdir) == 3
    assert not path.exists()


def test_nothing_that_can_be_read(saved, tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        checkpoint.restore(tmp_path, state())
    workdir = damaged(saved, tmp_path / "run", lambda path: path.write_bytes(b""))
    shutil.rmtree(workdir / "checkpoints" / "1")
    with pytest.raises(ValueError, match="no checkpoint can be read:\n"):
        checkpoint.restore(workdir, state())


def test_reading_leaves_a_save_that_is_going_on_alone(saved, tmp_path):
    workdir = shutil.copytree(saved, tmp_path / "run")
    half = workdir / "checkpoints" / "3.orbax-checkpoint-tmp"
    half.mkdir()
    assert restored(workdir) == 2
    assert half.exists()
    with checkpoint.open_checkpoints(workdir):
        deadline = time.time() + PATIENCE
        while half.exists() and time.time() < deadline:  # in the background
            time.sleep(0.01)
    assert not half.exists()


FULL = """
import resource, signal, sys, time
from pathlib import Path
from vit.run import checkpoint
from tests.vit.test_checkpoint import state
workdir = Path(sys.argv[1])
checkpoints = checkpoint.open_checkpoints(workdir)
checkpoint.save(checkpoints, 1, state(1))
while not checkpoint.complete_steps(workdir):
    time.sleep(0.05)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    checkpoint.save(checkpoints, 2, state(2))
    checkpoint.finish(checkpoints)
except checkpoint.SaveError as error:
    print("SaveError", error)
"""


@pytest.mark.thorough
def test_a_disk_that_is_full_is_an_error_and_earlier_checkpoints_stay(tmp_path):
    """Files of more than 4 KiB cannot be written in that process: what a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert "SaveError a checkpoint could not be written" in done.stdout, done.stderr
    assert "The checkpoints of steps [1] are complete" in done.stdout
    assert restored(tmp_path) == 1
