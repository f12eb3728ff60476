"""Draws and features under JAX's settings: 64 bits, strict dtypes, equal ranks.

Draws keep their bits, features have the dtype of their points. Attention is tested so with all its
options in `test_attention_options.py`, and the examples of the docstrings run so.
"""

from contextlib import contextmanager

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import couplings, features, norms, performer_attention, quadrature
from performer.testing import reference_attention


@contextmanager
def strict(x64=False):
    promotion = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(x64), promotion[0], promotion[1]:
        yield


def draws():
    key = jax.random.key(1)
    yield [couplings.get(name)(key, 5, 3) for name in couplings.COUPLINGS]
    yield couplings.with_quantile("pnc", norms.matern(1.5))(key, 6, 4)
    yield [rule(key, 1, 3, reflect=True) for rule in quadrature.METHODS.values()]


@pytest.mark.thorough
def test_draws_have_the_same_bits():
    made = []
    for x64 in (False, True):
        with strict(x64):
            made.append(jax.jit(lambda: list(draws()))())
    chex.assert_trees_all_equal(*made)


MAPS = features.MAPS | {"arc-cosine 1": features.arc_cosine(1)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("weighted", [True, False])
def test_features_have_the_dtype_of_their_points(name, weighted):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 5, 4)), rng.standard_normal((6, 4), np.float32)
    weights = np.exp(rng.standard_normal(6, np.float32)) if weighted else None
    results = []
    for dtype in (np.float32, np.float64):
        with strict(x64=dtype == np.float64):
            given = None if weights is None else jnp.asarray(weights)
            results.append(MAPS[name](jnp.asarray(x, dtype), jnp.asarray(w), weights=given))
            assert results[-1].dtype == dtype
    np.testing.assert_allclose(*results, rtol=2e-5, atol=1e-6)


def test_rows_that_are_formed_again_are_so_in_64_bits():
    """`robust`, at a norm where the rows of the default are lost."""
    rng = np.random.default_rng(0)
    query, value = rng.standard_normal((2, 1, 70, 2, 4))
    query *= 300 * 2**0.5 / np.linalg.norm(query, axis=-1, keepdims=True)
    frequencies = rng.standard_normal((12, 4), np.float32)
    want = reference_attention(query, -query, value, frequencies, is_causal=True)
    with strict(x64=True):
        args = [jnp.asarray(x) for x in (query, -query, value, frequencies)]
        lost, got = (
            performer_attention(*args, is_causal=True, implementation=name)
            for name in (None, "robust")
        )
    assert np.isnan(lost).any()
    np.testing.assert_allclose(got, want, rtol=4e-8, atol=4e-8)  # e^-NEGLIGIBLE of `sweep`
