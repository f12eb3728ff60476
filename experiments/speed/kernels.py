"""The kernels of `implementation="pallas"`, on a TPU; `experiments.benchmark` runs it there.

First its output and gradients are compared with those without the kernel, then both are timed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import timing
from experiments.speed import baselines
from experiments.speed.attention import (
    BOTH,
    FORWARD,
    Result,
    Scale,
    measurements,
    program,
    row,
    versus,
)

SIZES = ((64, 197, 12, ""), (4, 4096, 12, ""), (4, 4096, 12, ", causal"))
"""(batch, tokens, heads, kind)"""
DIFFERENCE = 0.03
"""What roundings to bfloat16 may make of the output and the gradients, relative to their norm."""


def differences(kernel: Any, without: Any) -> list[float]:
    """Relative differences of the output, and of the gradients if they are given.

    Raises:
        ValueError: where one is more than bfloat16 can make it: times of wrong values mean nothing.
    """
    found = []
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(without), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        found.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
    if not max(found) < DIFFERENCE:
        raise ValueError(
            f"the kernel's output and gradients differ by {found} from those without it, more than"
            f" {DIFFERENCE}: do not use implementation='pallas' here, and report it"
        )
    return found


def tpu(scale: Scale) -> tuple[list[dict], list[dict]]:
    """The kernel for TPU: its values beside those without it, then ratios of times, and times."""
    times, rows = [], []
    for batch, full, heads, kind in SIZES:
        args = baselines.inputs(max(full // scale.divisor, 16), heads, batch, jnp.bfloat16)
        names = [f"{name}{kind}" for name in ("kernel", "ours")]
        for which in (FORWARD, BOTH):
            programs = {name: program(name, which, args) for name in names}
            largest = max(differences(*(programs[name].call() for name in names)))
            case = f"{which}, bfloat16, {batch} x {args[0].shape[1]} x {heads}"
            rows.append(row(f"relative difference: {' / '.join(names)}", case, largest))
            best = timing.race(
                {name: p.call for name, p in programs.items()}, scale.repeats, queued=20
            )
            results = {name: Result(best[name], programs[name]) for name in names}
            rows.append(versus(" / ".join(reversed(names)), case, *reversed(best.values())))
            times += measurements(results, which, args[0].shape)
    return rows, times
