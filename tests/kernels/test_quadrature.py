"""Spherical-radial rules: exact to degree three, unbiased, fast operators, sound in attention."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from performer import kernels, quadrature
from performer.quadrature import gram, spherical_radial, structured
from tests.support.tiers import tiers

HAAR, BUTTERFLY = "haar", "butterfly"
STATIC = ("num_rules", "d", "orthogonal", "reflect", "reject")
KERNELS = ("gaussian", "arc-cosine-0", "arc-cosine-1")
rule_of = jax.jit(spherical_radial, static_argnames=STATIC)


def vertices(d):
    return quadrature.multiply_vertices(jnp.eye(d)).T


@pytest.mark.parametrize("d", tiers([15, 1, 2, 784], 1))
def test_vertices(d):
    V = np.asarray(vertices(d), np.float64)
    np.testing.assert_allclose(V @ V.T, (1 + 1 / d) * np.eye(d + 1) - 1 / d, atol=2e-6)
    x = jax.random.normal(jax.random.key(0), (3, d))
    np.testing.assert_allclose(
        quadrature.multiply_vertices(x), np.asarray(x, np.float64) @ V.T, atol=1e-5
    )


def moment(powers):
    """E prod w_i^p_i for w ~ N(0, I)."""
    return np.prod([0 if p % 2 else stats.norm.moment(p) if p else 1 for p in powers])


@pytest.mark.parametrize("orthogonal", [HAAR, BUTTERFLY])
@pytest.mark.parametrize("d", tiers([5, 1], 1))
def test_exact_on_monomials_to_degree_three(d, orthogonal):
    """Whatever the draw; without reflected points on the even ones alone."""
    for reflect in (True, False):
        rule = rule_of(jax.random.key(1), 2, d, orthogonal=orthogonal, reflect=reflect)
        points, weights = (np.asarray(part, np.float64) for part in rule[:2])
        for powers in itertools.product(range(4), repeat=d):
            degree = sum(powers)
            if degree > 3 or (degree % 2 and not reflect):
                continue
            found = weights @ np.prod(points ** np.array(powers), axis=1)
            found += float(rule.constant) * (degree == 0)
            np.testing.assert_allclose(found, moment(powers), atol=2e-5)


def draws(d, count, evaluate, **options):
    """The values of `evaluate(rule)` for independent rules, float64."""
    keys = jax.random.split(jax.random.key(2), count)
    of_key = jax.jit(jax.vmap(lambda key: evaluate(spherical_radial(key, 1, d, **options))))
    return np.asarray(of_key(keys), np.float64)


def off(samples, want):
    """By how many standard errors the mean is off."""
    return (samples.mean(axis=0) - want) / (samples.std(axis=0) / np.sqrt(len(samples)))


@pytest.mark.parametrize("d", tiers([8, 1], 1))
def test_unbiased(d):
    """Two-sided false-alarm rate 1e-4 for each of four values at each d."""
    limit = stats.norm.isf(0.5e-4)
    z = jnp.full(d, 1.5 / d**0.5)

    def evaluate(rule):
        along = rule.points @ z
        with_constant = rule.weights @ jnp.cos(along) + rule.constant
        return jnp.stack([with_constant, rule.weights @ jnp.exp(along)])

    cosine, exponential = np.exp(-(1.5**2) / 2), np.exp(1.5**2 / 2)
    for reflect in (True, False):
        samples = draws(d, 40_000, evaluate, reflect=reflect)
        assert abs(off(samples, [cosine, exponential])).max() < limit  # exp without the constant


@pytest.mark.thorough
def test_rejection_is_biased():
    """Quad Sec. 8 at d = 8, |z| = 2: 0.199 where the kernel is 0.135."""

    def evaluate(rule):
        return rule.weights @ jnp.cos(rule.points[:, 0] * 2) + rule.constant

    samples = draws(8, 40_000, evaluate, reflect=False, reject=True)
    assert abs(samples.mean() - 0.199) < 0.004
    constants = draws(8, 1000, lambda rule: rule.constant, reject=True)
    assert constants.min() >= -1e-6
    assert (draws(8, 1000, lambda rule: rule.constant) < 0).mean() > 0.3


@pytest.mark.parametrize("d", tiers([4, 16], 1))
def test_variance_is_below_the_bounds(d):
    """Prop. 2.2, and the bound of the module in the place of Prop. 2.1's, for the Gaussian kernel.

    x and y are opposite at norm l; n = 1 rule; all partial derivatives are at most 1.
    """
    norms = np.array([0.5, 1.0, 2.0])
    x = jnp.zeros((6, d)).at[:, 0].set(jnp.asarray([*norms, *-norms]))
    opposite = np.arange(3), np.arange(3, 6)
    variances = draws(d, 20_000, lambda r: gram(x, x, r)[opposite], reflect=False).var(axis=0)
    for l, variance in zip(norms, variances, strict=True):  # noqa: E741
        assert variance < 4 / (d - 2)
        assert variance < 140 / 3 * l**8 * d / (d + 6)
        printed = (
            0.66 * l**8 * d / ((d + 1) * (d + 2))
            + 53 * l**6 / (d * (d + 1) * (d + 2))
            + 6 * l**4 / ((d + 1) * (d**2 - 4))
        )
        assert variance > 2 * printed or (d, l) != (16, 0.5)


@pytest.mark.parametrize("kernel", tiers(KERNELS, ["arc-cosine-1"]))
def test_features_of_every_kernel(kernel):
    """Means over 10,000 rules within 5 standard errors, in every pair, scales included.

    At the origin, where f does not depend on w, every rule is exact.
    """
    x = jax.random.normal(jax.random.key(3), (5, 5)).at[4].set(0)
    options = dict(lengthscale=1.3, output_scale=0.7)
    reflect = not kernels.get(kernel).even
    samples = draws(5, 10_000, lambda r: gram(x, x, r, kernel, **options), reflect=reflect)
    exact = np.asarray(kernels.get(kernel)(x, x, **options))
    errors = samples.std(axis=0) / np.sqrt(len(samples))
    assert (abs(samples.mean(axis=0) - exact) < 5 * errors + 1e-5).all()
    assert abs(samples.mean(axis=0) - exact).max() < 0.05
    np.testing.assert_allclose(samples[:4, 4, 4], exact[4, 4], atol=1e-6)


def test_the_sign_of_the_constant_is_on_one_side():
    x = jax.random.normal(jax.random.key(4), (3, 4))
    rules = [rule_of(jax.random.key(i), num_rules=1, d=4, reflect=False) for i in range(20)]
    assert {float(jnp.sign(rule.constant)) for rule in rules} == {-1.0, 1.0}
    for rule in rules[:8]:
        left, right = quadrature.feature_maps(x, rule)
        assert left.shape == (3, 2 * 5 + 1)
        products = np.asarray(rule.points, np.float64) @ np.asarray(x[0] - x[1])
        want = np.asarray(rule.weights) @ np.cos(products) + float(rule.constant)
        np.testing.assert_allclose(left[0] @ right[1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", tiers([3, 1, 784, 16], 0))
def test_structured_rules(d):
    """Products are those of the points, which are simplices of the lengths, and their negatives."""

    @jax.jit
    def of_draw(key, x):
        rule = structured(key, 1, d)
        turn = jax.vmap(lambda matrix: matrix.matrix())(rule.matrices)[0]
        return rule.apply(x), rule.apply(jnp.eye(d)).T, rule.lengths[0], rule.weights, turn

    x = jax.random.normal(jax.random.key(6), (2, 3, d))
    products, points, lengths, weights, turn = of_draw(jax.random.key(5), x)
    points = np.asarray(points, np.float64)
    np.testing.assert_allclose(products, np.asarray(x) @ points.T, atol=2e-4 * d**0.25)
    first, second = points.reshape(2, d + 1, d)
    np.testing.assert_allclose(first, -second)
    units = first / np.asarray(lengths)[:, None]
    np.testing.assert_allclose(units, vertices(d) @ turn.T, atol=1e-5)
    assert abs(turn - np.eye(d)).max() > 0.3 or d == 1
    want = d / (d + 1) / np.asarray(lengths, np.float64) ** 2 / 2
    np.testing.assert_allclose(weights, np.tile(want, 2), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("reflect", [True, False])
def test_methods(reflect):
    @jax.jit
    def draw(key):
        return {name: f(key, 2, 4, reflect=reflect) for name, f in quadrature.METHODS.items()}

    for name, rule in draw(jax.random.key(7)).items():
        assert rule.points.shape == (10 * (1 + reflect), 4)
        assert rule.points.dtype == rule.weights.dtype == jnp.float32
        assert bool((rule.weights > 0).all())
        assert float(rule.weights.sum() + rule.constant) == pytest.approx(1, abs=1e-5)
        lengths = np.linalg.norm(rule.points, axis=1)
        if name == "ROM":
            np.testing.assert_allclose(lengths, 2, rtol=1e-5)
        else:
            assert lengths.std() > 0.1


def test_gauss_hermite_moments():
    """Even moments to order 6 of 200,000 coordinates, within 5 standard errors."""
    points = np.asarray(quadrature.gauss_hermite(jax.random.key(8), 50_000, 4), np.float64)
    assert len(np.unique(points)) == 8
    for order in (2, 4, 6):
        values = points**order
        error = values.std() / np.sqrt(values.size)
        assert abs(values.mean() - stats.norm.moment(order)) < 5 * error
