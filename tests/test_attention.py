"""performer_attention: against the float64 oracle, against softmax, masks, precision, gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import performer_attention
from tests import oracles

B, T, S, N, H, V, M = 2, 5, 9, 3, 8, 4, 16


def inputs(scale=1.0, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(B, T, N, H), (B, S, N, H), (B, S, N, V), (N, M, H)]
    query, key, value, frequencies = map(jax.random.normal, keys, shapes)
    return scale * query, scale * key, value, frequencies


def as64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@pytest.mark.parametrize("scale", [1.0, 3.0, 5.0])
def test_matches_the_oracle(scale):
    args = inputs(scale)
    np.testing.assert_allclose(
        performer_attention(*args), oracles.performer_attention(*as64(*args)), rtol=1e-4, atol=2e-5
    )


def test_frequencies_shared_by_the_heads_and_no_batch():
    query, key, value, frequencies = inputs()
    shared = performer_attention(query, key, value, frequencies[0])
    np.testing.assert_allclose(
        shared, oracles.performer_attention(*as64(query, key, value, frequencies[0])), atol=2e-5
    )
    single = performer_attention(query[0], key[0], value[0], frequencies[0])
    np.testing.assert_allclose(single, shared[0], atol=1e-6)


def test_is_two_softmax_attentions_through_landmarks():
    """The same numbers from jax.nn.dot_product_attention, which knows nothing of the stabiliser.

    The features attend over the keys: queries w, keys k sqrt(scale), bias -scale k^2 / 2. Then the
    queries attend over the features: keys w, bias = the log normaliser of the first attention.
    """
    query, key, _, frequencies = inputs()
    value = jax.random.normal(jax.random.key(9), key.shape)
    root = H**-0.25
    landmarks = jnp.broadcast_to(frequencies.swapaxes(0, 1), (B, M, N, H))
    key_bias = -jnp.sum((root * key) ** 2, axis=-1).swapaxes(1, 2)[:, :, None] / 2
    pooled = jax.nn.dot_product_attention(landmarks, root * key, value, bias=key_bias, scale=1.0)
    logits = jnp.einsum("bmnh,bsnh->bnms", landmarks, root * key) + key_bias
    feature_bias = jax.nn.logsumexp(logits, axis=-1)[:, :, None]
    want = jax.nn.dot_product_attention(
        root * query, landmarks, pooled, bias=feature_bias, scale=1.0
    )
    np.testing.assert_allclose(performer_attention(query, key, value, frequencies), want, atol=2e-5)


CONVERGENT = [name for name in performer.couplings.COUPLINGS if name != "fixed"]


@pytest.mark.parametrize("name", CONVERGENT)
def test_converges_to_softmax(name):
    """At m = 8192 the error is below 6%, and less than half of that at m = 64.

    The antithetic version too. With fixed lengths the kernel is biased, and attention does not
    converge: see below.
    """
    query, key, value, _ = inputs(0.5)
    want = oracles.softmax_attention(*as64(query, key, value))
    draw = performer.couplings.get(name)(jax.random.key(1), 8192, H)

    def error(frequencies):
        got = performer_attention(query, key, value, frequencies)
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    def antithetic(m):
        return jnp.concatenate([draw[: m // 2], -draw[: m // 2]])

    for few, many in [(draw[:64], draw), (antithetic(64), antithetic(8192))]:
        assert error(many) < 0.06
        assert error(many) < error(few) / 2


def test_fixed_lengths_have_a_floor():
    """The bias that norms.fixed states: 64 times the features do not halve the error."""
    query, key, value, _ = inputs(0.5)
    want = oracles.softmax_attention(*as64(query, key, value))
    coupling = performer.couplings.get("fixed-antithetic")

    def error(m):
        return np.linalg.norm(
            performer_attention(query, key, value, coupling(jax.random.key(1), m, H)) - want
        )

    assert error(16384) > error(256) / 2


def test_rows_sum_to_one_and_are_not_negative():
    query, key, _, frequencies = inputs()
    weights = performer_attention(
        query, key, jnp.stack([jnp.eye(S)] * B)[:, :, None] * jnp.ones((N, 1)), frequencies
    )
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)


MASKS = {
    "two missing": [[1, 1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1, 1, 1]],
    "one key left": [[0, 0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "none left": [[0] * 9, [1] * 9],
}


@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masked_keys_are_as_if_they_were_not_there(mask, dtype):
    query, key, value, frequencies = inputs()
    mask = np.array(mask, dtype)
    want = oracles.performer_attention(*as64(query, key, value, frequencies), mask=mask)
    got = performer_attention(query, key, value, frequencies, mask=mask[:, None, None])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    if not mask[0].any():
        np.testing.assert_array_equal(got[0], 0)


def test_a_masked_key_leaves_the_maximum_too():
    """A masked key 10^4 long would otherwise push all others to underflow."""
    query, key, value, frequencies = inputs()
    mask = np.ones((B, 1, 1, S), bool)
    mask[:, :, :, 3] = False
    huge = key.at[:, 3].set(frequencies[:, 0] * 10)
    np.testing.assert_array_equal(
        performer_attention(query, huge, value, frequencies, mask=mask),
        performer_attention(query, key, value, frequencies, mask=mask),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [0.0, 1.0, 1e2, 1e4])
def test_outputs_and_gradients_are_finite(dtype, norm):
    query, key, value, frequencies = inputs()
    query, key = (norm * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    mask = np.ones((B, 1, 1, S), bool)
    mask[0] = False

    def loss(query, key, value):
        out = performer_attention(query, key, value, frequencies, mask=mask)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
    assert out.dtype == dtype
    chex.assert_tree_all_finite((out, gradients))


def test_low_precision_is_near_float32():
    query, key, value, frequencies = (x.astype(jnp.bfloat16) for x in inputs())
    want = performer_attention(*(x.astype(jnp.float32) for x in (query, key, value, frequencies)))
    got = performer_attention(query, key, value, frequencies).astype(jnp.float32)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_gradients_are_those_of_the_unstabilised_estimate():
    """The maxima cancel, so no gradient may pass through them."""
    query, key, value, frequencies = inputs()

    def plain(query, key, value):
        x, y = (H**-0.25 * a for a in (query, key))
        phi_q, phi_k = (
            jnp.exp(
                jnp.einsum("bsnh,nmh->bnsm", a, frequencies)
                - jnp.sum(a**2, -1).swapaxes(1, 2)[..., None] / 2
            )
            for a in (x, y)
        )
        kernel = phi_q @ phi_k.swapaxes(-1, -2)
        return jnp.einsum("bnts,bsnv->btnv", kernel / kernel.sum(-1, keepdims=True), value)

    def gradient(attention):
        return jax.grad(lambda args: jnp.sum(jnp.sin(attention(*args))))((query, key, value))

    got = gradient(lambda q, k, v: performer_attention(q, k, v, frequencies))
    chex.assert_trees_all_close(got, gradient(plain), rtol=1e-3, atol=1e-5)


def test_jit_vmap_and_scale():
    query, key, value, frequencies = inputs()
    want = performer_attention(query, key, value, frequencies, scale=0.3)
    np.testing.assert_allclose(
        want,
        oracles.performer_attention(*as64(query, key, value, frequencies), scale=0.3),
        atol=2e-5,
    )
    mapped = jax.jit(jax.vmap(lambda q, k, v: performer_attention(q, k, v, frequencies, scale=0.3)))
    np.testing.assert_allclose(mapped(query, key, value), want, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=jnp.ones((B, S, N, H + 1))), "query has shape .* key has"),
        (dict(value=jnp.ones((B, S + 1, N, V))), "value has .* lengths and heads"),
        (
            dict(frequencies=jnp.ones((M, H + 1))),
            f"for the head_dim {H}, or",
        ),
        (dict(frequencies=jnp.ones((N + 1, M, H))), "one draw for each of the 3 heads"),
        (dict(mask=jnp.ones((T, S), bool)), "honours masks over keys only"),
        (dict(mask=jnp.ones((B, N, 1, S), bool)), "honours masks over keys only"),
        (dict(mask=jnp.ones((B, 1, 1, S - 1), bool)), "honours masks over keys only"),
        (dict(scale=0.0), "scale must be positive, got 0.0"),
    ],
)
def test_bad_input_names_the_sizes(change, message):
    query, key, value, frequencies = inputs()
    args = dict(query=query, key=key, value=value, frequencies=frequencies) | change
    with pytest.raises(ValueError, match=message):
        performer_attention.__wrapped__(**args)
