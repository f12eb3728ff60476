"""Positive features against the float64 oracle."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import features, performer_attention
from performer.features import FeatureMap
from tests import oracles
from tests.attention_inputs import close, inputs

X = jax.random.normal(jax.random.key(0), (5, 6))
W = jax.random.normal(jax.random.key(1), (7, 6))


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_positive_matches_the_equation(kernel):
    want = oracles.positive_features(np.asarray(X, np.float64), np.asarray(W, np.float64), kernel)
    np.testing.assert_allclose(features.positive(X, W, kernel=kernel), want, rtol=3e-6)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_trigonometric_matches_the_equation(kernel):
    x, w = np.asarray(X, np.float64), np.asarray(W, np.float64)
    want = [[np.sin(f @ p) for f in w] + [np.cos(f @ p) for f in w] for p in x] / np.sqrt(7)
    if kernel == "softmax":
        want = want * np.exp(np.sum(x**2, axis=-1, keepdims=True) / 2)
    np.testing.assert_allclose(
        features.trigonometric(X, W, kernel=kernel), want, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_hyperbolic_is_positive_of_both_signs(kernel):
    """To four units in the last place of an exponent, which is up to 15."""
    both, rounding = jnp.concatenate([W, -W]), 4 * np.spacing(np.float32(15))
    for halves, weights in ((None, None), (jnp.arange(7.0), jnp.tile(jnp.arange(7.0), 2) / 2)):
        np.testing.assert_allclose(
            features.hyperbolic(X, W, kernel=kernel, weights=halves),
            features.positive(X, both, kernel=kernel, weights=weights),
            rtol=rounding,
        )


def test_relu_and_elu_match_the_equation():
    x, w = np.asarray(X, np.float64), np.asarray(W, np.float64)
    p = x @ w.T
    weights = np.arange(7.0)
    for a in (None, weights):
        root = np.sqrt(1 / 7 if a is None else a)
        options = dict(weights=None if a is None else jnp.asarray(a, jnp.float32))
        np.testing.assert_allclose(
            features.relu(X, W, **options), np.maximum(p, 0) * root, rtol=1e-5, atol=1e-6
        )
        want = np.where(p > 0, p + 1, np.exp(np.minimum(p, 0))) * root
        np.testing.assert_allclose(features.elu(X, W, **options), want, rtol=1e-5, atol=1e-6)


def test_bad_input():
    call = features.FeatureMap.__call__.__wrapped__
    with pytest.raises(ValueError, match="unknown kernel 'gauss'"):
        call(features.positive, X, W, kernel="gauss")
    with pytest.raises(ValueError, match="features.relu has a kernel of its own"):
        features.relu(X, W, kernel="gaussian")
    with pytest.raises(ValueError, match="width 6 but frequencies have 5"):
        call(features.positive, X, W[:, :5])


# Records


def squares(projections, half):
    return jnp.zeros_like(half), projections**2


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [True, False])
def test_maps_that_are_on_no_list_work_in_attention(is_causal, small_chunks):
    """Against quadratic attention with these features; no feature in common gives 0."""
    query, key, value, w = inputs(t=22)
    w = jnp.abs(w)
    query = query.at[:, 3].set(-jnp.abs(query[:, 3]))
    for feature_map in (features.arc_cosine(0), features.arc_cosine(1), FeatureMap(squares)):
        phi, psi = (
            np.asarray(feature_map(np.repeat(x, 4 // x.shape[2], axis=2), w), np.float64)
            for x in (query, key)
        )
        kernel = np.einsum("btnm,bsnm->bnts", phi, psi)
        kernel = np.where(np.tri(22), kernel, 0) if is_causal else kernel
        total = kernel.sum(axis=-1, keepdims=True)
        values = np.repeat(np.asarray(value, np.float64), 2, axis=2)
        want = np.einsum("bnts,bsnv->btnv", kernel / np.where(total == 0, 1, total), values)
        attend = partial(performer_attention, is_causal=is_causal, feature_map=feature_map)
        got = attend(query, key, value, w)
        close(got, want, 2e-5)
        assert feature_map == FeatureMap(squares) or not got[:, 3].any()
        gradient = jax.grad(lambda *tokens: attend(*tokens, w).sum(), argnums=(0, 1, 2))  # noqa: B023
        chex.assert_tree_all_finite(gradient(query, key, value))


def test_elu_is_right_far_below_zero():
    """e^p + 1 - 1 would be 0 below -17."""
    w = jnp.array([[1.0]])
    x = jnp.array([[-80.0], [-20.0], [-14.0], [0.0], [3.0]])
    p = np.asarray(x, np.float64)
    want = np.where(p > 0, p + 1, np.exp(np.minimum(p, 0)))
    np.testing.assert_allclose(features.elu(x, w), want, rtol=1e-5)
    slope = jax.vmap(jax.grad(lambda x: features.elu(x, w)[0]))(x)
    np.testing.assert_allclose(slope, np.where(p > 0, 1, np.exp(np.minimum(p, 0))), rtol=1e-5)
