"""Queries, keys and frequencies as they come, to features of queries and of keys, as functions.

Shift, calibration, scale and weights of the features have their place here, so that the sums over
keys know of none of them.
"""

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array

from performer import features
from performer.attention import state as states
from performer.attention._checks import Inputs, Options
from performer.attention.state import Keys
from performer.calibration import (
    fold,
    for_heads,
    log_determinant,
    transform_keys,
    transform_queries,
)
from performer.typing import float32_or_wider


def transformed(query, key, inputs: Inputs, options: Options):
    """After shift and calibration: the tokens, the frequencies of both, and their log-weights."""
    frequencies, calibration, wide = inputs.frequencies, inputs.calibration, float32_or_wider(key)
    if inputs.shift is not None:
        shifted = key.astype(wide) - jnp.broadcast_to(inputs.shift.astype(wide), key.shape)
        key = shifted.astype(key.dtype)
    of_key = frequencies.astype(wide)
    given = inputs.query_frequencies
    own = of_key if given is None else given.astype(wide)
    of_features = None if inputs.weights is None else _logarithm(inputs.weights.astype(wide))
    if options.exact_window:  # the kernel itself, no multiple of it
        m, weight = of_key.shape[-2], options.feature_map.weight
        even = jnp.full(m, math.log(weight / m), wide)
        of_features = even if of_features is None else of_features + math.log(weight)
    if calibration is None:
        return query, key, own, of_key, of_features
    root = options.scale**0.5
    calibration = jax.tree.map(lambda x: x.astype(wide), calibration)
    moved = transform_keys(calibration, key.astype(wide) * root)
    if frequencies.ndim == 3:  # one calibration for each of the heads that share a key
        calibration = for_heads(calibration, frequencies.shape[0])
    of_query, of_key, tilt = fold(calibration, of_key)
    if given is not None:
        of_query = fold(calibration, own)[0]
    if options.exact_window and calibration.scale is not None:
        # e^{q.k} itself needs the queries, and so does their half norm.
        query = transform_queries(calibration, query)
        of_query = of_key if given is None else own
    if options.exact_window and calibration.root is not None and tilt is not None:
        tilt = tilt + log_determinant(calibration.root)[..., None]
    both = [x for x in (of_features, tilt) if x is not None]
    of_features = reduce(jnp.add, jnp.broadcast_arrays(*both)) if both else None
    return query, (moved / root).astype(key.dtype), of_query, of_key, of_features


def feature_maps(query, keys: Keys, of_query, of_key, of_features, options: Options):
    """Features of queries and of keys, as functions of arrays (k, b, ..., h)."""
    # q.k * scale = (q sqrt(scale)).(k sqrt(scale)); the root goes into W, once, rounded once.
    of_query, of_key = ((x * options.scale**0.5).astype(query.dtype) for x in (of_query, of_key))
    feature_map = options.feature_map

    def project(x, frequencies):
        equation = "...h,mh->...m" if frequencies.ndim == 2 else "k...h,kmh->k...m"
        return states.dot(equation, x, frequencies, x.dtype)

    def half_norm(x):
        squares = x.astype(float32_or_wider(x)) ** 2
        return options.scale / 2 * jnp.sum(squares, axis=-1, keepdims=True)

    def query_map(x):
        projections = project(x, of_query)
        if options.google:
            return _google(projections, half_norm(x), jnp.max(projections, -1, keepdims=True))
        half = half_norm(x)
        if feature_map.estimates_softmax and not options.exact_window:  # |q|^2 / 2 cancels
            half = jnp.zeros_like(half)
        return feature_map.split(projections, half)

    offset = None
    if options.google:
        projections = project(keys.key.transpose(2, 0, 1, 3), of_key)
        if keys.log_weights is not None:
            absent = jnp.isneginf(keys.log_weights).transpose(2, 0, 1)[..., None]
            projections = jnp.where(absent, -jnp.inf, projections)
        offset = states.finite(jnp.max(projections, axis=(-1, -2)))

    def key_map(x):
        projections = project(x, of_key)
        if offset is None:
            out = feature_map.split(projections, half_norm(x))
        else:
            maximum = offset.reshape(*offset.shape, *[1] * (x.ndim - 2))
            out = _google(projections, half_norm(x), maximum)
        if of_features is None:
            return out
        return _importance(out, of_features, feature_map.features_per_frequency)

    return query_map, key_map


def _google(projections: Array, half_norm: Array, maximum: Array) -> features.Split:
    """exp(. - maximum) + 1e-6, as the public code of Choromanski et al. 2021 has it."""
    return jnp.zeros_like(half_norm), jnp.exp(projections - half_norm - maximum) + 1e-6


def _logarithm(weights: Array) -> Array:
    """log of weights that may be 0, with gradients that are finite there."""
    positive = weights > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, weights, 1.0)), -jnp.inf)


def _importance(split: features.Split, log_weights: Array, per_frequency: int) -> features.Split:
    """The features of keys times the weights of their frequencies, (m,) or (k, m)."""
    log_weights = jnp.concatenate([log_weights] * per_frequency, axis=-1)
    exponent, factor = split
    *heads, m = log_weights.shape
    ones = [1] * (max(x.ndim for x in split if x is not None) - log_weights.ndim)
    log_weights = log_weights.reshape(*heads, *ones, m)
    if factor is None:
        return exponent + log_weights, None
    return exponent, factor * jnp.exp(log_weights)
