"""Eight devices, two processes and sharded parameters train as one device does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.small import CALIBRATED, SHALLOW, STEADY, small_config
from vit import checkpoint, config, devices, metrics, safety, train

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from vit import devices
arguments = json.loads(sys.argv[1])
if "coordinator" in arguments:
    devices.initialize(arguments["coordinator"], 2, arguments["process"])
from tests.small import CALIBRATED, SHALLOW, STEADY, small_config
from vit import config, steps, train

config.SIZES["XS"] = SHALLOW
for workdir, changes in arguments["runs"].items():
    train.train(small_config(attention=CALIBRATED, optim=STEADY, **changes), Path(workdir))
if arguments.get("shares"):
    from vit import data
    config.SIZES["XS"] = config.SIZES["Ti"]._replace(depth=1)
    settings = small_config(fsdp=8)
    dataset, mesh = data.load(settings.data), devices.mesh(settings)
    run = steps.build(settings, dataset, lambda step: 0.0, mesh)
    state, _ = run.train(run.initial(), next(train.train_batches(dataset, settings, mesh, 0)))
    for when in (run.abstract, state):
        print("shard", max(x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(when)
                           if x.shape == (192, 768)))
    arrays = [x for x in jax.tree.leaves(state) if x.dtype == "float32"]
    held = {device: 0 for device in jax.devices()}
    for shard in (shard for x in arrays for shard in x.addressable_shards):
        held[shard.device] += shard.data.nbytes
    print("held", max(held.values()), sum(x.nbytes for x in arrays))
    from experiments import ensemble
    config.SIZES["XS"] = SHALLOW
    settings = small_config(attention=CALIBRATED, optim=STEADY)
    seeds = ensemble.train(settings, [0, 1], Path(arguments["ensemble"]))
    print("ensemble", *(record["train_loss"][0] for record in seeds.records))
    print("spread", len(jax.tree.leaves(seeds.state)[0].devices()))
"""


def start(arguments, count=1):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "PYTHONPATH": ".",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def losses(workdir):
    return [
        (r["step"], r["train_loss"], r.get("eval_loss"), r.get("eval_accuracy"))
        for r in metrics.read(workdir / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", SHALLOW)
        train.train(small_config(attention=CALIBRATED, optim=STEADY), workdir)
    return losses(workdir)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert [x is None for x in a] == [x is None for x in b]
        np.testing.assert_allclose(
            [x for x in a if x is not None], [x for x in b if x is not None], rtol=1e-5
        )


def test_eight_devices_train_as_one(one_device, tmp_path):
    """Each copy of the parameters lies on four of them; a larger model's, on all eight."""
    runs = {str(tmp_path / "run"): {"fsdp": 4}}
    done = start({"runs": runs, "shares": True, "ensemble": str(tmp_path / "seeds")}, 8)
    output, errors = done.communicate(timeout=400)
    assert done.returncode == 0, errors
    assert_same(losses(tmp_path / "run"), one_device)
    words = [line.split() for line in output.splitlines()]
    (spread,) = [w[1] for w in words if w[0] == "spread"]
    assert spread == "2"  # two seeds, each on a device of its own
    (seed_0,) = [w[1:] for w in words if w[0] == "ensemble"]
    np.testing.assert_allclose(
        [float(x) for x in seed_0], [loss for _, loss, *_ in one_device], rtol=1e-5
    )
    shards = [w[1:] for w in words if w[0] == "shard"]
    assert shards[0] == shards[1] == ["(192,", "96)"]
    ((_, held, whole),) = [w for w in words if w[0] == "held"]
    assert int(held) < 1.2 * int(whole) / 8  # small arrays are whole


def test_two_processes_train_as_one_and_stop_together(one_device, tmp_path):
    """Two processes on loopback; SIGTERM to one stops both after the same step."""
    runs = {str(tmp_path / "run"): {"num_epochs": 400.2 / 44, "checkpoint_every": 1000}}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    pair = [
        start({"coordinator": coordinator, "process": process, "runs": runs})
        for process in range(2)
    ]
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.time() + 200
    while len(metrics.read(log)) < 5 and time.time() < deadline:
        time.sleep(0.05)
    pair[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=400) for process in pair]
    assert [process.returncode for process in pair] == [safety.STOPPED] * 2, outputs
    assert_same(losses(tmp_path / "run")[:3], one_device)
    last = metrics.read(log)[-1]["step"]
    assert 5 <= last < 400
    with checkpoint.open_checkpoints(tmp_path / "run") as checkpoints:
        assert [c.step for c in checkpoints.checkpoints] == [last]


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (3, {}, "batch_size=32 is not divisible by the 3 devices"),
        (8, {"fsdp": 3}, "config.fsdp=3 does not divide the 8 devices"),
        (
            8,
            {"optim": config.Optim(accumulate=8)},
            "not divisible by the 8 devices times config.optim.accumulate=8",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(monkeypatch, count, changes, message):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    with pytest.raises(ValueError, match=message):
        devices.mesh(small_config(**changes))


def test_processes_are_all_described_or_not_at_all(monkeypatch):
    for given in (("localhost:1", 2), (None, 4), (None, None, 0), ("", 2)):
        with pytest.raises(ValueError, match="give all three, or none"):
            devices.initialize(*given)
    for given in (("localhost", 2, 0), ("", 2, 0), ("a:1", 2, 2), ("a:1", 2, -1), ("a:1", 0, 0)):
        with pytest.raises(ValueError, match="--process_id=.*: the coordinator is HOST:PORT, the"):
            devices.initialize(*given)
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)


def test_the_peak_is_that_of_the_longest_name_that_fits(monkeypatch):
    class Device:
        device_kind = "TPU v5 lite"

    monkeypatch.setattr(jax, "devices", lambda: [Device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert devices.peak_flops() == 4 * 197e12
    Device.device_kind = "cpu"
    assert devices.peak_flops() is None
