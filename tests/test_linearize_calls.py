"""`performer.linearize`: called with other lengths and batches than it was measured with.

All keys are exact, so that a replaced place must equal the function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from tests.tiers import tiers

EXACT = dict(exact_window=1000, num_features=4)
KEYS = dict(exact_keys=1000, num_features=4)
"""All keys of attention without causality, of cross attention also."""


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def replaced(function, *batches, **options):
    """The new function; no attention is left."""
    new, report = performer.linearize(function, [tuple(x) for x in batches], **options)
    assert not report.left
    assert {row["attention"] for row in report.rows} == {"linear"}
    return new


def agree(new, function, *arguments):
    got, want = jax.jit(lambda *x: (new(*x), function(*x)))(*arguments)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want)


# Axes


def grouped(x):
    """One key head, heads before tokens, causal."""
    t, h = x.shape[1], x.shape[-1]
    scores = jnp.einsum("bnth,bsh->bnts", jnp.swapaxes(x, 1, 2), x[:, :, 0]) / h**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -1e9))
    return jnp.einsum("bnts,bsh->btnh", weights, x[:, :, 0])


@pytest.mark.parametrize("measured", tiers([12, 3], 1))
def test_the_axis_of_time_is_the_measured_one(measured):
    """As many query heads as tokens."""
    new = replaced(grouped, [normal(0, 2, measured, 4, 8)], **EXACT)
    for t in (3, 4, 5, measured):
        agree(new, grouped, normal(t, 2, t, 4, 8))


def matmuls(q, k, v):
    """Heads before tokens; `@` drops batches of length 1."""
    return jax.nn.softmax(q @ k.mT / 3) @ v


def codebook(x, keys, values):
    """Keys and values without a batch axis."""
    return jax.nn.softmax(x @ keys.T / 3) @ values


@pytest.mark.parametrize("measured", tiers([3, 1], 1))
def test_other_batch_sizes(measured):
    new = replaced(matmuls, [normal(i, measured, 4, 6, 8) for i in range(3)], **EXACT)
    assert jax.tree.leaves(new)[0].shape[0] == 4  # frequencies of each head
    for b in (1, 2, 3, 4, 6):
        agree(new, matmuls, *(normal(b + i, b, 4, 6, 8) for i in range(3)))


@pytest.mark.parametrize("measured", tiers([3, 16], 1))
def test_keys_without_a_batch_axis(measured):
    keys, values = normal(1, 9, 8), normal(2, 9, 5)
    new = replaced(codebook, [normal(0, measured, 6, 8), keys, values], **KEYS)
    for b, t in ((1, 6), (3, 6), (16, 7), (4, 12)):
        agree(new, codebook, normal(b, b, t, 8), keys, values)


def test_heads_that_cannot_be_told_from_examples():
    """`vmap` over the second axis counts the batch as heads: an error, never another number."""
    attend = jax.vmap(lambda x: jax.nn.softmax(x @ x.mT / 3) @ x, in_axes=2, out_axes=2)
    new = replaced(attend, [normal(0, 3, 6, 4, 8)], **EXACT)
    agree(new, attend, normal(1, 3, 5, 4, 8))
    with pytest.raises(ValueError, match=r"test_linearize_calls.py:\d+: its axis of heads"):
        new(normal(1, 2, 6, 4, 8))
