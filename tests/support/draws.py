"""Draws of many couplings by one program, in which they share what they have in common."""

from functools import cache

import jax
import numpy as np

from performer import couplings, testing

BATCH = 2000


@cache
def drawn(names, m, d, draws, seed=0):
    """{name: (draws, m, d)} in float32, the same keys for all: those of `testing.samples`."""

    @jax.jit
    @jax.vmap
    def draw(key):
        return [couplings.get(name)(key, m, d) for name in names]

    keys = jax.random.split(jax.random.key(seed), draws)
    batches = [draw(keys[i : i + BATCH]) for i in range(0, draws, BATCH)]
    return dict(zip(names, map(np.concatenate, zip(*batches, strict=True)), strict=True))


def serve(monkeypatch, names, m, d, draws):
    """Let the assertions of `performer.testing` have these draws."""
    table = {couplings.get(name): values for name, values in drawn(names, m, d, draws).items()}

    def given(coupling, *asked):
        assert asked == (m, d, draws, 0)
        return table[coupling]

    monkeypatch.setattr(testing.couplings, "_drawn", given)
