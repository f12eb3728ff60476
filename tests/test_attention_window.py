"""performer_attention with exact near keys, against a float64 oracle of all pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from performer import performer_attention
from performer.attention.calibration import calibrate
from tests.attention_inputs import M, close, inputs
from tests.attention_pairs import allowed, near, oracle

SIZES = ((13, 3, 0), (12, 4, 2), (7, 2, 1), (5, 9, 2), (1, 2, 1))
"""Tokens, window, first keys."""


@pytest.mark.parametrize("is_causal", [True, False])
def test_near_pairs_are_exact_and_far_ones_estimated(is_causal):
    """Windows that divide the length and that do not, longer than it, one token."""
    for t, w, f in SIZES:
        tokens = inputs(t=t)
        got = performer_attention(*tokens, is_causal=is_causal, exact_window=w, exact_first=f)
        close(got, oracle(*tokens, near(t, w, f, is_causal), allowed(t, is_causal)))


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_as_long_as_the_sequence_is_softmax(is_causal):
    query, key, value, frequencies = inputs(t=24, k=4, scale=2.0)
    value = jnp.concatenate([value, value[..., :3]], axis=-1)
    want = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)
    attend = partial(performer_attention, query, key, value, frequencies, is_causal=is_causal)
    for window in (24, 25, 100):
        close(attend(exact_window=window), want, 1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("method", ["shift", "shift+scale", "full", "shift+scale+proposal"])
def test_calibration(method, is_causal):
    """The determinant of L and the query's half norm do not cancel here."""
    query, key, value, frequencies = inputs(t=13, k=2, scale=1.5)
    key = key + np.linspace(0, 1, key.shape[-1], dtype=np.float32)
    fitted = calibrate(query, key, coupling="orf", method=method)
    if fitted.mean is not None:
        fitted = fitted._replace(mean=jnp.zeros_like(fitted.mean))
    got = performer_attention(
        query, key, value, frequencies, calibration=fitted, is_causal=is_causal, exact_window=3
    )
    leaves = [None if x is None else np.asarray(x, np.float64) for x in fitted]
    pairs = near(13, 3, 0, is_causal), allowed(13, is_causal)
    close(got, oracle(query, key, value, frequencies, *pairs, calibration=leaves), 2e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_log_weights_and_masks(is_causal):
    tokens, rng = inputs(t=14), np.random.default_rng(3)
    log_weights = 2 * rng.standard_normal((2, 14, 2)).astype(np.float32)
    log_weights[0, 3:6] = log_weights[1, :7, 0] = -np.inf
    attend = partial(performer_attention, is_causal=is_causal, exact_window=3, exact_first=1)
    got = attend(*tokens, key_log_weights=log_weights)
    pairs = near(14, 3, 1, is_causal), allowed(14, is_causal)
    close(got, oracle(*tokens, *pairs, log_weights=log_weights))
    # A mask hides what stands there, whatever it is.
    mask = log_weights[..., :1] > -np.inf
    key, value = (jnp.where(mask[..., None], x, 1e3) for x in tokens[1:3])
    hidden = attend(tokens[0], key, value, tokens[3], mask=mask[:, None, None, :, 0])
    weights = np.where(mask, 0, -np.inf).repeat(2, axis=-1)
    close(hidden, oracle(*tokens, *pairs, log_weights=weights))


@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_have_windows_and_first_keys_of_their_own(is_causal):
    """In any order: chunks are those of the tokens sorted by segment."""
    tokens = inputs(t=17)
    ids = np.stack([np.arange(17) * 3 // 17, np.random.default_rng(0).integers(0, 4, 17)])
    got = performer_attention(
        *tokens, segment_ids=ids, is_causal=is_causal, exact_window=3, exact_first=2
    )
    exact, seen = [], []
    for row in ids:
        place = np.argsort(np.argsort(row, kind="stable"), kind="stable")
        same = row[:, None] == row
        rank = np.array([np.sum((row == row[i]) & (np.arange(17) < i)) for i in range(17)])
        exact.append(near(17, 3, 0, False, place) | (rank < 2))
        seen.append(same & allowed(17, is_causal))
    close(got, oracle(*tokens, np.stack(exact), np.stack(seen)))


@pytest.mark.parametrize("feature_map", ["hyperbolic", "trigonometric"])
def test_other_maps_of_softmax_are_on_the_same_scale(feature_map):
    """Near keys at a distance of the far ones' logits: with many features the two agree."""
    query, key, value, _ = inputs(t=20, scale=0.5)
    value = jnp.concatenate([value, value[..., :3]], axis=-1)
    frequencies = jnp.asarray(np.random.default_rng(1).standard_normal((40_000, 8)), jnp.float32)
    got = performer_attention(
        query, key, value, frequencies, feature_map=feature_map, exact_window=4
    )
    heads = [jnp.repeat(x, 2, axis=2) for x in (key, value)]
    close(got, jax.nn.dot_product_attention(query, *heads), 0.01)


def test_the_kernel_estimate_is_unbiased():
    """Of each far pair, beside a near key that is exact: six comparisons at 1e-4 together.

    4,000 draws of 12 frequencies know each mean to 1 to 3 percent; the far part counted twice, or
    m times, is off by a factor.
    """
    query, key, _, _ = inputs(b=1, t=8, n=1, k=1, scale=0.6)
    draws = jax.random.normal(jax.random.key(0), (4000, M, key.shape[-1]))

    @jax.jit
    @jax.vmap
    def matrix(frequencies):
        value = jnp.eye(8)[None, :, None]
        output = performer_attention(query, key, value, frequencies, is_causal=True, exact_window=2)
        return output[0, :, 0]

    rows = np.asarray(matrix(draws), np.float64)
    logits = np.asarray(query[0, :, 0] @ key[0, :, 0].T, np.float64) / key.shape[-1] ** 0.5
    for i, j in [(4, 0), (5, 1), (6, 0), (6, 3), (7, 2), (7, 3)]:
        ratios = rows[:, i, j] / rows[:, i, i]
        z = (ratios.mean() - np.exp(logits[i, j] - logits[i, i])) / stats.sem(ratios)
        assert abs(z) < stats.norm.isf(1e-4 / 6 / 2), (i, j, z)


@pytest.mark.parametrize("pieces", [(5, 8), (1,) * 13, (4, 1, 1, 6, 1), (13,)])
def test_streaming(pieces):
    """In pieces of any length, token by token too, it is the whole; the state keeps its size."""
    query, key, value, frequencies = inputs(t=13)
    log_weights = np.random.default_rng(0).standard_normal((2, 13)).astype(np.float32)
    fitted = calibrate(query, key, coupling="orf")
    attend = jax.jit(
        partial(
            performer_attention,
            calibration=fitted,
            is_causal=True,
            exact_window=3,
            exact_first=2,
            return_state=True,
        )
    )
    options = dict(calibration=fitted, is_causal=True, exact_window=3, exact_first=2)
    want = performer_attention(
        query, key, value, frequencies, key_log_weights=log_weights, **options
    )
    outputs, state, start, shapes = [], None, 0, set()
    for length in pieces:
        part = slice(start, start + length)
        output, state = attend(
            *(x[:, part] for x in (query, key, value)),
            frequencies,
            key_log_weights=log_weights[:, part],
            initial_state=state,
        )
        outputs.append(output)
        start += length
        shapes.add(tuple(x.shape for x in jax.tree.leaves(state)))
    close(jnp.concatenate(outputs, axis=1), want)
    assert len(shapes) == 1


@pytest.mark.parametrize(("window", "first"), [(3, 2), (1, 0)])
def test_a_piece_without_tokens_leaves_the_state(window, first):
    """The same before the first token, and in a call without states."""
    tokens, state = inputs(t=4), None
    options = dict(is_causal=True, exact_window=window, exact_first=first)
    for start, end in [(0, 0), (0, 4), (4, 4)]:
        piece, before = [x[:, start:end] for x in tokens[:3]], state
        output, state = performer_attention(
            *piece, tokens[3], initial_state=state, return_state=True, **options
        )
        assert output.shape == (2, end - start, 4, 5)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert performer_attention(*piece, tokens[3], **options).shape == (2, 0, 4, 5)


@pytest.mark.parametrize("first", [2, 40])
@pytest.mark.parametrize("is_causal", [True, False])
def test_split_over_devices(is_causal, first, eight_devices):
    """Each device's first and last chunks have neighbours on other devices."""
    tokens = inputs(t=32)
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "s")
    options = dict(is_causal=is_causal, exact_window=4, exact_first=first)
    split = jax.shard_map(
        partial(performer_attention, axis_name="s", **options),
        mesh=mesh,
        in_specs=(spec, spec, spec, jax.P()),
        out_specs=spec,
    )
    close(jax.jit(split)(*tokens), performer_attention(*tokens, **options))


@pytest.mark.optimised("asserts bits")
def test_the_future_changes_nothing_bit_for_bit():
    query, key, value, frequencies = inputs(t=14)
    attend = partial(performer_attention, is_causal=True, exact_window=3, exact_first=2)
    want = attend(query, key, value, frequencies)
    for last in range(1, 14):
        changed = [x.at[:, last:].multiply(-7.0) for x in (query, key, value)]
        got = attend(*changed, frequencies)
        np.testing.assert_array_equal(got[:, :last], want[:, :last])


@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"segment_ids": "three"}])
def test_gradients(options):
    """Of all arrays along a direction, against differences of the oracle in float64."""
    tokens = inputs(t=14)
    ids = np.repeat([[0, 1, 2]], [5, 2, 7], axis=1).repeat(2, axis=0)
    seen = allowed(14, options.get("is_causal", False))
    exact = near(14, 3, 1, False)
    if options.get("segment_ids"):
        options, seen = {"segment_ids": ids}, ids[:, :, None] == ids[:, None]
        begin = np.array([0, 5, 7])[ids[0]]
        exact = near(14, 3, 0, False) | (np.arange(14) - begin < 1)

    def loss(*tokens):
        output = performer_attention(*tokens, exact_window=3, exact_first=1, **options)
        return jnp.sum(jnp.sin(output))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*tokens)
    wide = [np.asarray(x, np.float64) for x in tokens]
    for number in range(4):
        along = np.random.default_rng(number).standard_normal(wide[number].shape)

        def moved(step, number=number, along=along):
            args = [x + step * along if i == number else x for i, x in enumerate(wide)]
            return np.sin(oracle(*args, exact, seen)).sum()

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        size = np.linalg.norm(gradients[number])
        assert abs(np.vdot(gradients[number], along) - slope) < 1e-4 * size, number
        assert size > 0.05


def test_norms_that_lose_rows_without_a_window():
    """Chunks need no second look: what is far goes through the state, which is exact."""
    tokens = inputs(t=14, scale=30.0)
    got = performer_attention(*tokens, is_causal=True, exact_window=2, scale=1.0)
    want = oracle(*tokens, near(14, 2), allowed(14, True), scale=1.0)
    close(got, want, 1e-3)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "exact_window": 3}])
def test_frequencies_of_queries_alone(options):
    """exp(w.q + u.k - |q|^2 / 2 - |k|^2 / 2), calibrated by a shift and a scale or not."""
    query, key, value, frequencies = inputs(t=14, k=4)
    own = frequencies + 0.3 * jnp.roll(frequencies, 1, axis=0)
    fitted = calibrate(query, key, coupling="orf", method="shift+scale")
    for calibration in (None, fitted):
        got = performer_attention(
            query,
            key,
            value,
            frequencies,
            query_frequencies=own,
            calibration=calibration,
            **options,
        )
        q, k, w, u, v = (np.asarray(x, np.float64) for x in (query, key, own, frequencies, value))
        q, k = q / 8**0.25, k / 8**0.25
        true = np.einsum("btnh,bsnh->bnts", q, k)
        if calibration is not None:
            shift, scale, inverse = (np.asarray(x, np.float64) for x in fitted[:3])
            k = k - shift
            true = np.einsum("btnh,bsnh->bnts", q, k)
            q, k = (np.einsum("btnh,nhi->btni", x, y) for x, y in ((q, scale), (k, inverse)))
        halves = [np.sum(x**2, axis=-1).swapaxes(1, 2) / 2 for x in (q, k)]
        of_query, of_key = np.exp(q @ w.T), np.exp(k @ u.T)
        far = np.log(np.einsum("btnm,bsnm->bnts", of_query, of_key) / len(u))
        far = far - halves[0][..., None] - halves[1][..., None, :]
        seen = allowed(14, bool(options))
        logits = np.where(near(14, 3) if options else False, true, far)
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        close(got, np.einsum("bnts,bsnv->btnv", weights, v), 2e-5)
    with pytest.raises(ValueError, match="query_frequencies have shape"):
        performer_attention(query, key, value, frequencies, query_frequencies=own[:3])
    proposal = calibrate(query, key, coupling="orf", method="full")
    with pytest.raises(ValueError, match="go with a calibration of shift and scale"):
        performer_attention(
            query, key, value, frequencies, query_frequencies=own, calibration=proposal
        )


def test_half_precision():
    tokens = inputs(t=14)
    half = [x.astype(jnp.bfloat16) for x in tokens[:3]]
    got = performer_attention(*half, tokens[3], is_causal=True, exact_window=3, exact_first=1)
    assert got.dtype == jnp.bfloat16
    want = oracle(*tokens, near(14, 3, 1), allowed(14, True))
    assert np.abs(np.asarray(got, np.float64) - want).max() < 0.05


REFUSED = {
    "must not be negative": dict(exact_window=-1),
    "goes with an exact_window": dict(exact_first=2),
    "needs an estimate of softmax": dict(exact_window=2, feature_map="relu"),
    "stabilizer='exact'": dict(exact_window=2, stabilizer="google"),
    "state in causal attention alone": dict(exact_window=2, return_state=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        performer_attention(*inputs(), **REFUSED[message])


def test_states_of_other_windows_are_refused():
    tokens = inputs(t=4)
    attend = partial(performer_attention, *tokens, is_causal=True, return_state=True)
    _, state = attend(exact_window=2)
    with pytest.raises(ValueError, match=r"exact_window, exact_first = \(2, 0\), this one has \(3"):
        attend(exact_window=3, initial_state=state)
    with pytest.raises(ValueError, match="this one has"):
        attend(initial_state=state)
    with pytest.raises(ValueError, match="one key for each query"):
        performer_attention(*inputs(t=4, s=5), exact_window=2)
