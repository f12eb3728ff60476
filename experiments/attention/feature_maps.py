"""Feature maps of linear attention, as they are and trained by attention transfer.

A^ = phi(q) phi(k)^T, rows divided by their sums, with m features of queries and keys that are
multiplied by h^(-1/4). Each head has maps of its own, for queries and for keys:

    T2R            phi(x) = relu(W x + b)                          Kasai et al. 2021
    Hedgehog       phi(x) = [softmax(W x + b), softmax(-W x - b)]  Zhang et al. 2024; W = I at first
    Hedgehog, exp  phi(x) = [exp(W x + b), exp(-W x - b)]          the same without normalising
    positive       calibrated frequencies: one W for queries and keys, exp(W k - |k|^2 / 2 + weight)
    free           that, then W for queries, W for keys and weights apart

All are trained at the rate 0.1: of 0.005, 0.02, 0.05 and 0.1 it ends with the lowest divergence
for each, on digits with m = 32. If m is not 2 h, Hedgehog starts from rows of I and of random
rotations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import couplings
from performer.attention.calibration import fit, fold, transform_keys
from performer.attention.refinement import Sample, performer_estimate
from performer.typing import Key

COUPLING = "orf-antithetic"
TINY = 1e-6
"""Added to the sums of rows: with T2R they may be 0."""


class Method(NamedTuple):
    """A feature map, and how it is trained."""

    start: Callable[[Key, Array, int], tuple[Any, Any]]
    """(key, moments, m) -> parameters and what stays, of all heads."""
    estimate: Callable[..., Float[Array, "b n t s"]]
    """(parameters, what stays, sample, is_causal) -> A^."""
    loss: str = ""
    """Options of `performer.refinement.transfer`; not trained if empty."""


def _estimate(features: Callable, maps: Any, fixed: Any, sample: Sample, is_causal: bool = False):
    """Return phi(q) phi(k)^T, rows divided by their sums."""
    factor = sample.query.shape[-1] ** -0.25
    of_query, of_key = features(maps, fixed, factor * sample.query, factor * sample.key)
    scores = jnp.einsum("btnm,bsnm->bnts", of_query, of_key)
    scores = jnp.where(sample.pairs(is_causal), scores, 0)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)


def _linear(maps: dict, query: Array, key: Array) -> tuple[Array, Array]:
    """Return W x + b of queries and keys, (b, t, n, m) each."""
    pairs = (query, *maps["query"]), (key, *maps["key"])
    of_query, of_key = (jnp.einsum("btnh,nmh->btnm", x, W) + b for x, W, b in pairs)
    return of_query, of_key


def _exponentials(of_query: Array, of_key: Array) -> tuple[Array, Array]:
    """Return the exponentials over the largest of each feature over the keys, and of each query."""
    largest = jax.lax.stop_gradient(jnp.max(of_key, axis=1, keepdims=True))
    exponent = of_query + largest
    exponent = exponent - jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
    return jnp.exp(exponent), jnp.exp(of_key - largest)


def _relu(maps: dict, fixed: None, query: Array, key: Array) -> list[Array]:
    return [jax.nn.relu(x) for x in _linear(maps, query, key)]


def _softmax(maps: dict, fixed: None, query: Array, key: Array) -> list[Array]:
    both = _linear(maps, query, key)
    return [jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1) for x in both]


def _exp(maps: dict, fixed: None, query: Array, key: Array) -> tuple[Array, Array]:
    both = _linear(maps, query, key)
    return _exponentials(*(jnp.concatenate([x, -x], axis=-1) for x in both))


def _free(maps: dict, fixed: Any, query: Array, key: Array) -> tuple[Array, Array]:
    key = transform_keys(fixed, key)
    of_query, of_key = _linear(maps, query, key)
    return _exponentials(of_query, of_key - jnp.sum(key**2, axis=-1, keepdims=True) / 2)


t2r = partial(_estimate, _relu)
"""Kasai et al. 2021, Eq. 5."""
hedgehog = partial(_estimate, _softmax)
"""Zhang et al. 2024, Eq. 6 and the normalisation that they recommend."""
hedgehog_exp = partial(_estimate, _exp)
"""Zhang et al. 2024, Eq. 6."""
free = partial(_estimate, _free)
"""Exponential features whose frequencies of queries and keys and weights are apart."""


def _start_t2r(key: Key, moments: Array, m: int) -> tuple[Any, None]:
    heads, head_dim = _sizes(moments)
    return {
        name: (jax.random.normal(k, (heads, m, head_dim)), jnp.zeros((heads, m)))
        for name, k in zip(("query", "key"), jax.random.split(key), strict=True)
    }, None


def _start_hedgehog(key: Key, moments: Array, m: int) -> tuple[Any, None]:
    heads, h = _sizes(moments)
    rotations = couplings.draw(key, "orf", m // 2, h, heads)
    rows = rotations / jnp.linalg.norm(rotations, axis=-1, keepdims=True)
    rows = rows.at[:, :h].set(jnp.eye(h)[: m // 2])
    return dict.fromkeys(("query", "key"), (rows, jnp.zeros(rows.shape[:2]))), None


def _start(key: Key, moments: Array, m: int, calibration: str = "full") -> tuple[Array, Any]:
    heads, head_dim = _sizes(moments)
    frequencies = couplings.draw(key, COUPLING, m, head_dim, heads)
    return frequencies, fit(moments, calibration, COUPLING)


def _start_free(key: Key, moments: Array, m: int) -> tuple[Any, Any]:
    frequencies, calibration = _start(key, moments, m)
    of_query, of_key, log_weights = fold(calibration, frequencies)
    zeros = jnp.zeros(of_key.shape[:2])
    weights = zeros if log_weights is None else log_weights
    return {"query": (of_query, zeros), "key": (of_key, weights)}, calibration


def _sizes(moments: Array) -> tuple[int, int]:
    """Return heads, and the width of one."""
    return len(moments), (moments.shape[-1] - 1) // 2


METHODS = {
    "positive, not calibrated": Method(partial(_start, calibration="none"), performer_estimate),
    "positive": Method(_start, performer_estimate),
    "positive, squared error": Method(_start, performer_estimate, "squared"),
    "positive, transfer": Method(_start, performer_estimate, "divergence"),
    "free, transfer": Method(_start_free, free, "divergence"),
    "T2R, not trained": Method(_start_t2r, t2r),
    "T2R, transfer": Method(_start_t2r, t2r, "divergence"),
    "Hedgehog, not trained": Method(_start_hedgehog, hedgehog),
    "Hedgehog, transfer": Method(_start_hedgehog, hedgehog, "divergence"),
    "Hedgehog, exp, transfer": Method(_start_hedgehog, hedgehog_exp, "divergence"),
}
"""By name, as the rows of the table."""
