"""Inputs of attention, for the tests of its operator."""

import dataclasses
from functools import partial
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np

from performer import (
    Bias,
    Exact,
    Features,
    alibi,
    calibration,
    couplings,
    features,
    performer_attention,
)
from performer.attention import stream
from performer.attention.values import NOT_EXACT
from performer.features import FeatureMap
from performer.testing import reference_attention

H, V, M = 8, 5, 12
MAPS = tuple(features.MAPS)


def _own(projections, half):
    exponent = jnp.concatenate([projections / 2 - half, -projections / 2], axis=-1)
    return exponent, jnp.concatenate([projections**2, 1 + jnp.abs(projections)], axis=-1)


OWN = FeatureMap(_own, features_per_frequency=2)
"""A map that no paper has: of both parts, two features for each frequency, of |x|^2 too."""


def feature_map(name):
    """What `performer_attention` takes for a name of the oracles."""
    return OWN if name == "own" else name


def inputs(b=2, t=7, s=None, n=4, k=2, h=H, v=V, m=M, frequency_heads=None, scale=1.0, seed=0):
    """Standard normal arrays, the queries and keys times `scale`."""
    s = t if s is None else s
    rng = np.random.default_rng(seed)  # NumPy's: nothing to compile for each new shape
    lead = (m, h) if frequency_heads is None else (frequency_heads, m, h)
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, v), lead]
    query, key, value, frequencies = (rng.standard_normal(shape, np.float32) for shape in shapes)
    scale = np.float32(scale)
    return tuple(map(jnp.asarray, (scale * query, scale * key, value, frequencies)))


@partial(jax.jit, static_argnums=(1, 2))
def orthogonal(key, m, h):
    """Frequencies of "orf", drawn by one program."""
    return couplings.get("orf")(key, m, h)


def far_apart(norm, t=14):
    """Keys that stand in all directions, as many opposite to the queries, of that norm."""
    query, key, value, frequencies = inputs(t=t, k=4)
    query, key = (np.asarray(x) for x in (query, key))
    key = np.where(np.arange(4)[:, None] < 2, key, -query)
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    return *(jnp.asarray(norm * x, jnp.float32) for x in unit), value, frequencies


OF_FEATURES = (
    *("calibration", "weights", "query_frequencies", "feature_map", "coupling"),
    "trainable",
)


def by_keywords(function, query, key, value, frequencies, **keywords):
    """Call `performer_attention`, or a function like it, with fields of its values as keywords.

    They are the fields of `Features`, "exact_" and the fields of `Exact`, "keys" and "decay" of
    `Bias`, and "slopes" for `alibi`; so that tests can vary one of them, or cross them. Features
    are trainable, so that gradients of all arrays can be compared.
    """
    exact = {x: keywords.pop(f"exact_{x}") for x in Exact._fields if f"exact_{x}" in keywords}
    given = {x: keywords.pop(x) for x in OF_FEATURES if x in keywords}
    if isinstance(given.get("feature_map"), FunctionType):  # of the reference alone
        keywords["feature_map"] = given.pop("feature_map")
    bias = Bias(keywords.pop("keys", None), keywords.pop("decay", None))
    if (slopes := keywords.pop("slopes", None)) is not None:
        bias = bias + alibi(slopes)
    features, is_array = frequencies, hasattr(frequencies, "dtype")
    if given or exact or frequencies is None or is_array:
        given = {"trainable": True, "exact": Exact(**exact)} | given
        features = unchecked(Features, frequencies=frequencies, **given)
    bias = {} if bias.keys is bias.decay is None else {"bias": bias}
    return function(query, key, value, features, **bias, **keywords)


def unchecked(kind, **fields):
    """A value without the checks of annotations, which users do not have."""
    made = object.__new__(kind)
    for each in dataclasses.fields(kind):
        object.__setattr__(made, each.name, fields.get(each.name, each.default))
    return made


ours = partial(by_keywords, performer_attention)
ours_streamed = partial(by_keywords, stream)
oracle = partial(by_keywords, reference_attention)


def matrix_of_op(query, key, features, **options):
    """A^ as the outputs of `performer_attention` for unit values, without `attention.matrix`."""
    (*lead, s, k, _), unit = key.shape, jnp.eye(key.shape[-3])[:, None]
    unit = jnp.broadcast_to(unit, (*lead, s, k, s))
    return jnp.moveaxis(performer_attention(query, key, unit, features, **options), -2, -3)


SLOPES = np.array([0.5, 0.3, 0.0, 2.0], np.float32)
"""Of ALiBi, one for each of the four heads."""


def random_decays(b=2, t=14, n=2, seed=0):
    """Log-decays for each token and key head."""
    rng = np.random.default_rng(seed)
    return -rng.exponential(0.2, (b, t, n)).astype(np.float32)


def by_op(query, key, value, *, batch=3, num_features=16, pairs=None, exact=NOT_EXACT, **options):
    """Attention as `linearize` makes it: frequencies and calibration as documented.

    The moments are those of batches of so many examples, the second of each held out.
    """
    of_moments = {name: options[name] for name in ("is_causal", "scale") if name in options}
    fitted = np.arange(len(query)) % batch != min(batch, 8) // 2
    mask = None if pairs is None else pairs[fitted]
    moments = calibration.pair_moments(query[fitted], key[fitted], mask=mask, **of_moments)
    heads, width = key.shape[2:]
    drawn_key = jax.random.split(jax.random.key(0), 1)[0]
    frequencies = couplings.draw(drawn_key, couplings.DEFAULT, num_features, width, heads)
    fitted = calibration.fit(moments, "full", couplings.DEFAULT, exact.mixed)
    features = Features(frequencies, fitted, exact=exact)
    return performer_attention(query, key, value, features, **options)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
