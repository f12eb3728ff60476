"""Hadamard transforms and structured frequencies against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard as scipy_hadamard

from performer import couplings, hadamard, structured
from tests.support.tiers import tiers


@pytest.mark.parametrize("p", [1, 2, 8, 16, 32, 512])
def test_transform_is_the_hadamard_matrix(p):
    x = np.random.default_rng(0).standard_normal((3, p)).astype(np.float32)
    want = x.astype(np.float64) @ scipy_hadamard(p) / np.sqrt(p)
    np.testing.assert_allclose(hadamard.transform(jnp.asarray(x)), want, atol=1e-5)


def test_multiply_is_three_hd_blocks():
    p = 8
    signs = hadamard.random_signs(jax.random.key(0), p)
    h = scipy_hadamard(p) / np.sqrt(p)
    d1, d2, d3 = (np.diag(s) for s in np.asarray(signs, np.float64))
    want = h @ d3 @ h @ d2 @ h @ d1
    np.testing.assert_allclose(hadamard.multiply(signs, jnp.eye(p)).T, want, atol=1e-6)


@pytest.mark.parametrize("name", tiers(["fast-simrf", "sorf"], 1))
@pytest.mark.parametrize(("m", "d"), tiers([(40, 12), (8, 8)], 1))
def test_apply_is_the_product_with_the_coupling(name, m, d):
    key = jax.random.key(4)
    frequencies = structured.draw(key, m, d, simplex=name == "fast-simrf")
    W = couplings.get(name)(key, m, d)
    np.testing.assert_allclose(frequencies.matrix(), W, atol=2e-5)
    x = jax.random.normal(jax.random.key(5), (3, 2, d))
    got = jax.jit(lambda f, x: f.apply(x))(frequencies, x)
    np.testing.assert_allclose(got, x @ W.T, atol=5e-5)
