"""Attention transfer: its losses, what it holds out, and that it helps where it was not trained."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import calibration, couplings
from performer.attention import Exact, Features
from performer.refinement import (
    START,
    Far,
    Sample,
    absorbed,
    calibrated_far,
    divergence,
    estimate,
    learned_features,
    parted,
    positive_features,
    refine_far,
    softmax_attention,
    squared,
    traced,
    transfer,
)
from tests.support.attention_inputs import matrix_of_op
from tests.support.tiers import tiers

STRETCH = np.array([2.0, 1.5, 0.1, 0.1])


@partial(jax.jit, static_argnums=3)
def rows_of_far(far, fixed, of, is_causal=False):
    return estimate(learned_features(far, fixed), of, is_causal)


def sample(number, seed=0, is_padded=False):
    tokens = np.random.default_rng(seed).normal(size=(2, number, 9, 2, 4))
    exists = np.arange(9) < (np.array([9, 5])[np.arange(number) % 2, None] if is_padded else 9)
    exists = jnp.asarray(np.broadcast_to(exists, (number, 9)))
    return Sample(*(jnp.asarray(STRETCH * x, jnp.float32) for x in tokens), exists, exists)


@pytest.mark.parametrize("is_causal", tiers([True, False], 1))
def test_the_losses_are_those_of_the_equations(is_causal):
    """In NumPy, query by query, over what exists."""
    of = sample(2, is_padded=True)
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    pairs = of.pairs(is_causal)

    @jax.jit
    def computed(of):
        exact = softmax_attention(of, is_causal)
        rows = estimate(Features(frequencies), of, is_causal)
        losses = [loss(rows, exact, pairs) for loss in (squared, divergence)]
        return exact, rows, *losses

    exact, estimated, square, entropy = map(np.asarray, computed(of))
    of = jax.tree.map(np.asarray, of)
    squares, sizes, divergences, rows = np.zeros(2), np.zeros(2), np.zeros(2), 0
    for b, i in np.argwhere(np.asarray(of.queries)):
        seen = np.asarray(of.keys[b]) & (np.arange(9) <= i if is_causal else True)
        rows += 1
        for head in range(2):
            logits = of.key[b, seen, head].astype(float) @ of.query[b, i, head] / 2
            row = np.exp(logits - logits.max())
            row /= row.sum()
            np.testing.assert_allclose(exact[b, head, i, seen], row, rtol=1e-5)
            assert not exact[b, head, i, ~seen].any()
            other = estimated[b, head, i, seen].astype(float)
            squares[head] += ((other - row) ** 2).sum()
            sizes[head] += (row**2).sum()
            divergences[head] += (row * np.log(row / other)).sum()
    np.testing.assert_allclose(square, squares / sizes, rtol=1e-4)
    np.testing.assert_allclose(entropy, divergences / rows, rtol=1e-4)


def test_softmax_attention_of_bfloat16_is_not_rounded():
    """Against float64: logits of 20 in bfloat16 would be off by up to 0.06."""
    query, key = (4 * jax.random.normal(jax.random.key(i), (1, 9, 2, 4)) for i in range(2))
    of = Sample.of(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16))
    logits = np.einsum("btnh,bsnh->bnts", *(np.asarray(x).astype(float) for x in of[:2])) / 2
    want = np.exp(logits - logits.max(axis=-1, keepdims=True))
    want /= want.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(softmax_attention(of), want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("number", [1, 2, 7, 17])
def test_examples_are_trained_on_or_held_out(number):
    """Each is one of the two, one of eight held out; a single example is both."""
    whole = sample(number)
    trained, held_out = (np.asarray(part.query) for part in parted(whole))
    both = np.concatenate([trained, held_out])
    want = np.concatenate([whole.query] * 2) if number == 1 else np.asarray(whole.query)
    np.testing.assert_array_equal(np.sort(both[:, 0, 0, 0]), np.sort(want[:, 0, 0, 0]))
    assert len(held_out) == {1: 1, 2: 1, 7: 1, 17: 2}[number]


@pytest.mark.thorough
def test_refining_lowers_the_error():
    """On other examples than those it was done with; in two of four directions, few features."""
    seen, unseen = sample(64), sample(16, seed=2)
    fitted = calibration.calibrate(*seen[:2])
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    fixed = fitted, Exact()
    refined = transfer(positive_features, frequencies, fixed, seen, steps=100)

    def error(frequencies):
        rows = estimate(Features(frequencies, fitted), unseen)
        return squared(rows, softmax_attention(unseen), unseen.pairs(False))

    assert np.all(error(refined) < 0.7 * error(frequencies))


def test_what_gets_worse_where_it_is_held_out_is_not_kept():
    """At a rate at which everything gets worse, all stays as it was, bit for bit."""
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    options = dict(steps=40, rate=1e3)
    refined = transfer(positive_features, frequencies, (None, Exact()), sample(16), **options)
    np.testing.assert_array_equal(refined, frequencies)


FAR = Far(
    *(
        jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
        for i, shape in enumerate([(2, 6, 4), (2, 6, 4), (2, 6), (2,)])
    )
)


@pytest.mark.parametrize(("window", "first"), tiers([(3, 1), (1, 2), (0, 0)], 0))
@pytest.mark.parametrize("is_causal", tiers([True, False], 1))
def test_a_hybrid_in_numpy(window, first, is_causal):
    """Pair by pair, in float64: e^{q.k} near by, sums of features elsewhere; grouped heads."""
    query = jax.random.normal(jax.random.key(3), (2, 9, 4, 4))
    of = sample(2, is_padded=True)._replace(query=query)
    shift = jax.random.normal(jax.random.key(4), (2, 4))
    fixed = calibration.Calibration(shift=shift), Exact(window, first)
    got = np.asarray(rows_of_far(FAR, fixed, of, is_causal))
    w, u, bias, weight = (np.asarray(x, np.float64) for x in FAR)
    for b, n, i in np.argwhere(np.broadcast_to(of.queries[:, None], (2, 4, 9))):
        head, row = n // 2, np.zeros(9)
        q = np.asarray(query[b, i, n], np.float64) / 2**0.5
        for j in np.flatnonzero(of.keys[b]):
            if is_causal and j > i:
                continue
            k = np.asarray(of.key[b, j, head] / 2**0.5 - shift[head], np.float64)
            near = (window and abs(i // window - j // window) <= 1) or j < first
            terms = np.exp(w[head] @ q + u[head] @ k + bias[head] + weight[head])
            row[j] = np.exp(q @ k) if near else terms.mean()
        np.testing.assert_allclose(got[b, n, i], row / row.sum(), rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("window", "method"), tiers([(3, "shift+scale"), (3, "none"), (0, "shift+scale")], 1)
)
def test_the_operator_makes_the_same_rows(window, method):
    """Frequencies of queries and of keys, beside a calibration; the weights are those of `Far`."""
    of, fitted = sample(2), None
    if method != "none":
        fitted = calibration.calibrate(of.query, of.key, method=method)
    features = replace(FAR.features(Exact(window)), calibration=fitted)
    got = matrix_of_op(*of[:2], features, is_causal=True)
    want = rows_of_far(FAR, (fitted, Exact(window)), of, True)
    np.testing.assert_allclose(got, want, atol=2e-6)


PACKED = jnp.array([[5, 5, 1, 1, 1, 5, 1, 1, 5]] * 2)


@pytest.mark.parametrize(
    ("exact", "is_causal", "segments"),
    tiers(
        [
            (Exact(keys=2, rows=1), False, None),
            (Exact(window=2, first=1), True, PACKED),
            (Exact(), True, None),
            (Exact(window=2, first=1, keys=2), False, None),
            (Exact(window=2), False, PACKED),
        ],
        2,
    ),
)
@pytest.mark.parametrize("method", tiers(["full", "none", "shift+scale", "proposal"], 1))
def test_the_matrix_of_positive_features_is_the_operators(exact, is_causal, segments, method):
    """With grouped heads, padding, and segments whose lengths the window does not divide."""
    query = jax.random.normal(jax.random.key(3), (2, 9, 4, 4))
    of, fitted = sample(2, is_padded=True)._replace(query=query, segments=segments), None
    frequencies = couplings.draw(jax.random.key(1), "orf", 8, 4, 2)
    if method != "none":
        given = dict(method=method, is_causal=is_causal, mixed=any(exact))
        fitted = calibration.calibrate(of.query, of.key, **given)
    options = dict(is_causal=is_causal, mask=of.keys[:, None, None], segment_ids=segments)
    want = matrix_of_op(*of[:2], Features(frequencies, fitted, exact=exact), **options)

    @jax.jit
    def traced_sizes(exact):
        return estimate(positive_features(frequencies, (fitted, exact)), of, is_causal)

    pairs = of.pairs(is_causal)
    got = traced_sizes(traced(exact))
    np.testing.assert_allclose(jnp.where(pairs, got, 0), jnp.where(pairs, want, 0), atol=3e-6)


def test_refining_what_is_far():
    """Better than the window alone where it was not trained; the window where nothing is."""
    seen, unseen, window = sample(64), sample(16, seed=2), Exact(1)
    drawn = couplings.draw(jax.random.key(1), "orf", 16, 4, 2)
    start, fitted = calibrated_far(drawn, window, seen, is_causal=True)
    tilts = (
        calibrated_far(drawn, window, seen, method=x) for x in ("full", "shift+scale+proposal")
    )
    np.testing.assert_array_equal(*(tilted.w_key for tilted, _ in tilts))  # not traceless
    far = Far.of(START * start.w_key)
    refined = refine_far(far, fitted, window, seen, steps=100, is_causal=True)

    def error(far, fitted=None):
        rows = rows_of_far(far, (fitted, window), unseen, True)
        return divergence(rows, softmax_attention(unseen, True), unseen.pairs(True))

    nothing = far._replace(weight=jnp.full(2, -jnp.inf))
    assert np.all(error(refined) < 0.3 * error(nothing))
    assert np.all(error(refined) < 0.7 * error(far, fitted))
    unused = refine_far(far, None, Exact(9), seen, steps=20, is_causal=True)
    assert np.isneginf(unused.weight).all()
    only = refine_far(far, None, Exact(), seen, steps=20, is_causal=True)
    assert np.isfinite(only.weight).all()


@pytest.mark.parametrize("kind", ["an example without tokens", "queries without near keys"])
def test_features_are_refined_and_kept_where_the_window_cannot_be_judged(kind):
    """An example without pairs has no error; a query without near keys needs far ones."""
    exists, drawn = np.ones((16, 9), bool), couplings.draw(jax.random.key(1), "orf", 16, 4, 2)
    if kind == "an example without tokens":
        exists[4] = False  # the first one held out
        seen = sample(16)._replace(queries=jnp.asarray(exists), keys=jnp.asarray(exists))
        unused = refine_far(Far.of(START * drawn), None, Exact(9), seen, steps=1)
        assert np.isneginf(unused.weight).all()  # the others are judged
    else:
        exists[:, :6] = False
        seen = sample(16)._replace(keys=jnp.asarray(exists))
    refined = refine_far(Far.of(START * drawn), None, Exact(2), seen, steps=20)
    assert np.isfinite(refined.weight).all()
    assert np.all(abs(refined.w_key - START * drawn).max(axis=(1, 2)) > 0)


def test_a_calibration_absorbed_by_the_features():
    """The same rows as with it, near pairs and grouped heads included."""
    query = jax.random.normal(jax.random.key(3), (2, 9, 4, 4))
    of, window = sample(2)._replace(query=query), Exact(2, 1)
    fitted = calibration.calibrate(of.query, of.key + 1, method="shift+scale")
    want = rows_of_far(FAR, (fitted, window), of)
    got = rows_of_far(absorbed(FAR, fitted), (None, window), of)
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_near_pairs_of_packed_sequences():
    """They form chunks one after another, wherever their tokens are."""
    segments = jnp.array([[3, 3, 1, 1, 3, 1, 3, 3, 3]])
    of = sample(1)._replace(segments=segments)
    window = Exact(2, 1)
    got = rows_of_far(FAR._replace(weight=jnp.full(2, -jnp.inf)), (None, window), of)
    want = matrix_of_op(*of[:2], Features(None, exact=window), segment_ids=segments)
    np.testing.assert_allclose(got, want, atol=2e-6)
