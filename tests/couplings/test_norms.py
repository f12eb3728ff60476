"""Lengths: the chi quantile against SciPy, and the joint laws."""

import itertools

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
    """So is its derivative, within five standard deviations."""
    score = np.linspace(special.ndtri(1e-7), -special.ndtri(1e-7), 4001).astype(np.float32)
    with_slopes = jax.jit(jax.vmap(jax.value_and_grad(lambda s: norms.chi(s, d))))
    got, slopes = np.asarray(with_slopes(jnp.asarray(score)), np.float64)
    exact, step = score.astype(np.float64), 1e-5
    np.testing.assert_allclose(got, exact_quantile(exact, d), rtol=3e-7)
    inner = abs(exact) < 5
    want = exact_quantile(exact + step, d) - exact_quantile(exact - step, d)
    np.testing.assert_allclose(slopes[inner], want[inner] / (2 * step), rtol=1e-5)


def test_matern_is_the_law_of_a_multivariate_t():
    """w = z / sqrt(y / 2 nu), z ~ N(0, I_d), y ~ chi^2: |w|^2 / d ~ F(d, 2 nu), from SciPy."""
    score = np.linspace(-5, 5, 2001).astype(np.float32)
    cases = list(itertools.product([0.5, 1.5, 2.5], [1, 3, 64]))
    lengths = jax.jit(lambda score: [norms.matern(nu)(score, d) for nu, d in cases])(score)
    exact = score.astype(np.float64)
    for (nu, d), got in zip(cases, lengths, strict=True):
        law = stats.f(d, 2 * nu)
        lower, upper = law.ppf(special.ndtr(exact)), law.isf(special.ndtr(-exact))
        want = np.sqrt(d * np.where(exact < 0, lower, upper))
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=5e-7)


@pytest.mark.parametrize(("m", "d"), [(8, 8), (7, 8), (64, 1)])
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


def test_monotone_repeats_one_length():
    """And fixed lengths are sqrt(d)."""
    lengths = np.asarray(norms.monotone(jax.random.key(0), 5, 16))
    assert np.all(lengths == lengths[0])
    np.testing.assert_array_equal(norms.fixed(jax.random.key(0), 3, 16), [4.0, 4.0, 4.0])
