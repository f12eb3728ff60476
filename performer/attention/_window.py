"""Near keys exactly, far ones by their features, in one normaliser.

A sequence is cut into chunks of `exact_window` tokens. A query sees the keys of its own chunk and
of the one before (and of the one after, if it is not causal) by e^{q.k} itself, all others by the
estimate sum_j phi_j(q) phi_j(k): a sparse correction of a low-rank estimate (Chen et al. 2021), but
of the kernel, so that one normaliser serves both. The first keys, where trained models put the
attention that has no other place (Xiao et al. 2024), may be exact for every query, too.

What is far is the state of the keys up to two chunks before, and of those from two chunks after:
sums from either end, never differences. One scan over blocks of chunks carries the first forth, and
one over the keys alone, before it, the second back; a block keeps nothing but what it was given.

The estimate must be the kernel here, not the kernel up to a factor of the row: the maps have the
query's half norm, 1 / m, and the determinant of a calibration.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import state as states
from performer.attention._checks import Options
from performer.attention._sizes import blocks
from performer.attention._sweep import Rows, merge, ratio
from performer.attention.parallel import beside, earlier_devices, later_devices
from performer.attention.state import (
    Keys,
    State,
    WindowState,
    combine,
    dot,
    exponentials,
    extended,
    finite,
    flat,
    of_keys,
    operand_dtype,
    pad,
    weighted,
)
from performer.typing import float32_or_wider


class Carry(NamedTuple):
    """What comes into a chunk from one side, in segments of these numbers (b,) if there are any."""

    far: State
    """Of the keys from two chunks away."""
    far_segment: Array | None
    beside: State
    """Of the chunk next to it."""
    segment: Array | None


def attention(
    maps,
    query: Float[Array, "b t k g h"],
    keys: Keys,
    segments: Int[Array, "b t"] | None,
    nothing: State,
    options: Options,
) -> Float[Array, "b t k g v"]:
    """The output; as many queries as keys, and none before them.

    Args:
        maps: features of queries and of keys, which estimate the kernel itself.
        query: after calibration.
        keys: after shift and calibration.
        segments: runs of equal numbers; a query sees the keys of its own.
        nothing: the state (k, b, m) of no keys.
        options: of the call.
    """
    t, keys, axis_name = query.shape[1], _counted(keys), options.axis_name
    begin = jnp.zeros((1, 1), jnp.int32)
    if segments is not None:
        begin = _begins(segments)
    if axis_name is None:
        options = options._replace(exact_window=min(options.exact_window, t))
    else:
        begin = begin - t * jax.lax.axis_index(axis_name)
    place = jnp.arange(t) - begin
    others = _without_first(keys, place, options)
    if axis_name is not None:
        rows = _over_devices(maps, query, others, nothing, axis_name, options)
    else:
        ends = nothing, None if options.is_causal else nothing
        rows, _ = _near_and_far(maps, query, others, others, segments, ends, options)
    if options.exact_first:
        first = _first(keys, segments, begin, options)
        rows = merge(rows, _exact(query, first, _reached(place, options), options))
    return ratio(rows)


def stream(
    maps,
    query: Float[Array, "b t k g h"],
    keys: Keys,
    state: WindowState | None,
    nothing: State,
    options: Options,
) -> tuple[Float[Array, "b t k g v"], WindowState]:
    """The output after earlier keys, and the state after all; causal."""
    w, t, keys = options.exact_window, query.shape[1], _counted(keys)
    state = _empty(keys, nothing, options) if state is None else state
    place = state.position[:, None] + jnp.arange(t)
    first = _either(state.first, _taken(keys, jnp.arange(options.exact_first) - place[:, :1]))
    # The chunk before that of the first token, then its own: what is there of it, the new tokens.
    filled = state.position[:, None] % w
    index = jnp.arange(_chunks(t, w) * w + 2 * w)
    joined = _joined(state.near, _without_first(keys, place, options))
    around = _taken(joined, jnp.where(index < w + filled, index, index + w - filled))
    done = (filled + t) // w * w
    near = _taken(around, done + jnp.arange(2 * w))
    folded = _where(index < done, around)  # into the state, that is
    if t == 1:
        rows = _exact(query, _cut(around, 0, 2 * w), None, options)
        rows = merge(rows, _through(maps[0], query, state.far))
        after = jax.lax.cond(
            jnp.any(done > 0),
            lambda far: states.summarise(maps[1], _cut(folded, 0, w), far, options.block),
            lambda far: far,
            state.far,
        )
    else:
        places = jnp.arange(index.shape[0] - w) - w - filled
        queries = _along(query, jnp.clip(places, 0, t - 1))
        whole, folded = _cut((around, folded), 0, places.shape[-1])
        rows, after = _near_and_far(maps, queries, whole, folded, None, (state.far, None), options)
        rows = Rows(*(_along(x, w + filled + jnp.arange(t)) for x in rows))
    if options.exact_first:
        rows = merge(rows, _exact(query, first, _reached(place, options), options))
    return ratio(rows), WindowState(after, near, first, state.position + t)


def _over_devices(
    maps, query, keys: Keys, nothing: State, axis_name: str, options: Options
) -> Rows:
    """With the chunks of the neighbours beside those of this device."""
    w, t = options.exact_window, query.shape[1]
    sides = (w, 0 if options.is_causal else w)
    around = beside(extended(keys, *sides), *sides, axis_name)

    def far(start, exchange):
        own = states.summarise(maps[1], _cut(around, start, t), nothing, options.block)
        return exchange(own, axis_name)

    ends = far(0, earlier_devices), None if options.is_causal else far(2 * w, later_devices)
    rows, _ = _near_and_far(maps, pad(query, *sides), around, around, None, ends, options)
    return _cut(rows, w, t)


def _near_and_far(
    maps,
    query: Float[Array, "b t k g h"],
    near: Keys,
    far: Keys,
    segments: Int[Array, "b t"] | None,
    ends: tuple[State, State | None],
    options: Options,
) -> tuple[Rows, State]:
    """The rows (b, t, k, g), and the state of all far keys.

    Args:
        maps: features of queries and keys.
        query: a sequence.
        near: its keys, as they are seen from near.
        far: the same keys, as they enter states: some may be left out.
        segments: their numbers.
        ends: states of the keys before the sequence and after it.
        options: of the call.
    """
    (b, t, k, g, _), w, causal = query.shape, options.exact_window, options.is_causal
    count, length = blocks(t, max(options.block, w), w)
    more, sides = count * length - t, 2 if causal else 3
    query, near, far = pad(query, 0, more), extended(near, 0, more), extended(far, 0, more)
    around = extended(near, w, 0 if causal else w)

    def of_chunks(x, sides=1):  # (b, t, ...) -> (count, b, c, sides w, ...)
        parts = [x[:, i * w : i * w + count * length] for i in range(sides)]
        parts = [x.reshape(b, count, length // w, w, *x.shape[2:]) for x in parts]
        return jnp.moveaxis(jnp.concatenate(parts, axis=3), 1, 0)

    def heads_first(x, sides=1):  # (count, k, b, c, sides w, ...)
        return jnp.moveaxis(of_chunks(x, sides), 4, 1)

    ids = None
    if segments is not None:
        own = jnp.pad(segments, ((0, 0), (0, more)), mode="edge")
        beside = jnp.pad(own, ((0, 0), (w, 0 if causal else w)), mode="edge")
        ids = of_chunks(own), of_chunks(beside, sides)
    queries = jnp.moveaxis(heads_first(query), 5, 4)  # (count, k, b, c, g, w, h)
    queries = queries.reshape(*queries.shape[:4], g * w, query.shape[-1])
    xs = queries, *(jax.tree.map(heads_first, tuple(far)),), ids
    keys_of_near = jax.tree.map(partial(heads_first, sides=sides), tuple(around))
    start = _carry(ends[0], ids, 0)
    end = None if ends[1] is None else _carry(ends[1], ids, -1)

    @partial(jax.checkpoint, prevent_cse=False)
    def back(carry, xs):
        _, carried, ids = xs
        return _passed(maps[1], carried, ids, carry, reverse=True)[1], carry

    @partial(jax.checkpoint, prevent_cse=False)
    def forth(carry, xs):
        (query, carried, ids), near, later = xs
        past, after = _passed(maps[1], carried, ids, carry, reverse=False)
        parts = [past]
        if later is not None:
            parts.append(_passed(maps[1], carried, ids, later, reverse=True)[0])
        return after, _rows_of_block(maps[0], query, near, ids, parts, g, options)

    later = None if end is None else jax.lax.scan(back, end, xs, reverse=True)[1]
    last, rows = jax.lax.scan(forth, start, (xs, keys_of_near, later))

    def joined(x):  # (count, k, b, c, g w, ...) -> (b, t, k, g, ...)
        tail = x.shape[last.far.maximum.ndim + 2 :]
        x = x.reshape(count, k, b, length // w, g, w, *tail)
        x = x.transpose(2, 0, 3, 5, 1, 4, *range(6, x.ndim))
        return x.reshape(b, count * length, k, g, *x.shape[6:])[:, :t]

    after = combine(last.far, last.beside)
    after = State(*(x.reshape(y.shape) for x, y in zip(after, ends[0], strict=True)))
    return jax.tree.map(joined, rows), after


def _carry(end: State, ids, side: int) -> Carry:
    """Into the first chunk, or from the other side into the last."""
    end = jax.tree.map(flat, end)
    number = None if ids is None else ids[0][side, :, side, side]
    return Carry(end, number, State(end.maximum - jnp.inf, *map(jnp.zeros_like, end[1:])), number)


def _passed(key_map, carried, ids, carry: Carry, *, reverse: bool):
    """What comes into each chunk of a block, (states (k, b, c, m), segments (b, c)); and beyond."""
    key, *carried = carried
    split, value, log_weights = jax.tree.map(flat, (key_map(key), *carried))
    split, number = weighted(split, log_weights), None
    if ids is not None:  # of a chunk, the keys in the segment that goes on
        number = ids[0][..., 0 if reverse else -1]
        split = weighted(split, jnp.where(ids[0] == number[..., None], 0.0, -jnp.inf))
        number = number.T
    own = of_keys(split, value)
    axis = own.maximum.ndim - 2

    def step(carry: Carry, x):
        chunk, number = x
        far = carry.far
        if number is not None:
            goes_on = (carry.far_segment == carry.segment)[..., None]
            far = far._replace(maximum=jnp.where(goes_on, far.maximum, -jnp.inf))
        following = Carry(combine(far, carry.beside), carry.segment, chunk, number)
        return following, (carry.far, carry.far_segment)

    own = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), own)
    carry, (seen, of_segments) = jax.lax.scan(step, carry, (own, number), reverse=reverse)
    seen = jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), seen)
    return (seen, None if of_segments is None else of_segments.T), carry


def _rows_of_block(query_map, query, near, ids, parts, groups: int, options: Options) -> Rows:
    """Queries (k, b, c, g w, h) with the keys beside them and with states of others."""
    exponent, factor = jax.tree.map(flat, query_map(query))
    query, (key, value, log_weights) = jax.tree.map(flat, (query, near))
    logits = dot("...th,...sh->...ts", query, key, query.dtype) * options.scale
    logits = logits + log_weights[..., None, :]
    allowed = _allowed(ids, groups, options)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    if ids is None and len(parts) > 1:
        parts = [(combine(parts[0][0], parts[1][0]), None)]
    far = []
    for state, number in parts:
        towards = exponent + state.maximum[..., None, :]
        if ids is not None and number is not None:
            same = jnp.tile(ids[0] == number[..., None], groups)
            towards = jnp.where(same[..., None], towards, -jnp.inf)
        far.append(towards)
    maximum = [jnp.max(x, axis=-1) for x in (logits, *far)]
    maximum = jax.lax.stop_gradient(jnp.max(jnp.stack(maximum), axis=0))
    rows = _rows(logits, value, "...ts,...sv->...tv", maximum)
    dtype = operand_dtype(value)
    _, denominator, numerator = rows
    for (state, _), towards in zip(parts, far, strict=True):
        features = exponentials((towards, factor), maximum[..., None]).astype(dtype)
        denominator += dot("...tm,...m->...t", features, state.normaliser, state.normaliser.dtype)
        numerator += dot("...tm,...mv->...tv", features, state.numerator, dtype)
    return Rows(maximum, denominator, numerator)


def _allowed(ids, groups: int, options: Options) -> Bool[Array, "*c t s"] | None:
    """Which of the keys beside it a query sees."""
    w, allowed = options.exact_window, None
    if options.is_causal:
        allowed = jnp.tril(jnp.ones((w, 2 * w), bool), k=w)
    if ids is not None:
        same = ids[0][..., :, None] == ids[1][..., None, :]
        allowed = same if allowed is None else same & allowed
    return None if allowed is None else jnp.concatenate([allowed] * groups, axis=-2)


def _through(query_map, query, state: State) -> Rows:
    """Rows of a few queries (b, t, k, g, h) with a state (k, b, m)."""
    exponent, factor = query_map(jnp.moveaxis(query, 2, 0))  # (k, b, t, g, m)
    exponent = exponent + state.maximum[:, :, None, None]
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
    wide = state.normaliser.dtype
    features = exponentials((exponent, factor), maximum[..., None])
    denominator = dot("kbtgm,kbm->kbtg", features, state.normaliser, wide)
    numerator = dot("kbtgm,kbmv->kbtgv", features, state.numerator, wide)
    return Rows(*(jnp.moveaxis(x, 0, 2) for x in (maximum, denominator, numerator)))


def _exact(query: Array, keys: Keys, allowed: Bool[Array, "*b t f"] | None, options: Options):
    """Rows of all queries with a few keys, (b, f, k, .) or those of each query, (b, t, f, k, .)."""
    of = "btskh" if keys.key.ndim == 5 else "bskh"
    logits = dot(f"btkgh,{of}->btkgs", query, keys.key, query.dtype) * options.scale
    log_weights = jnp.swapaxes(cast(Array, keys.log_weights), -1, -2)[..., :, None, :]
    logits = logits + (log_weights if keys.key.ndim == 5 else log_weights[:, None])
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return _rows(logits, keys.value, f"btkgs,{of[:-1]}v->btkgv", maximum)


def _rows(logits: Array, value: Array, equation: str, maximum: Array) -> Rows:
    dtype = operand_dtype(value)
    weights = jnp.exp(logits - finite(maximum)[..., None]).astype(dtype)
    denominator = jnp.sum(weights, axis=-1, dtype=float32_or_wider(weights))
    return Rows(maximum, denominator, dot(equation, weights, value, dtype))


def _counted(keys: Keys) -> Keys:
    """With a log-weight for each of (b, s, k)."""
    log_weights = jnp.zeros((), float32_or_wider(keys.key))
    if keys.log_weights is not None:
        log_weights = keys.log_weights
    return keys._replace(log_weights=jnp.broadcast_to(log_weights, keys.key.shape[:3]))


def _begins(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Where the run of equal numbers begins that a token is in."""
    new = segments != jnp.roll(segments, 1, axis=1)
    return jax.lax.cummax(jnp.where(new, jnp.arange(segments.shape[1]), 0), axis=1)


def _without_first(keys: Keys, place: Int[Array, "#b t"], options: Options) -> Keys:
    return _where(place >= options.exact_first, keys) if options.exact_first else keys


def _first(keys: Keys, segments: Array | None, begin: Array, options: Options) -> Keys:
    """The first keys, or those of each query's own segment."""
    f = options.exact_first
    if segments is None:
        first = _cut(extended(keys, 0, max(f - keys.key.shape[1], 0)), 0, f)
        if options.axis_name is None:
            return first
        return jax.tree.map(lambda x: jax.lax.all_gather(x, options.axis_name)[0], first)
    b, t = segments.shape
    index = (begin[..., None] + jnp.arange(f)).reshape(b, t * f)
    own = jnp.repeat(segments, f, axis=1) == _along(segments, jnp.minimum(index, t - 1))
    first = _where(own, _taken(keys, index))
    return jax.tree.map(lambda x: x.reshape(b, t, f, *x.shape[2:]), first)


def _reached(place: Int[Array, "#b t"], options: Options) -> Bool[Array, "#b t f"] | None:
    """Which of the first keys a query sees."""
    return jnp.arange(options.exact_first) <= place[..., None] if options.is_causal else None


def _chunks(t: int, w: int) -> int:
    """How many chunks t tokens can touch."""
    return -(-(w - 1 + t) // w)


def _empty(keys: Keys, nothing: State, options: Options) -> WindowState:
    b = keys.key.shape[0]
    none = _where(False, keys)

    def of(length):
        return _cut(extended(none, 0, length), keys.key.shape[1], length)

    position = jnp.zeros((b,), jnp.int32)
    return WindowState(nothing, of(2 * options.exact_window), of(options.exact_first), position)


def _taken(keys: Keys, index: Int[Array, "b i"]) -> Keys:
    """The keys of these places; where there is no such place, no key."""
    last = keys.key.shape[1] - 1
    index = jnp.broadcast_to(index, (keys.key.shape[0], index.shape[-1]))
    taken = jax.tree.map(partial(_along, index=jnp.clip(index, 0, last)), keys)
    return _where((index >= 0) & (index <= last), taken)


def _where(exists: Bool[Array, "#b s"] | bool, keys: Keys) -> Keys:
    exists = jnp.broadcast_to(jnp.asarray(exists), keys.key.shape[:2])[..., None]
    log_weights = cast(Array, keys.log_weights)
    return keys._replace(log_weights=jnp.where(exists, log_weights, -jnp.inf))


def _either(left: Keys, right: Keys) -> Keys:
    """The left keys where there are any."""
    exists = ~jnp.isneginf(cast(Array, left.log_weights))

    def choose(x, y):
        return jnp.where(exists if x.ndim == 3 else exists[..., None], x, y)

    return jax.tree.map(choose, left, right)


def _joined(left: Keys, right: Keys) -> Keys:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), left, right)


def _cut(tree, start: int, length: int):
    return jax.tree.map(lambda x: x[:, start : start + length], tree)


def _along(x: Array, index: Int[Array, "b i"]) -> Array:
    """Tokens of (b, t, ...) at the places (b, i)."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
