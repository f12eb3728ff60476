"""Exact where it matters: keys with the largest weights, and the first rows, by e^{q.k} itself.

The weight of a key is the sum of its column of the attention matrix. Its estimate needs no matrix:
with features a of queries and b of keys, and D_t = sum_j a_j(t) sum_s b_j(s), it is

    sum_t a(t).b(s) / D_t = sum_j b_j(s) [sum_t a_j(t) / D_t],

a state of the queries with the log-weights -log D_t, which the keys then look up. The f keys with
the largest weights leave the features. To the queries each is a feature of its own, of exponent
q.k, whose state is that key: they share the normaliser of the estimate (Chen et al. 2021 choose
pairs by hashing instead).
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from performer.attention._checks import Plan
from performer.attention._maps import Arguments
from performer.attention._masks import Pairs
from performer.attention._sizes import blocks
from performer.attention._sweep import Rows, far_rows, ratio
from performer.attention._window import counted, exact_rows, of_others
from performer.attention.parallel import over_devices
from performer.attention.state import (
    Features,
    Keys,
    State,
    dot,
    finite,
    flat,
    heads_first,
    summarise,
)
from performer.typing import Size


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
    place = jnp.broadcast_to(jnp.arange(weights.shape[1])[:, None], weights.shape)
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

    def take(x):
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=1)

    return jax.tree.map(take, pool)


def _weights(maps, query: Array, keys: Keys, nothing: State, plan: Plan) -> Array:
    """Logarithms (b, s, k) of the estimated weights of keys; -inf for a key that is not there."""
    of_query, of_key = maps
    b, t, k, g, h = query.shape
    query = query.transpose(0, 1, 3, 2, 4).reshape(b, t * g, k, h)
    nothing = State(*nothing[:2], nothing.numerator[..., :0])

    def total(features, of, log_weights):
        state = summarise(features, Keys(of, of[..., :0], log_weights), nothing, plan.block)
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
        split, flat_state = jax.tree.map(flat, (features(x), state))
        rows = far_rows(split, [(flat_state, None, None)], None, state.normaliser.dtype)
        positive = rows.denominator > 0  # features with signs may have others
        logarithm = jnp.log(jnp.where(positive, rows.denominator, 1.0)) + rows.maximum
        return jnp.where(positive, logarithm, -jnp.inf)

    xs = heads_first(x, count, length)
    totals = of_block(xs[0]) if count == 1 else jax.lax.map(of_block, xs)
    totals = totals.reshape(count, k, b, length).transpose(2, 0, 3, 1)
    return totals.reshape(b, count * length, k)[:, :t]


def beside(query_map: Features, state: State, chosen: Keys, scale: float) -> tuple[Features, State]:
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
    place = jnp.arange(keys.key.shape[1])
    if axis_name is not None:  # keys of all devices, for the queries of the first
        here = jax.lax.axis_index(axis_name)
        place = place + here * keys.key.shape[1]
        query = jax.lax.psum(jnp.where(here == 0, query, 0), axis_name)
    later = place[None, None] > jnp.arange(query.shape[1])[None, :, None]
    same = jnp.ones((1, 1, 1), bool)
    if pairs.segments is not None:
        ids, key_ids = pairs.segments
        key_ids = ids if key_ids is None else key_ids
        same = ids[:, :r, None] == key_ids[:, None]
    allowed = same & ~later if pairs.is_causal else same & (later | True)
    fading = None
    if keys.log_decay is not None:
        fading = _between(keys.log_decay, later, same, axis_name)
    rows = exact_rows(query, keys, scale, allowed, fading)
    if axis_name is None:
        return output.at[:, :r].set(ratio(rows).astype(output.dtype))
    maximum = jax.lax.pmax(jax.lax.stop_gradient(rows.maximum), axis_name)
    factor = jnp.exp(rows.maximum - finite(maximum))
    sums = rows.denominator * factor, rows.numerator * factor[..., None]
    rows = Rows(maximum, *jax.lax.psum(sums, axis_name))
    own = jnp.where(here == 0, ratio(rows).astype(output.dtype), output[:, :r])
    return output.at[:, :r].set(own)


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
