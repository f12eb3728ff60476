"""Devices: one mesh (data, fsdp), where state and batches lie on it, and several processes.

A batch is split over all devices. The parameters, the optimiser's moments and the running mean are
split over the axis "fsdp" and repeated over "data"; `jit` gathers what a layer needs when it needs
it (fully sharded data parallelism, Rajbhandari et al. 2020). One process drives the devices of one
host; every process runs the same program.
"""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit.config import Config

SMALLEST = 4096
"""Arrays of fewer elements are not split: gathering them costs more than keeping them."""


class Peak(NamedTuple):
    """What a device can do at most, from the maker's data sheet."""

    flops: float
    """A second, of dense bfloat16 products."""
    bandwidth: float
    """Bytes a second to and from its memory."""
    gib: float
    """Its memory."""

    @property
    def memory(self) -> int:
        """In bytes."""
        return int(self.gib * 2**30)


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
"""By how the name of the device begins."""


def initialize(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a run; before anything else touches a device.

    On a TPU pod, under Slurm and under Open MPI nothing need be given.

    Args:
        coordinator: "host:port" of process 0.
        num_processes: how many there are.
        process_id: the number of this one.

    Raises:
        ValueError: when some of the three are given and some are not, or they cannot be.
    """
    if (coordinator, num_processes, process_id) != (None, None, None):
        given = (
            f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}"
        )
        if coordinator is None or num_processes is None or process_id is None:
            raise ValueError(
                f"{given}: give all three, or none where the cluster tells them (TPU pods, Slurm,"
                " Open MPI)"
            )
        if not re.fullmatch(r".+:[0-9]{1,5}", coordinator) or not 0 <= process_id < num_processes:
            raise ValueError(
                f"{given}: the coordinator is HOST:PORT, the processes are numbered from 0 to below"
                " their number"
            )
        jax.distributed.initialize(coordinator, num_processes, process_id)
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"--distributed found no cluster ({error}); give --coordinator=HOST:PORT,"
            " --num_processes and --process_id"
        ) from error


def define_flags() -> Callable[[], None]:
    """Flags by which a process joins others; the function that is returned joins, if they say so.

    That raises a ValueError as `initialize`, and as `check_alone` without these flags.
    """
    distributed = flags.DEFINE_bool("distributed", False, "one of several processes")
    coordinator = flags.DEFINE_string("coordinator", None, "host:port of process 0")
    num_processes = flags.DEFINE_integer("num_processes", None, "how many there are")
    process_id = flags.DEFINE_integer("process_id", None, "the number of this one, from 0")

    def join() -> None:
        processes = coordinator.value, num_processes.value, process_id.value
        if distributed.value or processes != (None, None, None):
            initialize(*processes)
        else:
            check_alone("; or start it on every worker, with --distributed")

    return join


def check_alone(otherwise: str = "") -> None:
    """Looks whether this host has devices of its own.

    Raises:
        ValueError: on one of several workers of a TPU slice, for there JAX would wait for the
            others without end; the message ends with what else can be done.
    """
    number = 1
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        with contextlib.suppress(Exception):  # no such cluster, or not as this version of JAX asks
            present = [c for c in (GkeTpuCluster, GceTpuCluster) if c.is_env_present()]
            number = present[0].get_process_count() if present else 1
    if number > 1:
        raise ValueError(
            f"this host is one of {number} of a TPU slice, whose devices start only together. Give"
            f" JAX_PLATFORMS=cpu to compute on its processor{otherwise}"
        )


def mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """All devices, or those given, as (data, fsdp).

    Raises:
        ValueError: when the devices cannot be divided so, or the batch not among them.
    """
    devices = jax.devices() if devices is None else devices
    count, parts = len(devices), config.optim.accumulate
    if count % config.fsdp:
        raise ValueError(f"config.fsdp={config.fsdp} does not divide the {count} devices")
    if config.data.batch_size % (count * parts):
        times = f" times config.optim.accumulate={parts}" if parts > 1 else ""
        raise ValueError(
            f"config.data.batch_size={config.data.batch_size} is not divisible by the {count}"
            f" devices{times}"
        )
    shape = (count // config.fsdp, config.fsdp)
    axes = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "fsdp"), axes, devices=devices)


def of_state(mesh: Mesh, state: Any) -> Any:
    """The sharding of each array: its longest axis that "fsdp" divides; small arrays are whole."""

    def sharding(x: Any) -> NamedSharding:
        fsdp = mesh.shape["fsdp"]
        axes = [axis for axis, size in enumerate(x.shape) if size % fsdp == 0]
        if fsdp == 1 or x.size < SMALLEST or not axes:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: x.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree.map(sharding, state)


def of_batch(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: the first axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def everywhere(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def put(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch on the devices, of which each process gives its own rows."""
    sharding = of_batch(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}


def memory() -> dict[str, float]:
    """The most memory that was in use so far, in GiB: of a device, and of this process.

    A backend that does not count (the CPU's) says nothing of the device.
    """
    gib = 2.0**30
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return ({"device_memory_gib": max(peaks) / gib} if peaks else {}) | {"memory_gib": host / gib}


def peak_of(kind: str) -> Peak | None:
    """Of a device, by its `device_kind`; None for one that `PEAK` does not know."""
    known = [name for name in PEAK if kind.startswith(name)]
    return PEAK[max(known, key=len)] if known else None


def peak_flops() -> float | None:
    """FLOP/s that all devices can do together, if that is known."""
    peak = peak_of(jax.devices()[0].device_kind)
    return peak and peak.flops * jax.device_count()
