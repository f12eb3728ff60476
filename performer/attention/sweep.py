"""Attention over a sequence in chunks: causal, in packed segments, with decay, with a window.

Keys outside a chunk enter through states (the monoid `state.combine`): those before it and, if
attention is not causal, those after it. Keys within it enter pair by pair (`Within`): by their
features, or, with a window, keys of the chunk and its neighbours by e^{q.k} itself. States then
come from two chunks away. All are blocks of one online softmax.

Blocks of chunks follow one another; the chunks of a block are computed side by side. States of the
keys before a block are carried along. States of the keys after it come from an earlier pass over
the keys. All are sums from one end, never differences.

Features within a chunk have a stabiliser that is causal, and exact for early queries too:

    outside the chunk  the maxima c_j of the state, feature by feature
    within it          one scalar per key, mu_s = max_j l_j(k_s), one per query, nu_t; the kernel is
                       e^{nu_t + mu_s} sum_j e^{l_j(q_t) - nu_t} e^{l_j(k_s) - mu_s}, and its row
                       is stabilised by nu_t + max_{s <= t} mu_s

(With a maximum over the whole chunk, late keys would make early ones underflow.) The inner sums of
a row are exact while the largest is above e^-55: while a feature of some key and the query is at
least so strong, relative to the strongest of each. For m = 128 that holds up to |q| = |k| = 10
after scaling for opposite q and k, up to 35 for orthogonal ones. Past that the row is lost. A lost
row without keys outside its chunk weighs those within it by e^{mu_s}, which still sums to 1.

`robust` computes lost rows again, if they matter next to the keys outside the chunk: each pair in
logarithms, feature by feature. All rows are then exact for any norm, and the others do not change.
It costs time where a row is lost, a little where none is, and half of the compilation again.

Axes: k heads with sums of their own, b batch, c chunks of a block, s tokens of a chunk, g query
heads of a key head, m features, h and v widths. Within a block arrays are (k, b, c, g s, .) for
queries and (k, b, c, s, .) for keys; `flat` joins k and b if either is 1.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from performer.attention import decay
from performer.attention.sizes import blocks
from performer.attention.state import (
    Features,
    Keys,
    State,
    combine,
    extended,
    flat,
    in_blocks,
    pad,
    state_of,
)
from performer.attention.values import Plan
from performer.features import Split
from performer.numerics import dot, exponentials, finite, operand_dtype, weighted
from performer.typing import float32_or_wider

TINY = 1e-32
"""Added to a kernel of non-negative features: 1 / TINY times a gradient still fits float32."""
LOST = 1e-29
"""Row sums below this count as underflow."""
UNSURE = 1e-23
"""Row sums above this are exact to the last digits of float32, despite underflow and `TINY`."""
LAST = -1e38
"""Maximum of rows that count for nothing next to any other."""
NEGLIGIBLE = 17.0
"""e^-NEGLIGIBLE is below the resolution of float32 at 1."""
KEPT = 4
"""Chunks of w tokens keep their states for the second pass up to m = KEPT w features."""


class Near(NamedTuple):
    """Exact keys of the queries of their chunk and of its neighbours."""

    keys: Keys
    """(b, t, k, .), with log-weights."""
    window: int
    """Tokens of a chunk."""
    scale: float


class Chunks(NamedTuple):
    """A block of chunks; in a scan, the axis of the blocks comes first."""

    query: Array
    """(k, b, c, g s, h)."""
    keys: Keys
    """(k, b, c, s, .): keys of the states."""
    segments: Array | None
    """(b, c, s)."""
    near: Keys | None
    """(k, b, c, 2 s or 3 s, .): exact keys of the chunk before, its own, and the one after."""
    near_segments: Array | None
    """(b, c, 2 s or 3 s)."""


class KeyFeatures(NamedTuple):
    """Features (k, b, c, s, m) of the keys of a block, their values and log-decays."""

    split: Split
    value: Array
    log_decay: Array | None


class ChunkStates(NamedTuple):
    """States of the keys of each chunk, for queries on one side; the axis of the chunks first."""

    state: State
    segment: Array | None
    """(c, b): segment of the token nearest to the queries; only its keys are in the state."""
    fading: Array | None
    """(c, k, b): log-decay of a state over the chunk."""


class Incoming(NamedTuple):
    """States that enter the chunks of a block from one side."""

    far: State
    segment: Array | None
    """(b,): segment of the keys."""
    waiting: ChunkStates | None
    """With a window, the neighbouring chunk, which enters one chunk later."""


class WithinChunk(NamedTuple):
    """Pairs of a query and a key within a chunk, (c, g s, s) or with neighbours (c, g s, 2-3 s)."""

    allowed: Bool[Array, "#b #c t s"] | None
    """None for all."""
    log_decay: Array | None

    def masked(self, logits: Array) -> Array:
        """Add the log-decay of the pairs; -inf where a pair is not allowed."""
        if self.log_decay is not None:
            logits = logits + self.log_decay
        return logits if self.allowed is None else jnp.where(self.allowed, logits, -jnp.inf)


Within = Callable[[State, Chunks, Split, KeyFeatures, WithinChunk], State]
"""(rows with the far keys, block, features of queries and of keys, pairs) -> rows with all keys."""


def sweep(
    maps: tuple[Features, Features],
    query: Float[Array, "b t k g h"],
    keys: Keys,
    ends: tuple[State, State | None],
    plan: Plan,
    *,
    segments: Int[Array, "b t"] | None = None,
    near: Near | None = None,
) -> tuple[State, State]:
    """Attend over a sequence; features and states of one block exist at a time.

    Args:
        maps: features of queries and of keys; with exact keys, of the kernel itself.
        query: g query heads for each key head.
        keys: keys of the states, and keys within chunks if `near` is None.
        ends: states (k, b, m) of the keys before and after the sequence; causal: None after it.
        plan: sizes of chunks and blocks.
        segments: numbers of the segments, as runs of equal numbers.
        near: exact keys.

    Returns:
        Rows (b, t, k, g), and the state after all `keys`.
    """
    (b, t, k, g, h), sides = query.shape, 1 if ends[1] is None else 2
    s = near.window if near else min_dim(plan.chunk, t)
    count, length = blocks(t, max(plan.block, s), s)
    c, more = length // s, count * length - t

    def chunks(x, neighbours=0):  # (b, t, k, ...) -> (count, k, b, c, s (1 + neighbours), ...)
        # Neighbours are i chunks further on: their keys are padded by a chunk in front.
        shifted = (x[:, i * s : i * s + count * length] for i in range(1 + neighbours))
        # (count, b, length, k, ...) -> (count, k, b, length, ...)
        shifted = [jnp.moveaxis(in_blocks(y, count, length), 3, 1) for y in shifted]
        apart = [y.reshape(*y.shape[:3], c, s, *y.shape[4:]) for y in shifted]
        return jnp.concatenate(apart, axis=4)

    queries = jnp.swapaxes(chunks(query), 4, 5)  # (count, k, b, c, g, s, h)
    queries = queries.reshape(*queries.shape[:4], g * s, h)
    state_keys = jax.tree.map(chunks, extended(keys, 0, more))
    near_keys = chunk_segments = near_segments = None
    if segments is not None:
        chunk_segments = near_segments = chunks(segments[..., None])[:, 0]
    if near:
        near_keys = extended(near.keys, s, more + s)
        near_keys = jax.tree.map(partial(chunks, neighbours=sides), near_keys)
        if segments is not None:
            near_segments = chunks(pad(segments, s, more + s)[..., None], sides)[:, 0]
    xs = Chunks(queries, state_keys, chunk_segments, near_keys, near_segments)
    within = by_logits(near.scale) if near else by_features(maps, plan.robust)
    start, later, kept = _at_end(ends[0], xs, 0), None, None
    if ends[1] is not None:
        # Without segments and decay queries on both sides see the same state of a chunk.
        alike = near is not None and segments is None and keys.log_decay is None
        keep = alike and ends[0].maximum.shape[-1] <= KEPT * s
        later, kept = _after_blocks(maps[1], xs, _at_end(ends[1], xs, -1), keep)

    @partial(jax.checkpoint, prevent_cse=False)  # in a scan there is nothing to share
    def forth(before, xs):
        return _block(maps, within, g, before, *xs)

    last, rows = jax.lax.scan(forth, start, (xs, later, kept))

    def joined(x):  # (count, k, b, c, g s, ...) -> (b, t, k, g, ...)
        tail = x.shape[last.far.maximum.ndim + 2 :]
        x = x.reshape(count, k, b, c, g, s, *tail).transpose(
            2, 0, 3, 5, 1, 4, *range(6, 6 + len(tail))
        )
        return x.reshape(b, count * length, k, g, *tail)[:, :t]

    after = last.far
    if last.waiting is not None:
        waiting = jax.tree.map(lambda x: x[0], last.waiting)
        after = combine(decay.faded(after, waiting.fading), waiting.state)
    after = State(*(x.reshape(y.shape) for x, y in zip(after, ends[0], strict=True)))
    return jax.tree.map(joined, rows), after


def _block(
    maps: tuple[Features, Features],
    within: Within,
    groups: int,
    before: Incoming,
    x: Chunks,
    later: Incoming | None,
    kept: ChunkStates | None,
) -> tuple[Incoming, State]:
    """Return what enters the next block, and the rows (k, b, c, g s) of the chunks of this one.

    `later` enters from the other end, None if attention is causal. `kept` are the states of the
    chunks, if the pass over later keys has kept them.
    """
    key_features, is_causal = _key_features(maps[1], x.keys), later is None
    log_decay = key_features.log_decay
    # Keys outside the chunks: states (k, b, c, m) from the side before, and from the side after.
    chunks = _chunk_states(key_features, x.segments, False) if kept is None else kept
    (state, segment), following = _entering(chunks, before, False)
    pairs, since, until = _pairs_within(x, log_decay, groups, is_causal)
    if later is None:
        sides = [(state, segment, since)]
    elif x.segments is None and log_decay is None:  # one state for both sides
        sides = [(combine(state, _entering(chunks, later, True)[0][0]), None, None)]
    else:
        other = _chunk_states(key_features, x.segments, True)
        sides = [(state, segment, since), (*_entering(other, later, True)[0], until)]
    query_split = jax.tree.map(flat, maps[0](x.query))  # (k, b, c, g s, m)
    query_segments = None if x.segments is None else _for_groups(x.segments, groups)
    far = _far_rows(query_split, sides, query_segments, operand_dtype(key_features.value))
    return following, within(far, x, query_split, key_features, pairs)


def _key_features(key_map: Features, keys: Keys) -> KeyFeatures:
    split, value, log_weights, log_decay = jax.tree.map(flat, (key_map(keys.key), *keys[1:]))
    return KeyFeatures(weighted(split, log_weights), value, log_decay)


# States outside the chunk


def _at_end(end: State, xs: Chunks, side: int) -> Incoming:
    """States that enter at one end of the sequence, where no chunk is waiting."""
    end, waiting = jax.tree.map(flat, end), None
    segment = None if xs.segments is None else xs.segments[side, :, side, side]
    if xs.near is not None:
        fading = jax.tree.map(lambda x: jnp.zeros_like(flat(x[0])[..., 0, 0]), xs.keys.log_decay)
        nothing = State(end.maximum - jnp.inf, *map(jnp.zeros_like, end[1:]))
        waiting = jax.tree.map(lambda x: x[None], ChunkStates(nothing, segment, fading))
    return Incoming(end, segment, waiting)


def _after_blocks(
    key_map: Features, xs: Chunks, end: Incoming, keep: bool
) -> tuple[Incoming, ChunkStates | None]:
    """States of the keys after each block; to `keep`, those of its chunks."""

    @partial(jax.checkpoint, prevent_cse=False)
    def back(later, x):
        keys, segments = x
        chunks = _chunk_states(_key_features(key_map, keys), segments, True)
        return _entering(chunks, later, True)[1], (later, chunks if keep else None)

    _, states = jax.lax.scan(back, end, (xs.keys, xs.segments), reverse=True)
    return states


def _chunk_states(keys: KeyFeatures, segments: Array | None, for_earlier: bool) -> ChunkStates:
    """States of the keys of each chunk for the queries after it, or for earlier ones."""
    split, value, log_decay = keys
    fading = segment = None
    if log_decay is not None:
        since, until, fading = decay.sums(log_decay)
        split = weighted(split, since if for_earlier else until)
    if segments is not None:
        segment = segments[..., 0 if for_earlier else -1]  # (b, c)
        split = weighted(split, jnp.where(segments == segment[..., None], 0.0, -jnp.inf))
        segment = segment.T
    state = state_of(split, value)  # (k, b, c, m)
    axis = state.maximum.ndim - 2
    # (k, b, c, m) -> (c, k, b, m)
    state, fading = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (state, fading))
    return ChunkStates(state, segment, fading)


def _entering(chunks: ChunkStates, incoming: Incoming, backwards: bool):
    """States (k, b, c, m) and segments (b, c) that enter each chunk; what enters the next block."""
    far, segment, waiting = incoming
    if waiting is not None:  # states are a chunk late
        in_order = (chunks, waiting) if backwards else (waiting, chunks)
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *in_order)
        chunks = jax.tree.map(lambda x: x[1:] if backwards else x[:-1], joined)
        waiting = jax.tree.map(lambda x: x[:1] if backwards else x[-1:], joined)

    def step(carry, chunk: ChunkStates):
        state, segment = carry
        faded = decay.faded(state, chunk.fading)
        if segment is not None:  # a state ends with its segment
            continues = (segment == chunk.segment)[..., None]
            faded = faded._replace(maximum=jnp.where(continues, faded.maximum, -jnp.inf))
        return (combine(faded, chunk.state), chunk.segment), carry

    c, axis = chunks.state.maximum.shape[0], chunks.state.maximum.ndim - 2
    # A chunk of a window is little work for an iteration.
    unroll = 1 if waiting is None or is_symbolic_dim(c) else 8
    last, entered = jax.lax.scan(step, (far, segment), chunks, reverse=backwards, unroll=unroll)
    states, segments = entered
    states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), states)  # (k, b, c, m)
    return (states, None if segments is None else segments.T), Incoming(*last, waiting)


def _far_rows(split: Split, sides, segments: Array | None, dtype: jnp.dtype) -> State:
    """Rows of queries (..., t, m) with states from one side or both.

    Args:
        split: features of queries.
        sides: states (..., m), their segments (b, c) or None, and log-decays (..., t) or None.
        segments: (b, c, t), of the queries.
        dtype: operands of products.
    """
    exponents = []
    for state, segment, fading in sides:
        exponent = split[0] + state.maximum[..., None, :]
        if fading is not None:
            exponent = exponent + fading[..., None]
        if segment is not None:
            same = segments == segment[..., None]
            exponent = jnp.where(same[..., None], exponent, -jnp.inf)
        exponents.append(exponent)
    maximum = reduce(jnp.maximum, (jnp.max(x, axis=-1) for x in exponents))
    maximum = jax.lax.stop_gradient(maximum)
    sums = []
    for ((_, s, z), *_), exponent in zip(sides, exponents, strict=True):
        features = exponentials((exponent, split[1]), maximum[..., None]).astype(dtype)
        normaliser = dot("...tm,...m->...t", features, s, s.dtype)
        sums.append((normaliser, dot("...tm,...mv->...tv", features, z, dtype)))
    return State(maximum, *jax.tree.map(lambda *x: reduce(jnp.add, x), *sums))


# Pairs within the chunk


def _pairs_within(
    x: Chunks, log_decay: Array | None, groups: int, is_causal: bool
) -> tuple[WithinChunk, Array | None, Array | None]:
    """Pairs within a chunk; log-decays of queries since the keys before it, until those after."""
    s, start = x.keys.key.shape[-2], 0
    if x.near is not None:  # the chunk before comes first
        start, log_decay = s, jax.tree.map(flat, x.near.log_decay)
    allowed = between = since = until = None
    if log_decay is not None:
        between = _for_groups(decay.between(log_decay)[..., start : start + s, :], groups, -2)
        since = _for_groups(decay.sums(log_decay[..., : start + s]).since[..., start:], groups)
        until = _for_groups(decay.sums(log_decay[..., start:]).until[..., :s], groups)
    if is_causal:
        allowed = jnp.tril(jnp.ones((s, start + s), bool), k=start)[None, None]
    if x.segments is not None:
        same = x.segments[..., :, None] == cast(Array, x.near_segments)[..., None, :]
        allowed = same if allowed is None else same & allowed
    if allowed is not None:
        allowed = _for_groups(allowed, groups, -2)
    return WithinChunk(allowed, between), since, until


def _for_groups(x: Array, groups: int, axis: int = -1) -> Array:
    """Repeat for the query heads of a key head, which are rows of one chunk."""
    return jnp.concatenate([x] * groups, axis)


def by_logits(scale: float) -> Within:
    """Exact keys of the chunk and its neighbours."""

    def within(far, x: Chunks, query_split, key_features, pairs: WithinChunk) -> State:
        key, value, log_weights = jax.tree.map(flat, cast(Keys, x.near)[:3])
        logits = dot("...th,...sh->...ts", flat(x.query), key, x.query.dtype) * scale
        logits = pairs.masked(logits + log_weights[..., None, :])
        return combine(far, softmax_rows(logits, value))

    return within


def softmax_rows(logits: Array, value: Array, equation: str = "...ts,...sv->...tv") -> State:
    """Rows of exact logits."""
    dtype, maximum = operand_dtype(value), jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - finite(maximum)[..., None]).astype(dtype)
    normaliser = jnp.sum(weights, axis=-1, dtype=float32_or_wider(weights))
    return State(maximum, normaliser, dot(equation, weights, value, dtype))


def by_features(maps: tuple[Features, Features], robust: bool) -> Within:
    """Keys of the chunk by their features; `robust` computes lost rows in logarithms."""

    def within(far, x: Chunks, query_split, keys: KeyFeatures, pairs: WithinChunk) -> State:
        dtype, least = operand_dtype(keys.value), UNSURE if robust else LOST
        weights, maximum, below = _kernel(query_split, keys.split, pairs, least, dtype)
        weights = weights.astype(dtype)
        normaliser = jnp.sum(weights, axis=-1, dtype=far.normaliser.dtype)
        numerator = dot("...ts,...sv->...tv", weights, keys.value, dtype)
        rows = combine(far, State(maximum, normaliser, numerator))
        if robust and query_split[0].shape[-1] > 1:
            lost = below > far.maximum - NEGLIGIBLE
            again = partial(_in_logarithms, maps, x, pairs, lost)
            rows = jax.lax.cond(anywhere(lost), jax.checkpoint(again), lambda rows: rows, rows)
        return rows

    return within


def _kernel(
    query_split: Split, key_split: Split, pairs: WithinChunk, least: float, dtype: jnp.dtype
) -> tuple[Float[Array, "*c t s"], Float[Array, "*c t"], Float[Array, "*c t"]]:
    """The kernel of queries (k, b, c, g s, m) and keys (k, b, c, s, m) of a chunk.

    Returns:
        Its rows times e^{-maximum}; the maxima, `LAST` for rows whose sum is below `least`; and an
        upper bound of the logarithm of these sums, -inf for the other rows.
    """
    nu, mu = (jax.lax.stop_gradient(jnp.max(x[0], axis=-1)) for x in (query_split, key_split))
    # Each side is at most 1, and 1 for its strongest feature; the exponent of the pair, nu + mu, is
    # put back below: mu in `scores`, which the row's largest stabilises, nu in the maximum.
    kernel = dot(
        "...tm,...sm->...ts",
        exponentials(query_split, nu[..., None]),
        exponentials(key_split, mu[..., None]),
        dtype,
    )
    scores = pairs.masked(mu[..., None, :])
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    bound = jnp.exp(scores - finite(largest)[..., None])
    if query_split[0].shape[-1] == 1:  # features share the exponent: none underflows alone
        return kernel * bound, nu + largest, jnp.full_like(largest, -jnp.inf)
    # In a row whose features underflow `TINY` is left: it weighs its keys by e^{mu_s}.
    weights = (kernel + TINY) * bound
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
    total = jnp.where(total == 0, 1.0, total)
    lost = (total < least) & ~jnp.isneginf(largest)
    maximum = jnp.where(lost, LAST, nu + largest + jnp.log(total))
    below = jnp.where(lost, nu + largest + math.log(least), -jnp.inf)
    return weights / total[..., None], maximum, below


def _in_logarithms(maps, x: Chunks, pairs: WithinChunk, lost: Array, rows: State) -> State:
    """The rows of a block, with the pairs of lost rows computed again, one by one.

    Memory: one key of each chunk at a time, with all queries of the chunk.
    """
    query_split = jax.tree.map(flat, maps[0](x.query))
    key_split, value, _ = _key_features(maps[1], x.keys)

    @partial(jax.checkpoint, prevent_cse=False)
    def log_kernel(split):  # (k, b, c, m)
        (exponent, factor), (key_exponent, key_factor) = query_split, split
        exponent = exponent + key_exponent[..., None, :]
        if factor is not None:
            factor = factor * key_factor[..., None, :]
        maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
        total = jnp.sum(exponentials((exponent, factor), maximum[..., None]), axis=-1)
        return maximum + jnp.log(jnp.where(total == 0, 1.0, total))

    by_key = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), key_split)  # (s, k, b, c, m)
    kernel = jnp.moveaxis(jax.lax.map(log_kernel, by_key), 0, -1)
    both = combine(rows, softmax_rows(pairs.masked(kernel), value))  # LAST counts for nothing
    return State(
        jnp.where(lost, both.maximum, rows.maximum),
        jnp.where(lost, both.normaliser, rows.normaliser),
        jnp.where(lost[..., None], both.numerator, rows.numerator),
    )


@jax.custom_batching.custom_vmap
def anywhere(lost: Bool[Array, "..."]) -> Bool[Array, ""]:
    """True if any is; a single answer under `vmap` too, so that `cond` stays one branch."""
    return jnp.any(lost)


@anywhere.def_vmap
def _(size, batched, lost):
    return anywhere(lost), False
