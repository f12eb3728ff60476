"""Exact attention for selected pairs: near keys, first keys, heavy keys, first queries.

All share one normaliser with the estimate sum_j phi_j(q) phi_j(k) of the other pairs: a sparse
correction of a low-rank estimate (Chen et al. 2021), but of the kernel. The estimate must be the
kernel here, not up to a factor of the row: the maps include the query's half norm, 1 / m, and the
determinant and the shift of a calibration (`Plan.absolute`). Logits of exact pairs are products
of queries and keys as given: M q and M^-1 k have the same one only up to the condition of M.

Near keys: a sequence is cut into windows of `Exact.window` tokens. A query attends to the keys of
its own and the previous window (and the next, if not causal) by e^{q.k} itself, and to far keys by
their features (`sweep`). The first keys, which attract much attention in trained models (Xiao et
al. 2024), may also be exact for every query.

Heavy keys are those with the largest weights, the sums of columns of the attention matrix. The
estimate of a weight needs no matrix: with features a of queries and b of keys,
D_t = sum_j a_j(t) sum_s b_j(s),

    sum_t a(t).b(s) / D_t = sum_j b_j(s) [sum_t a_j(t) / D_t],

a state of the queries with the log-weights -log D_t, which the keys then look up (Chen et al. 2021
choose pairs by hashing instead).

First and heavy keys leave the features (`first_keys`, `heavy_keys`): their rows (`exact_rows`) are
combined with the rows of the other keys.
"""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from performer.attention import decay
from performer.attention.state import (
    Keys,
    Map,
    Queries,
    State,
    WindowState,
    attend_with,
    by_block,
    combine,
    extended,
    heads_first,
    look_up,
    state_relative,
    summarise,
    take,
)
from performer.attention.sweep import Near, softmax_rows, sweep
from performer.attention.values import Exact, Plan
from performer.choices import LARGEST
from performer.numerics import dot, exponentials, finite, weighted
from performer.typing import float32_or_wider

NOWHERE = LARGEST
"""Place of a first key that has not been seen yet."""
CHOSEN = "chosen keys"
"""Name of their positions for `jax.checkpoint`: the backward pass does not choose again."""
Maps = tuple[Map, Map]
"""Features of queries and of keys."""


class Selected(NamedTuple):
    """Keys whose pairs with all queries are exact."""

    keys: Keys
    """(b, f, k, .), or (b, t, f, k, .) with keys of each query; with log-weights."""
    allowed: Bool[Array, "#b #t f"] | None = None
    """None for all pairs."""
    fading: Float[Array, "b t f k"] | None = None
    """Log-decay of the pairs."""


def exact_rows(query: Float[Array, "b t k g h"], selected: Selected, scale: float) -> State:
    """Rows (b, t, k, g) of all queries, as given, with the selected keys."""
    keys, allowed, fading = selected
    per_query = keys.key.ndim == 5
    axes = "btskh" if per_query else "bskh"
    logits = dot(f"btkgh,{axes}->btkgs", query, keys.exact, query.dtype) * scale
    # (b, f, k) -> (b, 1, k, 1, f), or (b, t, f, k) -> (b, t, k, 1, f)
    log_weights = jnp.swapaxes(cast(Array, keys.log_weights), -1, -2)[..., :, None, :]
    logits = logits + (log_weights if per_query else log_weights[:, None])
    if fading is not None:
        logits = logits + jnp.swapaxes(fading, -1, -2)[..., None, :]  # (b, t, k, 1, f)
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    return softmax_rows(logits, keys.value, f"btkgs,{axes[:-1]}v->btkgv")


# First keys


def first_keys(
    keys: Keys,
    f: int,
    exists: Bool[Array, "b t"] | None,
    segments: Int[Array, "b t"] | None,
    is_causal: bool,
) -> tuple[Selected, Keys]:
    """The first f keys of the sequence, or of each query's segment; and the other keys.

    Keys that do not exist, such as padding on the left, are not counted; None if all exist.
    """
    keys, t = counted(keys), keys.key.shape[1]
    number, position = jnp.arange(f)[None], jnp.arange(t)[None]
    if segments is None:
        places = number if exists is None else _nth(exists, number)  # (b, f)
        first, places = _taken(keys, places), places[:, None]
    else:
        begin = _begins(segments)
        number = jnp.broadcast_to(number, (*begin.shape, f))
        index = _nth_of_segments(exists, begin, number).reshape(len(begin), t * f)
        same = jnp.repeat(segments, f, axis=1) == take(segments, jnp.minimum(index, t - 1))
        first = _where(same, _taken(keys, index))
        first = jax.tree.map(lambda x: x.reshape(x.shape[0], t, f, *x.shape[2:]), first)
        places = jnp.where(same, index, t).reshape(*begin.shape, f) - begin[..., None]
        position = position - begin
    fading = None
    if keys.log_decay is not None:
        fading = _fading_of_first(keys.log_decay, position, places, is_causal)
    allowed = _reached(position, places) if is_causal else None
    return Selected(first, allowed, fading), _without_first(keys, position, places)


def existing(keys: Keys) -> Bool[Array, "b t"] | None:
    """Keys that exist for a head; None for all."""
    if keys.log_weights is None:
        return None
    return jnp.any(~jnp.isneginf(keys.log_weights), axis=-1)


def _nth(exists: Bool[Array, "b t"], number: Int[Array, "#b f"]) -> Int[Array, "b f"]:
    """Position of the key that has this number, from 0, among those that exist; t for none."""
    return jnp.sum(jnp.cumsum(exists, axis=1)[..., None] <= number[:, None], axis=1)


def _nth_of_segments(
    exists: Bool[Array, "b t"] | None, begin: Int[Array, "b t"], number: Int[Array, "b t f"]
) -> Int[Array, "b t f"]:
    """Position of the key that has this number in the segment of each token; t for none."""
    if exists is None:
        return begin[..., None] + number
    (b, t, f), count = number.shape, jnp.cumsum(exists, axis=1)
    before = (
        take(count - exists.astype(count.dtype), begin)[..., None] + number
    )  # in all segments up to this one
    order = jnp.argsort(~exists, axis=1, stable=True)
    index = take(order, jnp.minimum(before, t - 1).reshape(b, t * f)).reshape(b, t, f)
    return jnp.where(before < count[:, -1:, None], index, t)


def _begins(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Start of the run of equal numbers that contains a token."""
    new = segments != jnp.roll(segments, 1, axis=1)
    return jax.lax.cummax(jnp.where(new, jnp.arange(segments.shape[1]), 0), axis=1)


def _without_first(keys: Keys, position: Int[Array, "#b t"], places: Int[Array, "#b #t f"]) -> Keys:
    """Keys after the first ones, at these places; these fade the others all the same."""
    if not places.shape[-1]:
        return keys
    return _where(position > places[..., -1], keys)._replace(log_decay=keys.log_decay)


def _reached(position: Int[Array, "#b t"], places: Int[Array, "#b #t f"]) -> Bool[Array, "#b t f"]:
    """Mask of the first keys that a causal query sees."""
    return places <= position[..., None]


def _fading_of_first(
    log_decay: Float[Array, "b t k"],
    position: Int[Array, "#b t"],
    places: Int[Array, "#b #t f"],
    is_causal: bool = True,
) -> Float[Array, "b t f k"]:
    """Log-decay of the first keys for each query."""
    log_decay, begins = log_decay[:, :, None], position == 0
    after = (position[..., None] > places)[..., None]
    fading = decay.since_begin(jnp.where(after, log_decay, 0.0), begins)
    if not is_causal:  # also queries before the key
        between = jnp.where(after | begins[..., None, None], 0.0, log_decay)
        between, ends = (jnp.roll(jnp.flip(x, axis=1), 1, axis=1) for x in (between, begins))
        between = between.at[:, 0].set(0.0)
        fading += jnp.flip(decay.since_begin(between, ends), axis=1)
    return fading


# A stream: the buffer of near keys goes from call to call


def stream(
    maps: Maps,
    queries: Queries,
    keys: Keys,
    nothing: State,
    exact: Exact,
    scale: float,
    plan: Plan,
    state: WindowState | None,
) -> tuple[State, WindowState]:
    """Rows (b, t, k, g) after earlier keys, and the state after all; causal.

    The keys of a call stand in a buffer of windows of w tokens:

        | window before | own window: filled, then new | new ... | new, not full | padding |
        0               w          w + filled          2 w                       ^ w + filled + t

    `done` tokens of it have left the last two windows: they enter the state. The last two windows
    are `near` of the next call.
    """
    state = _empty(counted(keys), nothing, exact) if state is None else state
    keys, w, f, t = counted(keys), exact.window, exact.first, queries.query.shape[1]
    if t == 0:
        shape = (*queries.query.shape[:-1], keys.value.shape[-1])
        return State(jnp.zeros(shape[:-1]), jnp.zeros(shape[:-1]), jnp.zeros(shape)), state
    start = state.position[:, None].astype(jnp.arange(0).dtype)  # (b, 1), int64 under x64
    position = start + jnp.arange(t)[None]  # (b, t)
    filled, windows = start % w, -(-(w - 1 + t) // w)  # the most windows that t tokens touch
    number = jnp.arange(f)[None] - jnp.sum(state.places < NOWHERE, axis=1, keepdims=True)
    new = jnp.where(number < 0, t, _nth(cast(Array, existing(keys)), number))  # in this call
    new_places = jnp.where(new < t, start + new, NOWHERE).astype(jnp.int32)
    places = jnp.minimum(state.places, new_places)
    at = places[:, None].astype(position.dtype)
    others = _without_first(keys, position, at)
    buffer = _buffer(state.near, others, filled, (windows + 2) * w)
    done = (filled + t) // w * w  # tokens of the windows that this call completes
    entering = _where(jnp.arange((windows + 2) * w)[None] < done, buffer)
    if t == 1:
        new_window = jnp.any(done > 0)
        rows, far = _one_token(
            maps, queries, (buffer, entering), w, scale, plan, state.far, new_window
        )
    else:
        length = (windows + 1) * w
        # Position in the buffer -> query of this call; rows in the padding are not read.
        index = jnp.clip(jnp.arange(length)[None] - w - filled, 0, t - 1)
        near = Near(_cut(buffer, 0, length), w, scale)
        ends = state.far, None
        padded = jax.tree.map(partial(take, index=index), queries)
        rows, far = sweep(maps, padded, _cut(entering, 0, length), ends, plan, near=near)
        rows = State(*(take(x, w + filled + jnp.arange(t)[None]) for x in rows))
    first = state.first
    if f:
        first = _either(state.first, _taken(keys, new))
        given = state, first, buffer, entering, position, filled, at
        selected, first = _first_of_stream(*given)
        rows = combine(rows, exact_rows(queries.exact, selected, scale))
    near = _taken(buffer, done + jnp.arange(2 * w)[None])
    return rows, WindowState(far, near, first, places, state.position + t)


def _buffer(near: Keys, new: Keys, filled: Int[Array, "b 1"], length: int) -> Keys:
    """The buffer (b, length, k, .): near keys of the state, the new ones where they end."""
    joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), near, new)
    w, index = near.key.shape[1] // 2, jnp.arange(length)[None]
    return _taken(joined, jnp.where(index < w + filled, index, index + w - filled))


def _one_token(
    maps: Maps,
    queries: Queries,
    buffers: tuple[Keys, Keys],
    w: int,
    scale: float,
    plan: Plan,
    far: State,
    new_window: Bool[Array, ""],
) -> tuple[State, State]:
    """The rows of one token, and the state of the far keys after it.

    The state fades over a full window even if none of its keys exists.
    """
    near, entering = _cut(buffers[0], 0, 2 * w), _cut(buffers[1], 0, w)

    def with_window(far):
        far = decay.faded(far, decay.total(entering))
        return summarise(maps[1], decay.decayed(entering), far, plan.block)

    faded = decay.faded(far, decay.total(near))
    rows = look_up(maps[0], queries.query, faded, far.normaliser.dtype)
    rows = combine(rows, exact_rows(queries.exact, Selected(decay.decayed(near)), scale))
    return rows, jax.lax.cond(new_window, with_window, lambda far: far, far)


def _first_of_stream(
    state: WindowState, first: Keys, buffer: Keys, entering: Keys, position, filled, places
) -> tuple[Selected, Keys]:
    """The first keys as these queries see them, and as the next state has them.

    In a state their log-decay is the sum up to the keys that entered its far part.
    """
    fading = None
    if (elapsed := state.first.log_decay) is not None:
        w, t, length = state.near.key.shape[1] // 2, position.shape[1], buffer.key.shape[1]
        positions = position[:, :1] - w - filled + jnp.arange(length)[None]  # of the buffer
        per_token, gone = (
            _fading_of_first(cast(Array, x.log_decay), positions, places)
            for x in (buffer, entering)
        )
        fading = elapsed[:, None] + take(per_token, w + filled + jnp.arange(t)[None])
        first = first._replace(log_decay=elapsed + gone[:, -1])
    return Selected(first, _reached(position, places), fading), first


def _empty(keys: Keys, nothing: State, exact: Exact) -> WindowState:
    """The state before any key."""
    none, (b, s) = _where(False, keys), keys.key.shape[:2]
    near, first = (
        _cut(extended(none, 0, length), s, length) for length in (2 * exact.window, exact.first)
    )
    places = jnp.full((b, exact.first), NOWHERE, jnp.int32)
    return WindowState(nothing, near, first, places, jnp.zeros((b,), jnp.int32))


def _either(left: Keys, right: Keys) -> Keys:
    """The left keys where they exist, else the right ones."""
    exists = ~jnp.isneginf(cast(Array, left.log_weights))

    def choose(x, y):
        return jnp.where(exists if x.ndim == 3 else exists[..., None], x, y)

    return jax.tree.map(choose, left, right)


# Heavy keys


def heavy_keys(
    maps: Maps,
    query: Float[Array, "b t k g h"],
    keys: Keys,
    nothing: State,
    f: int,
    plan: Plan,
) -> tuple[Selected, Keys]:
    """The f keys (b, f, k, .) of each head with the largest estimated weights, and the others.

    The others are all keys, with the log-weight -inf for the chosen ones. `maps` get no gradients.
    """
    keys = counted(keys)
    weights = _log_weights_of_keys(maps, *jax.lax.stop_gradient((query, keys, nothing)), plan)
    return largest(weights, keys, f)


def largest(weights: Float[Array, "b s k"], keys: Keys, f: int) -> tuple[Selected, Keys]:
    """The f keys (b, f, k, .) of each head with the largest weights, and the others."""
    index = jax.lax.top_k(jnp.swapaxes(weights, 1, 2), min(f, weights.shape[1]))[1]
    index = checkpoint_name(jnp.swapaxes(index, 1, 2), CHOSEN)  # (b, f, k)

    def chosen(x):
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=1)

    position = jnp.arange(weights.shape[1], dtype=index.dtype)
    # (b, s, f, k) -> (b, s, k)
    out = jnp.any(position[None, :, None, None] == index[:, None], axis=2)
    log_weights = jnp.where(out, -jnp.inf, cast(Array, keys.log_weights))
    return Selected(jax.tree.map(chosen, keys)), keys._replace(log_weights=log_weights)


def _log_weights_of_keys(
    maps: Maps, query: Array, keys: Keys, nothing: State, plan: Plan
) -> Float[Array, "b s k"]:
    """Logarithms of the estimated weights of keys; -inf for a key that does not exist.

    Three passes: over the keys, the queries, and the keys again. Where all tokens are one block
    XLA computes their features once, for attention and for this.
    """
    query_map, key_map = maps
    b, t, k, g, h = query.shape
    nothing = State(*nothing[:2], nothing.numerator[..., :0])
    # The query heads of a key head as further queries: (b, t, k, g, h) -> (b, t g, k, h)
    query = jnp.moveaxis(heads_first(query).reshape(k, b, t * g, h), 0, 2)

    def summary(features, x, log_weights):
        return summarise(features, Keys(x, x[..., :0], log_weights), nothing, plan.block)

    def log_sums(split, state):  # log sum_j phi_j(x) s_j e^{c_j}, (k, b, t)
        exponent = split[0] + state.maximum[..., None, :]
        maximum = jnp.max(exponent, axis=-1)
        features = exponentials((exponent, split[1]), maximum[..., None])
        sums = dot("...tm,...m->...t", features, state.normaliser, state.normaliser.dtype)
        positive = sums > 0  # features with signs may have others
        return jnp.where(positive, jnp.log(jnp.where(positive, sums, 1.0)) + maximum, -jnp.inf)

    of_keys = summary(key_map, keys.key, keys.log_weights)

    def over_denominators(x):  # a_j(t) / D_t
        split = query_map(x)
        rows = log_sums(split, of_keys)
        return weighted(split, jnp.where(jnp.isneginf(rows), rows, -rows))

    columns = summary(over_denominators, query, None)

    def of_block(x):
        return jnp.moveaxis(log_sums(key_map(heads_first(x)), columns), 0, 2)

    return by_block(of_block, keys.key, plan.block) + cast(Array, keys.log_weights)


def attend_once(
    maps: Maps, queries: Queries, keys: Keys, f: int, scale: float, dtype: jnp.dtype
) -> Float[Array, "b t k g v"]:
    """Attention with heavy keys, all features of which exist at once, computed once.

    The weights of keys are sums over the same features: with b_j(s) relative to c_j, a_j(t)
    relative to the row and D_t = sum_j a_j(t) s_j, they are three products with vectors. Then the
    chosen keys leave the sums, whose terms stay relative to all keys: those below e^-87 are lost.
    A chosen key has its own weight then, which is above them, for its estimate exceeds it by
    e^{|w_j|^2 / 2} at most.
    """
    b, t, k, g, h = queries.query.shape
    keys = counted(keys)
    rows = heads_first(queries.query).reshape(k, b, t * g, h)
    of_queries, of_keys = maps[0](rows), maps[1](heads_first(keys.key))
    log_weights = cast(Array, keys.log_weights)
    split = weighted(of_keys, heads_first(log_weights))
    c = jax.lax.stop_gradient(finite(jnp.max(split[0], axis=-2)))
    on_keys = exponentials(split, c[..., None, :])
    exponent = of_queries[0] + c[..., None, :]
    top = jax.lax.stop_gradient(jnp.max(exponent, axis=-1))
    on_queries = exponentials((exponent, of_queries[1]), top[..., None])
    weights = _weights_of_keys(*jax.lax.stop_gradient((on_queries, on_keys, log_weights)))
    heavy, others = largest(weights, keys, f)
    kept = ~jnp.isneginf(heads_first(cast(Array, others.log_weights)))
    state = state_relative(c, on_keys, heads_first(keys.value), kept)
    return attend_with(on_queries, top, state, queries, heavy.keys, scale, dtype)


def _weights_of_keys(
    on_queries: Float[Array, "k b t m"],
    on_keys: Float[Array, "k b s m"],
    log_weights: Float[Array, "b s k"],
) -> Float[Array, "b s k"]:
    """Estimated weights of keys, from features relative to their maxima; -inf for no key."""
    rows = jnp.einsum("kbtm,kbm->kbt", on_queries, jnp.sum(on_keys, axis=-2))
    shares = jnp.where(rows > 0, 1 / jnp.where(rows > 0, rows, 1.0), 0.0)
    columns = jnp.einsum("kbtm,kbt->kbm", on_queries, shares)
    weights = jnp.moveaxis(jnp.einsum("kbsm,kbm->kbs", on_keys, columns), 0, 2)
    return jnp.where(jnp.isneginf(log_weights), -jnp.inf, weights)


# Keys


def counted(keys: Keys) -> Keys:
    """Keys with log-weights (b, s, k)."""
    log_weights = jnp.zeros((), float32_or_wider(keys.key))
    if keys.log_weights is not None:
        log_weights = keys.log_weights
    return keys._replace(log_weights=jnp.broadcast_to(log_weights, keys.key.shape[:3]))


def _taken(keys: Keys, index: Int[Array, "b i"]) -> Keys:
    """The keys at these positions; no key outside the sequence."""
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


def _cut(tree, start: int, length: int):
    return jax.tree.map(lambda x: x[:, start : start + length], tree)
