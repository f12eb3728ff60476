"""performer_attention: log-weights of keys, against the float64 oracle of all pairs."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import performer_attention
from performer.attention.calibration import calibrate
from tests import oracles
from tests.attention_inputs import MAPS, OWN, M, close, far_apart, inputs

IDS = np.repeat([[0, 1, 2]], [5, 1, 8], axis=1).repeat(2, axis=0)
ORDERS = {
    "bidirectional": ({}, {}),
    "causal": (dict(is_causal=True),) * 2,
    "packed": (dict(segment_ids=IDS), dict(segments=(IDS, IDS))),
}


def normal(*shape, scale=1.0, seed=7):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def off(got, tokens, log_weights, **options):
    """Over what float32 explains."""
    want, bound = oracles.full_attention(*tokens, log_weights=log_weights, **options)
    bound = 2.0**-24 * (bound + np.abs(want).max(axis=-1)) + 1e-30
    return (np.abs(got - want).max(axis=-1) / bound).max()


@pytest.mark.parametrize("implementation", [None, "robust"])
@pytest.mark.parametrize("rate", [0.01, 1.0, -1.0])
def test_decay(rate, implementation):
    """Several chunks, and a rate for each head: log-weights up to 200, up and down."""
    tokens = inputs(t=200, scale=0.7)
    log_weights = (rate * np.arange(200.0)[:, None] * [1.0, 0.5])[None].astype(np.float32)
    attend = partial(performer_attention, is_causal=True, implementation=implementation)
    got = attend(*tokens, key_log_weights=log_weights)
    assert off(got, tokens, log_weights, is_causal=True) < 1
    # Age alone counts: from another origin, the same.
    close(attend(*tokens, key_log_weights=log_weights - 40 * rate), got, 1e-4)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("implementation", [None, "robust"])
def test_any_log_weights(order, implementation, small_chunks):
    """Of each key and head, -inf among them, from 1 to 200."""
    package, oracle = ORDERS[order]
    tokens = inputs(t=14)
    for scale in (1.0, 200.0):
        log_weights = normal(2, 14, 2, scale=scale)
        log_weights[0, 3:6, 0] = log_weights[1, 8] = -np.inf
        for given in (log_weights, log_weights[..., 0], log_weights[0, :, 1]):
            got = performer_attention(
                *tokens, key_log_weights=given, implementation=implementation, **package
            )
            wide = given if given.ndim == 3 else given[..., None]
            assert off(got, tokens, wide, **oracle) < 1


@pytest.mark.parametrize("order", ["causal", "packed"])
def test_rows_that_are_formed_again(order, small_chunks):
    """At norms where the default loses rows."""
    package, oracle = ORDERS[order]
    tokens, log_weights = far_apart(60.0), normal(2, 14, 4, scale=100.0)
    log_weights[0, 3:6, 0] = -np.inf
    attend = partial(performer_attention, key_log_weights=log_weights, scale=1.0, **package)
    ratios = [
        off(attend(*tokens, implementation=name), tokens, log_weights, scale=1.0, **oracle)
        for name in ("robust", None)
    ]
    assert ratios[0] < 4
    assert ratios[1] > 100


@pytest.mark.parametrize("order", ORDERS)
def test_gradients(order, small_chunks):
    """Of everything at once along a direction, against differences of the oracle in float64."""
    package, oracle = ORDERS[order]
    tokens, log_weights = inputs(t=14), normal(2, 14, 2, scale=3.0)
    log_weights[:, 2] = -np.inf

    def loss(log_weights, query, key, value):
        output = performer_attention(
            query, key, value, tokens[3], key_log_weights=log_weights, **package
        )
        return jnp.sum(jnp.sin(output))

    arguments = [jnp.asarray(log_weights), *tokens[:3]]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arguments)
    np.testing.assert_array_equal(gradients[0][:, 2], 0)
    wide = [np.asarray(x, np.float64) for x in arguments]
    for number in range(4):
        along = normal(*wide[number].shape).astype(np.float64)

        def moved(step, number=number, along=along):
            args = [x + step * along if i == number else x for i, x in enumerate(wide)]
            output, _ = oracles.full_attention(*args[1:], tokens[3], log_weights=args[0], **oracle)
            return np.sin(output).sum()

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        size = np.linalg.norm(gradients[number])
        assert abs(np.vdot(gradients[number], along) - slope) < 1e-4 * size, number
        assert size > 0.1


@pytest.mark.optimised("asserts bits")
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_is_log_weights_of_zero_and_minus_infinity(is_causal, small_chunks):
    tokens = inputs(t=9)
    mask = np.random.default_rng(0).random((2, 9)) < 0.6
    attend = partial(performer_attention, *tokens, is_causal=is_causal)
    want = attend(mask=mask[:, None, None])
    log_weights = np.where(mask, 0.0, -np.inf).astype(np.float32)
    np.testing.assert_array_equal(attend(key_log_weights=log_weights), want)
    # Where a mask hides a key, its log-weight may be anything that is allowed.
    both = attend(mask=mask[:, None, None], key_log_weights=np.where(mask, 0.0, 1e30))
    np.testing.assert_array_equal(both, want)


@pytest.mark.optimised("asserts bits")
@pytest.mark.parametrize("feature_map", ["positive", OWN], ids=["positive", "own"])
def test_later_log_weights_change_nothing_bit_for_bit(feature_map, small_chunks):
    tokens, log_weights = inputs(t=30), normal(2, 30, scale=30.0)
    attend = partial(performer_attention, *tokens, is_causal=True, feature_map=feature_map)
    before = np.asarray(attend(key_log_weights=log_weights))
    for t in (1, 4, 13, 29):
        for other in (1e4, -1e4, -np.inf):
            changed = np.where(np.arange(30) < t, log_weights, np.float32(other))
            after = np.asarray(attend(key_log_weights=changed))
            np.testing.assert_array_equal(after[:, :t], before[:, :t])


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_log_weights(feature_map, is_causal, small_chunks):
    """A key that outweighs all others is all that counts where it is seen; alone, any counts."""
    query, key, value, frequencies = inputs(t=9)
    frequencies, query, key = (jnp.abs(x) for x in (frequencies, query, key))  # relu: no zeros
    attend = partial(performer_attention, is_causal=is_causal, feature_map=feature_map)
    for of_one, of_others in [(1e4, 0.0), (0.0, -1e4), (1e4, -1e4), (-1e30, -np.inf)]:
        log_weights = np.where(np.arange(9) == 4, of_one, of_others).astype(np.float32)
        got = attend(query, key, value, frequencies, key_log_weights=log_weights)
        one = np.repeat(np.broadcast_to(value[:, 4:5], value.shape), 2, axis=2)
        close(got[:, 4:], one[:, 4:])
        if is_causal and of_others > -np.inf:
            before = attend(*(x[:, :4] for x in (query, key, value)), frequencies)
            close(got[:, :4], before, 1e-3)  # e^1e4 times a key: float32 knows 1e4 to 1e-3
        elif is_causal:
            np.testing.assert_array_equal(got[:, :4], 0)


@pytest.mark.parametrize("stabilizer", ["exact", "google"])
def test_weights_repeat_keys(stabilizer, small_chunks):
    """e^l = 3: as if the key stood there three times, whatever the features are."""
    query, key, value, frequencies = inputs(t=7)
    times = np.array([1, 3, 1, 2, 0, 1, 1])
    got = performer_attention(
        query,
        key,
        value,
        frequencies,
        key_log_weights=np.where(times > 0, np.log(np.maximum(times, 1)), -np.inf),
        stabilizer=stabilizer,
    )
    key, value = (np.repeat(x, times, axis=1) for x in (key, value))
    close(got, performer_attention(query, key, value, frequencies, stabilizer=stabilizer))


def test_streams(small_chunks):
    """Prompt, tokens one by one; and ages that count from the last token."""
    query, key, value, frequencies = inputs(t=12)
    log_weights = normal(2, 12, 2, scale=30.0)
    attend = partial(performer_attention, frequencies=frequencies, is_causal=True)
    want = attend(query, key, value, key_log_weights=log_weights)
    outputs, state = [], None
    for part in (slice(0, 9), slice(9, 10), slice(10, 12)):
        output, state = attend(
            *(x[:, part] for x in (query, key, value)),
            key_log_weights=log_weights[:, part],
            initial_state=state,
            return_state=True,
        )
        outputs.append(output)
    close(jnp.concatenate(outputs, axis=1), want)


@pytest.mark.parametrize("stabilizer", ["exact", "google"])
def test_no_gradient_sees_what_stands_at_masked_keys(stabilizer):
    """Not those of frequencies and calibration either."""
    query, key, value, frequencies = inputs(t=9)
    mask = np.arange(9) < 5
    fitted = calibrate(query, key, method="shift+scale+proposal") if stabilizer == "exact" else None
    of_heads = jnp.broadcast_to(frequencies, (2, M, 8))

    @jax.jit
    def gradient(key, value):
        def loss(frequencies, fitted, key, value):
            output = performer_attention(
                query,
                key,
                value,
                frequencies,
                mask=mask[None, None, None],
                calibration=fitted,
                stabilizer=stabilizer,
            )
            return jnp.sum(jnp.sin(output))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(of_heads, fitted, key, value)

    want = gradient(key, value)
    dirty = (jnp.where(mask[:, None, None], x, np.nan) for x in (key, value))
    chex.assert_tree_all_finite(want)
    chex.assert_trees_all_equal(gradient(*dirty), want)
