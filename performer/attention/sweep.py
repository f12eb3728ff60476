"""Attention over windows of a sequence: causal, and within packed segments, chunk by chunk.

Within a chunk the kernel matrix is formed; what lies before the chunk is seen through the state of
all earlier keys, by the monoid `state.combine`. The two meet as blocks of an online softmax, each
with a stabiliser that is causal and exact for early queries too:

    before the chunk   the maxima c_j of the state, feature by feature
    within it          one scalar per key, mu_s = max_j l_j(k_s), one per query, nu_t; the kernel is
                       e^{nu_t + mu_s} sum_j e^{l_j(q_t) - nu_t} e^{l_j(k_s) - mu_s}, and its row
                       is stabilised by nu_t + max_{s <= t} mu_s

(A maximum over the whole chunk would let late keys push early ones to underflow.) The inner sum
underflows float32 only where q_t and k_s share no feature within e^-69 of their largest; a query
whose every kernel in the chunk is lost so weighs these keys by e^{mu_s} instead, and only if it
sees none before the chunk.

Arrays are heads first: query (k, b, g, t, h) with g query heads for each of the k key heads.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention.state import (
    FeatureMap,
    Split,
    State,
    blocks,
    combine,
    dot,
    exponentials,
    finite,
    join_time,
    masked,
    of_keys,
    operand_dtype,
    split_time,
)

LOST = 1e-30
"""Row sums below this are taken for underflow; 1 / LOST times a gradient still fits float32."""
LAST = -1e38
"""The maximum of rows that count for nothing beside any others."""

Window = Literal["causal", "all", "none"]


class Rows(NamedTuple):
    """A block of an online softmax: the output is numerator / denominator."""

    maximum: Float[Array, "*t"]
    denominator: Float[Array, "*t"]
    numerator: Float[Array, "*t v"]


def sweep(
    query_map: FeatureMap,
    key_map: FeatureMap,
    query: Float[Array, "k b g t h"],
    key: Float[Array, "k b t h"],
    value: Float[Array, "k b t v"],
    mask: Bool[Array, "b t"] | None,
    segments: Int[Array, "b t"] | None,
    initial: State,
    *,
    window: Window = "causal",
    chunk: int,
    block: int,
) -> tuple[Rows, State]:
    """One pass over the sequence: every query with all keys before its chunk, and in it a window.

    Args:
        query_map: features of queries.
        key_map: features of keys.
        query: queries, g heads for each key head.
        key: keys.
        value: values.
        mask: which keys exist.
        segments: a query sees only keys of its own segment; a segment is a run of equal numbers.
        initial: the state of the keys before the sequence.
        window: the keys of a query's own chunk that it sees: up to itself, all, or none.
        chunk: tokens in a chunk.
        block: tokens that are worked on at once, all their chunks side by side; features and states
            of one block exist at a time, in the backward pass too, where they are computed again.

    Returns:
        The rows (k, b, g, t) and the state after the last key.
    """
    t = key.shape[2]
    chunk = min(chunk, t)
    count, length = blocks(t, max(block, chunk), chunk)
    if mask is None and count * length > t:
        mask = jnp.ones(key.shape[1:3], bool)

    def cut(x, axis):
        if x is None:
            return None
        x = split_time(x, axis, count, length)
        return x.reshape(*x.shape[: axis + 1], length // chunk, chunk, *x.shape[axis + 2 :])

    xs = (cut(query, 3), cut(key, 2), cut(value, 2), cut(mask, 1), cut(segments, 1))
    carry = (initial, None if segments is None else segments[:, 0])
    body = jax.checkpoint(partial(_block, query_map, key_map, window))
    (state, _), rows = jax.lax.scan(body, carry, xs)
    return jax.tree.map(lambda x: join_time(x, 3)[:, :, :, :t], rows), state


def merge(left: Rows, right: Rows) -> Rows:
    """The rows over the keys of both."""
    maximum = jax.lax.stop_gradient(jnp.maximum(left.maximum, right.maximum))
    factors = [jnp.exp(rows.maximum - finite(maximum)) for rows in (left, right)]
    return Rows(
        maximum,
        left.denominator * factors[0] + right.denominator * factors[1],
        left.numerator * factors[0][..., None] + right.numerator * factors[1][..., None],
    )


def _block(query_map, key_map, window: Window, carry, xs):
    """The chunks of one block: c chunks of s tokens, side by side."""
    query, key, value, mask, segments = xs  # (k, b, g, c, s, h), (k, b, c, s, h), (b, c, s)
    state, previous = carry
    groups, (size, _) = query.shape[2], query.shape[-2:]
    # The g query heads of a key head are rows of the same chunk.
    query = jnp.moveaxis(query, 2, 3).reshape(*key.shape[:3], groups * size, -1)
    query_split, key_split = query_map(query), masked(key_map(key), mask)
    allowed = _window(window, size)
    before = same = None
    kept = key_split
    if segments is not None:
        last = segments[..., -1]  # (b, c)
        previous = jnp.concatenate([previous[:, None], last], axis=1)
        before, previous = segments == previous[:, :-1, None], previous[:, -1]
        same = segments[..., :, None] == segments[..., None, :]
        allowed = same if allowed is None else same & allowed
        kept = masked(key_split, segments == last[..., None])
        before = jnp.tile(before, groups)
    own = of_keys(kept, value)
    past, state = _prefix(state, own, None if segments is None else before[..., size - 1])
    dtype = operand_dtype(value)
    rows = _before(query_split, past, before, dtype)
    if window != "none":
        if allowed is not None:
            allowed = jnp.concatenate([allowed] * groups, axis=-2)
        within = _within(query_split, key_split, value, allowed, dtype)
        rows = merge(rows, within)
    rows = jax.tree.map(partial(_ungroup, groups=groups), rows)
    return (state, previous), rows


def _window(window: Window, size: int) -> Array | None:
    """(s, s): which keys of its chunk a query may see; None for all."""
    return jnp.tril(jnp.ones((size, size), bool)) if window == "causal" else None


def _ungroup(x: Array, groups: int) -> Array:
    """(k, b, c, g s, ...) -> (k, b, g, c s, ...)."""
    x = x.reshape(*x.shape[:3], groups, -1, *x.shape[4:])
    x = jnp.moveaxis(x, 3, 2)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def _prefix(initial: State, own: State, continues: Bool[Array, "b c"] | None):
    """The states before each chunk and after the last; a state ends with its segment."""
    states = jax.tree.map(lambda a, x: jnp.concatenate([a[:, :, None], x], 2), initial, own)
    if continues is None:
        folded = jax.lax.associative_scan(combine, states, axis=2)
    else:
        starts = jnp.concatenate([jnp.zeros_like(continues[:, :1]), ~continues], axis=1)

        def segmented(left, right):
            (left, left_starts), (right, right_starts) = left, right
            maximum = jnp.where(right_starts[..., None], -jnp.inf, left.maximum)
            both = combine(left._replace(maximum=maximum), right)
            return both, left_starts | right_starts

        starts = jnp.broadcast_to(starts, states.normaliser.shape[:-1])
        folded, _ = jax.lax.associative_scan(segmented, (states, starts), axis=2)
    return (
        jax.tree.map(lambda x: x[:, :, :-1], folded),
        jax.tree.map(lambda x: x[:, :, -1], folded),
    )


def _before(query_split: Split, past: State, before: Array | None, dtype: jnp.dtype) -> Rows:
    """The queries (k, b, c, t, m) over the keys before their chunk."""
    exponent, factor = query_split
    exponent = exponent + past.maximum[..., None, :]
    if before is not None:
        exponent = jnp.where(before[..., None], exponent, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
    weights = exponentials((exponent, factor), maximum[..., None]).astype(dtype)
    return Rows(
        maximum,
        dot("...tm,...m->...t", weights, past.normaliser, jnp.dtype(jnp.float32)),
        dot("...tm,...mv->...tv", weights, past.numerator, dtype),
    )


def _within(
    query_split: Split, key_split: Split, value: Array, allowed: Array | None, dtype: jnp.dtype
) -> Rows:
    """The queries (k, b, c, g s, m) over the keys (k, b, c, s, m) of their own chunk."""
    nu, mu = (jax.lax.stop_gradient(jnp.max(x[0], axis=-1)) for x in (query_split, key_split))
    kernel = dot(
        "...tm,...sm->...ts",
        exponentials(query_split, nu[..., None]),
        exponentials(key_split, mu[..., None]),
        dtype,
    )
    seen = jnp.broadcast_to(mu[..., None, :], kernel.shape)
    if allowed is not None:
        seen = jnp.where(allowed, seen, -jnp.inf)
    largest = jnp.max(seen, axis=-1)
    bound = jnp.exp(seen - finite(largest)[..., None])
    weights = kernel * bound
    maximum = nu + largest
    if query_split[1] is None:  # non-negative features: scale the rows to sum to 1
        total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
        lost = total < LOST
        weights = jnp.where(lost[..., None], bound, weights)
        total = jnp.where(lost, jnp.maximum(jnp.sum(bound, axis=-1), 1.0), total)
        weights = weights / total[..., None]
        maximum = jnp.where(lost & ~jnp.isneginf(largest), LAST, maximum + jnp.log(total))
    weights = weights.astype(dtype)
    return Rows(
        maximum,
        jnp.sum(weights, axis=-1, dtype=jnp.float32),
        dot("...ts,...sv->...tv", weights, value, dtype),
    )
