"""Attention over a sequence in chunks: causal, in packed segments, with decay, beside exact keys.

Keys outside a chunk enter through states (the monoid `state.combine`): those before it and, if
attention is not causal, those after it. Near keys enter pair by pair: keys of the chunk by their
features, or exact keys of the chunk and its neighbours by e^{q.k}, with states from two chunks
away. All are blocks of one online softmax.

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

`robust` computes lost rows again, if they matter beside the keys outside the chunk: each pair in
logarithms, feature by feature. All rows are then exact for any norm, and the others do not change.
It costs time where a row is lost, a little where none is, and half of the compilation again.
"""

import math
from functools import partial, reduce
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import min_dim
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from performer.attention import _decay
from performer.attention._checks import Plan
from performer.attention._sizes import blocks
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
    in_blocks,
    operand_dtype,
    pad,
    state_of,
    weighted,
)
from performer.features import Split
from performer.typing import float32_or_wider

TINY = 1e-32
"""Added to a kernel of non-negative features: 1 / TINY times a gradient still fits float32."""
LOST = 1e-29
"""Row sums below this count as underflow."""
UNSURE = 1e-23
"""Row sums above this are exact to the last digits of float32, despite underflow and `TINY`."""
LAST = -1e38
"""Maximum of rows that count for nothing beside any other."""
BESIDE = 17.0
"""e^-BESIDE is below the resolution of float32 at 1."""
KEPT = 4
"""Chunks of w tokens keep their states for the second pass up to m = KEPT w features."""


class Near(NamedTuple):
    """Exact keys of the queries of their chunk and of its neighbours."""

    keys: Keys
    """(b, t, k, .), with log-weights."""
    window: int
    """Tokens of a chunk."""
    scale: float


class Block(NamedTuple):
    """A block of c chunks of s tokens; in a scan, the axis of the blocks comes first."""

    query: Array
    """(k, b, c, g s, h): the g query heads of a key head are rows of a chunk."""
    keys: Keys
    """(k, b, c, s, .): keys of the states."""
    ids: Array | None
    """Segments (b, c, s)."""
    near: Keys | None
    """(k, b, c, 2 s or 3 s, .): exact keys of the chunk before, its own, and the one after."""
    near_ids: Array | None
    """(b, c, 2 s or 3 s)."""


class Own(NamedTuple):
    """The keys of each chunk as seen from one side; the axis of the chunks comes first."""

    state: State
    segment: Array | None
    """(c, b): the segment at that side, which has these keys."""
    fading: Array | None
    """(c, k, b): log-decay of a state over the chunk."""


class Carry(NamedTuple):
    """States that come into a chunk from one side."""

    far: State
    segment: Array | None
    """(b,): segment of the keys."""
    beside: Own | None
    """The neighbouring chunk, if it is not yet in the state."""


def sweep(
    maps: tuple[Features, Features],
    query: Float[Array, "b t k g h"],
    keys: Keys,
    ends: tuple[State, State | None],
    plan: Plan,
    *,
    ids: Int[Array, "b t"] | None = None,
    near: Near | None = None,
) -> tuple[State, State]:
    """Attend over a sequence; features and states of one block exist at a time.

    Args:
        maps: features of queries and of keys; beside exact keys, of the kernel itself.
        query: g query heads for each key head.
        keys: keys of the states, and near keys if `near` is None.
        ends: states (k, b, m) of the keys before and after the sequence; causal: None after it.
        plan: sizes of chunks and blocks.
        ids: segments, as runs of equal numbers.
        near: exact keys.

    Returns:
        Rows (b, t, k, g), and the state after all `keys`.
    """
    (b, t, k, g, h), sides = query.shape, 1 if ends[1] is None else 2
    s = near.window if near else min_dim(plan.chunk, t)
    count, length = blocks(t, max(plan.block, s), s)
    c, more = length // s, count * length - t

    def chunks(x, beside=0):  # (b, t, k, ...) -> (count, k, b, c, s (1 + beside), ...)
        parts = (x[:, i * s : i * s + count * length] for i in range(1 + beside))
        parts = [jnp.moveaxis(in_blocks(y, count, length), 3, 1) for y in parts]
        return jnp.concatenate([y.reshape(*y.shape[:3], c, s, *y.shape[4:]) for y in parts], axis=4)

    queries = jnp.swapaxes(chunks(query), 4, 5)  # (count, k, b, c, g, s, h)
    queries = queries.reshape(*queries.shape[:4], g * s, h)
    state_keys = jax.tree.map(chunks, extended(keys, 0, more))
    around = segments = near_ids = None
    if ids is not None:
        segments = near_ids = chunks(ids[..., None])[:, 0]
    if near:
        around = jax.tree.map(partial(chunks, beside=sides), extended(near.keys, s, more + s))
        if ids is not None:
            near_ids = chunks(pad(ids, s, more + s)[..., None], sides)[:, 0]
    xs = Block(queries, state_keys, segments, around, near_ids)
    start, later, own = _edge(ends[0], xs, 0), None, None
    if ends[1] is not None:
        # Without segments and decay queries on both sides see the same state of a chunk.
        alike = near is not None and ids is None and keys.log_decay is None
        keep = alike and ends[0].maximum.shape[-1] <= KEPT * s
        later, own = _after_blocks(maps[1], xs, _edge(ends[1], xs, -1), keep)

    @partial(jax.checkpoint, prevent_cse=False)  # in a scan there is nothing to share
    def forth(carry, xs):
        return _block(maps, near.scale if near else 1.0, g, plan.robust, carry, *xs)

    last, rows = jax.lax.scan(forth, start, (xs, later, own))

    def joined(x):  # (count, k, b, c, g s, ...) -> (b, t, k, g, ...)
        tail = x.shape[last.far.maximum.ndim + 2 :]
        x = x.reshape(count, k, b, c, g, s, *tail).transpose(
            2, 0, 3, 5, 1, 4, *range(6, 6 + len(tail))
        )
        return x.reshape(b, count * length, k, g, *tail)[:, :t]

    after = last.far
    if last.beside is not None:
        beside = jax.tree.map(lambda x: x[0], last.beside)
        after = combine(_decay.faded(after, beside.fading), beside.state)
    after = State(*(x.reshape(y.shape) for x, y in zip(after, ends[0], strict=True)))
    return jax.tree.map(joined, rows), after


@jax.custom_batching.custom_vmap
def anywhere(lost: Bool[Array, "..."]) -> Bool[Array, ""]:
    """True if any is; a single answer under `vmap` too, so that `cond` stays one branch."""
    return jnp.any(lost)


@anywhere.def_vmap
def _(size, batched, lost):
    return anywhere(lost), False


def _edge(end: State, xs: Block, side: int) -> Carry:
    """States that come in at one end of the sequence, where no chunk is beside."""
    end, beside = jax.tree.map(flat, end), None
    segment = None if xs.ids is None else xs.ids[side, :, side, side]
    if xs.near is not None:
        fading = jax.tree.map(lambda x: jnp.zeros_like(flat(x[0])[..., 0, 0]), xs.keys.log_decay)
        nothing = State(end.maximum - jnp.inf, *map(jnp.zeros_like, end[1:]))
        beside = jax.tree.map(lambda x: x[None], Own(nothing, segment, fading))
    return Carry(end, segment, beside)


def _after_blocks(key_map: Features, xs: Block, end: Carry, keep: bool) -> tuple[Carry, Own | None]:
    """States of the keys after each block; to `keep`, those of its chunks."""

    @partial(jax.checkpoint, prevent_cse=False)
    def back(carry, x):
        keys, ids = x
        own = _own(*_flat_features(key_map, keys), ids, True)
        return _passed(own, carry, True)[1], (carry, own if keep else None)

    _, kept = jax.lax.scan(back, end, (xs.keys, xs.ids), reverse=True)
    return kept


def _flat_features(key_map: Features, keys: Keys) -> tuple[Split, Array, Array | None]:
    """Features (k, b, c, s, m), values and log-decays of the keys of a block."""
    split, value, log_weights, log_decay = jax.tree.map(flat, (key_map(keys.key), *keys[1:]))
    return weighted(split, log_weights), value, log_decay


def _own(
    split: Split, value: Array, log_decay: Array | None, ids: Array | None, after: bool
) -> Own:
    """The keys of each chunk for the queries after it, or before it if they come `after`."""
    fading = segment = None
    if log_decay is not None:
        since, until, fading = _decay.sums(log_decay)
        split = weighted(split, since if after else until)
    if ids is not None:
        segment = ids[..., 0 if after else -1]  # (b, c)
        split = weighted(split, jnp.where(ids == segment[..., None], 0.0, -jnp.inf))
        segment = segment.T
    state = state_of(split, value)  # (k, b, c, m)
    axis = state.maximum.ndim - 2
    state, fading = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (state, fading))
    return Own(state, segment, fading)


def _passed(own: Own, carry: Carry, after: bool):
    """States (k, b, c, m) and segments (b, c) that enter each chunk of a block; the next carry."""
    far, segment, beside = carry
    if beside is not None:  # states are a chunk late
        parts = (own, beside) if after else (beside, own)
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        own = jax.tree.map(lambda x: x[1:] if after else x[:-1], joined)
        beside = jax.tree.map(lambda x: x[:1] if after else x[-1:], joined)

    def step(carry, own: Own):
        state, segment = carry
        faded = _decay.faded(state, own.fading)
        if segment is not None:  # a state ends with its segment
            goes_on = (segment == own.segment)[..., None]
            faded = faded._replace(maximum=jnp.where(goes_on, faded.maximum, -jnp.inf))
        return (combine(faded, own.state), own.segment), carry

    c, axis = own.state.maximum.shape[0], own.state.maximum.ndim - 2
    # A chunk of a window is little work for an iteration.
    unroll = 1 if beside is None or is_symbolic_dim(c) else 8
    last, seen = jax.lax.scan(step, (far, segment), own, reverse=after, unroll=unroll)
    states, segments = seen
    states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), states)
    return (states, None if segments is None else segments.T), Carry(*last, beside)


def _block(
    maps,
    scale: float,
    groups: int,
    robust: bool,
    carry: Carry,
    x: Block,
    later: Carry | None,
    own: Own | None,
) -> tuple[Carry, State]:
    """Rows (k, b, c, g s) of the chunks of a block; the scale is that of exact keys."""
    features = _flat_features(maps[1], x.keys)
    key_split, value, log_decay = features
    s, dtype = x.keys.key.shape[-2], operand_dtype(value)
    own = _own(*features, x.ids, False) if own is None else own
    seen, carry = _passed(own, carry, False)
    start, near_decay = 0, log_decay
    if x.near is not None:
        start, near_decay = s, jax.tree.map(flat, x.near.log_decay)
    between = since = until = None
    if near_decay is not None:
        between = _for_groups(_decay.between(near_decay)[..., start : start + s, :], groups, -2)
        since = _for_groups(_decay.sums(near_decay[..., : start + s]).since[..., start:], groups)
        until = _for_groups(_decay.sums(near_decay[..., start:]).until[..., :s], groups)
    parts = [(*seen, since)]
    if later is not None and x.ids is None and log_decay is None:
        parts = [(combine(seen[0], _passed(own, later, True)[0][0]), None, None)]
    elif later is not None:
        parts.append((*_passed(_own(*features, x.ids, True), later, True)[0], until))
    allowed = _allowed(x, start, groups, is_causal=later is None)
    split = jax.tree.map(flat, maps[0](x.query))
    query_ids = None if x.ids is None else _for_groups(x.ids, groups)
    rows = far = far_rows(split, parts, query_ids, dtype)
    if x.near is not None:
        key, near_value, log_weights = jax.tree.map(flat, x.near[:3])
        logits = dot("...th,...sh->...ts", flat(x.query), key, x.query.dtype) * scale
        logits = _weighed(logits + log_weights[..., None, :], allowed, between)
        return carry, combine(far, softmax_rows(logits, near_value))
    least = UNSURE if robust else LOST
    weights, maximum, below = _within(split, key_split, allowed, between, least, dtype)
    weights = weights.astype(dtype)
    denominator = jnp.sum(weights, axis=-1, dtype=far.normaliser.dtype)
    numerator = dot("...ts,...sv->...tv", weights, value, dtype)
    rows = combine(far, State(maximum, denominator, numerator))
    if robust and split[0].shape[-1] > 1:
        lost = below > far.maximum - BESIDE
        again = partial(_in_logarithms, maps, x.query, x.keys, allowed, between, lost)
        rows = jax.lax.cond(anywhere(lost), jax.checkpoint(again), lambda rows: rows, rows)
    return carry, rows


def _for_groups(x: Array, groups: int, axis: int = -1) -> Array:
    """Repeat for the query heads of a key head, which are rows of one chunk."""
    return jnp.concatenate([x] * groups, axis)


def _allowed(x: Block, start: int, groups: int, is_causal: bool) -> Bool[Array, "#b #c t s"] | None:
    """Mask of the near keys of each query; None for all."""
    s, allowed = x.keys.key.shape[-2], None
    if is_causal:
        allowed = jnp.tril(jnp.ones((s, start + s), bool), k=start)[None, None]
    if x.ids is not None:
        same = x.ids[..., :, None] == cast(Array, x.near_ids)[..., None, :]
        allowed = same if allowed is None else same & allowed
    return None if allowed is None else _for_groups(allowed, groups, -2)


def _weighed(logits: Array, allowed: Array | None, pair_bias: Array | None) -> Array:
    """Logits with log-weights of pairs, -inf where the pair is not allowed."""
    if pair_bias is not None:
        logits = logits + pair_bias
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def far_rows(split: Split, parts, segments: Array | None, dtype: jnp.dtype) -> State:
    """Rows of queries (..., t, m) with states.

    Args:
        split: features of queries.
        parts: states (..., m), their segments (b, c) or None, and log-decays (..., t) or None.
        segments: (b, c, t), of the queries.
        dtype: operands of products.
    """
    exponents = []
    for state, segment, fading in parts:
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
    for ((_, s, z), *_), exponent in zip(parts, exponents, strict=True):
        features = exponentials((exponent, split[1]), maximum[..., None]).astype(dtype)
        denominator = dot("...tm,...m->...t", features, s, s.dtype)
        sums.append((denominator, dot("...tm,...mv->...tv", features, z, dtype)))
    return State(maximum, *jax.tree.map(lambda *x: reduce(jnp.add, x), *sums))


def softmax_rows(logits: Array, value: Array, equation: str = "...ts,...sv->...tv") -> State:
    """Rows of exact logits."""
    dtype, maximum = operand_dtype(value), jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - finite(maximum)[..., None]).astype(dtype)
    denominator = jnp.sum(weights, axis=-1, dtype=float32_or_wider(weights))
    return State(maximum, denominator, dot(equation, weights, value, dtype))


def _within(
    query_split: Split,
    key_split: Split,
    allowed: Array | None,
    pair_bias: Array | None,
    least: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "*c t s"], Float[Array, "*c t"], Float[Array, "*c t"]]:
    """The kernel of queries (k, b, c, g s, m) and keys (k, b, c, s, m) of a chunk.

    Returns:
        Its rows times e^{-maximum}; the maxima, `LAST` for rows whose sum is below `least`; and an
        upper bound of the logarithm of these sums, -inf for the other rows.
    """
    nu, mu = (jax.lax.stop_gradient(jnp.max(x[0], axis=-1)) for x in (query_split, key_split))
    kernel = dot(
        "...tm,...sm->...ts",
        exponentials(query_split, nu[..., None]),
        exponentials(key_split, mu[..., None]),
        dtype,
    )
    scores = _weighed(mu[..., None, :], allowed, pair_bias)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    bound = jnp.exp(scores - finite(largest)[..., None])
    if query_split[0].shape[-1] == 1:  # features share the exponent: none underflows alone
        return kernel * bound, nu + largest, jnp.full_like(largest, -jnp.inf)
    weights = (kernel + TINY) * bound
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1))
    total = jnp.where(total == 0, 1.0, total)
    lost = (total < least) & ~jnp.isneginf(largest)
    maximum = jnp.where(lost, LAST, nu + largest + jnp.log(total))
    below = jnp.where(lost, nu + largest + math.log(least), -jnp.inf)
    return weights / total[..., None], maximum, below


def _in_logarithms(
    maps, query: Array, keys: Keys, allowed, pair_bias, lost: Array, rows: State
) -> State:
    """The rows of a block, lost ones with the keys of their chunk, pair by pair."""
    query_split = jax.tree.map(flat, maps[0](query))
    key_split, value, _ = _flat_features(maps[1], keys)

    @partial(jax.checkpoint, prevent_cse=False)
    def log_kernel(split):  # (k, b, c, m)
        (exponent, factor), (key_exponent, key_factor) = query_split, split
        exponent = exponent + key_exponent[..., None, :]
        if factor is not None:
            factor = factor * key_factor[..., None, :]
        maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
        total = jnp.sum(exponentials((exponent, factor), maximum[..., None]), axis=-1)
        return maximum + jnp.log(jnp.where(total == 0, 1.0, total))

    by_key = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), key_split)
    kernel = jnp.moveaxis(jax.lax.map(log_kernel, by_key), 0, -1)
    again = softmax_rows(_weighed(kernel, allowed, pair_bias), value)
    both = combine(rows, again)  # lost rows have the maximum LAST, which counts for nothing
    return State(
        jnp.where(lost, both.maximum, rows.maximum),
        jnp.where(lost, both.normaliser, rows.normaliser),
        jnp.where(lost[..., None], both.numerator, rows.numerator),
    )
