"""Diffusion, regression and k-means against loops over a dense kernel."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from experiments.graphs import methods, tasks
from performer.graphs import kernels
from tests.support.graph_examples import NUM_NODES, example, laplacian, weights_matrix

KERNEL = np.asarray(kernels.RegularisedLaplacian(2, 1.0).dense(example()))


def test_diffusion_of_small_steps_is_the_heat_kernel(monkeypatch):
    """qGRF Eq. 21 with the exact kernel in place of an estimate: an error of order t^2 / N_t."""
    identity = scipy.sparse.identity(NUM_NODES)
    step = identity + laplacian(weights_matrix()) * tasks.TIME / tasks.TIME_STEPS
    root = scipy.sparse.csr_array(np.linalg.inv(step))  # symmetric
    left = SimpleNamespace(to_scipy=lambda: scipy.sparse.block_diag([root] * 3, "csr"))
    exact = SimpleNamespace(left=left, shape=(3 * NUM_NODES, 3 * NUM_NODES))
    monkeypatch.setattr(tasks, "_estimate", lambda *_: exact)
    errors = tasks.diffusion_errors(jax.random.key(0), "independent", 3, example())
    assert errors.shape == (3,)
    assert np.all(errors < 1e-6)
    assert np.all(errors > 0)


def test_regression_is_the_weighted_mean_of_the_known():
    values = np.random.default_rng(0).standard_normal((NUM_NODES, 3))
    known = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1], bool)
    found = np.asarray(
        methods.regress(jnp.asarray(KERNEL), jnp.asarray(values), jnp.asarray(known))
    )
    for i in range(NUM_NODES):
        weights = [KERNEL[i, j] for j in range(NUM_NODES) if known[j]]
        expected = [
            sum(w * values[j, c] for w, j in zip(weights, np.flatnonzero(known), strict=True))
            / sum(weights)
            if i != 5
            else values[known, c].mean()
            for c in range(3)
        ]
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-5)
    one = methods.regress(jnp.asarray(KERNEL), jnp.asarray(values[:, 0]), known.tolist())
    np.testing.assert_allclose(one, found[:, 0], rtol=1e-6)


def test_a_component_without_labels_has_the_mean_of_all():
    """The limit of a kernel plus a small constant; nothing known at all is refused, or NaN."""
    values, known = jnp.arange(NUM_NODES * 2.0).reshape(-1, 2), jnp.arange(NUM_NODES) < 3
    kernel = kernels.Diffusion().dense(example())
    found = methods.regress(kernel, values.at[3:].set(jnp.nan), known)
    np.testing.assert_allclose(found[5:], np.tile([2.0, 3.0], (4, 1)))
    limit = methods.regress(kernel + 1e-7, values, known)
    np.testing.assert_allclose(found, limit, atol=1e-4)
    with pytest.raises(ValueError, match="`known` is false everywhere"):
        methods.regress(kernel, values, known & False)
    compiled = jax.jit(methods.regress)(kernel, values, known & False)
    assert np.isnan(compiled).all()


def test_regression_of_large_integers_and_of_wrong_shapes():
    values, known = np.full((NUM_NODES, 1), 5_000_000_000), np.arange(NUM_NODES) < 3
    regress = inspect.unwrap(methods.regress)
    found = regress(KERNEL, values, known.tolist())
    np.testing.assert_allclose(found, values, rtol=1e-6)
    with pytest.raises(ValueError, match=r"known must have the shape \(9,\).*got \(3,\)"):
        regress(KERNEL, values, np.flatnonzero(known))


def test_the_best_of_many_starts():
    """Eight groups far apart, which the first start does not find."""
    groups = np.repeat(np.arange(8), 5)
    points = 10 * np.eye(8)[groups] + np.random.default_rng(0).standard_normal((40, 8))
    kernel = jnp.asarray(points @ points.T)
    cluster = partial(methods.kernel_kmeans, jax.random.key(0), kernel, num_clusters=8)
    few, many = (cluster(num_starts=n) for n in (1, 100))
    assert methods.clustering_error(np.asarray(many.labels), groups) == 0
    assert methods.clustering_error(np.asarray(few.labels), groups) > 0
    assert many.objective < few.objective


def test_it_is_k_means_of_points():
    """With the linear kernel of points far from the origin, where only distances matter."""
    points = np.random.default_rng(0).standard_normal((40, 2)) + np.array([8, 5])
    found = methods.kernel_kmeans(
        jax.random.key(1), jnp.asarray(points @ points.T), num_clusters=3, num_starts=4
    )
    labels = np.asarray(found.labels)
    assert sorted(set(labels.tolist())) == [0, 1, 2]
    means = np.stack([points[labels == c].mean(axis=0) for c in range(3)])
    distances = np.sum((points[:, None] - means) ** 2, axis=-1)
    assert np.argmin(distances, axis=1).tolist() == labels.tolist(), "each at the nearest mean"
    objective = distances.min(axis=1).sum() - np.sum(points**2)
    np.testing.assert_allclose(found.objective, objective, rtol=1e-4)


@pytest.mark.parametrize("a", [np.array([0, 0, 1, 1, 2]), np.array([-1, -1, 7, 7, 10**9])])
def test_clustering_error_counts_pairs(a):
    """Labels are any integers."""
    b = np.array([3, 3, 3, -5, -5])
    wrong = sum((a[i] == a[j]) != (b[i] == b[j]) for i in range(5) for j in range(i))
    assert methods.clustering_error(a, b) == wrong / 10
    assert methods.clustering_error(a, a[::-1].copy()) > 0
    assert methods.clustering_error(a, 2 - a) == 0
    assert methods.clustering_error(np.zeros(1, int), np.ones(1, int)) == 0
    every = np.arange(100_000)
    assert methods.clustering_error(every, every[::-1].copy()) == 0, "n^2 numbers are not made"
