"""Features of queries and of keys, from the values of a call.

Calibration, scale and weights of features are applied here: the sums over keys do not know them.
"""

import math
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import max_dim
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import features as maps
from performer.attention import masks, refusals
from performer.attention.state import Keys, Map, extended, heads_first
from performer.attention.values import Features, Pairs, Plan, Tokens, as_features, state_heads
from performer.calibration import (
    fold,
    for_heads,
    log_determinant,
    transform_keys,
    transform_queries,
)
from performer.numerics import dot, weighted
from performer.typing import float32_or_wider


class Arguments(NamedTuple):
    """Arrays of a call after calibration; keys have a head for each separate sum."""

    query: Float[Array, "b t n h"]
    keys: Keys
    w_query: Float[Array, "*k m h"]
    w_key: Float[Array, "*k m h"]
    feature_bias: Float[Array, "*k m"] | None
    shift: Float[Array, "*k h"] | None = None
    """Shift of calibrated keys, where features must estimate e^{q.k} of the keys as given."""
    given: Float[Array, "b t n h"] | None = None
    """Queries before calibration, if exact pairs need them."""


def arguments(tokens: Tokens, features: Features, pairs: Pairs, plan: Plan) -> Arguments:
    """Apply shift and calibration to tokens and frequencies."""
    query, key, value = tokens
    if (wide := float32_or_wider(*tokens)) == jnp.float64:
        query, key, value = (x.astype(wide) for x in tokens)
    log_weights = _log_weights(pairs, wide)
    if log_weights is not None:
        # Masked keys may be NaN, and have no gradient.
        absent = jnp.isneginf(log_weights)[..., None]
        key, value = (jnp.where(absent, 0, x) for x in (key, value))
    calibration, given = features.calibration, (None, None)
    if plan.absolute and calibration is not None and calibration.changes_tokens:
        given = query, key
    query, key, *per_head = _transformed(query, key, features, plan)
    keys = Keys(key, value, log_weights, pairs.log_decay, given[1])
    t, n, k = *query.shape[1:3], key.shape[2]
    heads = state_heads(n, k, features, pairs)
    if heads != k:  # (b, s, k, .) -> (b, s, n, .)
        keys = jax.tree.map(lambda x: jnp.repeat(x, heads // x.shape[2], axis=2), keys)
        per_head = [
            x if x is None or x.ndim == rank else jnp.repeat(x, heads // x.shape[0], axis=0)
            for x, rank in zip(per_head, (2, 2, 1, 1), strict=True)
        ]
    if pairs.is_causal:  # as many keys as queries; no query sees later ones
        keys = extended(keys, 0, max_dim(max(t, 1) - keys.key.shape[1], 0))
        keys = jax.tree.map(lambda x: x[:, : max(t, 1)], keys)
    w_query, w_key, feature_bias, shift = cast(Any, per_head)
    return Arguments(query, keys, w_query, w_key, feature_bias, shift, given[0])


def _log_weights(pairs: Pairs, dtype: jnp.dtype) -> Float[Array, "b s #k"] | None:
    """Log-weights of keys, -inf for those that do not exist; None for 0 everywhere."""
    if pairs.exists is None:
        return pairs.log_weights
    weights = jnp.zeros((), dtype) if pairs.log_weights is None else pairs.log_weights
    return jnp.where(pairs.exists[..., None], weights, -jnp.inf)


def _transformed(query: Array, key: Array, features: Features, plan: Plan):
    frequencies, calibration = cast(Array, features.frequencies), features.calibration
    wide = float32_or_wider(key)
    w_key = frequencies.astype(wide)
    given = features.query_frequencies
    w_query = w_key if given is None else given.astype(wide)
    feature_bias = None if features.weights is None else logarithm(features.weights.astype(wide))
    if plan.absolute:
        m, weight = w_key.shape[-2], features.map.weight
        even = jnp.full(m, math.log(weight / m), wide)
        feature_bias = even if feature_bias is None else feature_bias + math.log(weight)
    if calibration is None:
        return query, key, w_query, w_key, feature_bias, None
    root = plan.scale**0.5
    calibration = jax.tree.map(lambda x: x.astype(wide), calibration)
    moved = transform_keys(calibration, key.astype(wide) * root)
    if frequencies.ndim == 3:  # one calibration for each head of the frequencies
        calibration = for_heads(calibration, frequencies.shape[0])
    w_folded, w_key, tilt = fold(calibration, w_key)
    if plan.absolute and calibration.scale is not None:
        # e^{q.k} itself and the half norm need the transformed queries, not their frequencies.
        query = transform_queries(calibration, query)
        w_query = w_key if given is None else w_query
    else:
        w_query = w_folded if given is None else fold(calibration, w_query)[0]
    if plan.absolute and calibration.root is not None and tilt is not None:
        tilt = sum(jnp.broadcast_arrays(tilt, log_determinant(calibration.root)[..., None]))
    both = [x for x in (feature_bias, tilt) if x is not None]
    feature_bias = reduce(jnp.add, jnp.broadcast_arrays(*both)) if both else None
    shift = None
    if plan.absolute and calibration.shift is not None:  # M^-1 c
        heads = frequencies.shape[0] if frequencies.ndim == 3 else key.shape[2]
        shift = -transform_keys(calibration, jnp.zeros((heads, key.shape[-1]), wide))
    return query, (moved / root).astype(key.dtype), w_query, w_key, feature_bias, shift


def features_of(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    features: Features | Float[Array, "*n m h"],
    *,
    mask: ArrayLike | None = None,
    scale: float | None = None,
) -> tuple[maps.Split, maps.Split, Float[Array, "n b s v"]]:
    """Return features of all queries and keys, and the values, for sums outside attention.

    Arguments and errors as in `performer_attention`, without exact pairs.

    Returns:
        Features (n, b, t, m) of queries and (n, b, s, m) of keys, 0 for masked keys, and values in
        float32 or wider, for each query head. Their products estimate exp(q.k) up to a
        factor of the query.
    """
    features = as_features(features)
    refusals.check_arrays(query, key, value, features)
    refusals.check_words(None, False, mask, features)
    lead, tokens = query.shape[:-3], refusals.with_one_batch_axis(Tokens(query, key, value))
    plan = Plan(scale=refusals.positive_scale(scale, query.shape[-1]))
    refusals.check_features(features, tokens)
    pairs = Pairs(exists=masks.key_mask(mask, None, lead, tokens.key))
    refusals.check_together(refusals.call_of(tokens, features, pairs))
    if any(features.exact):
        raise ValueError(
            f"{features.exact} has no features of its own: the sums of these features have no exact"
            " pairs; leave them out"
        )
    return _features(tokens, replace(features, coupling=None), pairs, plan)


@partial(jax.jit, static_argnums=3)
def _features(tokens: Tokens, features: Features, pairs: Pairs, plan: Plan):
    features = features.constant
    x = arguments(tokens, features, pairs, plan)
    query_map, key_map = feature_maps(x, features, plan)
    (b, t, n, h), k = x.query.shape, x.keys.key.shape[2]
    # (b, t, n, h) -> (k, b, n / k, t, h) -> (n, b, t, m)
    query = query_map(x.query.reshape(b, t, k, n // k, h).transpose(2, 0, 3, 1, 4))
    query = jax.tree.map(lambda y: y.swapaxes(1, 2).reshape(n, b, t, -1), query)
    # (b, s, k, .) -> (k, b, s, .)
    key, value, log_weights = jax.tree.map(heads_first, x.keys[:3])
    key = weighted(key_map(key), log_weights)
    value = value.astype(float32_or_wider(*tokens))
    return query, *jax.tree.map(lambda y: jnp.repeat(y, n // k, axis=0), (key, value))


def feature_maps(x: Arguments, features: Features, plan: Plan) -> tuple[Map, Map]:
    """Features of queries and of keys, as functions of arrays (k, b, ..., h)."""
    feature_map, scale = features.map, plan.scale
    # q.k * scale = (q sqrt(scale)).(k sqrt(scale)): the root is in W, rounded once.
    w_query, w_key = ((w * scale**0.5).astype(x.query.dtype) for w in (x.w_query, x.w_key))

    def project(x, frequencies):
        equation = "...h,mh->...m" if frequencies.ndim == 2 else "k...h,kmh->k...m"
        return dot(equation, x, frequencies, x.dtype)

    def query_map(y):
        half = half_norm(y, scale)
        if feature_map.estimates_softmax and not plan.absolute:  # |q|^2 / 2 cancels
            half = jnp.zeros_like(half)
        exponent, factor = feature_map.split(project(y, w_query), half)
        return (exponent if x.shift is None else exponent + along(y, x.shift, scale)), factor

    def key_map(y):
        out = feature_map.split(project(y, w_key), half_norm(y, scale))
        if x.feature_bias is None:
            return out
        return _importance(out, x.feature_bias, feature_map.features_per_frequency)

    return query_map, key_map


def half_norm(x: Float[Array, "*b h"], scale: float) -> Float[Array, "*b 1"]:
    """scale |x|^2 / 2."""
    squares = x.astype(float32_or_wider(x)) ** 2
    return scale / 2 * jnp.sum(squares, axis=-1, keepdims=True)


def along(query: Float[Array, "*b h"], shift: Float[Array, "*k h"], scale: float) -> Array:
    """q.c, (k, ..., 1): features of shifted keys estimate e^{q.(k - c)}."""
    *heads, h = shift.shape
    shift = shift.reshape(*heads, *[1] * (query.ndim - len(heads) - 1), h)
    return scale**0.5 * jnp.sum(query.astype(shift.dtype) * shift, axis=-1, keepdims=True)


def logarithm(weights: Array) -> Array:
    """log of weights that may be 0, where its gradient is finite."""
    positive = weights > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, weights, 1.0)), -jnp.inf)


def _importance(split: maps.Split, log_weights: Array, per_frequency: int) -> maps.Split:
    """Features of keys times the weights of their frequencies, (m,) or (k, m)."""
    log_weights = jnp.concatenate([log_weights] * per_frequency, axis=-1)
    exponent, factor = split
    *heads, m = log_weights.shape
    ones = [1] * (max(x.ndim for x in split if x is not None) - log_weights.ndim)
    log_weights = log_weights.reshape(*heads, *ones, m)
    if factor is None:
        return exponent + log_weights, None
    return exponent, factor * jnp.exp(log_weights)
