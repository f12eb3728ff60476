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
        draw = partial(couplings.get(name), m=M, d=D)
        one, many = jax.jit(draw), jax.jit(jax.vmap(draw))
        best = timing.race({"one": partial(one, keys[0]), "many": partial(many, keys)}, REPEATS)
        times = {"one draw, ms": best["one"], f"{HEADS} draws, ms": best["many"]}
        rows.append({"coupling": name} | {k: 1e3 * seconds.wall for k, seconds in times.items()})
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
            row = {"coupling": name, "d": d}
            row |= {f"{kind}, ms": 1e3 * seconds.wall for kind, seconds in best.items()}
            ratio = best["dense"].wall / best["structured"].wall
            rows.append(row | {"dense / structured": ratio})
    return rows
