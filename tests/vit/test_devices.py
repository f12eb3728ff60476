"""Eight devices and sharded parameters train as one device does."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import jax
import pytest

from tests.support.small import (
    CALIBRATED,
    SHALLOW,
    STEADY,
    assert_same_losses,
    small_config,
    train_batches,
)
from vit import config, train
from vit.reports import metrics
from vit.run import devices, runs, steps
from vit.task import opened

SETTINGS = small_config(attention=CALIBRATED, optim=STEADY, checkpoint_every=3)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The log of three steps on one device."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", SHALLOW)
        train.train(SETTINGS, workdir)
    return metrics.read(workdir / "metrics.jsonl")


@pytest.mark.thorough
def test_eight_devices_train_as_one(one_device, tmp_path, monkeypatch, eight_devices):
    """Batch, parameters (small arrays too) and tokens are each split in two."""
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)
    monkeypatch.setattr(devices, "SMALLEST", 1)
    settings = dataclasses.replace(SETTINGS, fsdp=2, seq=2)
    train.train(settings, tmp_path / "run")
    assert_same_losses(metrics.read(tmp_path / "run" / "metrics.jsonl"), one_device)
    run = runs.Run(settings, *opened(settings), devices.mesh(settings)).program
    shardings = [x.sharding for x in jax.tree.leaves(run.abstract)]
    assert {len(sharding.device_set) for sharding in shardings} == {8}
    assert sum(not x.is_fully_replicated for x in shardings) > len(shardings) / 2


def test_each_of_eight_devices_holds_an_eighth(monkeypatch, eight_devices):
    """Before and after a step; small arrays are whole."""
    monkeypatch.setitem(config.SIZES, "XS", config.SIZES["Ti"]._replace(depth=1))
    settings = small_config(fsdp=8)
    (dataset, task), mesh = opened(settings), devices.mesh(settings)
    run = steps.build(settings, task, 3, mesh)
    state, _ = run.train(run.initial(), next(train_batches(dataset, settings, mesh)))
    for when in (run.abstract, state):
        large = [x for x in jax.tree.leaves(when) if x.shape == (192, 768)]
        assert {x.sharding.shard_shape(x.shape) for x in large} == {(192, 96)}
    arrays = [x for x in jax.tree.leaves(state) if x.dtype == "float32"]
    held = Counter()
    for shard in (shard for x in arrays for shard in x.addressable_shards):
        held[shard.device] += shard.data.nbytes
    assert len(held) == 8
    assert max(held.values()) < 1.2 * sum(x.nbytes for x in arrays) / 8


def test_what_cannot_be_divided_is_named():
    in_parts = {"optim": config.Optim(accumulate=8)}
    for count, changes, message in [
        (3, {}, "batch_size=32 is not divisible by the 3 devices"),
        (8, {"fsdp": 3}, "config.fsdp=3 does not divide the 8 devices"),
        (8, {"seq": 3}, "config.seq=3 does not divide the 8 devices"),
        (8, {"seq": 4, "fsdp": 4}, "fsdp=4 does not divide the 8 devices / config.seq=4"),
        (8, in_parts, "not divisible by the 8 devices times config.optim.accumulate=8"),
    ]:
        with pytest.raises(ValueError, match=message):
            devices.mesh(small_config(**changes), [object()] * count)


def test_only_data_cross_the_network_between_slices():
    class Device:
        platform = device_kind = "cpu"
        process_index = 0

        def __init__(self, number):
            self.id, self.slice_index = number, number % 2

    both = [Device(i) for i in range(8)]
    mesh = devices.mesh(small_config(fsdp=2, seq=2), both)
    assert mesh.shape == {"data": 2, "fsdp": 2, "seq": 2}
    assert [{x.slice_index for x in part.flat} for part in mesh.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match="fsdp=4 x .*seq=2 does not divide the 4 devices of each"):
        devices.mesh(small_config(fsdp=4, seq=2), both)


def test_one_worker_of_a_slice_is_refused_instead_of_waiting_for_the_others(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    devices.check_alone()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b,c,d")
    with pytest.raises(ValueError, match="one of 4 of a TPU slice.*JAX_PLATFORMS=cpu.*; or so$"):
        devices.check_alone("; or so")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a")
    devices.check_alone()


def test_the_peak_is_that_of_the_longest_name_that_fits(monkeypatch):
    class Device:
        device_kind = ""

    monkeypatch.setattr(jax, "devices", lambda: [Device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    for kind, peak in [
        ("TPU v5 lite", 197e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
    ]:
        Device.device_kind = kind
        assert devices.peak_flops() == 4 * peak
    Device.device_kind = "cpu"
    assert devices.peak_flops() is None


def test_the_peak_of_memory_is_in_gib_on_linux_and_macos(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=3 * 2**30)
    monkeypatch.setattr(devices.resource, "getrusage", lambda _: usage)
    for platform, gib in (("darwin", 3.0), ("linux", 3.0 * 1024)):
        monkeypatch.setattr(devices.sys, "platform", platform)
        assert devices.memory()["memory_gib"] == gib
