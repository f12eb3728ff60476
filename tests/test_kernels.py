"""Exact kernels against SciPy in float64, and against random features with the same scales."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import spatial, special

from performer import couplings, directions, features, kernels, norms

X = jax.random.normal(jax.random.key(0), (5, 3))
Y = jax.random.normal(jax.random.key(1), (4, 3))
LENGTHSCALES = [0.7, np.array([0.5, 1.0, 2.0], np.float32)]


def distances(lengthscale):
    return spatial.distance.cdist(*(np.asarray(p, np.float64) / lengthscale for p in (X, Y)))


@pytest.mark.parametrize("lengthscale", LENGTHSCALES, ids=["one", "each"])
def test_gaussian_matches_the_equation(lengthscale):
    want = 1.3**2 * np.exp(-(distances(lengthscale) ** 2) / 2)
    got = kernels.gaussian(X, Y, lengthscale=lengthscale, output_scale=1.3)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, 3.5])
def test_matern_matches_the_bessel_function(nu):
    """VRC Eq. 83 with the power nu that its first bracket misses."""
    s = np.sqrt(2 * nu) * distances(0.7)
    want = 1.3**2 * 2 ** (1 - nu) / special.gamma(nu) * s**nu * special.kv(nu, s)
    got = kernels.matern(nu)(X, Y, lengthscale=0.7, output_scale=1.3)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("order", [0, 1])
def test_arc_cosine(order):
    """Its closed form, and means over 20,000 frequencies within 5 standard errors."""
    x, y = (np.asarray(p, np.float64) for p in (X, Y))
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1) / 0.7**2
    angle = np.arccos(x @ y.T / lengths / 0.7**2)
    want = 1 - angle / np.pi
    if order:
        want = lengths / np.pi * (np.sin(angle) + (np.pi - angle) * np.cos(angle))
    options = dict(lengthscale=0.7, output_scale=1.3)
    exact = kernels.arc_cosine(order)(X, Y, **options)
    np.testing.assert_allclose(exact, 1.3**2 * want, rtol=1e-5)

    @jax.vmap
    def estimate(w):
        phi, psi = (features.arc_cosine(order)(p, w[None], **options) for p in (X, Y))
        return phi @ psi.T

    estimates = estimate(jax.random.normal(jax.random.key(4), (20_000, 3)))
    estimates = np.asarray(estimates, np.float64)
    errors = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert (abs(estimates.mean(axis=0) - exact) < 5 * errors).all()


def test_arc_cosine_at_the_origin_and_near_by():
    """At the origin the features are 1/2 and 0; small angles keep their digits."""
    points = jnp.concatenate([jnp.zeros((1, 3)), X])
    for order, at_origin in ((0, 0.5), (1, 0.0)):
        kernel = kernels.arc_cosine(order)
        np.testing.assert_allclose(kernel(points, points)[0], at_origin, atol=1e-6)
        assert np.isfinite(jax.grad(lambda p, k=kernel: k(p, p).sum())(points)).all()
        phi = features.arc_cosine(order)(points, X)
        np.testing.assert_allclose(phi[0] @ phi[0], at_origin, atol=1e-6)
    near = jnp.array([[1.0, 0], [1.0, 1e-4]])
    assert float(1 - kernels.arc_cosine(0)(near, near)[0, 1]) == pytest.approx(
        1e-4 / np.pi, rel=5e-3
    )
    for function in (kernels.arc_cosine, features.arc_cosine):
        with pytest.raises(ValueError, match="order of an arc-cosine kernel must be 0 or 1, got 2"):
            function(2)


@pytest.mark.parametrize("kernel", [kernels.gaussian, *map(kernels.matern, (0.5, 1.5))])
def test_diagonal_and_its_gradient(kernel):
    """Exactly s^2 on the diagonal (far from the origin, too), and a finite gradient."""
    np.testing.assert_array_equal(jnp.diagonal(kernel(X + 100, X + 100)), 1)

    def total(lengthscale):
        return kernel(X, X, lengthscale=lengthscale).sum()

    difference = (total(0.71) - total(0.69)) / 0.02
    assert float(jax.grad(total)(0.7)) == pytest.approx(float(difference), rel=1e-2)
    assert np.isfinite(jax.grad(lambda x: kernel(x, x).sum())(X)).all()


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric"])
def test_features_take_the_same_scales(name):
    """Means over 20,000 independent frequencies within 5 standard errors, in every pair."""
    frequencies = jax.random.normal(jax.random.key(2), (20_000, 1, 3))
    options = dict(kernel="gaussian", lengthscale=np.array([1.5, 2, 3], np.float32))

    @jax.vmap
    def estimate(w):
        phi, psi = (getattr(features, name)(p, w, **options, output_scale=1.3) for p in (X, Y))
        return phi @ psi.T

    estimates = np.asarray(estimate(frequencies), np.float64)
    want = 1.3**2 * np.exp(-(distances(options["lengthscale"]) ** 2) / 2)
    errors = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert (abs(estimates.mean(axis=0) - want) < 5 * errors).all()


def test_features_of_matern_frequencies():
    coupling = couplings.blocks(
        directions.orthogonal, partial(norms.pairwise, quantile=norms.matern(1.5))
    )

    @jax.vmap
    def estimate(key):
        phi = features.trigonometric(X, coupling(key, 3, 3), lengthscale=0.7, output_scale=2.0)
        return phi @ phi.T

    estimates = np.asarray(estimate(jax.random.split(jax.random.key(3), 5000)), np.float64)
    want = np.asarray(kernels.matern(1.5)(X, X, lengthscale=0.7, output_scale=2.0))
    errors = estimates.std(axis=0) / np.sqrt(len(estimates))
    assert (abs(estimates.mean(axis=0) - want) < 5 * errors + 1e-5).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lengthscale=0.0), "lengthscale must be positive and finite, got 0.0"),
        (dict(lengthscale=np.array([1.0, -2, 1])), "lengthscale must be .* got -2.0"),
        (dict(output_scale=float("nan")), "output_scale must be .* got nan"),
        (dict(output_scale=float("inf")), "output_scale must be .* got inf"),
    ],
)
def test_bad_scales(options, message):
    for function in (kernels.gaussian, kernels.matern(0.5), features.positive):
        with pytest.raises(ValueError, match=message):
            function(X, Y, **options)


@pytest.mark.parametrize("nu", [1.0, 0.0, -0.5])
def test_matern_of_another_order(nu):
    with pytest.raises(ValueError, match=f"1/2, 3/2, 5/2, ... for a closed form, got {nu}"):
        kernels.matern(nu)
