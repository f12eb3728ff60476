"""Exact kernels against SciPy in float64, and against random features with the same scales."""

import ast
import dataclasses
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import spatial, special, stats

import performer
from performer import couplings, features, kernels, norms

X = jax.random.normal(jax.random.key(0), (5, 3))
Y = jax.random.normal(jax.random.key(1), (4, 3))


def distances(lengthscale):
    return spatial.distance.cdist(*(np.asarray(p, np.float64) / lengthscale for p in (X, Y)))


def test_gaussian_matches_the_equation():
    for lengthscale in (0.7, np.array([0.5, 1.0, 2.0], np.float32)):
        want = 1.3**2 * np.exp(-(distances(lengthscale) ** 2) / 2)
        got = kernels.gaussian(X, Y, lengthscale=lengthscale, output_scale=1.3)
        np.testing.assert_allclose(got, want, rtol=1.5e-5)


def test_matern_matches_the_bessel_function():
    """VRC Eq. 83 with the power nu that its first bracket misses."""
    for nu in (0.5, 1.5, 2.5, 3.5):
        s = np.sqrt(2 * nu) * distances(0.7)
        want = 1.3**2 * 2 ** (1 - nu) / special.gamma(nu) * s**nu * special.kv(nu, s)
        got = kernels.matern(nu)(X, Y, lengthscale=0.7, output_scale=1.3)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_arc_cosine():
    """Its closed form; random features of it are below."""
    x, y = (np.asarray(p, np.float64) for p in (X, Y))
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1) / 0.7**2
    angle = np.arccos(x @ y.T / lengths / 0.7**2)
    closed = 1 - angle / np.pi, lengths / np.pi * (np.sin(angle) + (np.pi - angle) * np.cos(angle))
    for order, want in enumerate(closed):
        exact = kernels.arc_cosine(order)(X, Y, lengthscale=0.7, output_scale=1.3)
        np.testing.assert_allclose(exact, 1.3**2 * want, rtol=1e-5)


@pytest.mark.thorough
def test_arc_cosine_at_the_origin_and_near_by():
    """At the origin the features are 1/2 and 0; small angles keep their digits."""
    points = jnp.concatenate([jnp.zeros((1, 3)), X])
    for order, at_origin in ((0, 0.5), (1, 0.0)):
        kernel = kernels.arc_cosine(order)
        np.testing.assert_allclose(kernel(points, points)[0], at_origin, atol=1e-6)
        gradient = jax.jit(jax.grad(lambda p, k=kernel: k(p, p).sum()))
        assert np.isfinite(gradient(points)).all()
        phi = features.arc_cosine(order)(points, X)
        np.testing.assert_allclose(phi[0] @ phi[0], at_origin, atol=1e-6)
    near = jnp.array([[1.0, 0], [1.0, 1e-4]])
    assert float(1 - kernels.arc_cosine(0)(near, near)[0, 1]) == pytest.approx(
        1e-4 / np.pi, rel=5e-3
    )


def test_diagonal_and_its_gradient():
    """Exactly s^2 on the diagonal (far from the origin, too), and a finite gradient."""
    all_kernels = [kernels.gaussian, *map(kernels.matern, (0.5, 1.5))]

    @jax.jit
    def of_lengthscale(lengthscale):
        def total(lengthscale, kernel):
            return kernel(X, X, lengthscale=lengthscale).sum()

        return [jax.value_and_grad(total)(lengthscale, kernel) for kernel in all_kernels]

    at, above, below = (np.array(of_lengthscale(x)) for x in (0.7, 0.71, 0.69))
    np.testing.assert_allclose(at[:, 1], (above - below)[:, 0] / 0.02, rtol=1e-2)
    for kernel in all_kernels:
        np.testing.assert_array_equal(jnp.diagonal(kernel(X + 100, X + 100)), 1)
        of_points = jax.jit(jax.grad(lambda x, kernel=kernel: kernel(x, x).sum()))
        assert np.isfinite(of_points(X)).all()


def test_features_take_the_same_scales():
    """Means over 20,000 independent frequencies within 5 standard errors, in every pair."""
    frequencies = jax.random.normal(jax.random.key(2), (20_000, 1, 3))
    lengthscale = np.array([1.5, 2, 3], np.float32)
    options = dict(kernel="gaussian", lengthscale=lengthscale, output_scale=1.3)

    @jax.jit
    @jax.vmap
    def estimate(w):
        maps = features.positive, features.hyperbolic, features.trigonometric
        return [f(X, w, **options) @ f(Y, w, **options).T for f in maps]

    want = 1.3**2 * np.exp(-(distances(lengthscale) ** 2) / 2)
    for estimates in np.asarray(estimate(frequencies), np.float64):
        errors = estimates.std(axis=0) / np.sqrt(len(estimates))
        assert (abs(estimates.mean(axis=0) - want) < 5 * errors).all()


def cauchy(x, y):
    return 1 / (1 + jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)) ** 2


def erlang(score, d):
    """Lengths of the density e^{-|w|} in three dimensions, the transform of `cauchy`."""
    del d
    tables = np.linspace(-6, 6, 2000), stats.gamma(3).isf(stats.norm.sf(np.linspace(-6, 6, 2000)))
    return jnp.interp(score, *map(jnp.float32, tables))


OWN = kernels.Kernel(cauchy, features.trigonometric, erlang)
ALL = [*dict.fromkeys(kernels.KERNELS.values()), kernels.matern(3.5), OWN]


def test_random_features_of_every_kernel():
    """Means over 5,000 draws within 5 standard errors, in every pair; one of our own, too."""
    options = dict(lengthscale=2.0, output_scale=1.3)

    @jax.jit
    @jax.vmap
    def estimate(key):
        def of(kernel):
            phi, psi = (kernels.random_features(key, kernel, p, 3, **options) for p in (X, Y))
            return phi @ psi.T

        return [of(kernel) for kernel in ALL]

    found = estimate(jax.random.split(jax.random.key(3), 5000))
    for kernel, estimates in zip(ALL, found, strict=True):
        estimates, want = np.asarray(estimates, np.float64), np.asarray(kernel(X, Y, **options))
        errors = estimates.std(axis=0) / np.sqrt(len(estimates))
        assert (abs(estimates.mean(axis=0) - want) < 5 * errors + 1e-5).all(), kernel
        assert abs(estimates.mean(axis=0) - want).max() < 0.1 * want.max(), kernel


@pytest.mark.thorough
def test_random_features_take_the_coupling():
    key, kernel = jax.random.key(0), kernels.matern(1.5)
    w = kernels.frequencies(key, kernel, 6, 3, "orf")
    phi = kernels.random_features(key, kernel, X, 6, "orf", lengthscale=0.7)
    np.testing.assert_array_equal(phi, features.trigonometric(X, w, lengthscale=0.7))
    np.testing.assert_allclose(w[:3] @ w[:3].T, np.diag(np.sum(w[:3] ** 2, axis=1)), atol=1e-4)
    for coupling in ("halton", "fixed", couplings.with_quantile("pnc", norms.matern(1.5))):
        plain = kernels.frequencies(key, "gaussian", 6, 3, coupling)
        np.testing.assert_array_equal(plain, couplings.get(coupling)(key, 6, 3))


def test_kernels_are_values():
    """Equal by value, hashable, with a repr that evaluates; other parts make another kernel."""
    for kernel in ALL[:-1]:
        same = eval(repr(kernel), vars(performer) | {"kernels": kernels})
        assert same == pickle.loads(pickle.dumps(kernel)) == kernel
        assert hash(same) == hash(kernel)
        assert dataclasses.replace(kernel, even=not kernel.even) != kernel
        assert sum(kernel == one for one in ALL) == 1


def test_at_zero_and_even_are_those_of_the_feature_map():
    for kernel in ALL[:-1]:
        phi, psi = (kernel.feature_map(p, jnp.zeros((1, 3))) for p in (X, Y))
        if kernel.at_zero is None:
            assert np.std(phi @ psi.T) > 0.1
        else:
            np.testing.assert_allclose(phi @ psi.T, kernel.at_zero, atol=1e-6)
        w = jax.random.normal(jax.random.key(5), (1, 3))
        there, back = (kernel.feature_map(X, s) @ kernel.feature_map(Y, s).T for s in (w, -w))
        assert np.allclose(there, back, atol=1e-5) == kernel.even


def matern_derivatives(difference, nu, lengthscale):
    """Gradient and Hessian in x, by (s^nu K_nu)' = -s^nu K_{nu-1} and SciPy's Bessel functions."""
    u = 2 * nu / lengthscale**2
    s = np.sqrt(u) * np.linalg.norm(difference)
    if s == 0:
        return np.zeros(len(difference)), -nu / (nu - 1) / lengthscale**2 * np.eye(len(difference))
    constant = 2 ** (1 - nu) / special.gamma(nu)
    first = -constant / 2 * s ** (nu - 1) * special.kv(nu - 1, s)
    second = constant / 4 * s ** (nu - 2) * special.kv(nu - 2, s)
    outer = np.outer(difference, difference)
    return 2 * u * first * difference, 4 * u**2 * second * outer + 2 * u * first * np.eye(
        len(difference)
    )


def test_derivatives_at_equal_close_and_far_points():
    """Of first and second order, forward, reverse and mixed, under jit and vmap, in float32."""
    y = np.array([1.0, -2, 0.5])
    apart = np.outer([0, 1e-6, 1e-3, 0.1, 1, 5, 1e12], [0.6, 0, 0.8]).astype(np.float32)
    x = (y + apart).astype(np.float32)
    x[-1], apart = np.float32([1e12, 0, 1e12]), x - y  # as float32 has them
    apart[-1] = x[-1] - y
    orders = 1.5, 2.5, 9.5

    @jax.jit
    @jax.vmap
    def derivatives(x):
        def of_order(nu):
            def of(x, y):
                return kernels.matern(nu)(x[None], y[None], lengthscale=0.5)[0, 0]

            y32, gradient = jnp.asarray(y, jnp.float32), jax.grad(of)
            mixed = -jax.jacfwd(gradient, argnums=1)(x, y32)
            hessians = jax.hessian(of)(x, y32), jax.jacrev(gradient)(x, y32), mixed
            return (gradient(x, y32), jax.jacfwd(of)(x, y32)), hessians

        return [of_order(nu) for nu in orders]

    for nu, found in zip(orders, derivatives(x), strict=True):
        for i, difference in enumerate(np.asarray(apart, np.float64)):
            wanted = matern_derivatives(difference, nu, lengthscale=0.5)
            if i == len(apart) - 1:
                wanted = np.zeros(3), np.zeros((3, 3))
            for ours, want in zip(found, wanted, strict=True):
                for one in ours:
                    close = dict(rtol=2e-5, atol=2e-5 * abs(want).max(), err_msg=str(nu))
                    np.testing.assert_allclose(one[i], want, **close)


COMPILED = """
import jax
import numpy as np
from performer import kernels

jax.config.update("jax_enable_x64", True)
draws = np.random.default_rng(1)
for name, n, shape in ("matern-1/2", 20, ()), ("matern-3/2", 20, (1,)), ("arc-cosine-0", 4, (2,)):
    for dtype in np.float32, np.float64:
        x = draws.uniform(-2, 2, (n, *(shape or (2,)))).astype(dtype)
        l, c = np.full(shape, 0.3, dtype), draws.normal(size=(n, n)).astype(dtype)
        of = lambda l: (c * kernels.get(name)(x, x, lengthscale=l) ** 2).sum()
        value, slope = jax.jit(jax.value_and_grad(of))(l)
        print(*[repr(np.asarray(a, float).tolist()) for a in (x, l, c, value, slope)], sep=";")
"""


def test_compiled_derivatives_at_equal_points():
    """Compiled as for users, whose fusions compute x / l - x / l, which is not 0, by one rounding.

    With the distances of rounding errors, the derivatives had the wrong sign or size.
    """
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    lines = iter(done.stdout.splitlines())

    def half(r):
        return np.exp(-r)

    def three_halves(r):
        return (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)

    def angular(u):
        u = u / np.linalg.norm(u, axis=1, keepdims=True)
        angle = 2 * np.arctan2(spatial.distance.cdist(u, u), spatial.distance.cdist(u, -u))
        return 1 - angle / np.pi

    def of_distance(profile):
        return lambda u: profile(spatial.distance.cdist(u, u))

    for exact in (of_distance(half), of_distance(three_halves), angular):
        for tolerance in (1e-4, 1e-6):  # float32, float64
            arrays = (np.array(ast.literal_eval(a)) for a in next(lines).split(";"))
            x, scale, c, value, slope = arrays

            def of(scale, x=x, c=c, exact=exact):
                return np.sum(c * exact(x / scale) ** 2)

            steps = 1e-6 * np.eye(scale.size).reshape(-1, *scale.shape)
            wanted = [(of(scale + step) - of(scale - step)) / 2e-6 for step in steps]
            np.testing.assert_allclose(value, of(scale), rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(slope.ravel(), wanted, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.thorough
def test_second_derivatives_of_the_arc_cosine_kernel():
    """Of order 1, by its gradient (|y| sin t x / |x| + (pi - t) y) / pi in float64 differences."""
    x = np.array([0.3, -0.7, 1.1])

    def gradient(x, y):
        lengths = np.linalg.norm(x), np.linalg.norm(y)
        angle = np.arccos(np.clip(x @ y / lengths[0] / lengths[1], -1, 1))
        return (lengths[1] * np.sin(angle) * x / lengths[0] + (np.pi - angle) * y) / np.pi

    def of(x, y):
        return kernels.arc_cosine(1)(x[None], y[None])[0, 0]

    ys = np.stack([x, 2 * x, x + 0.3, -x + [0, 0, 0.5]])
    seconds = jax.jit(jax.vmap(lambda y: jax.hessian(of, argnums=(0, 1))(jnp.float32(x), y)))
    (found, mixed), _ = seconds(jnp.float32(ys))
    np.testing.assert_allclose(found[:2], 0, atol=1e-6)
    np.testing.assert_allclose(mixed[:2], [np.eye(3)] * 2, atol=1e-6)
    step = 1e-5 * np.eye(3)
    for i in (2, 3):
        y = ys[i]
        of_x = [(gradient(x + e, y) - gradient(x - e, y)) / 2e-5 for e in step]
        of_y = [(gradient(x, y + e) - gradient(x, y - e)) / 2e-5 for e in step]
        np.testing.assert_allclose(found[i], np.transpose(of_x), atol=2e-5)
        np.testing.assert_allclose(mixed[i], np.transpose(of_y), atol=2e-5)


def test_kinks_and_far_points_are_finite():
    points = jnp.float32([[0, 0], [0, 0], [1e25, 0], [-1e30, 0]])
    for kernel in (kernels.gaussian, *map(kernels.matern, (0.5, 2.5, 25.5))):
        np.testing.assert_array_equal(kernel(points[:1], points)[0], [1, 1, 0, 0])
        gradient = jax.jit(jax.grad(lambda x, k=kernel: k(x, points).sum()))
        assert np.isfinite(gradient(points[:1])).all()
