"""Butterfly matrices: their factors, the law of their columns, and what is not uniform.

False-alarm rates are those of a fresh seed; the seeds are fixed.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from performer.structured import Butterfly, random_butterfly
from tests.support.tiers import tiers

SIZES = [(1, 3), (2, 3), (3, 1), (15, 3), (16, 3), (784, 1)]
APPLY = jax.jit(lambda f, x: (f.matrix(), f.apply(x), f.apply_transpose(x)))


def cut_factors(d, cos, minus_sin, sin):
    """Sec. 9.1: the factors for the next power of two, cut to d x d, the last one first.

    `cos` and the others hold one number for each join.
    """
    p = len(cos) + 1
    k, first_join = p // 2, 0
    while k:
        factor = np.zeros((p, p))
        for block in range(p // (2 * k)):
            for i in range(2 * k * block, 2 * k * block + k):
                join = first_join + block
                factor[i, i] = factor[i + k, i + k] = cos[join]
                factor[i, i + k], factor[i + k, i] = minus_sin[join], sin[join]
        for column in range(d):
            if np.any(factor[d:, column]):
                factor[column, column] = 1
        yield factor[:d, :d]
        k, first_join = k // 2, first_join + p // (2 * k)


def cut_product(d, cos, minus_sin, sin):
    matrix = np.eye(d)
    for factor in cut_factors(d, cos, minus_sin, sin):
        matrix = factor @ matrix
    return matrix


def dense(butterfly):
    """The matrix of a drawn butterfly, a float64 product of dense factors."""
    d = butterfly.signs.shape[-1]
    matrix = np.eye(d)
    for i in range(len(butterfly.angles)):
        theta = np.asarray(butterfly.angles[i], np.float64)
        matrix = matrix * np.asarray(butterfly.signs[i], np.float64)
        matrix = matrix @ cut_product(d, np.cos(theta), -np.sin(theta), np.sin(theta))
        if butterfly.orders is not None:
            matrix = matrix @ np.eye(d)[np.asarray(butterfly.orders[i])]
    return matrix


def example(d, products):
    """A butterfly of any angles, signs and permutations."""
    rng = np.random.default_rng(d)
    joins = (1 << (d - 1).bit_length()) - 1
    return Butterfly(
        jnp.asarray(rng.uniform(-np.pi, np.pi, (products, joins)), jnp.float32),
        jnp.asarray(rng.choice([-1, 1], (products, d)), jnp.float32),
        None if products == 1 else jnp.asarray([rng.permutation(d) for _ in range(products)]),
    )


@lru_cache(maxsize=8)
def draws(d, products, count):
    """The angles (count, products, joins) and matrices (count, d, d) of `count` draws, float64."""

    @jax.jit
    @jax.vmap
    def draw(key):
        butterfly = random_butterfly(key, d, products=products)
        return butterfly.angles, butterfly.matrix()

    keys = jax.random.split(jax.random.key(d), count)
    return tuple(np.asarray(found, np.float64) for found in draw(keys))


@pytest.mark.parametrize(("d", "products"), tiers(SIZES, [(1, 3), (3, 1), (15, 3)]))
def test_apply_is_the_product_with_an_orthogonal_matrix(d, products):
    butterfly = example(d, products)
    x = jax.random.normal(jax.random.key(3), (2, 3, d))
    matrix, there, back = APPLY(butterfly, x)
    want = dense(butterfly)
    np.testing.assert_allclose(want @ want.T, np.eye(d), atol=1e-12)
    np.testing.assert_allclose(matrix, want, atol=2e-5)
    np.testing.assert_allclose(there, x @ want.T, atol=2e-5)
    np.testing.assert_allclose(back, x @ want, atol=2e-5)


def test_squared_cosines_are_beta():
    """Beta(k/2, k/2) for blocks of size k: three tests, false-alarm rate 3e-5.

    And no two angles are correlated: the 21 pairs at 5 standard errors, 1e-5.
    """
    angles, _ = draws(8, 1, 40_000)
    share = np.cos(angles[:, 0]) ** 2
    for first, k in [(0, 4), (1, 2), (3, 1)]:
        assert stats.kstest(share[:, first], stats.beta(k / 2, k / 2).cdf).pvalue > 1e-5
    assert np.abs(np.corrcoef(share.T) - np.eye(7)).max() < 5 / np.sqrt(len(share))


def diagonal_moments(d, products, count):
    """Of each draw: the mean fourth moment of B (1, ..., 1) / sqrt(d), over the uniform one."""
    _, b = draws(d, products, count)
    return np.mean((b.sum(axis=-1) / d**0.5) ** 4 * d * (d + 2) / 3, axis=1)


@pytest.mark.parametrize("d", [4, 8])
def test_one_matrix_is_not_haar(d):
    """At x = (1, ..., 1) / sqrt(d) the fourth moment is (d + 1)(d + 2) / (6 d) of the uniform one.

    With cos^2 ~ Beta(k/2, k/2) each level contributes E (c - s)^4 = (2k + 1) / (k + 1). At d = 4,
    E (B x)_0^4 = 5/32 = 0.156 where uniform is 0.125. 5 standard errors: false-alarm rate 1e-6.
    """
    found = diagonal_moments(d, 1, 40_000)
    assert abs(off(found, (d + 1) * (d + 2) / (6 * d))) < 5
    assert abs(off(found, 1)) > 50


@pytest.mark.parametrize(("d", "count"), tiers([(4, 40_000), (15, 20_000)], 1))
def test_products_are_nearly_uniform(d, count):
    """At the same x, where one B is 1.25 and 2.2 times off, B P B P B P shows nothing.

    The mean over the coordinates, at 5 standard errors of 0.002 to 0.003: false-alarm rate 1e-6.
    """
    found = diagonal_moments(d, 3, count)
    assert found.std() / np.sqrt(count) < 0.003
    assert abs(off(found, 1)) < 5


def off(samples, expected):
    """By how many standard errors the mean is off."""
    return (samples.mean() - expected) / (samples.std() / np.sqrt(len(samples)))


def test_permutations_are_uniform_and_independent():
    """Of 5 numbers, in two products: 75 shares of 1/5 at 5 standard errors, false-alarm rate 4e-5.

    Where P_1 and P_2 take each number from, and P_2 from where P_1 took the number.
    """
    keys = jax.random.split(jax.random.key(0), 4000)
    draw = jax.jit(jax.vmap(lambda key: random_butterfly(key, 5, products=2).orders))
    orders = np.asarray(draw(keys))
    assert np.all(np.sort(orders, axis=-1) == np.arange(5))
    first, second = orders[:, 0], orders[:, 1]
    for values in (first, second, np.take_along_axis(np.argsort(second), first, axis=1)):
        shares = np.mean(values[..., None] == np.arange(5), axis=0)
        assert np.abs(shares - 1 / 5).max() < 5 * np.sqrt(0.16 / len(keys))
