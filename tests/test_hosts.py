"""Two processes of a run: what they do not agree on is said by both, before they wait for ever."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.small import PATIENCE
from vit.reports import metrics
from vit.run import hosts

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
from vit.run import devices
coordinator, process, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
devices.initialize(coordinator, 2, process)
from tests.small import SHALLOW, small_config
from vit.run import checkpoint, hosts
from vit import config, evaluate, train
from orbax.checkpoint import v1 as ocp

config.SIZES["XS"] = SHALLOW
hosts.PATIENCE = 2.0
settings = small_config()

def start(settings, workdir):
    try:
        train.train(settings, folder / workdir)
    except ValueError as error:
        print(json.dumps(str(error)), flush=True)

start(settings, "run" if process == 0 else "another")
start(dataclasses.replace(settings, seed=process), "run")
start(settings, "run")

def damaged(path, *args, load=ocp.load_checkpointables, **options):
    if path.endswith("/3"):
        raise OSError("input/output error")
    return load(path, *args, **options)

load = ocp.load_checkpointables
if process == 1:
    ocp.load_checkpointables = damaged
start(settings, "run")
ocp.load_checkpointables = load
print("evaluated", json.dumps(evaluate.evaluate_run(folder / "run")), flush=True)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What both have printed, and the folder: another workdir, another seed, then alike; at last
    one of them cannot read the newest checkpoint."""
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
    try:
        done = [process.communicate(timeout=PATIENCE) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], done
    return [out for out, _ in done], folder


def errors(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith('"')]


def test_both_say_that_one_has_another_folder(outputs):
    printed, folder = outputs
    for output in printed:
        assert "not all processes see the folder of the run" in errors(output)[0]
        assert f"process 1: {folder}/another" in errors(output)[0]
    assert not (folder / "another" / "config.json").exists()
    assert not (folder / "run" / "hosts").exists()


def test_both_say_that_one_has_another_flag(outputs):
    for output in outputs[0]:
        assert (
            "process 1, with config.seed: 1, and process 0 with config.seed: 0"
            in (errors(output)[1])
        )


def test_both_go_back_to_what_both_can_read(outputs):
    printed, folder = outputs
    for output in printed:
        assert len(errors(output)) == 2
        assert "/3 cannot be read (process 1: OSError: input/output error); going back" in output
    assert (folder / "run" / "unreadable" / "3").exists()
    assert sorted(p.name for p in (folder / "run" / "checkpoints").iterdir()) == ["2", "3"]
    log = metrics.read(folder / "run" / "metrics.jsonl")
    assert [r["step"] for r in log] == [1, 2, 3]


def test_several_processes_evaluate_what_was_trained(outputs):
    printed, folder = outputs
    last = metrics.read(folder / "run" / "metrics.jsonl")[-1]
    records = [json.loads(p.partition("evaluated ")[2].partition("\n")[0]) for p in printed]
    assert records[0] == records[1]
    assert records[0]["eval_examples"] == 360
    assert records[0]["eval_accuracy"] == last["eval_accuracy"]


def test_one_process_agrees_with_itself(tmp_path):
    assert hosts.gathered("é") == ["é"]
    assert hosts.failures("") == []
    assert hosts.failures("no") == ["no"]
    hosts.check_same({"seed": 1})
    hosts.check_same_folder(tmp_path / "none")
