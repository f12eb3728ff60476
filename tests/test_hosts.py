"""Several processes of a run train as one; what they do not agree on is refused by all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from tests.small import CALIBRATED, PATIENCE, SHALLOW, STEADY, assert_same_losses, small_config
from vit import config, train
from vit.reports import metrics
from vit.run import checkpoint, devices, safety

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
import jax
coordinator, process, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(coordinator, 2, process)
from tests.small import CALIBRATED, SHALLOW, STEADY, small_config
from vit.run import checkpoint
from vit import config, evaluate, train

config.SIZES["XS"] = SHALLOW
settings = small_config(attention=CALIBRATED, optim=STEADY)

def start(settings, workdir):
    try:
        train.train(settings, folder / workdir)
    except ValueError as error:
        print(json.dumps(str(error)), flush=True)

start(dataclasses.replace(settings, seed=process), "run")
start(settings, "run")

print("evaluated", json.dumps(evaluate.evaluate_run(folder / "run")), flush=True)
start(dataclasses.replace(settings, num_epochs=400.2 / 44, checkpoint_every=1000), "long")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What two processes on loopback have printed, and their folder.

    They are given different seeds, then the same. In a long run SIGTERM to one stops both.
    """
    folder = tmp_path_factory.mktemp("hosts")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, coordinator, str(process), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": "."},
        )
        for process in range(2)
    ]
    log, deadline = folder / "long" / "metrics.jsonl", time.time() + PATIENCE
    try:
        while len(metrics.read(log)) < 5 and pair[1].poll() is None and time.time() < deadline:
            time.sleep(0.05)
        pair[1].send_signal(signal.SIGTERM)
        done = [process.communicate(timeout=PATIENCE) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [safety.STOPPED] * 2, done
    return [out for out, _ in done], folder


def errors(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith('"')]


@pytest.mark.thorough
def test_both_name_another_flag_and_evaluate_alike(outputs):
    printed, folder = outputs
    for output in printed:
        (error,) = errors(output)
        assert "process 1, with config.seed: 1, and process 0 with config.seed: 0" in error
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == ["2", "3"]
    log = metrics.read(folder / "run" / "metrics.jsonl")
    assert [r["step"] for r in log] == [1, 2, 3]
    records = [json.loads(p.partition("evaluated ")[2].partition("\n")[0]) for p in printed]
    assert records[0] == records[1]
    assert records[0]["eval_examples"] == 360
    assert records[0]["eval_accuracy"] == log[-1]["eval_accuracy"]


@pytest.mark.thorough
def test_two_processes_train_as_one_and_stop_together(outputs, tmp_path, monkeypatch):
    """Both stop after the same step."""
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)
    train.train(small_config(attention=CALIBRATED, optim=STEADY), tmp_path / "run")
    workdir = outputs[1] / "long"
    alone, log = (metrics.read(path / "metrics.jsonl") for path in (tmp_path / "run", workdir))
    assert_same_losses(log[:3], alone)
    assert 5 <= log[-1]["step"] < 400
    assert checkpoint.found(workdir) == [log[-1]["step"]]


def test_a_second_process_that_differs_is_refused(monkeypatch):
    """As process 1 of two; process 0 has seed 0."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(devices, "gathered", lambda text: ['{"seed": 0}', text])
    devices.check_same({"seed": 0})
    with pytest.raises(ValueError, match="process 1, with seed: 1, and process 0 with seed: 0"):
        devices.check_same({"seed": 1})
