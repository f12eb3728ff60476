"""Gaussian processes by conjugate gradients against dense algebra."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize

from performer.graphs import features, gp, graph_random_features, kernels
from tests.support.graph_examples import karate
from tests.support.tiers import tiers

OBSERVED, NEW = jnp.arange(0, 28), jnp.arange(26, 34)
Y = jnp.sin(OBSERVED / 4.0) + 0.2 * jax.random.normal(jax.random.key(0), (28,))


@functools.cache
def estimate():
    return graph_random_features(
        jax.random.key(1), karate(), kernels.Diffusion(1.5), num_walks=20, p_halt=0.3,
    )  # fmt: skip


def test_a_posterior_that_is_not_solved_is_refused():
    with pytest.raises(ValueError, match="relative residual of .* for a tolerance of 1e-20"):
        gp.condition(estimate(), OBSERVED, NEW, Y, 1e-4, tolerance=1e-20)
    compiled = jax.jit(lambda y: gp.condition(estimate(), OBSERVED, NEW, y, 1e-4, tolerance=1e-20))
    assert all(np.isnan(leaf).all() for leaf in compiled(Y))


def law_of(gram, observed, y, nodes, output_scale, noise_scale):
    """The equations in float64; a node may be observed more than once."""
    gram = output_scale**2 * np.asarray(gram, np.float64)
    inverse = np.linalg.inv(gram[np.ix_(observed, observed)] + noise_scale**2 * np.eye(len(y)))
    cross = gram[np.ix_(nodes, observed)]
    return cross @ inverse @ y, gram[np.ix_(nodes, nodes)] - cross @ inverse @ cross.T


@pytest.mark.parametrize("compiled", tiers([True, False], 1))
@pytest.mark.parametrize(
    ("observed", "nodes"),
    [([3, 0, 3, 5, 3, 33], [3, 4, 4]), ([], [0, 1]), ([1, 2, 2], [])],
    ids=["seen twice", "nothing seen", "nothing asked"],
)
def test_the_posterior_is_that_of_the_equations(observed, nodes, compiled):
    """Of an estimate and of matrices, with values of any dtype, and repeated nodes."""
    observed, nodes = (np.array(a, np.int32) for a in (observed, nodes))
    y = np.arange(len(observed)) - 2.0
    kernel = estimate()
    mean, covariance = law_of(kernel.gram(), observed, y, nodes, 1.3, 0.5)

    def posterior(kernel, observed, y):
        return gp.condition(kernel, observed, nodes, y, 0.5, output_scale=1.3)

    of = jax.jit(posterior) if compiled else posterior
    dtypes = [np.float32] if compiled else [np.float32, np.int32, jnp.bfloat16]
    kinds = [kernel] if compiled else [kernel, kernel.gram(), np.asarray(kernel.gram())]
    for matrix, dtype in zip(kinds, dtypes, strict=True):
        found = of(matrix, jnp.asarray(observed), jnp.asarray(y, dtype))
        np.testing.assert_allclose(found.mean, mean, atol=2e-4)
        np.testing.assert_allclose(found.covariance, covariance, atol=2e-4)
    if not compiled:
        with jax.enable_x64(True):
            wide = of(np.asarray(kernel.gram(), np.float64), observed, y.astype(np.float32))
        assert wide.mean.dtype == np.float64


def test_an_inexact_solution_leaves_an_error_of_second_order():
    """At a residual of 1%, covariances are off by 1.6e-3 uncorrected, by 5e-5 corrected."""
    nodes = np.arange(34)
    with jax.enable_x64(True):
        gram = np.asarray(estimate().gram(), np.float64)
        _, covariance = law_of(gram, OBSERVED, np.asarray(Y), nodes, 1.0, 0.3)
        found = gp.condition(gram, OBSERVED, nodes, Y, 0.3, tolerance=1e-2)
    np.testing.assert_allclose(found.covariance, covariance, atol=2e-4)


def test_a_kernel_too_coarse_for_the_noise_warns():
    identity = np.eye(34, dtype=np.float32)
    with pytest.warns(UserWarning, match="rounding errors of the kernel in float32 may be 3.34"):
        gp.condition(identity, OBSERVED, NEW, Y, 1e-3)


@pytest.mark.thorough
def test_fit_takes_whole_values_and_nodes_seen_twice():
    """Each node seen twice with the same value is each seen once with noise / sqrt(2)."""
    sampled = features.sample(jax.random.key(2), karate(), num_walks=4, p_halt=0.3)
    observed, y = np.arange(34).repeat(2), (np.arange(34) % 3 - 1).repeat(2)
    options = dict(num_steps=1, num_probes=1000, tolerance=1e-5, optimizer=optax.sgd(1.0))
    start = gp.Scales(1, 1.0, np.float64(0.5))
    (found, losses), (same, _) = (
        gp.fit(jax.random.key(3), sampled, observed, y.astype(dtype), start, **options)
        for dtype in (np.int32, np.float32)
    )
    np.testing.assert_array_equal(np.array(found), np.array(same))
    # A step down the slope of the dense form, of which 1,000 probes know the trace to some percent.
    phi = np.asarray(features.modulate(sampled, kernels.Diffusion(1.0)).to_dense(), np.float64)
    gram = (phi @ phi.T)[np.ix_(observed, observed)]

    def loss(log_noise):
        covariance = gram + np.exp(2 * log_noise) * np.eye(68)
        return (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(covariance)[1]) / 2

    slope = (loss(np.log(0.5) + 1e-4) - loss(np.log(0.5) - 1e-4)) / 2e-4 / 68
    assert np.log(found.noise_scale / 0.5) == pytest.approx(-slope, rel=0.1)
    square = y @ np.linalg.solve(gram + 0.25 * np.eye(68), y)
    np.testing.assert_allclose(losses, [square / 68], rtol=1e-3)


@pytest.mark.parametrize("unit", [1e-3, 1e5])
def test_fit_starts_from_the_spread_of_the_values(unit):
    """Against SciPy on the dense form of the same estimate, up to the noise of the signs."""
    sampled = features.sample(jax.random.key(2), karate(), num_walks=4, p_halt=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales, _ = gp.fit(
            jax.random.key(3), sampled, OBSERVED, unit * Y, num_steps=300, num_probes=16,
            optimizer=optax.adam(0.03),
        )  # fmt: skip

    def loss(logs):
        kernel = kernels.Diffusion(float(np.exp(logs[0])))
        phi = np.asarray(features.modulate(sampled, kernel).to_dense(), np.float64)[:28]
        covariance = np.exp(2 * logs[1]) * phi @ phi.T + np.exp(2 * logs[2]) * np.eye(28)
        square = np.asarray(Y) @ np.linalg.solve(covariance, np.asarray(Y))
        return (square + np.linalg.slogdet(covariance)[1]) / 2 / 28

    found = np.log([float(each) for each in scales]) - np.log([1, unit, unit])
    best = optimize.minimize(loss, found, method="Nelder-Mead")
    assert loss(found) < best.fun + 5e-3


def test_a_fit_of_few_steps_warns():
    sampled = features.sample(jax.random.key(2), karate(), num_walks=4, p_halt=0.3)
    message = "after 20 steps the loss per point still changes by .* per unit of log"
    with pytest.warns(UserWarning, match=message):
        gp.fit(jax.random.key(3), sampled, OBSERVED, Y, gp.Scales(1.0, 20.0, 20.0), num_steps=20)


def test_empty_lists_observe_nothing():
    """NumPy makes them float64; the annotations, checked in the tests alone, ask for arrays."""
    sample, none = inspect.unwrap(gp.sample), np.zeros(0, np.int32)
    found, prior = (sample(jax.random.key(0), estimate(), x, x, 0.5) for x in ([], none))
    np.testing.assert_array_equal(found, prior)


def test_one_sample_is_that_of_the_equations():
    """Matheron's rule in float64 with dense matrices, for the same draws of weights and noise."""
    observed, y, noise_scale, output_scale = np.array([3, 0, 3, 5]), np.arange(4.0), 0.5, 1.3
    key, narrow = jax.random.key(7), estimate()
    with jax.enable_x64(True):
        phi = jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, narrow)
        found = gp.sample(key, phi, observed, y, noise_scale, 2, output_scale=1.3, tolerance=1e-12)
        keys = jax.random.split(key)
        weights = np.asarray(jax.random.normal(keys[0], (34, 2)))
        noise = np.asarray(jax.random.normal(keys[1], (4, 2)))
        root = output_scale * np.asarray(phi.left.to_dense())
    prior, gram = root @ weights, root @ root.T
    system = gram[np.ix_(observed, observed)] + noise_scale**2 * np.eye(4)
    gain = np.linalg.solve(system, y[:, None] - prior[observed] - noise_scale * noise)
    np.testing.assert_allclose(found, (prior + gram[:, observed] @ gain).T, atol=1e-10)


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_values_of_any_unit(unit):
    """Squares of sigma_v^2 K leave the range of float32."""
    scales = dict(output_scale=1.3 * unit)
    found = gp.condition(estimate(), OBSERVED, NEW, unit * Y, 0.5 * unit, **scales)
    mean, covariance = law_of(
        estimate().gram(), np.asarray(OBSERVED), np.asarray(Y), np.asarray(NEW), 1.3, 0.5
    )
    np.testing.assert_allclose(found.mean / unit, mean, atol=1e-4)
    np.testing.assert_allclose(np.float64(found.covariance) / unit**2, covariance, atol=1e-4)
    paths = [
        gp.sample(jax.random.key(3), estimate(), OBSERVED, u * Y, 0.5 * u, output_scale=1.3 * u) / u
        for u in (1, unit)
    ]
    np.testing.assert_allclose(*paths, atol=1e-3)
