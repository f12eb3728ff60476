"""Stitched walks: roots of series, products of features, and no bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer.graphs import features, kernels, stitched
from tests.support.graph_examples import copies, karate


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_root_of_a_series(power):
    """A diffusion kernel's is that of sigma / sqrt(power); any other's powers are the series."""
    g = kernels.root(kernels.Diffusion(2.0)(30), power)
    np.testing.assert_allclose(g, kernels.Diffusion(2.0 / power**0.5)(30), atol=1e-6)
    series = lambda length: 0.5 ** np.arange(length) * (1 + np.arange(length) % 3)  # noqa: E731
    g, product = np.asarray(kernels.root(series(20), power), np.float64), np.ones(1)
    for _ in range(power):
        product = np.convolve(product, g)
    np.testing.assert_allclose(product[:20], series(20), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_products_are_those_of_the_dense_matrices():
    kernel = stitched.stitched(
        jax.random.key(0), karate(), kernels.Diffusion(2.0), 3, num_walks=2, p_halt=0.3
    )
    one, two = (
        np.linalg.multi_dot([np.asarray(phi.to_dense(), np.float64) for phi in side])
        for side in (kernel.left, kernel.right)
    )
    expected = (one @ two.T + two @ one.T) / 2
    v = np.asarray(jax.random.normal(jax.random.key(1), (34, 2)))
    np.testing.assert_allclose(kernel @ v, expected @ v, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kernel.gram(), expected, rtol=1e-4, atol=1e-5)
    assert kernel.shape == (34, 34)


@pytest.mark.thorough
def test_unbiased():
    """595 entries of 300 independent estimates within 5.5 errors; by t_299: 1 alarm in 1e4."""
    count, kernel = 300, kernels.Diffusion(1.5)
    many = copies(karate(), count)
    estimate = stitched.stitched(jax.random.key(0), many, kernel, 2, num_walks=4, p_halt=0.4)
    grams = np.asarray(estimate @ jnp.tile(jnp.eye(34), (count, 1))).reshape(count, 34, 34)
    error = grams.std(axis=0, ddof=1) / count**0.5
    z = (grams.mean(axis=0) - np.asarray(kernel.dense(karate()))) / np.maximum(error, 1e-12)
    assert np.abs(z).max() < 5.5
    assert isinstance(estimate.left[0], features.Features)
