"""Rotary positions from the spectrum of a graph."""

import jax
import jax.numpy as jnp
import numpy as np

from performer.graphs import rotary
from tests.graph_examples import copies, example, karate, weights_matrix


def projector(vectors):
    """On the span of columns, whatever their basis."""
    basis = np.linalg.qr(np.asarray(vectors, np.float64))[0]
    return basis @ basis.T


def test_coordinates_are_the_lowest_eigenvectors():
    """Eigenvectors of D - W written out, without the constants on the three components."""
    weights = weights_matrix()
    values, vectors = np.linalg.eigh(np.diag(weights.sum(axis=1)) - weights)
    assert np.abs(values[:3]).max() < 1e-12 < values[3]
    found = rotary.coordinates(example(), 3)
    np.testing.assert_allclose(projector(found), projector(vectors[:, 3:6]), atol=1e-5)
    np.testing.assert_allclose(found.T @ found, 9 * np.eye(3), atol=1e-5)


def test_coordinates_of_a_large_graph_are_those_of_the_dense_one(monkeypatch):
    """By Lanczos and by all eigenvectors: pairs of equal eigenvalues, two components."""
    graph = copies(karate(), 2)
    dense = rotary.coordinates(graph, 6)
    monkeypatch.setattr(rotary, "DENSE", 10)
    np.testing.assert_allclose(projector(rotary.coordinates(graph, 6)), projector(dense), atol=1e-5)


def test_rotations_are_those_of_complex_numbers():
    """In float64: (x_b + i x_{b + h/2}) e^{i omega . r}, for shared frequencies and for heads."""
    rng = np.random.default_rng(0)
    x, r = rng.normal(size=(2, 5, 3, 8)), rng.normal(size=(5, 4))
    for omega in (rng.normal(size=(3, 4, 4)), rng.normal(size=(4, 4))):
        angles = np.array([[omega[n] @ r[i] if omega.ndim == 3 else omega @ r[i]
                            for n in range(3)] for i in range(5)])  # fmt: skip
        expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
        with jax.enable_x64(True):
            found = rotary.rotate(*map(jnp.asarray, (x, r, omega)))
        np.testing.assert_allclose(found[..., :4], expected.real, atol=1e-12)
        np.testing.assert_allclose(found[..., 4:], expected.imag, atol=1e-12)
