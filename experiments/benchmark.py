"""Speed of the samplers.

    python -m experiments.benchmark couplings

Warm and jitted, keys as arguments. Prints milliseconds of one draw (m = 128, d = 64) and of 144 at
once (12 layers x 12 heads), the best of 7; how often the sampler was traced over all keys; and the
ratio of dense to structured products of 1,024 vectors with d frequencies, implementations in turn.
"""

import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from experiments import report
from performer import couplings, structured

M, D, HEADS = 128, 64, 144
REPEATS = 7


def best_of(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Best wall time of each call in seconds; the calls take turns, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: min(t) for name, t in times.items()}


def samplers() -> list[dict[str, Any]]:
    """One row for each coupling."""
    rows = []
    keys = jax.random.split(jax.random.key(0), HEADS)
    for name in couplings.names():
        coupling, traces = couplings.get(name), []

        def draw(key, coupling=coupling, traces=traces):
            traces.append(None)
            return coupling(key, M, D)

        one, many = (
            jax.jit(draw),
            jax.jit(jax.vmap(lambda key, coupling=coupling: coupling(key, M, D))),
        )
        best = best_of({"one": partial(one, keys[0]), "many": partial(many, keys)})
        for key in keys[:REPEATS]:
            one(key)
        rows.append(
            {
                "coupling": name,
                "one draw, ms": 1e3 * best["one"],
                "144 draws, ms": 1e3 * best["many"],
                "traces": len(traces),
            }
        )
    return rows


def products() -> list[dict[str, Any]]:
    """Dense W x against structured W x, m = d."""
    rows = []
    for d in (256, 512, 1024, 2048, 4096):
        x = jax.random.normal(jax.random.key(1), (1024, d))
        for name in ("sorf", "fast-simrf"):
            frequencies = structured.draw(jax.random.key(0), d, d, simplex=name == "fast-simrf")
            W = frequencies.matrix()
            dense = jax.jit(lambda W, x: x @ W.T)
            fast = jax.jit(lambda f, x: f.apply(x))
            best = best_of({"dense": partial(dense, W, x), "fast": partial(fast, frequencies, x)})
            rows.append(
                {
                    "coupling": name,
                    "d": d,
                    "dense, ms": 1e3 * best["dense"],
                    "structured, ms": 1e3 * best["fast"],
                    "dense / structured": best["dense"] / best["fast"],
                }
            )
    return rows


def main() -> None:
    """The command line."""
    if sys.argv[1:] != ["couplings"]:
        sys.exit("usage: python -m experiments.benchmark couplings")
    device = jax.devices()[0]
    print(
        f"{device.device_kind} ({jax.device_count()} devices), {platform.machine()},"
        f" jax {jax.__version__}\n"
    )
    out = Path("results/benchmark")
    print(report.table(samplers(), out / "samplers"))
    print(report.table(products(), out / "products"))


if __name__ == "__main__":
    main()
