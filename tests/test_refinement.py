"""Attention transfer: its losses, what it holds out, and that it helps where it was not trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import calibration, couplings
from performer.refinement import (
    Sample,
    divergence,
    performer_estimate,
    refine,
    softmax_attention,
    squared,
    transfer,
)

STRETCH = jnp.array([2.0, 1.5, 0.1, 0.1])


def sample(number, seed=0, is_padded=False):
    query, key = STRETCH * jax.random.normal(jax.random.key(seed), (2, number, 9, 2, 4))
    of = Sample.of(query, key)
    exists = jnp.arange(9) < (jnp.array([9, 5])[jnp.arange(number) % 2, None] if is_padded else 9)
    exists = jnp.broadcast_to(exists, (number, 9))
    return of._replace(queries=exists, keys=exists)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_losses_are_those_of_the_equations(is_causal):
    """In NumPy, query by query, over what exists."""
    of = sample(2, is_padded=True)
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    exact = softmax_attention(of, is_causal)
    estimate = performer_estimate(frequencies, None, of, is_causal)
    squares, sizes, divergences, rows = np.zeros(2), np.zeros(2), np.zeros(2), 0
    for b, i in np.argwhere(np.asarray(of.queries)):
        seen = np.asarray(of.keys[b]) & (np.arange(9) <= i if is_causal else True)
        rows += 1
        for head in range(2):
            logits = np.asarray(of.key[b, seen, head] @ of.query[b, i, head], np.float64) / 2
            row = np.exp(logits - logits.max())
            row /= row.sum()
            np.testing.assert_allclose(exact[b, head, i, seen], row, rtol=1e-5)
            assert not exact[b, head, i, ~seen].any()
            other = np.asarray(estimate[b, head, i, seen], np.float64)
            squares[head] += ((other - row) ** 2).sum()
            sizes[head] += (row**2).sum()
            divergences[head] += (row * np.log(row / other)).sum()
    pairs = of.pairs(is_causal)
    np.testing.assert_allclose(squared(estimate, exact, pairs), squares / sizes, rtol=1e-4)
    np.testing.assert_allclose(divergence(estimate, exact, pairs), divergences / rows, rtol=1e-4)


@pytest.mark.parametrize("loss", ["divergence", "squared"])
def test_refining_lowers_the_error(loss):
    """On other examples than those it was done with; in two of four directions, few features."""
    seen, unseen = sample(64), sample(16, seed=2)
    fitted = calibration.calibrate(*seen[:2])
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    refined = refine(frequencies, fitted, seen, steps=100, loss=loss)

    def error(frequencies):
        estimate = performer_estimate(frequencies, fitted, unseen)
        return squared(estimate, softmax_attention(unseen), unseen.pairs(False))

    assert np.all(error(refined) < 0.7 * error(frequencies))


def test_what_gets_worse_where_it_is_held_out_is_not_kept():
    """At a rate at which everything gets worse, all stays as it was, bit for bit."""
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    refined = refine(frequencies, None, sample(16), steps=40, rate=1e3)
    np.testing.assert_array_equal(refined, frequencies)


def test_an_unknown_loss():
    with pytest.raises(ValueError, match="unknown loss 'squares'"):
        transfer(performer_estimate, jnp.ones((2, 8, 4)), None, sample(2), steps=1, loss="squares")
