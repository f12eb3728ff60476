"""Speed of the samplers, and of structured products: a part of `experiments.benchmark`."""

from functools import partial
from typing import Any

import jax

from experiments.common import timing
from performer import couplings, structured

M, D, HEADS = 128, 64, 144
REPEATS = 7


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
        best = timing.race({"one": partial(one, keys[0]), "many": partial(many, keys)}, REPEATS)
        for key in keys[:REPEATS]:
            one(key)
        rows.append(
            {
                "coupling": name,
                "one draw, ms": 1e3 * best["one"].wall,
                "144 draws, ms": 1e3 * best["many"].wall,
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
            best = timing.race(
                {"dense": partial(dense, W, x), "fast": partial(fast, frequencies, x)}, REPEATS
            )
            rows.append(
                {
                    "coupling": name,
                    "d": d,
                    "dense, ms": 1e3 * best["dense"].wall,
                    "structured, ms": 1e3 * best["fast"].wall,
                    "dense / structured": best["dense"].wall / best["fast"].wall,
                }
            )
    return rows
