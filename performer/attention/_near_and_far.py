"""The pass of `_window` over the chunks: near keys by e^{q.k}, far ones through states.

Blocks of chunks are worked on one after another. A block gets the state of the keys before it and,
if attention is not causal, that of the keys after it; its own chunks have states of their own,
which two scans over the chunks add up, one from either side. Where there is more than one block,
the states that come from the right are made before, in a pass over the keys alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from performer.attention import _decay
from performer.attention._checks import Options
from performer.attention._sizes import blocks
from performer.attention._sweep import Rows
from performer.attention.state import (
    Keys,
    State,
    combine,
    dot,
    exponentials,
    extended,
    finite,
    flat,
    heads_first,
    of_keys,
    operand_dtype,
    pad,
    weighted,
)
from performer.features import Split
from performer.typing import float32_or_wider

KEPT = 4
"""The states of all chunks are kept for the way forth if they take no more than so many times the
memory of the values, m / w; else they are made again."""


class Carry(NamedTuple):
    """What comes into a chunk from one side, in segments of these numbers (b,) if there are any.

    As it counts at the edge of the chunk.
    """

    far: State
    """Of the keys from two chunks away."""
    far_segment: Array | None
    beside: State
    """Of the chunk next to it."""
    segment: Array | None


class Block(NamedTuple):
    """A block of c chunks; before it, in a scan, the axis of the blocks."""

    query: Array
    """(k, b, c, g w, h), the g query heads of a key head as rows of a chunk."""
    near: Keys
    """(k, b, c w, .)."""
    before: Keys
    """(k, b, w, .): the chunk before the block."""
    after: Keys | None
    """The chunk after it; None if attention is causal."""
    far: Keys
    """(k, b, c, w, .), what of a chunk goes into states."""
    ids: tuple[Array, Array] | None
    """Segments (b, c, w) of the chunk, and (b, c, 2 w or 3 w) with those beside it."""
    since: Array | None
    """(k, b, c, w): what the keys before the chunk have faded for each query."""


class Unsummed(NamedTuple):
    """The far keys of the chunks of a block, where their states depend on the side of the query."""

    split: Split
    """Features."""
    value: Array
    fading: _decay.Sums | None


def near_and_far(
    maps,
    query: Float[Array, "b t k g h"],
    near: Keys,
    far: Keys,
    segments: Int[Array, "b t"] | None,
    ends: tuple[State, State | None],
    options: Options,
    folded: Int[Array, " b"] | None = None,
) -> tuple[Rows, State]:
    """The rows (b, t, k, g), and the state of all far keys.

    Args:
        maps: features of queries and keys.
        query: a sequence.
        near: its keys, as they are seen from near.
        far: the same keys, as they enter states: some may be left out.
        segments: their numbers.
        ends: states of the keys before the sequence and after it, None if attention is causal.
        options: of the call.
        folded: how many of the far keys exist and fade; all, if None.
    """
    (b, t, k, g, _), w = query.shape, options.exact_window
    count, length = blocks(t, max(options.block, w), w)
    xs = _in_blocks(query, near, far, segments, folded, count, length, options)
    start = _carry(ends[0], xs.ids, 0)
    end = None if ends[1] is None else _carry(ends[1], xs.ids, -1)
    keep = xs.ids is None and xs.since is None and ends[0].maximum.shape[-1] <= KEPT * w

    @partial(jax.checkpoint, prevent_cse=False)
    def back(carry, x):
        own = _own(maps[1], x)
        return _passed(own, x.ids, carry, reverse=True)[1], (carry, own if keep else None)

    @partial(jax.checkpoint, prevent_cse=False)
    def forth(carry, xs):
        x, (later, own) = xs
        own = _own(maps[1], x) if own is None else own
        parts, after = _parts(own, x, carry, later)
        return after, _rows_of_block(maps[0], x, parts, g, options)

    later = None, None
    if end is not None and count == 1:
        later = jax.tree.map(lambda x: x[None], end), None
    elif end is not None:
        later = jax.lax.scan(back, end, xs, reverse=True)[1]
    last, rows = jax.lax.scan(forth, start, (xs, later))

    def joined(x):  # (count, k, b, c, g w, ...) -> (b, t, k, g, ...)
        tail = x.shape[last.far.maximum.ndim + 2 :]
        x = x.reshape(count, k, b, length // w, g, w, *tail)
        x = x.transpose(2, 0, 3, 5, 1, 4, *range(6, x.ndim))
        return x.reshape(b, count * length, k, g, *x.shape[6:])[:, :t]

    after = combine(last.far, last.beside)
    after = State(*(x.reshape(y.shape) for x, y in zip(after, ends[0], strict=True)))
    return jax.tree.map(joined, rows), after


def _in_blocks(
    query, near: Keys, far: Keys, segments, folded, count, length, options: Options
) -> Block:
    (b, t, k, g, h), w = query.shape, options.exact_window
    c, more = length // w, count * length - t

    def chunks(x):  # (count, k, b, length, ...) -> (count, k, b, c, w, ...)
        return x.reshape(*x.shape[:3], c, w, *x.shape[4:])

    def beside(keys, part, there):  # of each block, the chunk before it or after it
        keys = jax.tree.map(lambda x: jnp.roll(x[:, :, :, part], there, axis=0), keys)
        last = 0 if there == 1 else -1
        return keys._replace(log_weights=keys.log_weights.at[last].set(-jnp.inf))

    in_blocks = partial(heads_first, count=count, length=length)
    ids = since = None
    if near.log_decay is not None:
        place = jnp.arange(t)[None]
        begins = place % w == 0
        if folded is not None:
            begins &= place <= folded[:, None]
        since = chunks(in_blocks(_decay.since_begin(near.log_decay, begins)))
    near, far = (jax.tree.map(in_blocks, extended(keys, 0, more)) for keys in (near, far))
    query = pad(query, 0, more).reshape(b, count, c, w, k, g, h).transpose(1, 4, 0, 2, 5, 3, 6)
    before = beside(near, slice(length - w, None), 1)
    after = None if options.is_causal else beside(near, slice(w), -1)
    if segments is not None:
        own = jnp.pad(segments, ((0, 0), (0, more)), mode="edge")
        own = own.reshape(b, count, length).swapaxes(0, 1)
        sides = [jnp.roll(own[:, :, -w:], 1, axis=0), own, jnp.roll(own[:, :, :w], -1, axis=0)]
        ids = own.reshape(count, b, c, w), _windows(sides[: 2 if options.is_causal else 3], w)
    query = query.reshape(count, k, b, c, g * w, h)
    return Block(query, near, before, after, jax.tree.map(chunks, far), ids, since)


def _windows(sides: Sequence[Array], w: int) -> Array:
    """(k, b, w | c w | w, .) -> (k, b, c, 2 w or 3 w, .), each chunk between the ones beside it."""
    around, (k, b, length, *tail) = jnp.concatenate(sides, axis=2), sides[1].shape
    parts = [around[:, :, i * w : i * w + length] for i in range(len(sides))]
    return jnp.concatenate([x.reshape(k, b, length // w, w, *tail) for x in parts], axis=3)


def _carry(end: State, ids, side: int) -> Carry:
    """Into the first chunk, or from the other side into the last."""
    end = jax.tree.map(flat, end)
    number = None if ids is None else ids[0][side, :, side, side]
    return Carry(end, number, State(end.maximum - jnp.inf, *map(jnp.zeros_like, end[1:])), number)


def _own(key_map, x: Block) -> State | Unsummed:
    """Of the chunks of a block, (k, b, c, m)."""
    key, *carried = x.far
    split, value, log_weights, log_decay = jax.tree.map(flat, (key_map(key), *carried))
    split = weighted(split, log_weights)
    if x.ids is None and log_decay is None:
        return of_keys(split, value)
    return Unsummed(split, value, None if log_decay is None else _decay.sums(log_decay))


def _parts(own: State | Unsummed, x: Block, earlier: Carry, later: Carry | None):
    """What each chunk sees, as (states (k, b, c, m), their segments (b, c), what a query adds)."""
    seen, after = _passed(own, x.ids, earlier, reverse=False)
    parts = [(*seen, None if x.since is None else flat(x.since))]
    if later is not None:
        seen, _ = _passed(own, x.ids, later, reverse=True)
        fading = own.fading if isinstance(own, Unsummed) else None
        parts.append((*seen, fading and fading.until))
        if isinstance(own, State):
            parts = [(combine(parts[0][0], parts[1][0]), None, None)]
    return parts, after


def _passed(own: State | Unsummed, ids, carry: Carry, *, reverse: bool):
    """What comes into each chunk of a block, (states (k, b, c, m), segments (b, c)); and beyond."""
    number = total = None
    if isinstance(own, State):
        state = own
    else:
        split, value, fading = own
        if fading is not None:
            split = weighted(split, fading.since if reverse else fading.until)
            total = fading.total
        if ids is not None:  # of a chunk, the keys in the segment that goes on
            number = ids[0][..., 0 if reverse else -1]
            split = weighted(split, jnp.where(ids[0] == number[..., None], 0.0, -jnp.inf))
            number = number.T
        state = of_keys(split, value)
    axis = state.maximum.ndim - 2

    def step(carry: Carry, x):
        chunk, number, total = x
        far = carry.far
        if number is not None:
            goes_on = (carry.far_segment == carry.segment)[..., None]
            far = far._replace(maximum=jnp.where(goes_on, far.maximum, -jnp.inf))
        far = _decay.faded(combine(far, carry.beside), total)
        return Carry(far, carry.segment, chunk, number), (carry.far, carry.far_segment)

    state, total = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (state, total))
    xs, length = (state, number, total), state.maximum.shape[0]
    unroll = 1 if is_symbolic_dim(length) else 8  # a chunk is little work for a turn of a loop
    carry, (seen, of_segments) = jax.lax.scan(step, carry, xs, reverse=reverse, unroll=unroll)
    seen = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), seen)
    return (seen, None if of_segments is None else of_segments.T), carry


def _rows_of_block(query_map, x: Block, parts, groups: int, options: Options) -> Rows:
    """Queries with the keys beside them and with states of others."""
    ids, w, query = x.ids, options.exact_window, flat(x.query)
    exponent, factor = jax.tree.map(flat, query_map(x.query))
    sides = [side for side in (x.before, x.near, x.after) if side is not None]
    around = jax.tree.map(lambda *parts: flat(_windows(parts, w)), *sides)
    key, value, log_weights, log_decay = around
    logits = dot("...th,...sh->...ts", query, key, query.dtype) * options.scale
    logits = logits + log_weights[..., None, :]
    if log_decay is not None:
        logits = logits + jnp.concatenate([_decay_of_pairs(log_decay, w)] * groups, axis=-2)
    allowed = _allowed(ids, groups, options)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    far = []
    for state, number, fading in parts:
        towards = exponent + state.maximum[..., None, :]
        if fading is not None:
            towards += jnp.concatenate([fading] * groups, axis=-1)[..., None]
        if number is not None and ids is not None:
            same = jnp.tile(ids[0] == number[..., None], groups)
            towards = jnp.where(same[..., None], towards, -jnp.inf)
        far.append(towards)
    maximum = [jnp.max(x, axis=-1) for x in (logits, *far)]
    maximum = jax.lax.stop_gradient(jnp.max(jnp.stack(maximum), axis=0))
    rows = softmax_rows(logits, value, "...ts,...sv->...tv", maximum)
    dtype = operand_dtype(value)
    _, denominator, numerator = rows
    for (state, *_), towards in zip(parts, far, strict=True):
        features = exponentials((towards, factor), maximum[..., None]).astype(dtype)
        denominator += dot("...tm,...m->...t", features, state.normaliser, state.normaliser.dtype)
        numerator += dot("...tm,...mv->...tv", features, state.numerator, dtype)
    return Rows(maximum, denominator, numerator)


def _decay_of_pairs(log_decay: Float[Array, "*c s"], w: int) -> Float[Array, "*c w s"]:
    """Of the queries of the middle chunk, or the last of two, with the keys around them."""
    before, own, *after = jnp.split(log_decay, log_decay.shape[-1] // w, axis=-1)
    since, until, _ = _decay.sums(own)
    pairs = [since[..., None] + _decay.sums(before).until[..., None, :], _decay.between(own)]
    if after:
        pairs.append(until[..., None] + _decay.sums(after[0]).since[..., None, :])
    return jnp.concatenate(pairs, axis=-1)


def _allowed(ids, groups: int, options: Options) -> Bool[Array, "*c t s"] | None:
    """Which of the keys beside it a query sees."""
    w, allowed = options.exact_window, None
    if options.is_causal:
        allowed = jnp.tril(jnp.ones((w, 2 * w), bool), k=w)
    if ids is not None:
        same = ids[0][..., :, None] == ids[1][..., None, :]
        allowed = same if allowed is None else same & allowed
    return None if allowed is None else jnp.concatenate([allowed] * groups, axis=-2)


def softmax_rows(logits: Array, value: Array, equation: str, maximum: Array) -> Rows:
    """Of exact logits."""
    dtype = operand_dtype(value)
    weights = jnp.exp(logits - finite(maximum)[..., None]).astype(dtype)
    denominator = jnp.sum(weights, axis=-1, dtype=float32_or_wider(weights))
    return Rows(maximum, denominator, dot(equation, weights, value, dtype))
