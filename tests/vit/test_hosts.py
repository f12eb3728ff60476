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

from tests.support.small import PATIENCE, SHALLOW, STEADY, assert_same_losses, small_config
from vit import config, evaluate, train
from vit.reports import metrics
from vit.run import checkpoint, devices, safety

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
import jax
coordinator, process, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(coordinator, 2, process)
from tests.support.small import SHALLOW, STEADY, small_config
from vit import config, evaluate, train

config.SIZES["XS"] = SHALLOW
settings = small_config(optim=STEADY, num_epochs=400.2 / 44, checkpoint_every=1000)
try:
    train.train(dataclasses.replace(settings, seed=process), folder / "run")
except ValueError as error:
    print(error)
try:
    train.train(settings, folder / "run")
except SystemExit as stopped:
    print(json.dumps(evaluate.evaluate_on(folder / "run", {})))
    print(json.dumps(evaluate.evaluate_run(folder / "run")), flush=True)
    sys.exit(stopped.code)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Output of two processes on loopback, and the folder of their run.

    They are given different seeds, then the same. SIGTERM to one stops both; they then evaluate.
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
    log, deadline = folder / "run" / "metrics.jsonl", time.time() + PATIENCE
    try:
        while len(metrics.read(log)) < 5 and pair[1].poll() is None and time.time() < deadline:
            time.sleep(0.05)
        pair[1].send_signal(signal.SIGTERM)
        done = [process.communicate(timeout=PATIENCE) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [safety.STOPPED] * 2, done
    return [out for out, _ in done], folder / "run"


@pytest.mark.thorough
def test_both_name_another_flag_and_evaluate_alike(outputs, monkeypatch):
    """As one process does."""
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)
    printed, workdir = outputs
    for output in printed:
        assert "process 1, with config.seed: 1, and process 0 with config.seed: 0" in output
    one, other = (json.loads(output.splitlines()[-1]) for output in printed)
    assert one == other
    assert one == pytest.approx(evaluate.evaluate_run(workdir), rel=1e-5)
    for output in printed:  # on other data
        assert json.loads(output.splitlines()[-2]) == pytest.approx(one, rel=1e-5)


@pytest.mark.thorough
def test_two_processes_train_as_one_and_stop_together(outputs, tmp_path, monkeypatch):
    """Both stop after the same step."""
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)
    train.train(small_config(optim=STEADY, checkpoint_every=3), tmp_path / "run")
    logs = [metrics.read(path / "metrics.jsonl") for path in (tmp_path / "run", outputs[1])]
    assert_same_losses(logs[1][:3], logs[0])
    last = logs[1][-1]["step"]
    assert 5 <= last < 400
    assert checkpoint.complete_steps(outputs[1]) == [last]


def test_a_second_process_that_differs_is_refused(monkeypatch):
    """As process 1 of two; process 0 has seed 0."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(devices, "gathered", lambda text: ['{"seed": 0}', text])
    devices.check_same({"seed": 0})
    with pytest.raises(ValueError, match="process 1, with seed: 1, and process 0 with seed: 0"):
        devices.check_same({"seed": 1})
