"""Attention over windows of a sequence: causal, and within packed segments, chunk by chunk.

Within a chunk the kernel matrix is formed; what lies before the chunk is seen through the state of
all earlier keys, by the monoid `state.combine`. The two meet as blocks of an online softmax, each
with a stabiliser that is causal and exact for early queries too:

    before the chunk   the maxima c_j of the state, feature by feature
    within it          one scalar per key, mu_s = max_j l_j(k_s), one per query, nu_t; the kernel is
                       e^{nu_t + mu_s} sum_j e^{l_j(q_t) - nu_t} e^{l_j(k_s) - mu_s}, and its row
                       is stabilised by nu_t + max_{s <= t} mu_s

(A maximum over the whole chunk would let late keys push early ones to underflow.) The inner sums of
a row are exact while the largest is above e^-55, that is while some key shares a feature with the
query that is not weaker than that beside the strongest of each: for opposite q and k with m = 128,
up to |q| = |k| = 10 after scaling, for orthogonal ones 35. Past that, a query that sees no key
before its chunk weighs those within it by e^{mu_s}; the row still sums to 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention.state import (
    FeatureMap,
    State,
    blocks,
    combine,
    dot,
    exponentials,
    finite,
    flat,
    masked,
    normalised,
    of_keys,
    operand_dtype,
    pad,
)
from performer.features import Split

TINY = 1e-32
"""Added to a kernel of non-negative features: 1 / TINY times a gradient still fits float32."""
LOST = 1e-29
"""Row sums below this are taken for underflow."""
LAST = -1e38
"""The maximum of rows that count for nothing beside any others."""

Window = Literal["causal", "all", "none"]


class Tokens(NamedTuple):
    """A sequence, with g query heads for each key head."""

    query: Float[Array, "b t k g h"]
    key: Float[Array, "b t k h"]
    value: Float[Array, "b t k v"]
    mask: Bool[Array, "b t"] | None
    """Which keys exist."""
    segments: Int[Array, "b t"] | None
    """A query sees only keys of its own segment, which is a run of equal numbers."""


class Rows(NamedTuple):
    """A block of an online softmax: the output is numerator / denominator."""

    maximum: Float[Array, "*t"]
    denominator: Float[Array, "*t"]
    numerator: Float[Array, "*t v"]


def sweep(
    query_map: FeatureMap,
    key_map: FeatureMap,
    tokens: Tokens,
    initial: State,
    *,
    window: Window = "causal",
    finish: Callable[[Rows], Any],
    chunk: int,
    block: int,
) -> tuple[Any, State]:
    """One pass over the sequence: every query with all keys before its chunk, and in it a window.

    Args:
        query_map: features of queries.
        key_map: features of keys.
        tokens: the sequence.
        initial: the state of the keys before the sequence.
        window: the keys of a query's own chunk that it sees: up to itself, all, or none.
        finish: what is wanted of the rows, `ratio` for the output.
        chunk: tokens in a chunk.
        block: tokens that are worked on at once, all their chunks side by side; features and states
            of one block exist at a time, in the backward pass too, where they are computed again.

    Returns:
        finish(rows), arrays (b, t, k, g, ...), and the state after the last key.
    """
    query, key, value, mask, segments = tokens
    (b, t, k, _), groups = key.shape, query.shape[3]
    chunk = min(chunk, t)
    count, length = blocks(t, max(block, chunk), chunk)
    if mask is None and count * length > t:
        mask = jnp.ones((b, t), bool)

    def chunks(x):  # (b, t, ...) -> (b, count, c, s, ...)
        x = pad(x, 0, count * length - t)
        return x.reshape(b, count, length // chunk, chunk, *x.shape[2:])

    # Heads first, (count, k, b, c, s, h); the g query heads of a key head are rows of one chunk.
    keys_values = (chunks(x).transpose(1, 4, 0, 2, 3, 5) for x in (key, value))
    query = chunks(query).transpose(1, 4, 0, 2, 5, 3, 6)
    query = query.reshape(*query.shape[:4], groups * chunk, query.shape[-1])

    mask, segments = (
        None if x is None else jnp.moveaxis(chunks(x), 1, 0) for x in (mask, segments)
    )
    first = None if segments is None else segments[0, :, 0, 0]
    carry = (jax.tree.map(flat, initial), first)

    @partial(jax.checkpoint, prevent_cse=False)  # in a scan there is nothing to share
    def body(carry, xs):
        carry, rows = _block(query_map, key_map, window, groups, carry, xs)
        return carry, finish(rows)

    (state, _), out = jax.lax.scan(body, carry, (query, *keys_values, mask, segments))

    def joined(x):  # (count, k, b, c, g s, ...) -> (b, t, k, g, ...)
        tail = x.shape[carry[0].maximum.ndim + 2 :]
        x = x.reshape(count, k, b, length // chunk, groups, chunk, *tail)
        x = x.transpose(2, 0, 3, 5, 1, 4, *range(6, x.ndim))
        return x.reshape(b, count * length, *x.shape[4:])[:, :t]

    state = State(*(x.reshape(y.shape) for x, y in zip(state, initial, strict=True)))
    return jax.tree.map(joined, out), state


def ratio(rows: Rows) -> Float[Array, "*t v"]:
    """The output of attention."""
    return normalised(rows.numerator, rows.denominator)


def merge(left: Rows, right: Rows) -> Rows:
    """The rows over the keys of both."""
    maximum = jax.lax.stop_gradient(jnp.maximum(left.maximum, right.maximum))
    factors = [jnp.exp(rows.maximum - finite(maximum)) for rows in (left, right)]
    return Rows(
        maximum,
        left.denominator * factors[0] + right.denominator * factors[1],
        left.numerator * factors[0][..., None] + right.numerator * factors[1][..., None],
    )


def _block(query_map, key_map, window: Window, groups: int, carry, xs):
    """The chunks of one block, side by side."""
    query, key, value, mask, segments = xs  # (k, b, c, g s, h), (k, b, c, s, h), (b, c, s)
    state, previous = carry
    query_split, key_split, value = jax.tree.map(flat, (query_map(query), key_map(key), value))
    key_split = masked(key_split, mask)
    kept, before, continues, allowed = key_split, None, None, None
    if window == "causal":
        allowed = jnp.tril(jnp.ones((key.shape[-2],) * 2, bool))
    if segments is not None:
        last = segments[..., -1]  # (b, c)
        earlier = jnp.concatenate([previous[:, None], last[:, :-1]], axis=1)
        before, continues, previous = segments == earlier[..., None], last == earlier, last[:, -1]
        before = jnp.tile(before, groups)
        same = segments[..., :, None] == segments[..., None, :]
        allowed = same if allowed is None else same & jnp.broadcast_to(allowed, same.shape)
        kept = masked(key_split, segments == last[..., None])
    if allowed is not None:
        allowed = jnp.concatenate([allowed] * groups, axis=-2)
    past, state = _prefix(state, of_keys(kept, value), continues)
    dtype = operand_dtype(value)

    exponent, factor = query_split
    exponent = exponent + past.maximum[..., None, :]
    if before is not None:
        exponent = jnp.where(before[..., None], exponent, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
    if window != "none":
        weights, largest = _within(query_split, key_split, allowed, dtype)
        maximum = jnp.maximum(maximum, largest)
    features = exponentials((exponent, factor), maximum[..., None]).astype(dtype)
    denominator = dot("...tm,...m->...t", features, past.normaliser, past.normaliser.dtype)
    numerator = dot("...tm,...mv->...tv", features, past.numerator, dtype)
    if window != "none":
        weights = (weights * jnp.exp(largest - finite(maximum))[..., None]).astype(dtype)
        denominator += jnp.sum(weights, axis=-1, dtype=denominator.dtype)
        numerator += dot("...ts,...sv->...tv", weights, value, dtype)
    return (state, previous), Rows(maximum, denominator, numerator)


def _prefix(initial: State, own: State, continues: Bool[Array, "b c"] | None):
    """The states before each chunk and after the last; a state ends with its segment."""

    def step(state, x):
        chunk, continues = x
        seen = state
        if continues is not None:
            seen = state._replace(maximum=jnp.where(continues[..., None], state.maximum, -jnp.inf))
        return combine(seen, chunk), state

    axis = initial.maximum.ndim - 1
    own = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), own)
    last, past = jax.lax.scan(step, initial, (own, None if continues is None else continues.T))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), past), last


def _within(
    query_split: Split, key_split: Split, allowed: Array | None, dtype: jnp.dtype
) -> tuple[Float[Array, "*c t s"], Float[Array, "*c t"]]:
    """The kernel of the queries (k, b, c, g s, m) and the keys (k, b, c, s, m) of their chunk.

    Returns:
        Its rows e^{-maximum} and the maxima.
    """
    nu, mu = (jax.lax.stop_gradient(jnp.max(x[0], axis=-1)) for x in (query_split, key_split))
    kernel = dot(
        "...tm,...sm->...ts",
        exponentials(query_split, nu[..., None]),
        exponentials(key_split, mu[..., None]),
        dtype,
    )
    largest = _largest(mu, allowed, kernel.shape[-2])
    bound = jnp.exp(mu[..., None, :] - finite(largest)[..., None])
    if allowed is not None:
        bound = jnp.where(allowed, bound, 0.0)
    if query_split[1] is not None:
        return kernel * bound, nu + largest
    # Non-negative features: the rows sum to 1.
    weights = (kernel + TINY) * bound
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
    total = jnp.where(total == 0, 1.0, total)
    maximum = nu + largest + jnp.log(total)
    lost = (total < LOST) & ~jnp.isneginf(largest)
    return weights / total[..., None], jnp.where(lost, LAST, maximum)


def _largest(mu: Float[Array, "*c s"], allowed: Array | None, rows: int) -> Float[Array, "*c t"]:
    """max of mu over the keys that each row may see."""
    if allowed is None:
        return jnp.broadcast_to(jnp.max(mu, axis=-1, keepdims=True), (*mu.shape[:-1], rows))
    if allowed.ndim == 2:  # causal: the same for all heads and chunks
        running = jax.lax.cummax(mu, axis=mu.ndim - 1)
        return jnp.concatenate([running] * (rows // mu.shape[-1]), axis=-1)
    return jnp.max(jnp.where(allowed, mu[..., None, :], -jnp.inf), axis=-1)
