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
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import _decay
from performer.attention import state as states
from performer.attention._checks import Options
from performer.attention._near_and_far import near_and_far, softmax_rows
from performer.attention._sweep import Rows, merge, ratio
from performer.attention.parallel import beside, earlier_devices, later_devices
from performer.attention.state import (
    Keys,
    State,
    WindowState,
    dot,
    exponentials,
    extended,
    pad,
)
from performer.typing import float32_or_wider


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
        rows, _ = near_and_far(maps, query, others, others, segments, ends, options)
    if options.exact_first:
        first = _first(keys, segments, begin, options)
        fading = None if keys.log_decay is None else _faded_first(keys, place, options)
        rows = merge(rows, _exact(query, first, _reached(place, options), options, fading))
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
    if t == 0:  # the state as it came
        return jnp.zeros((*query.shape[:-1], keys.value.shape[-1]), keys.value.dtype), state
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
        whole, part = _cut(around, 0, 2 * w), _cut(folded, 0, w)
        rows, after = _next(maps, query, whole, part, jnp.any(done > 0), state, options)
    else:
        places = jnp.arange(index.shape[0] - w) - w - filled
        queries = _along(query, jnp.clip(places, 0, t - 1))
        whole, part = _cut((around, folded), 0, places.shape[-1])
        ends = state.far, None
        rows, after = near_and_far(maps, queries, whole, part, None, ends, options, done[:, 0])
        rows = Rows(*(_along(x, w + filled + jnp.arange(t)) for x in rows))
    if options.exact_first:
        fading, elapsed = None, state.first.log_decay
        if elapsed is not None:
            places = state.position[:, None] - w - filled + index
            of_tokens, gone = (_faded_first(x, places, options) for x in (around, folded))
            fading = elapsed[:, None] + _along(of_tokens, w + filled + jnp.arange(t))
            first = first._replace(log_decay=elapsed + gone[:, -1])
        rows = merge(rows, _exact(query, first, _reached(place, options), options, fading))
    return ratio(rows), WindowState(after, near, first, state.position + t)


def _next(maps, query, around: Keys, folded: Keys, full, state: WindowState, options: Options):
    """The rows of one token, and the state of the far keys after it.

    The state fades over a chunk that is full even if none of its keys exists.
    """

    def fold(far):
        far = _decay.faded(far, _decay.total(folded))
        return states.summarise(maps[1], _decay.until_end(folded), far, options.block)

    rows = _exact(query, _decay.until_end(around), None, options)
    rows = merge(rows, _through(maps[0], query, _decay.faded(state.far, _decay.total(around))))
    return rows, jax.lax.cond(full, fold, lambda far: far, state.far)


def _over_devices(
    maps, query, keys: Keys, nothing: State, axis_name: str, options: Options
) -> Rows:
    """With the chunks of the neighbours beside those of this device."""
    w, t = options.exact_window, query.shape[1]
    sides = (w, 0 if options.is_causal else w)
    around = beside(extended(keys, *sides), *sides, axis_name)

    def far(start, weigh, exchange):
        part = _cut(around, start, t)
        own = states.summarise(maps[1], weigh(part), nothing, options.block)
        return exchange(own, axis_name, _decay.total(part))

    later = None
    if not options.is_causal:
        later = far(2 * w, _decay.until_start, later_devices)
    ends = far(0, _decay.until_end, earlier_devices), later
    rows, _ = near_and_far(maps, pad(query, *sides), around, around, None, ends, options)
    return _cut(rows, w, t)


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


def _exact(
    query: Array,
    keys: Keys,
    allowed: Bool[Array, "*b t f"] | None,
    options: Options,
    fading: Float[Array, "b t f k"] | None = None,
) -> Rows:
    """Rows of all queries with a few keys, (b, f, k, .) or those of each query, (b, t, f, k, .)."""
    of = "btskh" if keys.key.ndim == 5 else "bskh"
    logits = dot(f"btkgh,{of}->btkgs", query, keys.key, query.dtype) * options.scale
    log_weights = jnp.swapaxes(cast(Array, keys.log_weights), -1, -2)[..., :, None, :]
    logits = logits + (log_weights if keys.key.ndim == 5 else log_weights[:, None])
    if fading is not None:
        logits = logits + jnp.swapaxes(fading, -1, -2)[..., None, :]
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return softmax_rows(logits, keys.value, f"btkgs,{of[:-1]}v->btkgv", maximum)


def _counted(keys: Keys) -> Keys:
    """With a log-weight for each of (b, s, k)."""
    log_weights = jnp.zeros((), float32_or_wider(keys.key))
    if keys.log_weights is not None:
        log_weights = keys.log_weights
    return keys._replace(log_weights=jnp.broadcast_to(log_weights, keys.key.shape[:3]))


def _faded_first(keys: Keys, place: Int[Array, "#b t"], options: Options) -> Array:
    """Log-decay of the first keys for each query, (b, t, f, k)."""
    log_decay, begins = cast(Array, keys.log_decay)[:, :, None], place == 0
    after = (place[..., None] > jnp.arange(options.exact_first))[..., None]
    later = jnp.where(after, log_decay, 0.0)
    fading = _decay.since_begin(later, begins) + _of_others(later, jnp.less, options)
    if not options.is_causal:  # queries before them, too
        between = jnp.where(after | begins[..., None, None], 0.0, log_decay)
        fading += _of_others(between, jnp.greater, options)
        between, ends = (jnp.roll(jnp.flip(x, axis=1), 1, axis=1) for x in (between, begins))
        between = between.at[:, 0].set(0.0)
        fading += jnp.flip(_decay.since_begin(between, ends), axis=1)
    return fading


def _of_others(log_decay: Array, which, options: Options) -> Array | float:
    """Sums (b, 1, f, k) over the tokens of the devices before this one, or after it."""
    if options.axis_name is None:
        return 0.0
    sums = jax.lax.all_gather(jnp.sum(log_decay, axis=1, keepdims=True), options.axis_name)
    some = which(jnp.arange(sums.shape[0]), jax.lax.axis_index(options.axis_name))
    return jnp.sum(jnp.where(some[:, None, None, None, None], sums, 0.0), axis=0)


def _begins(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Where the run of equal numbers begins that a token is in."""
    new = segments != jnp.roll(segments, 1, axis=1)
    return jax.lax.cummax(jnp.where(new, jnp.arange(segments.shape[1]), 0), axis=1)


def _without_first(keys: Keys, place: Int[Array, "#b t"], options: Options) -> Keys:
    if not options.exact_first:
        return keys
    return _where(place >= options.exact_first, keys)._replace(log_decay=keys.log_decay)


def _first(keys: Keys, segments: Array | None, begin: Array, options: Options) -> Keys:
    """The first keys, or those of each query's own segment."""
    f = options.exact_first
    if segments is None:
        if options.axis_name is not None:  # which may lie on several devices
            gather = partial(jax.lax.all_gather, axis_name=options.axis_name, axis=1, tiled=True)
            keys = jax.tree.map(gather, _cut(keys, 0, f))
        return _cut(extended(keys, 0, max(f - keys.key.shape[1], 0)), 0, f)
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
    log_weights, log_decay = cast(Array, keys.log_weights), keys.log_decay
    return keys._replace(
        log_weights=jnp.where(exists, log_weights, -jnp.inf),
        log_decay=None if log_decay is None else jnp.where(exists, log_decay, 0.0),
    )


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
