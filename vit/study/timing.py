"""Timing of benchmarks: compiled ahead of time, in one process, implementations in turn.

The best of several repeats is kept, of wall time and of CPU time over all threads of the process.
CPU time varies less when other programs use the machine; with an accelerator it is the host's.
Compile time and temporary memory are reported apart.
"""

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from vit.storage import machine


class Program(NamedTuple):
    """A compiled function with its arguments."""

    call: Callable[[], Any]
    compile_seconds: float
    temporary_bytes: int
    """Memory that the program needs in addition to its arguments and results."""


class Best(NamedTuple):
    """The best repeat, in seconds for one call."""

    wall: float
    cpu: float


def hardware() -> str:
    """Describe the hardware, its load and the version of JAX."""
    device = jax.devices()[0]
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{device.device_kind} ({jax.device_count()} devices), {platform.machine()},"
        f" {machine.cores()} cores{load}, jax {jax.__version__}"
    )


def compiled(function: Callable[..., Any], *args: Any) -> Program:
    """Trace and compile `function` of `args` without running it."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return Program(partial(program, *args), seconds, memory.temp_size_in_bytes)


def race(calls: dict[str, Callable[[], Any]], repeats: int, queued: int = 1) -> dict[str, Best]:
    """Time the calls in turn, `repeats` times.

    In its turn a call is made twice, and the second one counts: the program before leaves caches
    and allocator in another state, which can cost tens of percent. A repeat is `queued` calls in a
    row and awaits the last: an accelerator can be faster than the host that starts the programs.
    """
    times: dict[str, list[Best]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            jax.block_until_ready(call())
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(queued - 1):
                call()
            jax.block_until_ready(call())
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            times[name].append(Best(wall / queued, cpu / queued))
    return {name: Best(*map(min, zip(*best, strict=True))) for name, best in times.items()}
