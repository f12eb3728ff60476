"""Near keys exactly, far ones by their features, in one normaliser.

A sequence is cut into chunks of `exact_window` tokens. A query sees the keys of its own chunk and
of the one before (and of the one after, if it is not causal) by e^{q.k} itself, all others by the
estimate sum_j phi_j(q) phi_j(k): a sparse correction of a low-rank estimate (Chen et al. 2021), but
of the kernel, so that one normaliser serves both. The first keys, where trained models put the
attention that has no other place (Xiao et al. 2024), may be exact for every query, too.

Each part gives rows of an online softmax, and `merge` joins them:

    far     a sweep over keys that are delayed by one chunk, so that the state before a chunk holds
            the keys up to two chunks before it; forth, and back if attention is not causal
    near    whole chunks, each with the keys of its neighbours beside its own
    first   a product with a few keys

The estimate must be the kernel here, not the kernel up to a factor of the row: the maps have the
query's half norm, 1 / m, and the determinant of a calibration.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import state as states
from performer.attention._checks import Options
from performer.attention._sizes import blocks
from performer.attention._sweep import Rows, Tokens, merge, ratio, sweep
from performer.attention.parallel import beside, earlier_devices, later_devices
from performer.attention.state import (
    Keys,
    State,
    WindowState,
    dot,
    extended,
    finite,
    operand_dtype,
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
    rows = _near_and_far(
        maps, query, _without_first(keys, place, options), segments, nothing, options
    )
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
    index, length = jnp.arange(_chunks(t, w) * w + 2 * w), _chunks(t, w) * w
    joined = _joined(state.near, _without_first(keys, place, options))
    around = _taken(joined, jnp.where(index < w + filled, index, index + w - filled))
    done = (filled + t) // w * w
    near = _taken(around, done + jnp.arange(2 * w))
    far_keys = _cut(_where(index < done, around), 0, length)
    if t == 1:
        rows = _exact(query, _cut(around, 0, 2 * w), None, options)
        far, _ = _far(maps, Tokens(query, _where(False, keys), None), state.far, options)
        after = jax.lax.cond(
            jnp.any(done > 0),
            lambda far: states.summarise(maps[1], far_keys, far, options.block),
            lambda far: far,
            state.far,
        )
        rows = merge(rows, far)
    else:
        queries = _along(query, jnp.clip(jnp.arange(length) - filled, 0, t - 1))
        far, after = _far(maps, Tokens(queries, far_keys, None), state.far, options)
        rows = merge(_near(queries, _cut(around, 0, length + w), None, options), far)
        rows = Rows(*(_along(x, filled + jnp.arange(t)) for x in rows))
    if options.exact_first:
        rows = merge(rows, _exact(query, first, _reached(place, options), options))
    return ratio(rows), WindowState(after, near, first, state.position + t)


def _near_and_far(maps, query, keys: Keys, segments, nothing: State, options: Options) -> Rows:
    w, t = options.exact_window, query.shape[1]
    sides = (w, 0 if options.is_causal else w)
    length = t + -t % w
    query, around = pad(query, 0, length - t), extended(keys, 0, length - t)
    around = extended(around, *sides)
    numbers = [None, None]
    if segments is not None:
        own = jnp.pad(segments, ((0, 0), (0, length - t)), mode="edge")
        numbers = [own, jnp.pad(own, ((0, 0), sides), mode="edge")]
    if options.axis_name is not None:
        around = beside(around, *sides, options.axis_name)

    def far(tokens, exchange):
        initial = nothing
        if options.axis_name is not None:
            own = states.summarise(maps[1], tokens.keys, nothing, options.block)
            initial = exchange(own, options.axis_name)
        return _far(maps, tokens, initial, options)[0]

    def tokens(start):
        keys, of_keys = _cut((around, numbers[1]), start, length)
        return Tokens(query, keys, numbers[0], of_keys)

    rows = merge(_near(query, around, numbers, options), far(tokens(0), earlier_devices))
    if not options.is_causal:
        back = far(_flipped(tokens(2 * w)), later_devices)
        rows = merge(rows, _flipped(back))
    return _cut(rows, 0, t)


def _far(maps, tokens: Tokens, initial: State, options: Options) -> tuple[Rows, State]:
    """Every query with the keys before its chunk."""
    chunk, block = min(options.exact_window, tokens.query.shape[1]), options.block
    sizes = dict(window="none", finish=lambda rows: rows, chunk=chunk, block=block)
    return sweep(*maps, tokens, initial, **sizes)


def _near(query: Array, around: Keys, numbers, options: Options) -> Rows:
    """Every query with the keys of its chunk and its neighbours.

    Args:
        query: (b, t, k, g, h), whole chunks.
        around: as many keys, with a chunk more before, and after if not causal.
        numbers: of the segments of queries and of keys, or None for both.
        options: of the call.
    """
    (b, t, k, g, _), w = query.shape, options.exact_window
    sides = around.key.shape[1] // w - t // w + 1
    count, length = blocks(t, options.block, w)
    chunks, more = length // w, count * length - t
    query, around = pad(query, 0, more), extended(around, 0, more)
    allowed = jnp.concatenate([jnp.ones((w, w), bool), jnp.tril(jnp.ones((w, w), bool))], axis=1)

    def of_chunks(x, sides):  # (b, t, ...) -> (count, b, c, sides w, ...)
        parts = [x[:, i * w : i * w + count * length] for i in range(sides)]
        parts = [x.reshape(b, count, chunks, w, *x.shape[2:]) for x in parts]
        return jnp.moveaxis(jnp.concatenate(parts, axis=3), 1, 0)

    @partial(jax.checkpoint, prevent_cse=count == 1)
    def of_block(xs):
        query, (key, value, log_weights), ids = xs
        logits = dot("bctkgh,bcskh->bckgts", query, key, query.dtype) * options.scale
        logits = logits + jnp.moveaxis(log_weights, -1, 2)[:, :, :, None, None]
        if options.is_causal:
            logits = jnp.where(allowed, logits, -jnp.inf)
        if ids is not None:
            same = ids[0][..., :, None] == ids[1][..., None, :]
            logits = jnp.where(same[:, :, None, None], logits, -jnp.inf)
        return _rows(logits, value, "bckgts,bcskv->bckgtv")

    ids = None
    if numbers is not None and numbers[0] is not None:
        ids = [jnp.pad(x, ((0, 0), (0, more)), mode="edge") for x in numbers]
        ids = of_chunks(ids[0], 1), of_chunks(ids[1], sides)
    xs = of_chunks(query, 1), jax.tree.map(partial(of_chunks, sides=sides), around), ids
    if count == 1:
        rows = jax.tree.map(lambda x: x[None], of_block(jax.tree.map(lambda x: x[0], xs)))
    else:
        rows = jax.lax.map(of_block, xs)

    def joined(x):  # (count, b, c, k, g, w, ...) -> (b, t, k, g, ...)
        x = x.transpose(1, 0, 2, 5, 3, 4, *range(6, x.ndim))
        return x.reshape(b, count * length, k, g, *x.shape[6:])[:, :t]

    return jax.tree.map(joined, rows)


def _exact(query: Array, keys: Keys, allowed: Bool[Array, "*b t f"] | None, options: Options):
    """Rows of all queries with a few keys, (b, f, k, .) or those of each query, (b, t, f, k, .)."""
    of = "btskh" if keys.key.ndim == 5 else "bskh"
    logits = dot(f"btkgh,{of}->btkgs", query, keys.key, query.dtype) * options.scale
    log_weights = jnp.swapaxes(keys.log_weights, -1, -2)[..., :, None, :]
    logits = logits + (log_weights if keys.key.ndim == 5 else log_weights[:, None])
    if allowed is not None:
        logits = jnp.where(allowed[:, :, None, None], logits, -jnp.inf)
    return _rows(logits, keys.value, f"btkgs,{of[:-1]}v->btkgv")


def _rows(logits: Array, value: Array, equation: str) -> Rows:
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
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
    return keys._replace(log_weights=jnp.where(exists, keys.log_weights, -jnp.inf))


def _either(left: Keys, right: Keys) -> Keys:
    """The left keys where there are any."""
    exists = ~jnp.isneginf(left.log_weights)

    def choose(x, y):
        return jnp.where(exists if x.ndim == 3 else exists[..., None], x, y)

    return jax.tree.map(choose, left, right)


def _joined(left: Keys, right: Keys) -> Keys:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), left, right)


def _cut(tree, start: int, length: int):
    return jax.tree.map(lambda x: x[:, start : start + length], tree)


def _flipped(tree):
    return jax.tree.map(lambda x: jnp.flip(x, axis=1), tree)


def _along(x: Array, index: Int[Array, "b i"]) -> Array:
    """Tokens of (b, t, ...) at the places (b, i)."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
