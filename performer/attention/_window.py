"""Near keys exactly, far ones by their features, in one normaliser.

A sequence is cut into chunks of `exact_window` tokens. A query sees the keys of its own chunk and
of the one before (and of the one after, if it is not causal) by e^{q.k} itself, all others by the
estimate sum_j phi_j(q) phi_j(k): a sparse correction of a low-rank estimate (Chen et al. 2021), but
of the kernel, so that one normaliser serves both. The first keys, where trained models put the
attention that has no other place (Xiao et al. 2024), may be exact for every query, too.

What is far is the state of the keys up to two chunks before, and of those from two chunks after,
as `_sweep` has them.

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
from performer.attention._checks import Exact, Plan
from performer.attention._sweep import Near, Rows, far_rows, merge, ratio, softmax_rows, sweep
from performer.attention.parallel import beside, earlier_devices, later_devices
from performer.attention.state import Keys, State, WindowState, dot, extended, pad
from performer.typing import float32_or_wider


def attention(
    maps,
    query: Float[Array, "b t k g h"],
    keys: Keys,
    ids: Int[Array, "b t"] | None,
    state: WindowState | None,
    nothing: State,
    scale: float,
    exact: Exact,
    is_causal: bool,
    plan: Plan,
) -> tuple[Float[Array, "b t k g v"], WindowState | None]:
    """The output of as many queries as keys; and the state after all, for streams.

    Args:
        maps: features of queries and of keys, which estimate the kernel itself.
        query: after calibration.
        keys: after shift and calibration.
        ids: segments, runs of equal numbers; a query sees the keys of its own.
        state: of the keys before them.
        nothing: the state (k, b, m) of no keys.
        scale: the factor on q.k.
        exact: which keys are exact.
        is_causal: whether a query sees the keys up to itself alone.
        plan: how it is computed.
    """
    t, keys, f = query.shape[1], _counted(keys), exact.first
    if state is not None or plan.return_state or t == 0:
        return _stream(maps, query, keys, state, nothing, scale, exact, plan)
    begin = jnp.zeros((1, 1), jnp.int32) if ids is None else _begins(ids)
    if plan.axis_name is not None:
        begin = begin - t * jax.lax.axis_index(plan.axis_name)
    place = jnp.arange(t, dtype=begin.dtype)[None] - begin
    others = _without_first(keys, place, f)
    if plan.axis_name is not None:
        rows = _over_devices(maps, query, others, nothing, scale, exact.window, is_causal, plan)
    else:
        near = Near(others, min(exact.window, t), scale)
        ends = nothing, None if is_causal else nothing
        rows, _ = sweep(maps, query, others, ends, plan, ids=ids, near=near)
    if f:
        first, fading = _first(keys, ids, begin, f, plan.axis_name), None
        if keys.log_decay is not None:
            fading = _faded_first(keys.log_decay, place, f, is_causal, plan.axis_name)
        allowed = _reached(place, f) if is_causal else None
        rows = merge(rows, _exact(query, first, scale, allowed, fading))
    return ratio(rows), None


def _stream(
    maps,
    query: Float[Array, "b t k g h"],
    keys: Keys,
    state: WindowState | None,
    nothing: State,
    scale: float,
    exact: Exact,
    plan: Plan,
) -> tuple[Float[Array, "b t k g v"], WindowState]:
    """The output after earlier keys, and the state after all; causal."""
    w, f, t = exact.window, exact.first, query.shape[1]
    state = _empty(keys, nothing, exact) if state is None else state
    if t == 0:  # the state as it came
        return jnp.zeros((*query.shape[:-1], keys.value.shape[-1]), keys.value.dtype), state
    place = state.position[:, None] + jnp.arange(t)
    first = _either(state.first, _taken(keys, jnp.arange(f) - place[:, :1]))
    # The chunk before that of the first token, then its own: what is there of it, the new tokens.
    filled = state.position[:, None] % w
    chunks = -(-(w - 1 + t) // w)  # that t tokens can touch
    index = jnp.arange((chunks + 2) * w)
    joined = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1), state.near, _without_first(keys, place, f)
    )
    around = _taken(joined, jnp.where(index < w + filled, index, index + w - filled))
    done = (filled + t) // w * w
    near = _taken(around, done + jnp.arange(2 * w))
    folded = _where(index < done, around)  # into the state, that is
    if t == 1:
        whole, part = _cut(around, 0, 2 * w), _cut(folded, 0, w)
        rows, after = _next(maps, query, whole, part, jnp.any(done > 0), state, scale, plan)
    else:
        places = jnp.arange((chunks + 1) * w) - w - filled
        queries = _along(query, jnp.clip(places, 0, t - 1))
        whole, part = _cut((around, folded), 0, places.shape[-1])
        ends, whole = (state.far, None), Near(whole, w, scale)
        rows, after = sweep(maps, queries, part, ends, plan, near=whole)
        rows = Rows(*(_along(x, w + filled + jnp.arange(t)) for x in rows))
    if f:
        fading, elapsed = None, state.first.log_decay
        if elapsed is not None:
            places = state.position[:, None] - w - filled + index
            of_tokens, gone = (
                _faded_first(cast(Array, x.log_decay), places, f) for x in (around, folded)
            )
            fading = elapsed[:, None] + _along(of_tokens, w + filled + jnp.arange(t))
            first = first._replace(log_decay=elapsed + gone[:, -1])
        rows = merge(rows, _exact(query, first, scale, _reached(place, f), fading))
    return ratio(rows), WindowState(after, near, first, state.position + t)


def _next(
    maps, query, around: Keys, folded: Keys, full, state: WindowState, scale: float, plan: Plan
):
    """The rows of one token, and the state of the far keys after it.

    The state fades over a chunk that is full even if none of its keys exists.
    """

    def fold(far):
        far = _decay.faded(far, _decay.total(folded))
        return states.summarise(maps[1], _decay.as_seen(folded, "until"), far, plan.block)

    far = _decay.faded(state.far, _decay.total(around))
    split = maps[0](jnp.moveaxis(query[:, 0], 1, 0))  # (k, b, g, m)
    seen = far_rows(split, [(far, None, None)], None, far.normaliser.dtype)
    seen = Rows(*(jnp.moveaxis(x, 0, 1)[:, None] for x in seen))  # (b, 1, k, g, ...)
    rows = merge(_exact(query, _decay.as_seen(around, "until"), scale), seen)
    return rows, jax.lax.cond(full, fold, lambda far: far, state.far)


def _over_devices(
    maps,
    query,
    keys: Keys,
    nothing: State,
    scale: float,
    w: int,
    is_causal: bool,
    plan: Plan,
) -> Rows:
    """With the chunks of the neighbours beside those of this device."""
    name, t, sides = cast(str, plan.axis_name), query.shape[1], (w, 0 if is_causal else w)
    around = beside(extended(keys, *sides), *sides, name)

    def far(start, side, exchange):
        part = _cut(around, start, t)
        own = states.summarise(maps[1], _decay.as_seen(part, side), nothing, plan.block)
        return exchange(own, name, _decay.total(part))

    later = None if is_causal else far(2 * w, "since", later_devices)
    ends, near = (far(0, "until", earlier_devices), later), Near(around, w, scale)
    rows, _ = sweep(maps, pad(query, *sides), around, ends, plan, near=near)
    return _cut(rows, w, t)


def _exact(
    query: Array,
    keys: Keys,
    scale: float,
    allowed: Bool[Array, "*b t f"] | None = None,
    fading: Float[Array, "b t f k"] | None = None,
) -> Rows:
    """Rows of all queries with a few keys, (b, f, k, .) or those of each query, (b, t, f, k, .)."""
    of = "btskh" if keys.key.ndim == 5 else "bskh"
    logits = dot(f"btkgh,{of}->btkgs", query, keys.key, query.dtype) * scale
    log_weights = jnp.swapaxes(cast(Array, keys.log_weights), -1, -2)[..., :, None, :]
    logits = logits + (log_weights if keys.key.ndim == 5 else log_weights[:, None])
    if fading is not None:
        logits = logits + jnp.swapaxes(fading, -1, -2)[..., None, :]
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    return softmax_rows(logits, keys.value, f"btkgs,{of[:-1]}v->btkgv")


def _counted(keys: Keys) -> Keys:
    """With a log-weight for each of (b, s, k)."""
    log_weights = jnp.zeros((), float32_or_wider(keys.key))
    if keys.log_weights is not None:
        log_weights = keys.log_weights
    return keys._replace(log_weights=jnp.broadcast_to(log_weights, keys.key.shape[:3]))


def _faded_first(
    log_decay: Float[Array, "b t k"],
    place: Int[Array, "#b t"],
    f: int,
    is_causal: bool = True,
    axis_name: str | None = None,
) -> Float[Array, "b t f k"]:
    """Log-decay of the first keys for each query."""
    log_decay, begins = log_decay[:, :, None], place == 0
    after = (place[..., None] > jnp.arange(f))[..., None]
    later = jnp.where(after, log_decay, 0.0)
    fading = _decay.since_begin(later, begins) + _of_others(later, jnp.less, axis_name)
    if not is_causal:  # queries before them, too
        between = jnp.where(after | begins[..., None, None], 0.0, log_decay)
        fading += _of_others(between, jnp.greater, axis_name)
        between, ends = (jnp.roll(jnp.flip(x, axis=1), 1, axis=1) for x in (between, begins))
        between = between.at[:, 0].set(0.0)
        fading += jnp.flip(_decay.since_begin(between, ends), axis=1)
    return fading


def _of_others(log_decay: Array, which, axis_name: str | None) -> Array | float:
    """Sums (b, 1, f, k) over the tokens of the devices before this one, or after it."""
    if axis_name is None:
        return 0.0
    sums = jax.lax.all_gather(jnp.sum(log_decay, axis=1, keepdims=True), axis_name)
    some = which(jnp.arange(sums.shape[0]), jax.lax.axis_index(axis_name))
    return jnp.sum(jnp.where(some[:, None, None, None, None], sums, 0.0), axis=0)


def _begins(ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Start of the run of equal numbers that contains a token."""
    new = ids != jnp.roll(ids, 1, axis=1)
    return jax.lax.cummax(jnp.where(new, jnp.arange(ids.shape[1]), 0), axis=1)


def _without_first(keys: Keys, place: Int[Array, "#b t"], f: int) -> Keys:
    return _where(place >= f, keys)._replace(log_decay=keys.log_decay) if f else keys


def _first(keys: Keys, ids: Array | None, begin: Array, f: int, axis_name: str | None) -> Keys:
    """The first keys, or those of each query's own segment."""
    if ids is None:
        if axis_name is not None:  # which may lie on several devices
            gather = partial(jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
            keys = jax.tree.map(gather, _cut(keys, 0, f))
        return _cut(extended(keys, 0, max(f - keys.key.shape[1], 0)), 0, f)
    b, t = ids.shape
    index = (begin[..., None] + jnp.arange(f)).reshape(b, t * f)
    own = jnp.repeat(ids, f, axis=1) == _along(ids, jnp.minimum(index, t - 1))
    first = _where(own, _taken(keys, index))
    return jax.tree.map(lambda x: x.reshape(b, t, f, *x.shape[2:]), first)


def _reached(place: Int[Array, "#b t"], f: int) -> Bool[Array, "#b t f"]:
    """Which of the first keys a causal query sees."""
    return jnp.arange(f, dtype=place.dtype)[None, None] <= place[..., None]


def _empty(keys: Keys, nothing: State, exact: Exact) -> WindowState:
    """The state before any key."""
    none, (b, s) = _where(False, keys), keys.key.shape[:2]

    def of(length):
        return _cut(extended(none, 0, length), s, length)

    position = jnp.zeros((b,), jnp.int32)
    return WindowState(nothing, of(2 * exact.window), of(exact.first), position)


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


def _cut(tree, start: int, length: int):
    return jax.tree.map(lambda x: x[:, start : start + length], tree)


def _along(x: Array, index: Int[Array, "b i"]) -> Array:
    """Tokens of (b, t, ...) at the places (b, i)."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
