"""Speed, memory and exactness of `performer_attention`; see `python -m experiments.benchmark`.

m = 128 frequencies, heads of 64, batch 1, float32. A pass is the output ("forward") or the output
and the gradients with respect to query, key and value ("forward + backward"), one compiled program,
the same for every implementation of `experiments.baselines`; see `experiments.timing` for how they
are timed. Every row C1 to C11 is a ratio with a target, which is one for a CPU.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import baselines, report, timing
from performer import couplings, performer_attention
from vit import config, model

M, D = 128, 64
ROOF_G1 = 0.187e-3
"""Seconds: the memory traffic of a fused forward pass (B8 H12 N16384, bfloat16) on an H200."""


def ours(query, key, value, frequencies, *, is_causal=False):
    """What is measured."""
    return performer_attention(query, key, value, frequencies, is_causal=is_causal)


IMPLEMENTATIONS = {
    "ours": ours,
    "public": baselines.public,
    "exact": baselines.exact,
    "ours, causal": partial(ours, is_causal=True),
    "public, causal": partial(baselines.public, is_causal=True),
    "public, causal, reversed": baselines.public_reversed,
    "exact, causal": partial(baselines.exact, is_causal=True),
}
FORWARD, BOTH = "forward", "forward + backward"


def inputs(tokens: int, heads: int, batch: int = 1, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Query, key, value, frequencies, and the gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, tokens, heads, D)
    query, key, value, gradient = (jax.random.normal(k, shape, dtype) for k in keys[:4])
    return [query, key, value, couplings.get("pm")(keys[4], M, D), gradient]


def programs(names: Sequence[str], which: str, args: list[jax.Array]) -> dict[str, timing.Program]:
    """The implementations of these names, compiled."""

    def forward_backward(function, query, key, value, frequencies, gradient):
        of_tokens = partial(_frequencies_last, function, frequencies)
        output, pull = jax.vjp(of_tokens, query, key, value)
        return output, pull(gradient)

    if which == FORWARD:
        return {name: timing.compiled(IMPLEMENTATIONS[name], *args[:4]) for name in names}
    return {
        name: timing.compiled(partial(forward_backward, IMPLEMENTATIONS[name]), *args)
        for name in names
    }


def _frequencies_last(function, frequencies, query, key, value):
    return function(query, key, value, frequencies)


class Bench:
    """All measurements of a run: those asked for again are not made again."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []
        self.best: dict[tuple, timing.Best] = {}
        self.memory: dict[tuple, int] = {}
