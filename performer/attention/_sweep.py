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
up to |q| = |k| = 10 after scaling, for orthogonal ones 35. Past that the row is lost: a query that
sees no key before its chunk weighs those within it by e^{mu_s}; it still sums to 1.

`robust` forms the lost rows that matter beside what lies before their chunk again, each pair in
logarithms, feature by feature, as bidirectional attention does: all rows are then exact for any
norm, and the others do not change. It costs time where a row is lost, a little where none is, and
half as much compilation again.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import _decay
from performer.attention._sizes import blocks, min_dim
from performer.attention.state import (
    Features,
    Keys,
    State,
    combine,
    dot,
    exponentials,
    extended,
    finite,
    flat,
    normalised,
    of_keys,
    operand_dtype,
    pad,
    weighted,
)
from performer.features import Split
from performer.typing import Size

TINY = 1e-32
"""Added to a kernel of non-negative features: 1 / TINY times a gradient still fits float32."""
LOST = 1e-29
"""Row sums below this are taken for underflow."""
UNSURE = 1e-23
"""Row sums above this are exact, to the last digits of float32, whatever is missing or added."""
LAST = -1e38
"""The maximum of rows that count for nothing beside any others."""

BESIDE = 17.0
"""e^-BESIDE is below what float32 resolves beside 1."""

Window = Literal["causal", "all", "none"]
Pairs = tuple[Bool[Array, "*p t s"] | None, Float[Array, "*d t s"] | None]
"""Which keys of its chunk a query sees, None for all, and their log-weights for it, None for 0."""


class Tokens(NamedTuple):
    """A sequence, with g query heads for each key head."""

    query: Float[Array, "b t k g h"]
    keys: Keys
    segments: Int[Array, "b t"] | None
    """A query sees only keys of its own segment, which is a run of equal numbers."""


class Rows(NamedTuple):
    """A block of an online softmax: the output is numerator / denominator."""

    maximum: Float[Array, "*t"]
    denominator: Float[Array, "*t"]
    numerator: Float[Array, "*t v"]


def sweep(
    query_map: Features,
    key_map: Features,
    tokens: Tokens,
    initial: State,
    *,
    window: Window = "causal",
    finish: Callable[[Rows], Any],
    chunk: Size,
    block: Size,
    robust: bool = False,
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
        robust: a second look at the rows that are lost.

    Returns:
        finish(rows), arrays (b, t, k, g, ...), and the state after the last key.
    """
    query, keys, segments = tokens
    b, t, k, groups, _ = query.shape
    chunk = min_dim(chunk, t)
    count, length = blocks(t, max(block, chunk), chunk)
    keys = extended(keys, 0, count * length - t)

    def chunks(x):  # (b, t, ...) -> (b, count, c, s, ...)
        x = pad(x, 0, count * length - x.shape[1])
        return x.reshape(b, count, length // chunk, chunk, *x.shape[2:])

    def keys_of_chunks(x):  # heads first, (count, k, b, c, s, ...)
        x = chunks(x)
        return x.transpose(1, 4, 0, 2, 3, *range(5, x.ndim))

    # The g query heads of a key head are rows of one chunk.
    query = chunks(query).transpose(1, 4, 0, 2, 5, 3, 6)
    query = query.reshape(*query.shape[:4], groups * chunk, query.shape[-1])
    segments = None if segments is None else jnp.moveaxis(chunks(segments), 1, 0)
    first = None if segments is None else segments[0, :, 0, 0]
    carry = (jax.tree.map(flat, initial), first)

    @partial(jax.checkpoint, prevent_cse=False)  # in a scan there is nothing to share
    def body(carry, xs):
        carry, rows = _block(query_map, key_map, window, groups, robust, carry, xs)
        return carry, finish(rows)

    xs = (query, jax.tree.map(keys_of_chunks, tuple(keys)), segments)
    (state, _), out = jax.lax.scan(body, carry, xs)

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


@jax.custom_batching.custom_vmap
def anywhere(lost: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Whether any is; one answer under `vmap` too, where two would mean that all is computed."""
    return jnp.any(lost)


@anywhere.def_vmap
def _(size, batched, lost):
    return anywhere(lost), False


def _block(query_map, key_map, window: Window, groups: int, robust: bool, carry, xs):
    """The chunks of one block, side by side."""
    query, (key, *carried), segments = xs  # (k, b, c, g s, h), (k, b, c, s, ...), (b, c, s)
    state, previous = carry
    query_split, key_split = jax.tree.map(flat, (query_map(query), key_map(key)))
    value, log_weights, log_decay = jax.tree.map(flat, carried)
    key_split = weighted(key_split, log_weights)
    kept, before, continues, fading, pairs = key_split, None, None, None, None
    if log_decay is not None:
        fading = _decay.sums(log_decay)
        kept = weighted(key_split, fading.until)
        if window != "none":
            pairs = jnp.concatenate([_decay.between(log_decay)] * groups, axis=-2)
    allowed = _allowed(window, segments, groups, key.shape[-2])
    if segments is not None:
        last = segments[..., -1]  # (b, c)
        earlier = jnp.concatenate([previous[:, None], last[:, :-1]], axis=1)
        before, continues, previous = segments == earlier[..., None], last == earlier, last[:, -1]
        before = jnp.tile(before, groups)
        kept = weighted(kept, jnp.where(segments == last[..., None], 0.0, -jnp.inf))
    past, state = _prefix(state, of_keys(kept, value), continues, fading and fading.total)
    dtype = operand_dtype(value)

    exponent, factor = query_split
    exponent = exponent + past.maximum[..., None, :]
    if fading is not None:
        exponent += jnp.concatenate([fading.since] * groups, axis=-1)[..., None]
    if before is not None:
        exponent = jnp.where(before[..., None], exponent, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
    if window != "none":
        least = UNSURE if robust else LOST
        weights, largest, below = _within(query_split, key_split, (allowed, pairs), least, dtype)
        lost = below > maximum - BESIDE
        maximum = jnp.maximum(maximum, largest)
    features = exponentials((exponent, factor), maximum[..., None]).astype(dtype)
    denominator = dot("...tm,...m->...t", features, past.normaliser, past.normaliser.dtype)
    numerator = dot("...tm,...mv->...tv", features, past.numerator, dtype)
    if window != "none":
        weights = (weights * jnp.exp(largest - finite(maximum))[..., None]).astype(dtype)
        denominator += jnp.sum(weights, axis=-1, dtype=denominator.dtype)
        numerator += dot("...ts,...sv->...tv", weights, value, dtype)
    rows = Rows(maximum, denominator, numerator)
    if window != "none" and robust and query_split[0].shape[-1] > 1:
        again = partial(
            _in_logarithms,
            query_map,
            key_map,
            (allowed, pairs),
            lost,
            (query, key, value, log_weights),
        )
        rows = jax.lax.cond(anywhere(lost), jax.checkpoint(again), lambda rows: rows, rows)
    return (state, previous), rows


def _allowed(window: Window, segments: Array | None, groups: int, length: Size) -> Array | None:
    """Which keys of its chunk a query sees, (g s, s) or (b, c, g s, s); None for all."""
    allowed = jnp.tril(jnp.ones((length, length), bool)) if window == "causal" else None
    if segments is not None:
        same = segments[..., :, None] == segments[..., None, :]
        allowed = same if allowed is None else same & jnp.broadcast_to(allowed, same.shape)
    return None if allowed is None else jnp.concatenate([allowed] * groups, axis=-2)


def _prefix(initial: State, own: State, continues: Bool[Array, "b c"] | None, total):
    """The states before each chunk and after the last; a state ends with its segment, and fades."""

    def step(state, x):
        chunk, continues, total = x
        seen = _decay.faded(state, total)
        if continues is not None:
            seen = seen._replace(maximum=jnp.where(continues[..., None], seen.maximum, -jnp.inf))
        return combine(seen, chunk), state

    axis = initial.maximum.ndim - 1
    own, total = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (own, total))
    continues = None if continues is None else continues.T
    last, past = jax.lax.scan(step, initial, (own, continues, total))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), past), last


def _within(
    query_split: Split, key_split: Split, pairs: Pairs, least: float, dtype: jnp.dtype
) -> tuple[Float[Array, "*c t s"], Float[Array, "*c t"], Float[Array, "*c t"]]:
    """The kernel of the queries (k, b, c, g s, m) and the keys (k, b, c, s, m) of their chunk.

    Returns:
        Its rows e^{-maximum}; the maxima; and for rows whose sum is below `least`, which then are
        `LAST`, the logarithm of what it is below, else -inf.
    """
    nu, mu = (jax.lax.stop_gradient(jnp.max(x[0], axis=-1)) for x in (query_split, key_split))
    kernel = dot(
        "...tm,...sm->...ts",
        exponentials(query_split, nu[..., None]),
        exponentials(key_split, mu[..., None]),
        dtype,
    )
    largest, bound = _bound(mu, pairs, kernel.shape[-2])
    if query_split[0].shape[-1] == 1:  # features share the exponent: nothing is lost between them
        return kernel * bound, nu + largest, jnp.full_like(largest, -jnp.inf)
    # Positive features: the rows sum to 1.
    weights = (kernel + TINY) * bound
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
    total = jnp.where(total == 0, 1.0, total)
    lost = (total < least) & ~jnp.isneginf(largest)
    maximum = jnp.where(lost, LAST, nu + largest + jnp.log(total))
    below = jnp.where(lost, nu + largest + math.log(least), -jnp.inf)
    return weights / total[..., None], maximum, below


def _bound(mu: Float[Array, "*c s"], pairs: Pairs, rows: Size) -> tuple[Array, Array]:
    """The largest mu that a row may see, and e^mu below it; both with the pairs' log-weights."""
    allowed, log_weights = pairs
    if log_weights is None:
        largest = _largest(mu, allowed, rows)
        bound = jnp.exp(mu[..., None, :] - finite(largest)[..., None])
        return largest, bound if allowed is None else jnp.where(allowed, bound, 0.0)
    scores = mu[..., None, :] + log_weights
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    return largest, jnp.exp(scores - finite(largest)[..., None])


def _largest(mu: Float[Array, "*c s"], allowed: Array | None, rows: Size) -> Float[Array, "*c t"]:
    """max of mu over the keys that each row may see."""
    if allowed is None:
        return jnp.broadcast_to(jnp.max(mu, axis=-1, keepdims=True), (*mu.shape[:-1], rows))
    if allowed.ndim == 2:  # causal: the same for all heads and chunks
        running = jax.lax.cummax(mu, axis=mu.ndim - 1)
        return jnp.concatenate([running] * (rows // mu.shape[-1]), axis=-1)
    return jnp.max(jnp.where(allowed, mu[..., None, :], -jnp.inf), axis=-1)


def _in_logarithms(query_map, key_map, pairs: Pairs, lost: Array, xs, rows: Rows) -> Rows:
    """The rows of a block, those that are lost with the keys of their chunk, pair by pair."""
    allowed, of_pairs = pairs
    query, key, value, log_weights = xs
    query_split, key_split = jax.tree.map(flat, (query_map(query), key_map(key)))

    @partial(jax.checkpoint, prevent_cse=False)
    def of_key(split):  # (k, b, c, m)
        (exponent, factor), (of_key, factor_of_key) = query_split, split
        exponent = exponent + of_key[..., None, :]
        if factor is not None:
            factor = factor * factor_of_key[..., None, :]
        maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
        total = jnp.sum(exponentials((exponent, factor), maximum[..., None]), axis=-1)
        return maximum + jnp.log(jnp.where(total == 0, 1.0, total))

    keys = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), weighted(key_split, log_weights))
    kernel = jnp.moveaxis(jax.lax.map(of_key, keys), 0, -1)
    if of_pairs is not None:
        kernel = kernel + of_pairs
    if allowed is not None:
        kernel = jnp.where(allowed, kernel, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(kernel, axis=-1))
    dtype = operand_dtype(value)
    weights = jnp.exp(kernel - finite(maximum)[..., None]).astype(dtype)
    denominator = jnp.sum(weights, axis=-1, dtype=rows.denominator.dtype)
    again = Rows(maximum, denominator, dot("...ts,...sv->...tv", weights, value, dtype))
    both = merge(rows, again)  # where the first look left LAST, which counts for nothing
    return Rows(
        jnp.where(lost, both.maximum, rows.maximum),
        jnp.where(lost, both.denominator, rows.denominator),
        jnp.where(lost[..., None], both.numerator, rows.numerator),
    )
