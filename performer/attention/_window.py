"""Exact where it matters: near keys, the first, those with the largest weights, the first rows.

All share one normaliser with the estimate sum_j phi_j(q) phi_j(k) of the others: a sparse
correction of a low-rank estimate (Chen et al. 2021), but of the kernel. The estimate must be the
kernel here, not up to a factor of the row: the maps include the query's half norm, 1 / m, and the
determinant of a calibration.

Near keys: a sequence is cut into chunks of `exact_window` tokens. A query attends to the keys of
its own and the previous chunk (and the next, if not causal) by e^{q.k} itself. Far keys enter
through states, up to two chunks before and from two chunks after (`_sweep`). The first keys, which
attract much attention in trained models (Xiao et al. 2024), may be exact for every query, too.

Keys with the largest weights, the sums of columns of the attention matrix. The estimate of a
weight needs no matrix: with features a of queries and b of keys, D_t = sum_j a_j(t) sum_s b_j(s),

    sum_t a(t).b(s) / D_t = sum_j b_j(s) [sum_t a_j(t) / D_t],

a state of the queries with the log-weights -log D_t, which the keys then look up. The f keys with
the largest weights leave the features. To the queries each is a feature of its own, of exponent
q.k, whose state is that key (Chen et al. 2021 choose pairs by hashing instead).
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import _decay
from performer.attention import state as states
from performer.attention._checks import Plan
from performer.attention._maps import Arguments
from performer.attention._masks import Pairs
from performer.attention._sizes import blocks
from performer.attention._sweep import Near, far_rows, softmax_rows, sweep
from performer.attention.parallel import beside, on_one_side, over_devices
from performer.attention.state import (
    Features,
    Keys,
    State,
    WindowState,
    combine,
    dot,
    extended,
    flat,
    heads_first,
    in_blocks,
    pad,
    ratio,
    take,
)
from performer.typing import Size, Window, float32_or_wider


class Call(NamedTuple):
    """Attention with exact keys, of as many queries as keys."""

    maps: tuple[Features, Features]
    """Features of queries and of keys, which estimate the kernel itself."""
    query: Float[Array, "b t k g h"]
    """Queries after calibration."""
    keys: Keys
    """Keys after shift and calibration, with log-weights."""
    nothing: State
    """State (k, b, m) of no keys."""
    scale: float
    exact: Window
    is_causal: bool
    plan: Plan
    chosen: Keys | None = None
    """Further exact keys (b, f, k, .) of all queries."""


def attention(
    call: Call, ids: Int[Array, "b t"] | None, state: WindowState | None
) -> tuple[Float[Array, "b t k g v"], WindowState | None]:
    """The output, and for streams the state after all keys.

    Args:
        call: keys may lack log-weights.
        ids: segments, as runs of equal numbers.
        state: state of earlier keys.
    """
    call = call._replace(keys=counted(call.keys))
    query, keys, f, is_causal, plan = *call[1:3], call.exact.exact_first, call.is_causal, call.plan
    t = query.shape[1]
    if state is not None or plan.return_state or t == 0:
        return _stream(call, state)
    begin = jnp.zeros((1, 1), jnp.int32) if ids is None else _begins(ids)
    if plan.axis_name is not None:
        begin = begin - t * jax.lax.axis_index(plan.axis_name)
    place = jnp.arange(t, dtype=begin.dtype)[None] - begin
    others = _without_first(keys, place, f)
    if plan.axis_name is not None:
        rows = _over_devices(call, others)
    else:
        near = Near(others, min(call.exact.exact_window, t), call.scale)
        ends = call.nothing, None if is_causal else call.nothing
        rows, _ = sweep(call.maps, query, others, ends, plan, ids=ids, near=near)
    if f:
        first, fading = _first(keys, ids, begin, f, plan.axis_name), None
        if keys.log_decay is not None:
            fading = _faded_first(keys.log_decay, place, f, is_causal, plan.axis_name)
        allowed = _reached(place, f) if is_causal else None
        rows = combine(rows, exact_rows(query, first, call.scale, allowed, fading))
    if call.chosen is not None:
        rows = combine(rows, exact_rows(query, call.chosen, call.scale))
    return ratio(rows), None


def _stream(call: Call, state: WindowState | None) -> tuple[Float[Array, "b t k g v"], WindowState]:
    """The output after earlier keys, and the state after all; causal."""
    maps, query, keys, nothing, scale, exact, _, plan, _ = call
    (w, f), t = exact[:2], query.shape[1]
    state = _empty(keys, nothing, exact) if state is None else state
    if t == 0:
        return jnp.zeros((*query.shape[:-1], keys.value.shape[-1]), keys.value.dtype), state
    position = state.position[:, None].astype(jnp.arange(0).dtype)  # int64 under x64
    place = position + jnp.arange(t)[None]
    first = _either(state.first, _taken(keys, jnp.arange(f)[None] - place[:, :1]))
    # The chunk before that of the first token, the filled part of its own, then the new tokens.
    filled = position % w
    chunks = -(-(w - 1 + t) // w)  # the most that t tokens touch
    index = jnp.arange((chunks + 2) * w)[None]
    joined = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1), state.near, _without_first(keys, place, f)
    )
    around = _taken(joined, jnp.where(index < w + filled, index, index + w - filled))
    done = (filled + t) // w * w
    near = _taken(around, done + jnp.arange(2 * w)[None])
    folded = _where(index < done, around)  # keys that enter the state
    if t == 1:
        whole, part = _cut(around, 0, 2 * w), _cut(folded, 0, w)
        rows, after = _next(call, whole, part, jnp.any(done > 0), state)
    else:
        places = jnp.arange((chunks + 1) * w)[None] - w - filled
        queries = take(query, jnp.clip(places, 0, t - 1))
        whole, part = _cut((around, folded), 0, places.shape[-1])
        ends, whole = (state.far, None), Near(whole, w, scale)
        rows, after = sweep(maps, queries, part, ends, plan, near=whole)
        rows = State(*(take(x, w + filled + jnp.arange(t)[None]) for x in rows))
    if f:
        fading, elapsed = None, state.first.log_decay
        if elapsed is not None:
            places = position - w - filled + index
            per_token, gone = (
                _faded_first(cast(Array, x.log_decay), places, f) for x in (around, folded)
            )
            fading = elapsed[:, None] + take(per_token, w + filled + jnp.arange(t)[None])
            first = first._replace(log_decay=elapsed + gone[:, -1])
        rows = combine(rows, exact_rows(query, first, scale, _reached(place, f), fading))
    return ratio(rows), WindowState(after, near, first, state.position + t)


def _next(
    call: Call, around: Keys, folded: Keys, full: Bool[Array, ""], state: WindowState
) -> tuple[State, State]:
    """The rows of one token, and the state of the far keys after it.

    The state fades over a full chunk even if none of its keys exists.
    """

    def fold(far):
        far = _decay.faded(far, _decay.total(folded))
        return states.summarise(call.maps[1], _decay.as_seen(folded, "until"), far, call.plan.block)

    far = _decay.faded(state.far, _decay.total(around))
    split = call.maps[0](jnp.moveaxis(call.query[:, 0], 1, 0))  # (k, b, g, m)
    seen = far_rows(split, [(far, None, None)], None, far.normaliser.dtype)
    seen = State(*(jnp.moveaxis(x, 0, 1)[:, None] for x in seen))  # (b, 1, k, g, ...)
    rows = combine(exact_rows(call.query, _decay.as_seen(around, "until"), call.scale), seen)
    return rows, jax.lax.cond(full, fold, lambda far: far, state.far)


def _over_devices(call: Call, keys: Keys) -> State:
    """Rows of a sharded sequence, with the chunks of the neighbouring devices."""
    name, t, w = cast(str, call.plan.axis_name), call.query.shape[1], call.exact.exact_window
    sides = w, 0 if call.is_causal else w
    around = beside(extended(keys, *sides), *sides, name)

    def far(start, side):
        part = _cut(around, start, t)
        return on_one_side(call.maps[1], part, side, call.nothing, call.plan.block, name)

    ends = far(0, "until"), None if call.is_causal else far(2 * w, "since")
    near = Near(around, w, call.scale)
    rows, _ = sweep(call.maps, pad(call.query, *sides), around, ends, call.plan, near=near)
    return _cut(rows, w, t)


def exact_rows(
    query: Array,
    keys: Keys,
    scale: float,
    allowed: Bool[Array, "#b #t #f"] | None = None,
    fading: Float[Array, "b t f k"] | None = None,
) -> State:
    """Rows of all queries with a few keys, (b, f, k, .), or with their own, (b, t, f, k, .)."""
    of = "btskh" if keys.key.ndim == 5 else "bskh"
    logits = dot(f"btkgh,{of}->btkgs", query, keys.key, query.dtype) * scale
    # (b, f, k) -> (b, 1, k, 1, f)
    log_weights = jnp.swapaxes(cast(Array, keys.log_weights), -1, -2)[..., :, None, :]
    logits = logits + (log_weights if keys.key.ndim == 5 else log_weights[:, None])
    if fading is not None:
        logits = logits + jnp.swapaxes(fading, -1, -2)[..., None, :]  # (b, t, k, 1, f)
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    return softmax_rows(logits, keys.value, f"btkgs,{of[:-1]}v->btkgv")


def counted(keys: Keys) -> Keys:
    """Keys with log-weights (b, s, k)."""
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
    after = (place[..., None] > jnp.arange(f, dtype=place.dtype)[None, None])[..., None]
    later = jnp.where(after, log_decay, 0.0)
    fading = _decay.since_begin(later, begins) + of_others(later, jnp.less, axis_name)
    if not is_causal:  # queries before the key, too
        between = jnp.where(after | begins[..., None, None], 0.0, log_decay)
        fading += of_others(between, jnp.greater, axis_name)
        between, ends = (jnp.roll(jnp.flip(x, axis=1), 1, axis=1) for x in (between, begins))
        between = between.at[:, 0].set(0.0)
        fading += jnp.flip(_decay.since_begin(between, ends), axis=1)
    return fading


def of_others(log_decay: Array, which, axis_name: str | None) -> Array | float:
    """Sums (b, 1, f, k) over the tokens of the devices before or after this one."""
    if axis_name is None:
        return 0.0
    sums = jax.lax.all_gather(jnp.sum(log_decay, axis=1, keepdims=True), axis_name)
    some = which(jnp.arange(len(sums), dtype=jnp.int32), jax.lax.axis_index(axis_name))
    return jnp.sum(jnp.where(some[:, None, None, None, None], sums, 0.0), axis=0)


def _begins(ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Start of the run of equal numbers that contains a token."""
    new = ids != jnp.roll(ids, 1, axis=1)
    return jax.lax.cummax(jnp.where(new, jnp.arange(ids.shape[1]), 0), axis=1)


def _without_first(keys: Keys, place: Int[Array, "#b t"], f: int) -> Keys:
    return _where(place >= f, keys)._replace(log_decay=keys.log_decay) if f else keys


def _first(keys: Keys, ids: Array | None, begin: Array, f: int, axis_name: str | None) -> Keys:
    """The first keys, or those of each query's segment."""
    if ids is None:
        if axis_name is not None:  # they may lie on several devices
            gather = partial(jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
            keys = jax.tree.map(gather, _cut(keys, 0, f))
        return _cut(extended(keys, 0, max(f - keys.key.shape[1], 0)), 0, f)
    b, t = ids.shape
    index = (begin[..., None] + jnp.arange(f)[None, None]).reshape(b, t * f)
    own = jnp.repeat(ids, f, axis=1) == take(ids, jnp.minimum(index, t - 1))
    first = _where(own, _taken(keys, index))
    return jax.tree.map(lambda x: x.reshape(b, t, f, *x.shape[2:]), first)


def _reached(place: Int[Array, "#b t"], f: int) -> Bool[Array, "#b t f"]:
    """Mask of the first keys that a causal query sees."""
    return jnp.arange(f, dtype=place.dtype)[None, None] <= place[..., None]


def _empty(keys: Keys, nothing: State, exact: Window) -> WindowState:
    """The state before any key."""
    none, (b, s) = _where(False, keys), keys.key.shape[:2]
    near, first = (
        _cut(extended(none, 0, length), s, length) for length in (2 * exact[0], exact[1])
    )
    return WindowState(nothing, near, first, jnp.zeros((b,), jnp.int32))


def _taken(keys: Keys, index: Int[Array, "b i"]) -> Keys:
    """The keys at these places; no key outside the sequence."""
    last = keys.key.shape[1] - 1
    index = jnp.broadcast_to(index, (keys.key.shape[0], index.shape[-1]))
    taken = jax.tree.map(partial(take, index=jnp.clip(index, 0, last)), keys)
    return _where((index >= 0) & (index <= last), taken)


def _where(exists: Bool[Array, "#b s"] | bool, keys: Keys) -> Keys:
    exists = jnp.broadcast_to(jnp.asarray(exists), keys.key.shape[:2])[..., None]
    log_weights, log_decay = cast(Array, keys.log_weights), keys.log_decay
    return keys._replace(
        log_weights=jnp.where(exists, log_weights, -jnp.inf),
        log_decay=None if log_decay is None else jnp.where(exists, log_decay, 0.0),
    )


def _either(left: Keys, right: Keys) -> Keys:
    """The left keys where they exist, else the right ones."""
    exists = ~jnp.isneginf(cast(Array, left.log_weights))

    def choose(x, y):
        return jnp.where(exists if x.ndim == 3 else exists[..., None], x, y)

    return jax.tree.map(choose, left, right)


def _cut(tree, start: int, length: int):
    return jax.tree.map(lambda x: x[:, start : start + length], tree)


def heaviest(
    maps: tuple[Features, Features],
    query: Float[Array, "b t k g h"],
    keys: Keys,
    nothing: State,
    f: int,
    plan: Plan,
) -> tuple[Keys, Keys]:
    """The f keys (b, f, k, .) of each head with the largest estimated weights, and the others.

    The others have the log-weight -inf at the places of these. Of `maps` there are no gradients.
    """
    keys, axis_name = counted(keys), plan.axis_name
    weights = _weights(maps, *jax.lax.stop_gradient((query, keys, nothing)), plan)
    place = jnp.arange(weights.shape[1], dtype=jnp.int32)[:, None]  # as `axis_index`
    place = jnp.broadcast_to(place, weights.shape)
    if axis_name is not None:
        place = place + jax.lax.axis_index(axis_name) * weights.shape[1]
    chosen = _largest((weights, place, keys), f)
    if axis_name is not None:
        gather = partial(jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
        chosen = _largest(jax.tree.map(gather, chosen), f)
    (_, places, chosen), log_weights = chosen, cast(Array, keys.log_weights)
    out = jnp.any(place[:, :, None] == places[:, None], axis=2)  # (b, s, f, k) -> (b, s, k)
    return chosen, keys._replace(log_weights=jnp.where(out, -jnp.inf, log_weights))


def _largest(pool: tuple[Array, Array, Keys], f: int) -> tuple[Array, Array, Keys]:
    """The entries (b, f, k, ...) of a pool with the largest weights."""
    weights = jnp.swapaxes(pool[0], 1, 2)
    index = jnp.swapaxes(jax.lax.top_k(weights, min(f, weights.shape[-1]))[1], 1, 2)

    def of_heads(x):
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=1)

    return jax.tree.map(of_heads, pool)


def _weights(maps, query: Array, keys: Keys, nothing: State, plan: Plan) -> Array:
    """Logarithms (b, s, k) of the estimated weights of keys; -inf for a key that is not there."""
    of_query, of_key = maps
    b, t, k, g, h = query.shape
    query = query.transpose(0, 1, 3, 2, 4).reshape(b, t * g, k, h)
    nothing = State(*nothing[:2], nothing.numerator[..., :0])

    def total(features, of, log_weights):
        state = states.summarise(features, Keys(of, of[..., :0], log_weights), nothing, plan.block)
        return state if plan.axis_name is None else over_devices(state, plan.axis_name)

    rows = _looked_up(of_query, query, total(of_key, keys.key, keys.log_weights), plan.block)
    columns = total(of_query, query, jnp.where(jnp.isneginf(rows), rows, -rows))
    return _looked_up(of_key, keys.key, columns, plan.block) + cast(Array, keys.log_weights)


def _looked_up(
    features: Features, x: Float[Array, "b t k h"], state: State, block: Size
) -> Float[Array, "b t k"]:
    """Logarithms of sum_j phi_j(x) s_j e^{c_j}."""
    (b, t, k, _), (count, length) = x.shape, blocks(x.shape[1], block)

    def of_block(x):
        split, flat_state = jax.tree.map(flat, (features(heads_first(x)), state))
        rows = far_rows(split, [(flat_state, None, None)], None, state.normaliser.dtype)
        positive = rows.normaliser > 0  # features with signs may have others
        logarithm = jnp.log(jnp.where(positive, rows.normaliser, 1.0)) + rows.maximum
        return jnp.where(positive, logarithm, -jnp.inf)

    xs = in_blocks(x, count, length)
    totals = of_block(xs[0]) if count == 1 else jax.lax.map(of_block, xs)
    totals = totals.reshape(count, k, b, length).transpose(2, 0, 3, 1)
    return totals.reshape(b, count * length, k)[:, :t]


def beside_exact(
    query_map: Features, state: State, chosen: Keys, scale: float
) -> tuple[Features, State]:
    """Features of queries and their state (k, b, m + f, .), with one feature for each exact key."""
    key, value, log_weights = (jnp.moveaxis(cast(Array, x), 2, 0) for x in chosen[:3])
    shape, dtype = state.maximum.shape, state.maximum.dtype

    def both(x):
        exponent, factor = query_map(x)
        logits = dot("kb...h,kbfh->kb...f", x, key, x.dtype) * scale
        exponent = jnp.broadcast_to(exponent, (*logits.shape[:-1], shape[-1]))
        if factor is not None:
            factor = jnp.concatenate([factor, jnp.ones_like(logits)], axis=-1)
        return jnp.concatenate([exponent, logits], axis=-1), factor

    own = log_weights, jnp.ones_like(log_weights), value
    pairs = zip(state, own, (-1, -1, -2), strict=True)
    return both, State(*(jnp.concatenate([x, y.astype(dtype)], axis=a) for x, y, a in pairs))


def with_rows(
    output: Float[Array, "b t k g v"],
    x: Arguments,
    scale: float,
    r: int,
    pairs: Pairs,
    axis_name: str | None,
) -> Float[Array, "b t k g v"]:
    """The output, its first r rows by softmax over all keys."""
    keys, shape = counted(x.keys), (*output[:, :r].shape[:-1], x.query.shape[-1])
    query = x.query[:, :r].reshape(shape)
    place = jnp.arange(keys.key.shape[1], dtype=jnp.int32)  # as `axis_index`
    if axis_name is not None:  # keys of all devices, for the queries of the first
        here = jax.lax.axis_index(axis_name)
        place = place + here * keys.key.shape[1]
        query = jax.lax.psum(jnp.where(here == 0, query, 0), axis_name)
    later = place[None, None] > jnp.arange(query.shape[1], dtype=jnp.int32)[None, :, None]
    same = jnp.ones((1, 1, 1), bool)
    if pairs.segments is not None:
        ids, key_ids = pairs.segments
        key_ids = ids if key_ids is None else key_ids
        same = ids[:, :r, None] == key_ids[:, None]
    allowed = same & ~later if pairs.is_causal else same
    fading = None
    if keys.log_decay is not None:
        fading = _between(keys.log_decay, later, same, axis_name)
    rows = exact_rows(query, keys, scale, allowed, fading)
    if axis_name is None:
        return output.at[:, :r].set(ratio(rows).astype(output.dtype))
    exact = ratio(over_devices(rows, axis_name)).astype(output.dtype)
    return output.at[:, :r].set(jnp.where(here == 0, exact, output[:, :r]))


def _between(
    log_decay: Float[Array, "b s k"],
    later: Bool[Array, "1 r s"],
    same: Bool[Array, "#b #r #s"],
    axis_name: str | None,
) -> Float[Array, "b r s k"]:
    """Log-decay between the first queries and each key, over tokens of the same segment."""
    log_decay = jnp.where(same[..., None], log_decay[:, None], 0.0)
    after = jnp.where(later[..., None], log_decay, 0.0)
    between = of_others(after.swapaxes(1, 2), jnp.less, axis_name)
    between += jnp.cumsum(after, axis=2).swapaxes(1, 2)  # (b, s, r, k)
    before = jnp.where(later[..., None], 0.0, log_decay)[:, :, 1:]
    before = jnp.pad(before, ((0, 0), (0, 0), (0, 1), (0, 0)))
    return between.swapaxes(1, 2) + jax.lax.cumsum(before, axis=2, reverse=True)
