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
def test_chi_quantile_is_accurate_in_both_tails(d):
    score = np.linspace(special.ndtri(1e-7), -special.ndtri(1e-7), 4001).astype(np.float32)
    got = np.asarray(norms.chi_quantile(jnp.asarray(score), d), np.float64)
    np.testing.assert_allclose(got, exact_quantile(score.astype(np.float64), d), rtol=3e-7)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_chi_quantile_has_the_derivative_of_the_quantile(d):
    score = np.linspace(-5, 5, 101).astype(np.float32)
    got = jax.vmap(jax.grad(lambda s: norms.chi_quantile(s, d)))(jnp.asarray(score))
    step = 1e-5
    exact = score.astype(np.float64)
    want = exact_quantile(exact + step, d) - exact_quantile(exact - step, d)
    np.testing.assert_allclose(got, want / (2 * step), rtol=1e-5)


@pytest.mark.parametrize(("m", "d"), [(8, 8), (7, 8), (1, 3), (64, 64)])
def test_pairs_satisfy_vrc_eq_7(m, d):
    lengths = np.asarray(norms.pairwise(jax.random.key(3), m, d), np.float64)
    lower = stats.chi.cdf(lengths, d)
    for i in range(0, m - 1, 2):
        assert lower[i] + lower[i + 1] == pytest.approx(1, abs=2e-6)
    assert len(lengths) == m


def test_different_pairs_are_independent():
    keys = jax.random.split(jax.random.key(0), 4000)
    lengths = jax.vmap(lambda key: norms.pairwise(key, 4, 16))(keys)
    correlation = np.corrcoef(lengths, rowvar=False)
    assert correlation[0, 1] < -0.95
    assert abs(correlation[0, 2]) < 4 / np.sqrt(4000)  # false-alarm rate 6e-5


def test_monotone_repeats_one_length():
    lengths = np.asarray(norms.monotone(jax.random.key(0), 5, 16))
    assert np.all(lengths == lengths[0])
