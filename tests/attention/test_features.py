"""Positive features against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import features
from tests.support import oracles

RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=(n, 6)), jnp.float32) for n in (5, 7))


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


# Records


def test_elu_is_right_far_below_zero():
    """e^p + 1 - 1 would be 0 below -17."""
    w = jnp.array([[1.0]])
    x = jnp.array([[-80.0], [-20.0], [-14.0], [0.0], [3.0]])
    p = np.asarray(x, np.float64)
    want = np.where(p > 0, p + 1, np.exp(np.minimum(p, 0)))
    np.testing.assert_allclose(features.elu(x, w), want, rtol=1e-5)
    slope = jax.vmap(jax.grad(lambda x: features.elu(x, w)[0]))(x)
    np.testing.assert_allclose(slope, np.where(p > 0, 1, np.exp(np.minimum(p, 0))), rtol=1e-5)


def test_integers_above_32_bits_are_numbers():
    x, W = np.array([[5_000_000_000, 7]]), jnp.eye(2)
    found, want = (features.relu(a, W) for a in (x, x.astype(np.float32)))
    np.testing.assert_array_equal(found, want)
