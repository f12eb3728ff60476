"""Devices: the mesh (data, fsdp, seq), sharding of state and batches, and several processes.

A batch is split over "data" and "fsdp", and the tokens of an example over "seq" (by the model).
Parameters, moments and running mean are split over "fsdp" and repeated over the others; `jit`
gathers the parameters of each layer when needed (fully sharded data parallelism, Rajbhandari et al.
2020). Each host runs one process of the same program.
"""

import json
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit.config import TrainConfig

SMALLEST = 4096
"""Arrays with fewer elements are not split: gathering them costs more than keeping them."""


class Peak(NamedTuple):
    """Peak performance of a device, by its data sheet."""

    flops: float
    """Operations per second of dense bfloat16 products."""
    bandwidth: float
    """Bytes per second of memory traffic."""
    gib: float
    """Memory in GiB."""


PEAK = {
    "TPU v4": Peak(275e12, 1228e9, 32),
    "TPU v5 lite": Peak(197e12, 819e9, 16),
    "TPU v5": Peak(459e12, 2765e9, 95),
    "TPU v6 lite": Peak(918e12, 1640e9, 32),
    "TPU7x": Peak(1153e12, 3690e9, 96),  # a device of JAX is half a chip
    "NVIDIA A100": Peak(312e12, 1555e9, 40),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2039e9, 80),
    "NVIDIA L40S": Peak(362e12, 864e9, 45),
    "NVIDIA H100": Peak(989e12, 3352e9, 79),
    "NVIDIA H100 PCIe": Peak(756e12, 2039e9, 79),
    "NVIDIA H100 NVL": Peak(835e12, 3938e9, 93),
    "NVIDIA H200": Peak(989e12, 4800e9, 141),
    "NVIDIA H200 NVL": Peak(835e12, 4800e9, 141),
    "NVIDIA B200": Peak(2250e12, 8000e9, 180),
    "NVIDIA GB200": Peak(2500e12, 8000e9, 185),
}
"""Peaks by prefix of `device_kind`."""


class Hosts(NamedTuple):
    """Flags of a run in several processes; TPU pods, Slurm and Open MPI need the first alone.

    Args:
        distributed: run as one of several processes.
        coordinator: host:port of process 0.
        num_processes: number of processes.
        process_id: number of this process, from 0.
    """

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


ALONE = Hosts()


def join(hosts: Hosts) -> None:
    """Join the processes of a run.

    Raises:
        ValueError: as `jax.distributed.initialize`, or for one process as `check_alone`.
    """
    if hosts == ALONE:
        return check_alone("; or start it on every worker, with --distributed")
    try:
        jax.distributed.initialize(*hosts[1:])
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"{error}: give --coordinator=HOST:PORT, --num_processes and --process_id, or"
            " --distributed alone on a cluster (TPU pods, Slurm, Open MPI)"
        ) from error


def check_alone(otherwise: str = "") -> None:
    """Raise ValueError on one of several workers of a TPU slice, where JAX waits for all of them.

    TPU_WORKER_HOSTNAMES lists the workers; the message ends with `otherwise`.
    """
    number = len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(","))
    if number > 1 and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise ValueError(
            f"this host is one of {number} of a TPU slice, whose devices start only together. Set"
            f" JAX_PLATFORMS=cpu to compute on the CPU{otherwise}"
        )


def agree(value: bool) -> bool:
    """Return the value of process 0."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def gathered(text: str) -> list[str]:
    """Return the text of every process; all of them must call this."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(content)))
    padded = np.pad(content, (0, 1 + int(lengths.max()) - len(content)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def failures(reason: str) -> list[str]:
    """Return the reasons of all processes that failed; "" stands for success."""
    one = jax.process_count() == 1
    reasons = enumerate(gathered(reason))
    return [text if one else f"process {number}: {text}" for number, text in reasons if text]


def check_same(values: dict[str, Any]) -> None:
    """Raise ValueError in all processes unless they have the same values (of JSON types)."""
    first, *others = map(json.loads, gathered(json.dumps(values)))
    different = [
        f"process {number}, with {name}: {other.get(name)!r:.200}, and process 0 with {name}:"
        f" {value!r:.200}"
        for number, other in enumerate(others, 1)
        for name, value in first.items()
        if other.get(name) != value
    ]
    if different:
        raise ValueError(
            "the processes were not started with the same command, data or packages:\n  "
            + "\n  ".join(different)
        )


def mesh(config: TrainConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return the mesh (data, fsdp, seq) of all devices, or of those given.

    The devices of "fsdp" and "seq" are of one slice of TPUs; "data" runs over all slices.

    Raises:
        ValueError: when the number of devices does not fit `fsdp`, `seq` or the batch size.
    """
    devices = jax.devices() if devices is None else devices
    seq, accumulated, there = config.seq, config.optim.accumulate, f"the {len(devices)} devices"
    if (jax.local_device_count() % seq and jax.process_count() > 1) or len(devices) % seq:
        raise ValueError(f"config.seq={seq} does not divide {there}, or those of a process")
    count = len(devices) // seq
    there += f" / config.seq={seq}" * (seq > 1)
    if count % config.fsdp:
        raise ValueError(f"config.fsdp={config.fsdp} does not divide {there}")
    if config.data.batch_size % (count * accumulated):
        times = f" times config.optim.accumulate={accumulated}" * (accumulated > 1)
        raise ValueError(
            f"config.data.batch_size={config.data.batch_size} is not divisible by {there}{times}"
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if len(devices) // slices % (config.fsdp * seq):
        raise ValueError(
            f"config.fsdp={config.fsdp} x config.seq={seq} does not divide the"
            f" {len(devices) // slices} devices of each of {slices} slices"
        )
    shape = (count // config.fsdp // slices, config.fsdp, seq)
    axes = ("data", "fsdp", "seq"), (AxisType.Auto,) * 3
    if slices == 1:
        return jax.make_mesh(shape, *axes, devices=devices)
    grid = mesh_utils.create_hybrid_device_mesh(shape, (slices, 1, 1), devices)
    return Mesh(grid, *axes)


def of_state(mesh: Mesh, state: Any) -> Any:
    """Return the sharding of each array: the longest axis that "fsdp" divides, or none."""

    def sharding(x: Any) -> NamedSharding:
        fsdp = mesh.shape["fsdp"]
        axes = [axis for axis, size in enumerate(x.shape) if size % fsdp == 0]
        if fsdp == 1 or x.size < SMALLEST or not axes:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: x.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree.map(sharding, state)


def of_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: its first axis over "data" and "fsdp"."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return a batch on the devices; each process passes its own rows."""
    sharding = of_batch(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}


def memory() -> dict[str, float]:
    """Return the peak memory in GiB of this process, and of a device if its backend counts it."""
    gib = 2.0**30
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return ({"device_memory_gib": max(peaks) / gib} if peaks else {}) | {"memory_gib": host / gib}


def peak_of(kind: str) -> Peak | None:
    """Return the peak of a device by its `device_kind`; None if it is not in `PEAK`."""
    known = [name for name in PEAK if kind.startswith(name)]
    return PEAK[max(known, key=len)] if known else None


def peak_flops() -> float | None:
    """Return the peak FLOP/s of all devices together, if known."""
    peak = peak_of(jax.devices()[0].device_kind)
    return peak and peak.flops * jax.device_count()
