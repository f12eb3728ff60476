"""Gaussian processes by conjugate gradients against dense algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from performer import gp as dense
from performer.graphs import features, gp, graph_random_features, modulations
from tests.graph_examples import karate

OBSERVED, NEW = jnp.arange(0, 28), jnp.arange(26, 34)
Y = jnp.sin(OBSERVED / 4.0) + 0.2 * jax.random.normal(jax.random.key(0), (28,))


@functools.cache
def estimate():
    return graph_random_features(
        jax.random.key(1), karate(), modulations.diffusion(1.5), num_walks=20, p_halt=0.3,
    )  # fmt: skip


def test_the_posterior_is_that_of_the_gram_matrix():
    kernel = estimate()
    gram = 1.3**2 * kernel.gram()
    found = gp.posterior(kernel, OBSERVED, Y, NEW, output_scale=1.3, noise_scale=0.3)
    expected = dense.condition(gram[:28, :28], gram[NEW][:, OBSERVED], gram[NEW][:, NEW], Y, 0.3)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-4)
    of_dense = gp.posterior(kernel.gram(), OBSERVED, Y, NEW, output_scale=1.3, noise_scale=0.3)
    np.testing.assert_allclose(found.mean, of_dense.mean, atol=1e-4)
    noisy = [dense.observed(law, 0.3) for law in (expected, found)]
    assert abs(float(dense.kl(*noisy))) < 1e-3


def test_it_compiles():
    kernel = estimate()
    compiled = jax.jit(lambda k, y: gp.posterior(k, OBSERVED, y, NEW, noise_scale=0.3))
    expected = gp.posterior(kernel, OBSERVED, Y, NEW, noise_scale=0.3)
    np.testing.assert_allclose(compiled(kernel, Y).mean, expected.mean, atol=1e-5)


def test_fitted_scales_maximise_the_dense_likelihood():
    """Of the same walks; the optimum by L-BFGS on the dense likelihood in float64."""
    sampled = features.sample(jax.random.key(2), karate(), num_walks=20, p_halt=0.3)
    found = gp.fit(
        jax.random.key(3), sampled, OBSERVED, Y, gp.Scales(1.0, 1.0, 0.5), num_steps=400,
        num_probes=16, optimizer=gp.optax.adam(3e-2),
    )  # fmt: skip
    start, node, step = (np.asarray(x) for x in (sampled.start, sampled.node, sampled.step))
    factorials = np.cumprod(np.maximum(np.arange(sampled.max_steps + 1.0), 1))

    def loss(logs):
        lengthscale, output_scale, noise_scale = np.exp(logs)
        t = np.arange(sampled.max_steps + 1)
        f = np.exp(-(lengthscale**2) / 4) * (lengthscale**2 / 4) ** t / factorials
        phi = np.zeros((34, 34))
        np.add.at(phi, (start, node), f[step] * np.asarray(sampled.load, np.float64) / 20)
        gram = output_scale**2 * (phi @ phi.T)[:28, :28] + noise_scale**2 * np.eye(28)
        y = np.asarray(Y, np.float64)
        return (y @ np.linalg.solve(gram, y) + np.linalg.slogdet(gram)[1]) / 2

    best = scipy.optimize.minimize(loss, np.log([1.0, 1.0, 0.5]), method="Nelder-Mead").fun
    reached = loss(np.log(np.array([float(x) for x in found])))
    begun = loss(np.log([1.0, 1.0, 0.5]))
    assert reached - best < 0.02 * (begun - best) + 0.02
    assert begun - best > 0.5


def test_gradients_that_do_not_converge_are_an_error():
    with pytest.raises(ValueError, match=r"relative residual of .* for a tolerance of 1e-20"):
        gp.posterior(estimate(), OBSERVED, Y, NEW, noise_scale=1e-4, tolerance=1e-20)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_bad_scales(scale):
    with pytest.raises(ValueError, match="noise_scale must be positive"):
        gp.posterior(estimate(), OBSERVED, Y, NEW, noise_scale=scale)
    with pytest.raises(ValueError, match="output_scale must be positive"):
        gp.posterior(estimate(), OBSERVED, Y, NEW, output_scale=scale, noise_scale=1.0)
    sampled = features.sample(jax.random.key(2), karate(), num_walks=2, p_halt=0.3)
    with pytest.raises(ValueError, match="lengthscale must be positive"):
        gp.fit(jax.random.key(3), sampled, OBSERVED, Y, gp.Scales(scale, 1.0, 0.5))
