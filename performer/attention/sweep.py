"""Attention over a sequence in chunks: causal, in packed segments, with decay, with a window.

Keys outside a chunk enter through states (the monoid `state.combine`): those before it and, if
attention is not causal, those after it. Keys within it enter pair by pair, by their features. All
are blocks of one online softmax.

With a window of w tokens, keys at most one window away enter by e^{q.k} itself. A chunk is several
windows, as many as the device computes best. Its states keep a distance of w tokens, and its pairs
are those with the keys from w tokens before it to w after it: near ones by e^{q.k}, the others by
their features.

    states | w | chunk of s tokens, s a multiple of w | w, if not causal | states

Blocks of chunks follow one another; the chunks of a block are computed side by side. States of the
keys before a block are carried along. States of the keys after it come from an earlier pass over
the keys. All are sums from one end, never differences.

Features within a chunk have a stabiliser that is causal, and exact for early queries too:

    outside the chunk  the maxima c_j of the state, feature by feature
    within it          one scalar per key, mu_s = max_j l_j(k_s), one per query, nu_t; the kernel is
                       e^{nu_t + mu_s} sum_j e^{l_j(q_t) - nu_t} e^{l_j(k_s) - mu_s}, and its row
                       is stabilised by nu_t + max_{s <= t} mu_s

(With a maximum over the whole chunk, late keys would make early ones underflow.) The inner sums of
a row are exact while the largest is above e^-66: while a feature of some key and the query is at
least so strong, relative to the strongest of each. For m = 128 and h = 64 that holds below
|q| = |k| = 10 after scaling for opposite q and k (at 10 for 997 of 1,000 pairs), and for 97% of
orthogonal ones at 25. Past that the row is lost. It is NaN, unless its pairs are negligible next to
the keys outside the chunk.

`robust` computes lost rows again: each pair in logarithms, feature by feature. All rows are then
exact for any norm, and the others do not change. It costs time where a row is lost, a little where
none is, and half of the compilation again.

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
import numpy as np
from jax.core import max_dim, min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from performer.attention import decay
from performer.attention.sizes import blocks
from performer.attention.state import (
    Keys,
    Map,
    Queries,
    State,
    combine,
    extended,
    flat,
    pad,
    state_of,
)
from performer.attention.values import Plan
from performer.features import Split
from performer.numerics import anywhere, dot, exponentials, finite, operand_dtype, weighted
from performer.typing import Size, float32_or_wider

HEADROOM = 1e9
"""Row sums above HEADROOM times the least number of their dtype have lost no digit to underflow."""
NEGLIGIBLE = 17.0
"""e^-NEGLIGIBLE is below the resolution of float32 at 1."""
LOST = HEADROOM * float(np.finfo(np.float32).tiny)
"""Row sums of float32 below this are lost."""
ABOVE_LOST = math.log(LOST) + NEGLIGIBLE
"""Rows with this logarithm, of no weight, leave a normaliser below 1 where a lost row matters."""


class Near(NamedTuple):
    """Keys that are exact for the queries near them."""

    keys: Keys
    """(b, t, k, .), with log-weights."""
    window: int
    """Tokens of a window. A query attends to the keys of its own window and its neighbours."""
    scale: float


class Chunks(NamedTuple):
    """A block of chunks; in a scan, the axis of the blocks comes first."""

    queries: Queries
    """(k, b, c, g s, h)."""
    keys: Keys
    """(k, b, c s, .): keys that enter by their features, from w before the block to w before its
    end; not causal: to w after it, (k, b, c s + 2 w, .)."""
    segments: Array | None
    """(b, .), from w before the block to its end, or w after it if not causal."""
    near: Keys | None
    """(k, b, ., .), of the same tokens: exact keys."""


class KeyFeatures(NamedTuple):
    """Features (k, b, *c, s, m) of keys, with their log-weights; values and log-decays."""

    split: Split
    value: Array
    log_decay: Array | None

    def by_token(self, change: Callable[[Array, int], Array]) -> "KeyFeatures":
        """Change all arrays along the axis of their tokens."""
        split = jax.tree.map(lambda x: change(x, -2), self.split)
        log_decay = jax.tree.map(lambda x: change(x, -1), self.log_decay)
        return KeyFeatures(split, change(self.value, -2), log_decay)


class ChunkStates(NamedTuple):
    """States of the keys of each chunk, for queries on one side; the axis of the chunks first."""

    state: State
    segment: Array | None
    """(c, b): segment of the token nearest to the queries; only its keys are in the state."""
    fading: Array | None
    """(c, k, b): log-decay of a state over the chunk."""


class Incoming(NamedTuple):
    """State that enters the chunks of a block from one side."""

    state: State
    segment: Array | None
    """(b,): segment of the keys."""


class WithinChunk(NamedTuple):
    """Pairs of a query and a key of a chunk, (c, g s, keys)."""

    allowed: Bool[Array, "#b #c t s"] | None
    """None for all."""
    log_decay: Array | None

    def masked(self, logits: Array) -> Array:
        """Add the log-decay of the pairs; -inf where a pair is not allowed."""
        if self.log_decay is not None:
            logits = logits + self.log_decay
        return logits if self.allowed is None else jnp.where(self.allowed, logits, -jnp.inf)


class Cut(NamedTuple):
    """How a block of chunks is cut."""

    chunks: Size
    """Number of chunks."""
    tokens: Size
    """Tokens of a chunk."""
    window: int
    """Tokens of a window; 0 for none."""

    def shifted(self, x: Array, axis: int, start: Size) -> Array:
        """Chunks that begin `start` tokens late: (..., t, ...) -> (..., chunks, tokens, ...)."""
        x = jax.lax.slice_in_dim(x, start, start + self.chunks * self.tokens, axis=axis)
        return parts(x, axis, self.chunks, self.tokens)

    def around(self, x: Array, axis: int) -> Array:
        """Chunks with the tokens after them: (..., t, ...) -> (..., chunks, tokens + ., ...)."""
        return parts(x, axis, self.chunks, self.tokens)


def parts(x: Array, axis: int, count: Size, length: Size) -> Array:
    """Parts of the tokens, each with the `more` tokens that follow it.

    (..., count length + more, ...) -> (..., count, length + more, ...)
    """
    axis %= x.ndim
    cut = partial(jax.lax.slice_in_dim, axis=axis)
    own, rest = cut(x, 0, count * length), cut(x, count * length, x.shape[axis])
    own = own.reshape(*x.shape[:axis], count, length, *x.shape[axis + 1 :])
    more = rest.shape[axis]
    if more == 0:
        return own
    if not is_symbolic_dim(length) and more >= length:
        following = parts(cut(x, length, x.shape[axis]), axis, count, length)
    else:
        begins = jax.lax.slice_in_dim(cut(own, 1, count), 0, more, axis=axis + 1)
        following = jnp.concatenate([begins, jnp.expand_dims(rest, axis)], axis=axis)
    return jnp.concatenate([own, following], axis=axis + 1)


def sweep(
    maps: tuple[Map, Map],
    queries: Queries,
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
        queries: g query heads for each key head.
        keys: keys that enter by their features.
        ends: states (k, b, m) of the keys before and after the sequence; causal: None after it.
        plan: sizes of chunks and blocks.
        segments: numbers of the segments, as runs of equal numbers.
        near: exact keys.

    Returns:
        Rows (b, t, k, g), and the state after all `keys`; with a window, without the keys of the
        last w positions of the last chunk.
    """
    (b, t, k, g, h), is_causal = queries.query.shape, ends[1] is None
    w = near.window if near else 0
    s = _nearly_full(plan.chunk, t, max(w, 1))
    count, length = blocks(t, max(plan.block, s), s)
    cut, more = Cut(length // s, s, w), count * length - t
    after = 0 if is_causal else w  # tokens that a chunk reads beyond its end

    def in_parts(x):  # (b, ., k, ...) -> (count, k, b, ., ...)
        return jnp.moveaxis(parts(x, 1, count, length), (1, 3), (0, 1))

    def in_chunks(query):  # (b, t, k, g, h) -> (count, k, b, c, g s, h)
        query = in_parts(pad(query, 0, more)).reshape(count, k, b, cut.chunks, s, g, h)
        return jnp.swapaxes(query, 4, 5).reshape(count, k, b, cut.chunks, g * s, h)

    queries = jax.tree.map(in_chunks, queries)
    far_keys = extended(keys._replace(given=None), w, more + after)
    if is_causal and w:  # the last w tokens are near or not seen
        far_keys = jax.tree.map(lambda x: x[:, : count * length], far_keys)
    far_keys, near_keys = jax.tree.map(in_parts, far_keys), None
    if segments is not None:
        segments = jnp.moveaxis(parts(pad(segments, w, more + after), 1, count, length), 1, 0)
    if near:
        near_keys = near.keys._replace(key=near.keys.exact, given=None)
        near_keys = jax.tree.map(in_parts, extended(near_keys, w, more + after))
    xs = Chunks(queries, far_keys, segments, near_keys)
    start, later = _at_end(ends[0], xs, 0), None
    if ends[1] is not None:
        later = _after_blocks(maps[1], cut, xs, _at_end(ends[1], xs, -1))

    @partial(jax.checkpoint, prevent_cse=False)  # in a scan there is nothing to share
    def forth(before, xs):
        return _block(maps, cut, near.scale if near else 1.0, plan.robust, g, before, *xs)

    last, rows = jax.lax.scan(forth, start, (xs, later))

    def joined(x):  # (count, k, b, c, g s, ...) -> (b, t, k, g, ...)
        tail = x.shape[last.state.maximum.ndim + 2 :]
        x = x.reshape(count, k, b, cut.chunks, g, s, *tail).transpose(
            2, 0, 3, 5, 1, 4, *range(6, 6 + len(tail))
        )
        return x.reshape(b, count * length, k, g, *tail)[:, :t]

    state = State(*(x.reshape(y.shape) for x, y in zip(last.state, ends[0], strict=True)))
    return jax.tree.map(joined, rows), state


def _nearly_full(chunk: Size, t: Size, w: int) -> Size:
    """Tokens of a chunk, a multiple of w and at most `chunk`, so that all are nearly full."""
    most = max_dim(chunk // w, 1)
    if is_symbolic_dim(t):
        return w * most if w > 1 else min_dim(most, t)
    windows = max(1, -(-t // w))
    return w * -(-windows // -(-windows // most))


def _block(
    maps: tuple[Map, Map],
    cut: Cut,
    scale: float,
    robust: bool,
    groups: int,
    before: Incoming,
    x: Chunks,
    later: Incoming | None,
) -> tuple[Incoming, State]:
    """Return what enters the next block, and the rows (k, b, c, g s) of the chunks of this one.

    `later` enters from the other end, None if attention is causal.
    """
    keys = _key_features(maps[1], x.keys)
    # Keys outside the chunks: states (k, b, c, m) from the side before, and from the side after.
    states = _chunk_states(cut, keys, x.segments, False)
    (state, segment), following = _entering(states, before, False)
    near, far, since, until = _pairs_within(cut, x, keys.log_decay, groups, later is None)
    if later is None:
        sides = [(state, segment, since)]
    else:
        states = _chunk_states(cut, keys, x.segments, True)
        other, other_segment = _entering(states, later, True)[0]
        if x.segments is None and keys.log_decay is None:  # one state for both sides
            sides = [(combine(state, other), None, None)]
        else:
            sides = [(state, segment, since), (other, other_segment, until)]
    query_split = jax.tree.map(flat, maps[0](x.queries.query))  # (k, b, c, g s, m)
    query_segments = None
    if x.segments is not None:
        query_segments = _for_groups(cut.shifted(x.segments, -1, cut.window), groups)
    rows = _far_rows(query_split, sides, query_segments, operand_dtype(keys.value))
    if near is not None:
        rows = combine(rows, _near_rows(cut, x, near, scale))
    if far is not None:
        rows = _with_features(maps, cut, robust, rows, x, query_split, keys, far)
    return following, rows


def _key_features(key_map: Map, keys: Keys) -> KeyFeatures:
    split, value, log_weights, log_decay = jax.tree.map(flat, (key_map(keys.key), *keys[1:4]))
    return KeyFeatures(weighted(split, log_weights), value, log_decay)


# States outside the chunk


def _at_end(end: State, xs: Chunks, side: int) -> Incoming:
    """State that enters at one end of the sequence."""
    segment = None if xs.segments is None else xs.segments[side, :, side]
    return Incoming(jax.tree.map(flat, end), segment)


def _after_blocks(key_map: Map, cut: Cut, xs: Chunks, end: Incoming) -> Incoming:
    """States of the keys after each block."""
    whole = cut._replace(chunks=1, tokens=cut.chunks * cut.tokens)

    @partial(jax.checkpoint, prevent_cse=False)
    def back(later, x):
        keys, segments = x
        states = _chunk_states(whole, _key_features(key_map, keys), segments, True)
        return _entering(states, later, True)[1], later

    return jax.lax.scan(back, end, (xs.keys, xs.segments), reverse=True)[1]


def _chunk_states(
    cut: Cut, keys: KeyFeatures, segments: Array | None, for_earlier: bool
) -> ChunkStates:
    """States of the keys of each chunk for the queries after it, or for earlier ones.

    These chunks are w tokens earlier, or later, than the chunks of the queries.
    """
    start = 2 * cut.window if for_earlier else 0
    split, value, log_decay = keys.by_token(partial(cut.shifted, start=start))
    fading = segment = None
    if log_decay is not None:
        since, until, fading = decay.sums(log_decay)
        split = weighted(split, since if for_earlier else until)
    if segments is not None:
        segments = cut.shifted(segments, -1, start)
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

    def step(carry, chunk: ChunkStates):
        state, segment = carry
        faded = decay.faded(state, chunk.fading)
        if segment is not None:  # a state ends with its segment
            continues = (segment == chunk.segment)[..., None]
            faded = faded._replace(maximum=jnp.where(continues, faded.maximum, -jnp.inf))
        return Incoming(combine(faded, chunk.state), chunk.segment), carry

    last, (states, segments) = jax.lax.scan(step, incoming, chunks, reverse=backwards)
    axis = chunks.state.maximum.ndim - 2
    states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), states)  # (k, b, c, m)
    return (states, None if segments is None else segments.T), last


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
    cut: Cut, x: Chunks, log_decay: Array | None, groups: int, is_causal: bool
) -> tuple[WithinChunk | None, WithinChunk | None, Array | None, Array | None]:
    """Near pairs and other pairs of a chunk, None if there are none.

    With log-decays of queries since the keys before it, and until the keys after it.
    """
    w, s, after = cut.window, cut.tokens, 0 if is_causal else cut.window
    keys = w + s + after  # of a chunk, from w before it
    allowed = near = between = since = until = None
    if x.near is not None:
        log_decay = jax.tree.map(flat, x.near.log_decay)
    if log_decay is not None:
        log_decay = cut.around(log_decay, -1)
        between = _for_groups(decay.between(log_decay)[..., w : w + s, :], groups, -2)
        since = _for_groups(decay.sums(log_decay[..., : w + s]).since[..., w:], groups)
        until = _for_groups(decay.sums(log_decay[..., w:]).until[..., :s], groups)
    if is_causal:
        allowed = jnp.tril(jnp.ones((s, keys), bool), k=w)[None, None]
    if x.segments is not None:
        same = cut.shifted(x.segments, -1, w)[..., None] == cut.around(x.segments, -1)[..., None, :]
        allowed = same if allowed is None else same & allowed
    if w:
        window, key_window = jnp.arange(s) // w, jnp.arange(keys) // w - 1
        near = (abs(window[:, None] - key_window[None]) <= 1)[None, None]
    allowed, near = (
        None if pairs is None else _for_groups(pairs, groups, -2) for pairs in (allowed, near)
    )
    if near is None:
        return None, WithinChunk(allowed, between), since, until
    far, near = (near if allowed is None else allowed & near for near in (~near, near))
    # A causal query attends to no far key of the last window.
    far = WithinChunk(*jax.tree.map(lambda x: x[..., : s + 2 * after], (far, between)))
    return WithinChunk(near, between), None if s == w else far, since, until


def _for_groups(x: Array, groups: int, axis: int = -1) -> Array:
    """Repeat for the query heads of a key head, which are rows of one chunk."""
    return jnp.concatenate([x] * groups, axis)


def _near_rows(cut: Cut, x: Chunks, pairs: WithinChunk, scale: float) -> State:
    """Rows of the exact keys of each chunk."""
    key, value, log_weights = jax.tree.map(flat, cast(Keys, x.near)[:3])
    key, value, log_weights = (
        cut.around(x, axis) for x, axis in ((key, -2), (value, -2), (log_weights, -1))
    )
    query = flat(x.queries.exact)
    logits = dot("...th,...sh->...ts", query, key, query.dtype) * scale
    return softmax_rows(pairs.masked(logits + log_weights[..., None, :]), value)


def softmax_rows(logits: Array, value: Array, equation: str = "...ts,...sv->...tv") -> State:
    """Rows of exact logits."""
    dtype, maximum = operand_dtype(value), jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - finite(maximum)[..., None]).astype(dtype)
    normaliser = jnp.sum(weights, axis=-1, dtype=float32_or_wider(weights))
    return State(maximum, normaliser, dot(equation, weights, value, dtype))


def _with_features(
    maps: tuple[Map, Map],
    cut: Cut,
    robust: bool,
    rows: State,
    x: Chunks,
    query_split: Split,
    keys: KeyFeatures,
    pairs: WithinChunk,
) -> State:
    """The rows, and the pairs of each chunk by their features.

    Lost rows that matter are NaN, or computed in logarithms if `robust`.
    """
    keys, dtype = keys.by_token(cut.around), operand_dtype(keys.value)
    weights, maximum, below = _kernel(query_split, keys.split, pairs, dtype)
    weights = weights.astype(dtype)
    normaliser = jnp.sum(weights, axis=-1, dtype=rows.normaliser.dtype)
    numerator = dot("...ts,...sv->...tv", weights, keys.value, dtype)
    every = combine(rows, State(maximum, normaliser, numerator))
    if query_split[0].shape[-1] == 1:  # features share the exponent: none underflows alone
        return every
    lost = below > rows.maximum - NEGLIGIBLE
    if robust:
        again = partial(_in_logarithms, maps, cut, x, pairs, lost)
        return jax.lax.cond(anywhere(lost), jax.checkpoint(again), lambda rows: rows, every)
    return every._replace(normaliser=jnp.where(lost, jnp.nan, every.normaliser))


def _kernel(
    query_split: Split, key_split: Split, pairs: WithinChunk, dtype: jnp.dtype
) -> tuple[Float[Array, "*c t s"], Float[Array, "*c t"], Float[Array, "*c t"]]:
    """The kernel of queries (k, b, c, g s, m) and keys (k, b, c, s, m) of a chunk.

    Returns:
        Its rows times e^{-maximum}, 0 for lost rows; the maxima, -inf for lost rows; and an upper
        bound of the logarithm of the sums of lost rows, -inf for the others.
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
    weights = kernel * jnp.exp(scores - finite(largest)[..., None])
    if query_split[0].shape[-1] == 1:  # features share the exponent, and may have signs
        return weights, nu + largest, jnp.full_like(largest, -jnp.inf)
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
    least = HEADROOM * jnp.finfo(total.dtype).tiny
    lost = total < least
    total = jnp.where(lost, 1.0, total)
    maximum = jnp.where(lost, -jnp.inf, nu + largest + jnp.log(total))
    below = jnp.where(lost, nu + largest + math.log(least), -jnp.inf)
    return jnp.where(lost[..., None], 0.0, weights / total[..., None]), maximum, below


def _in_logarithms(
    maps, cut: Cut, x: Chunks, pairs: WithinChunk, lost: Array, rows: State
) -> State:
    """The rows of a block, with the pairs of lost rows computed again, one by one.

    Memory: one key of each chunk at a time, with all queries of the chunk.
    """
    query_split = jax.tree.map(flat, maps[0](x.queries.query))
    key_split, value, _ = _key_features(maps[1], x.keys).by_token(cut.around)

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
    both = combine(rows, softmax_rows(pairs.masked(kernel), value))  # lost rows have no weight
    return State(
        jnp.where(lost, both.maximum, rows.maximum),
        jnp.where(lost, both.normaliser, rows.normaliser),
        jnp.where(lost[..., None], both.numerator, rows.numerator),
    )
