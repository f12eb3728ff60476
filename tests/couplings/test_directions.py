"""Directions: orthonormality, the simplex, the sign of a Haar matrix, and no deadlock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import directions, norms
from tests.support import oracles
from tests.support.tiers import tiers


@pytest.mark.parametrize(("m", "d"), tiers([(2, 5), (1, 1), (64, 64)], 1))
def test_haar_rows_are_orthonormal(m, d):
    rows = np.asarray(directions.haar(jax.random.key(1), m, d), np.float64)
    np.testing.assert_allclose(rows @ rows.T, np.eye(m), atol=2e-6)


def test_haar_determinant_takes_both_signs():
    keys = jax.random.split(jax.random.key(0), 400)
    matrices = jax.vmap(lambda key: directions.haar(key, 3, 3))(keys)
    positive = np.mean(np.linalg.det(np.asarray(matrices, np.float64)) > 0)
    assert abs(positive - 0.5) < 4 * 0.5 / np.sqrt(400)  # false-alarm rate 6e-5


def test_haar_has_the_moments_of_haar_measure():
    """E Q = 0, E Q_ij^2 = 1/d, E Q_00^4 = 3/(d(d+2)), E Q_00 Q_01 Q_10 Q_11 = -1/((d-1)d(d+2))."""
    d, draws = 4, 40_000
    keys = jax.random.split(jax.random.key(7), draws)
    q = np.asarray(jax.vmap(lambda key: directions.haar(key, d, d))(keys), np.float64)
    samples = {
        0.0: [q[:, i, j] for i in range(d) for j in range(d)],
        1 / d: [q[:, i, j] ** 2 for i in range(d) for j in range(d)],
        3 / (d * (d + 2)): [q[:, 0, 0] ** 4, q[:, d - 1, d - 1] ** 4],
        -1 / ((d - 1) * d * (d + 2)): [q[:, 0, 0] * q[:, 0, 1] * q[:, 1, 0] * q[:, 1, 1]],
    }
    for expected, draws_of in samples.items():
        for x in draws_of:  # 35 comparisons at 5 standard errors: false-alarm rate 2e-5
            assert abs(x.mean() - expected) < 5 * x.std() / np.sqrt(draws)


@pytest.mark.parametrize("d", [2, 3, 16, 65])
def test_simplex_vertices_are_simrf_eq_9(d):
    rows = np.asarray(directions.multiply_simplex(jnp.eye(d)).T, np.float64)
    np.testing.assert_allclose(rows, oracles.simplex_rows(d), atol=1e-6)
    gram = np.full((d, d), -1 / (d - 1))
    np.fill_diagonal(gram, 1)
    np.testing.assert_allclose(rows @ rows.T, gram, atol=3e-6)


def test_simplex_keeps_the_angles_and_is_rotated():
    a, b = (directions.simplex(jax.random.key(i), jnp.ones(8), 8) for i in (0, 1))
    np.testing.assert_allclose(a @ a.T, b @ b.T, atol=1e-5)
    assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize("d", tiers([3, 64], 1))
def test_simplex_weighted_is_at_its_optimum(d):
    """SimRF Eq. 16: each vector points away from the resultant of the others."""
    lengths = norms.independent(jax.random.key(1), d, d)
    units = directions.simplex_weighted(jax.random.key(2), lengths, d)
    np.testing.assert_allclose(np.linalg.norm(units, axis=-1), 1, rtol=1e-5)
    vectors = np.asarray(lengths[:, None] * units, np.float64)
    others = vectors.sum(axis=0) - vectors
    cosines = np.sum(units * others, axis=-1) / np.linalg.norm(others, axis=-1)
    np.testing.assert_allclose(cosines, -1, atol=1e-5)
    # No polygon of these lengths has a shorter resultant: it closes.
    assert np.linalg.norm(vectors.sum(axis=0)) < 1e-4 * lengths.sum()


def test_simplex_weighted_with_one_dominant_length():
    """No closed polygon: all the others point against the longest."""
    lengths = jnp.array([10.0, 1.0, 2.0, 3.0])
    units = np.asarray(directions.simplex_weighted(jax.random.key(0), lengths, 4))
    np.testing.assert_allclose(units[1:] @ units[0], -1, atol=1e-4)


def test_simplex_weighted_of_one_row_is_a_unit_vector():
    """No other vector turns it, so that the rotation alone decides."""
    units = directions.simplex_weighted(jax.random.key(0), jnp.ones(1), 3)
    np.testing.assert_allclose(np.linalg.norm(units, axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("d", "ratio"), tiers([(4, 0.88), (16, 1.0)], 1))
def test_hadamard_moments(d, ratio):
    """Covariance I/d, and the fourth moment that the docstring states (5 standard errors)."""
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    row = jax.vmap(lambda key: directions.hadamard(key, jnp.ones(1), d)[0])(keys)
    row = np.asarray(row, np.float64)
    products = row[:, :, None] * row[:, None]
    error = products.std(axis=0) / np.sqrt(draws)
    assert np.all(np.abs(products.mean(axis=0) - np.eye(d) / d) < 5 * error + 1e-7)
    fourth = row[:, 0] ** 4 * d * (d + 2) / 3
    assert abs(fourth.mean() - ratio) < 5 * fourth.std() / np.sqrt(draws)
