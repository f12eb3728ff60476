"""A finished run is trained longer: the same bits as one planned so, never by accident."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.small import SHALLOW, final_state, sized, small_config, stop_at
from vit import config, train
from vit.reports import metrics
from vit.run import checkpoint, files, runs

EPOCHS = 3.2 / 44
SETTINGS = small_config(optim=config.Optim(learning_rate=1e-2, warmup_steps=1, ema=0.9))
"""Three steps."""


_shallow = sized(SHALLOW)


@pytest.fixture
def folder(tmp_path):
    """A run at step 3 of 3, as far as its folder says."""
    config.save(SETTINGS, tmp_path / "config.json")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    return tmp_path


def test_the_config_says_how_long_and_where_the_rate_starts_anew(folder):
    longer = runs.extend(folder, 2.0, SETTINGS)
    assert config.load(folder / "config.json") == longer
    assert longer == dataclasses.replace(SETTINGS, num_epochs=EPOCHS + 2, restarts=repr(EPOCHS))
    assert runs.restarts(longer, 44) == (3,)
    assert metrics.read(folder / "metrics.jsonl") == [{"step": 3, "num_epochs": EPOCHS + 2}]
    with pytest.raises(ValueError, match="no checkpoint can be read"):  # and no other config
        train.train(SETTINGS, folder)
    ten = dataclasses.replace(SETTINGS, num_epochs=10.0)
    config.save(ten, folder / "config.json")
    (folder / "checkpoints" / "440").mkdir()
    assert runs.extend(folder, 20).restarts == "10"
    (folder / "checkpoints" / "1320").mkdir()
    twice = runs.extend(folder, 0.5, ten)  # the config of the command that began it
    assert (twice.restarts, twice.num_epochs) == ("10,30", 30.5)
    assert runs.as_extended(ten, folder) == twice


def test_only_a_run_that_has_ended_is_extended_and_only_once(folder, tmp_path_factory):
    runs.extend(folder, EPOCHS)
    before = (folder / "config.json").read_bytes()
    refused = {
        "is at step 3 of 6: the same command without --extend trains it": (EPOCHS, None),
        "--extend=0: must be a number of epochs above 0": (0.0, None),
        "--extend=nan: must be": (float("nan"), None),
        "another config.*\n  seed: 0 -> 1": (EPOCHS, dataclasses.replace(SETTINGS, seed=1)),
    }
    for message, (epochs, given) in refused.items():
        with pytest.raises(ValueError, match=message):
            runs.extend(folder, epochs, given)
    (folder / "checkpoints" / "6").mkdir()
    with pytest.raises(ValueError, match="from step 6 on has 1; lower .* or raise .* --extend"):
        runs.extend(folder, 1 / 44)
    assert (folder / "config.json").read_bytes() == before
    empty = tmp_path_factory.mktemp("empty") / "none"
    with pytest.raises(ValueError, match="holds no run"):
        runs.extend(empty, 1.0)
    assert not empty.exists()


def test_a_run_that_another_process_trains_is_not_extended(folder):
    with files.alone(folder / "lock"), pytest.raises(ValueError, match="is in use by process"):
        runs.extend(folder, 1.0)


@pytest.mark.thorough
@pytest.mark.optimised("asserts bits")
def test_an_extended_run_is_bitwise_one_that_was_planned_so(tmp_path, monkeypatch):
    """Stopped within the extension, and resumed by the command that began the run."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    train.train(SETTINGS, parts)
    planned = runs.extend(parts, EPOCHS, SETTINGS)
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(SystemExit):
            train.train(SETTINGS, parts)
    assert checkpoint.found(parts) == [3, 4]
    record = train.train(SETTINGS, parts)
    assert (record["step"], record["epoch"]) == (6, 6 / 44)
    train.train(planned, whole)
    program = runs.restore(whole).program
    states = [final_state(program, path) for path in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    logs = [metrics.read(path / "metrics.jsonl") for path in (whole, parts)]
    assert [[r["step"] for r in log] for log in logs] == [[*range(1, 7)]] * 2
    assert [r["train_loss"] for r in logs[0]] == [r["train_loss"] for r in logs[1]]
    assert "eval_loss" in logs[1][2]  # at the end that it had first
