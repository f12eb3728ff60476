"""Speed of the samplers, and of structured products: a part of `experiments.benchmark`."""

from functools import partial
from typing import Any

import jax

from experiments.common import timing
from performer import couplings
from performer.couplings import structured

M, D, HEADS = 128, 64, 144
REPEATS = 7


def samplers() -> list[dict[str, Any]]:
    """Time each coupling."""
    rows = []
    keys = jax.random.split(jax.random.key(0), HEADS)
    for name in couplings.names():
        coupling, traces = couplings.get(name), []

        def draw(key, coupling=coupling, traces=traces):
            traces.append(key)
            return coupling(key, M, D)

        one = jax.jit(draw)
        for key in keys[:REPEATS]:
            one(key)
        traced, many = len(traces), jax.jit(jax.vmap(draw))
        best = timing.race({"one": partial(one, keys[0]), "many": partial(many, keys)}, REPEATS)
        rows.append(
            {
                "coupling": name,
                "one draw, ms": 1e3 * best["one"].wall,
                "144 draws, ms": 1e3 * best["many"].wall,
                "traces": traced,
            }
        )
    return rows


def products() -> list[dict[str, Any]]:
    """Time dense W x and structured W x, m = d."""
    rows = []
    dense, fast = jax.jit(lambda W, x: x @ W.T), jax.jit(lambda f, x: f.apply(x))
    for d in (256, 512, 1024, 2048, 4096):
        x = jax.random.normal(jax.random.key(1), (1024, d))
        for name in ("sorf", "fast-simrf"):
            frequencies = structured.draw(jax.random.key(0), d, d, simplex=name == "fast-simrf")
            calls = {"dense": partial(dense, frequencies.matrix(), x)}
            calls |= {"structured": partial(fast, frequencies, x)}
            best = timing.race(calls, REPEATS)
            rows.append(
                {
                    "coupling": name,
                    "d": d,
                    **{f"{kind}, ms": 1e3 * seconds.wall for kind, seconds in best.items()},
                    "dense / structured": best["dense"].wall / best["structured"].wall,
                }
            )
    return rows
