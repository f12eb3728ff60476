"""Lengths: the chi quantile against SciPy, and the joint laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from performer import norms

DIMENSIONS = (1, 2, 3, 8, 64, 300, 1024)


def exact_quantile(score, d):
    """sqrt(2 P^-1(d/2, Phi(score))), each tail from its own side."""
    lower = np.sqrt(2 * special.gammaincinv(d / 2, special.ndtr(score)))
    upper = np.sqrt(2 * special.gammainccinv(d / 2, special.ndtr(-score)))
    return np.where(score < 0, lower, upper)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_chi_is_accurate_in_both_tails(d):
    score = np.linspace(special.ndtri(1e-7), -special.ndtri(1e-7), 4001).astype(np.float32)
    got = np.asarray(norms.chi(jnp.asarray(score), d), np.float64)
    np.testing.assert_allclose(got, exact_quantile(score.astype(np.float64), d), rtol=3e-7)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_chi_quantile_has_the_derivative_of_the_quantile(d):
    score = np.linspace(-5, 5, 101).astype(np.float32)
    got = jax.vmap(jax.grad(lambda s: norms.chi(s, d)))(jnp.asarray(score))
    step = 1e-5
    exact = score.astype(np.float64)
    want = exact_quantile(exact + step, d) - exact_quantile(exact - step, d)
    np.testing.assert_allclose(got, want / (2 * step), rtol=1e-5)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("d", [1, 3, 64])
def test_matern_is_the_law_of_a_multivariate_t(d, nu):
    """w = z / sqrt(y / 2 nu), z ~ N(0, I_d), y ~ chi^2: |w|^2 / d ~ F(d, 2 nu), from SciPy."""
    score = np.linspace(-5, 5, 2001).astype(np.float32)
    got = np.asarray(norms.matern(nu)(jnp.asarray(score), d), np.float64)
    exact = score.astype(np.float64)
    law = stats.f(d, 2 * nu)
    lower, upper = law.ppf(special.ndtr(exact)), law.isf(special.ndtr(-exact))
    np.testing.assert_allclose(got, np.sqrt(d * np.where(exact < 0, lower, upper)), rtol=5e-7)


def test_matern_needs_a_positive_smoothness():
    with pytest.raises(ValueError, match=r"positive, got 0\.0"):
        norms.matern(0.0)


@pytest.mark.parametrize(("m", "d"), [(8, 8), (7, 8), (1, 3), (64, 64), (64, 1)])
def test_pairs_satisfy_vrc_eq_7(m, d):
    """F(l_a) = 1 - F(l_b), to a relative precision that holds in the tails too."""
    keys = jax.random.split(jax.random.key(3), 2000)
    lengths = np.asarray(jax.vmap(lambda key: norms.pairwise(key, m, d))(keys), np.float64)
    assert lengths.shape == (2000, m)
    law = stats.chi(d)
    for i in range(0, min(m - 1, 8), 2):
        a, b = lengths[:, i], lengths[:, i + 1]
        shorter, longer = np.minimum(a, b), np.maximum(a, b)
        np.testing.assert_allclose(law.cdf(shorter), law.sf(longer), rtol=1e-4)


def test_a_complement_in_float32_would_be_seen():
    """The planted fault: F^-1(1 - u) with 1 - u rounded to float32 fails the test above."""
    u = special.ndtr(np.random.default_rng(0).standard_normal(2000))
    tail = np.minimum(u, 1 - u)
    rounded = 1 - (1 - tail.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(rounded / tail - 1)) > 1e-4


def test_different_pairs_are_independent():
    keys = jax.random.split(jax.random.key(0), 4000)
    lengths = jax.vmap(lambda key: norms.pairwise(key, 4, 16))(keys)
    correlation = np.corrcoef(lengths, rowvar=False)
    assert correlation[0, 1] < -0.95
    assert abs(correlation[0, 2]) < 4 / np.sqrt(4000)  # false-alarm rate 6e-5


def test_monotone_repeats_one_length():
    lengths = np.asarray(norms.monotone(jax.random.key(0), 5, 16))
    assert np.all(lengths == lengths[0])


def test_fixed_draws_nothing():
    np.testing.assert_array_equal(norms.fixed(jax.random.key(0), 3, 16), [4.0, 4.0, 4.0])
