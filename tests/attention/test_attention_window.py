"""performer_attention with exact near keys, decay and log-weights of keys.

`test_attention_options` crosses them with every other option. Here is what stands beside that:
softmax attention, unbiasedness, long streams and extremes, against a float64 oracle.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from performer.attention import decay, sizes
from performer.attention.state import State, combine
from tests.support.attention_inputs import (
    SLOPES,
    M,
    close,
    far_apart,
    inputs,
    oracle,
    ours,
    ours_streamed,
    random_decays,
)
from tests.support.tiers import tiers


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
        output = ours(query, key, value, frequencies, is_causal=True, exact_window=2)
        return output[0, :, 0]

    rows = np.asarray(matrix(draws), np.float64)
    logits = np.asarray(query[0, :, 0] @ key[0, :, 0].T, np.float64) / key.shape[-1] ** 0.5
    for i, j in [(4, 0), (5, 1), (6, 0), (6, 3), (7, 2), (7, 3)]:
        ratios = rows[:, i, j] / rows[:, i, i]
        z = (ratios.mean() - np.exp(logits[i, j] - logits[i, i])) / stats.sem(ratios)
        assert abs(z) < stats.norm.isf(1e-4 / 6 / 2), (i, j, z)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_choice_of_keys_computes_no_feature_again(key_heads):
    """Count operations of one block: 1.09 times without the choice, 1.9 with its own features."""
    query, key = jnp.zeros((2, 64, 4, 64)), jnp.zeros((2, 64, key_heads, 64))

    def operations(**options):
        call = jax.jit(partial(ours, **options))
        return call.lower(query, key, key, jnp.zeros((64, 64))).compile().cost_analysis()["flops"]

    assert operations(exact_keys=1) < 1.25 * operations()


def test_what_is_one_block():
    """Look for a loop over blocks of 12 heads: none up to 256 tokens, or if m <= head_dim.

    Blocks copy their tokens, which takes longer than the features that they save. Wider features of
    a head that fit are a loop over heads.
    """

    def has_loop(t, m):
        tokens, frequencies = jnp.zeros((8, t, 12, 64)), jnp.zeros((m, 64))
        program = jax.make_jaxpr(ours)(tokens, tokens, tokens, frequencies)
        return "scan[" in str(program)

    assert not has_loop(256, 129)
    assert has_loop(257, 129)
    assert not has_loop(2048, 64)
    assert has_loop(256, 128)


@pytest.mark.thorough
def test_gradients_beside_exact_keys():
    """Gradients for a constant choice: central differences in float64."""
    with jax.enable_x64(True):
        tokens = [jnp.asarray(x, jnp.float64) for x in inputs()]
        ways = [jnp.asarray(x, jnp.float64) for x in inputs(seed=1)]

        def loss(step):
            moved = (x + step * y for x, y in zip(tokens, ways, strict=True))
            return jnp.sum(ours(*moved, exact_keys=3, exact_rows=1) ** 2)

        want = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(loss)(0.0), want, rtol=1e-7)


@pytest.mark.parametrize("rate", [0.003, 0.5])
def test_a_million_tokens_lose_no_digit(rate):
    """The state of keys that are alike: the sums of a geometric series, after 10^6 steps.

    A sum of the 1 / rate keys that count is rounded by as many halves of a unit, so is this one:
    the tokens before add nothing. The rates are no powers of 2: decay that is added to the maxima
    alone is off by 7e-5 here. The first key weighs e^99 times as much as the others; where the
    maxima forget nothing, those are 0.
    """
    one = State(jnp.full((1, 4), 0.7), jnp.ones((1, 4)), jnp.ones((1, 4, 2)))
    heavy = one._replace(maximum=one.maximum + 99)

    def step(_, state):
        faded = decay.faded(state, jnp.array([-rate], jnp.float32))
        return combine(faded, one)

    state = jax.jit(lambda x: jax.lax.fori_loop(0, 10**6, step, x))(heavy)
    size = np.asarray(state.normaliser, np.float64) * np.exp(np.asarray(state.maximum, np.float64))
    rate = float(np.float32(rate))
    np.testing.assert_allclose(size, np.exp(0.7) / -np.expm1(-rate), rtol=2**-24 / rate + 1e-6)
    np.testing.assert_allclose(state.numerator[..., 0], state.normaliser, rtol=1e-5)


PLACES = {
    "alone": {},
    "packed": {"segment_ids": np.repeat([[0, 1, 2]], [9, 1, 19], axis=1).repeat(2, axis=0)},
    "decaying": {"decay": random_decays(t=29)},
}


@pytest.mark.parametrize(
    ("is_causal", "place"),
    tiers(product([False, True], PLACES), [(False, "alone"), (False, "packed"), (True, "alone")]),
)
def test_a_chunk_has_several_windows(is_causal, place, small_chunks):
    """Three blocks of three chunks of 4 tokens, against float64: pairs and states meet exactly."""
    tokens = inputs(t=29, s=29)
    for window in (1, 2, 4, 5):
        given = dict(is_causal=is_causal, exact_window=window, **PLACES[place])
        want, bound = oracle(*tokens, with_bound=True, **given)
        error = np.abs(ours(*tokens, **given) - want).max(axis=-1)
        assert (error / (2.0**-24 * bound + 1e-30)).max() < 4, window


@pytest.mark.parametrize("lengths", [(1,) * 9, (2, 4, 3)])
def test_decayed_first_keys_in_pieces(lengths):
    """Pieces that begin within a window: first keys fade by the tokens since, in any piece."""
    tokens, log_decay = inputs(t=9, s=9), random_decays(t=9)
    exact = dict(exact_window=3, exact_first=2)
    attend, stream_by = partial(ours, is_causal=True, **exact), partial(ours_streamed, **exact)
    outputs, state, begin = [], None, 0
    for length in lengths:
        query, key, value, log = (x[:, begin : begin + length] for x in (*tokens[:3], log_decay))
        given = query, key, value, tokens[3]
        output, state = stream_by(*given, decay=log, state=state)
        outputs.append(output)
        begin += length
    close(jnp.concatenate(outputs, axis=1), attend(*tokens, decay=log_decay), 1e-5)


@pytest.mark.parametrize("lengths", [(14,), (3, 1, 10), (1,) * 14])
@pytest.mark.parametrize("decays", [False, True])
def test_padding_is_no_first_key(lengths, decays):
    """Padding on the left, of other lengths in each example, whole or in pieces."""
    *tokens, frequencies = inputs(t=14)
    mask = np.arange(14) >= np.array([[5], [2]])
    mask[1, 4] = False
    given = dict(mask=mask[:, None, None])
    if decays:
        given["decay"] = random_decays()
    attend = partial(ours_streamed, exact_window=3, exact_first=2)
    exact = dict(is_causal=True, exact_window=3, exact_first=2)
    first = np.cumsum(mask, axis=1) <= 2  # by definition, without the oracle's own count
    want = oracle(
        *tokens, frequencies, **given, is_causal=True, exact_window=3,
        exact_pairs=(first & mask)[:, None, None],
    )  # fmt: skip
    np.testing.assert_allclose(oracle(*tokens, frequencies, **given, **exact), want, atol=1e-12)
    outputs, state, begin = [], None, 0
    for length in lengths:
        end = begin + length
        pieces = {
            name: x[..., begin:end] if name == "mask" else x[:, begin:end]
            for name, x in given.items()
        }
        part = [x[:, begin:end] for x in tokens]
        output, state = attend(*part, frequencies, **pieces, state=state)
        outputs.append(output)
        begin = end
    close(jnp.concatenate(outputs, axis=1), want, 1e-5)
    if len(lengths) == 1:
        close(ours(*tokens, frequencies, **given, **exact), want, 1e-5)


def test_padding_is_no_first_key_of_a_segment():
    *tokens, frequencies = inputs(t=14)
    mask = np.ones((2, 14), bool)
    mask[0, :2] = mask[:, 5:7] = mask[1, 9] = False
    ids = np.repeat([[0, 1, 2]], [5, 3, 6], axis=1).repeat(2, axis=0)
    exact = dict(exact_window=2, exact_first=2, segment_ids=ids, mask=mask[:, None, None])
    for is_causal in (True, False):
        want = oracle(*tokens, frequencies, **exact, is_causal=is_causal)
        got = ours(*tokens, frequencies, **exact, is_causal=is_causal)
        close(got, want, 1e-5)


# Extremes


IDS = np.repeat([[0, 1, 2]], [5, 1, 8], axis=1).repeat(2, axis=0)


CASES = ["packed log-weights", "window", "alibi", "log-weights", "elu+1", "causal window"]


@pytest.mark.parametrize("case", tiers(CASES, 2))
def test_robust_attention_is_exact_for_any_norm(case, small_chunks):
    """Within the first-order bound of float32 up to norms where `blocked` loses rows.

    Those are NaN, and all others within the bound. With a window `robust` is the default.
    """
    given = dict(is_causal=True)
    if "packed" in case:
        given = dict(segment_ids=IDS)
    if "log-weights" in case:
        rng = np.random.default_rng(7)
        log_weights = 100 * rng.standard_normal((2, 14, 4)).astype(np.float32)
        log_weights[0, 3:6, 0] = -np.inf
        given["keys"] = log_weights
    elif "window" in case:
        given = dict(is_causal="causal" in case, exact_window=2)
    elif case == "alibi":
        given["slopes"] = SLOPES
    else:
        given["feature_map"] = case
    robust = None if "window" in case else "robust"
    ratios = {robust: [], "blocked": []}
    for norm in (1.0, 20.0, 60.0, 1e3):
        tokens = far_apart(norm)
        if "window" in case:  # all keys opposite to all queries: near and far ones count alike
            query = jnp.broadcast_to(tokens[0][:, :1], tokens[0].shape)
            tokens = query, -query, *tokens[2:]
        want, bound = oracle(*tokens, scale=1.0, with_bound=True, **given)
        for implementation, of_norms in ratios.items():
            got = ours(*tokens, implementation=implementation, scale=1.0, **given)
            error = np.abs(got - want).max(axis=-1)
            of_norms.append(error / (2.0**-24 * bound + 1e-30))
    assert np.max(ratios[robust]) < 4
    assert np.nanmax(ratios["blocked"]) < 4
    assert "log-weights" in case or not np.isnan(ratios["blocked"][0]).any()
    assert case == "elu+1" or np.isnan(ratios["blocked"]).any()  # what it is for


def test_lost_rows_of_features_with_factors():
    """elu(q) + 1 = (e^-80, 6) and elu(k) + 1 = (1 + a, e^-80): the kernel is (7 + a) e^-80."""
    a = np.array([1.0, 30.0, 9.0])
    key = jnp.asarray(np.stack([a, np.full(3, -80.0)], axis=-1)[None, :, None], jnp.float32)
    query = jnp.broadcast_to(jnp.array([-80.0, 5.0]), key.shape)
    options: dict = dict(feature_map="elu+1", scale=1.0, is_causal=True, implementation="robust")
    got = ours(query, key, jnp.eye(3)[None, :, None], jnp.eye(2), **options)
    want = np.tril(np.tile(7 + a, (3, 1)))
    np.testing.assert_allclose(got[0, :, 0], want / want.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("feature_map", "is_causal"),
    tiers([("positive", True), ("relu", True), ("positive", False)], 1),
)
def test_huge_log_weights(feature_map, is_causal, small_chunks):
    """A key that outweighs all others is all that counts where it is seen; alone, any counts."""
    query, key, value, frequencies = inputs(t=9)
    frequencies, query, key = (jnp.abs(x) for x in (frequencies, query, key))  # relu: no zeros
    attend = partial(ours, is_causal=is_causal, feature_map=feature_map)
    for of_one, of_others in [(1e4, 0.0), (0.0, -1e4), (1e4, -1e4), (-1e30, -np.inf)]:
        log_weights = np.where(np.arange(9) == 4, of_one, of_others).astype(np.float32)
        got = attend(query, key, value, frequencies, keys=log_weights)
        one = np.repeat(np.broadcast_to(value[:, 4:5], value.shape), 2, axis=2)
        close(got[:, 4:], one[:, 4:])
        if is_causal and of_others > -np.inf:
            before = attend(*(x[:, :4] for x in (query, key, value)), frequencies)
            close(got[:, :4], before, 1e-3)  # e^1e4 times a key: float32 knows 1e4 to 1e-3
        elif is_causal:
            np.testing.assert_array_equal(got[:, :4], 0)


@pytest.mark.parametrize("is_causal", [True, False])
def test_without_features_a_window_is_softmax_of_its_pairs(is_causal):
    """In float64; streamed in two pieces if causal; gradients are finite."""
    query, key, value, _ = inputs(t=12, s=12)
    options: dict = dict(is_causal=is_causal, exact_window=3, exact_first=1)
    chunk = np.arange(12) // 3
    near = (abs(chunk[:, None] - chunk) <= 1) | (np.arange(12) < 1)
    near &= np.tri(12, dtype=bool) if is_causal else True
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    weights = np.where(near, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    want = np.einsum("bnts,bsnv->btnv", weights / weights.sum(-1, keepdims=True), v)
    attend = partial(ours, **options)
    close(attend(query, key, value, None), want)
    slope = jax.grad(lambda q: jnp.sum(attend(q, key, value, None) ** 2))(query)
    assert np.isfinite(slope).all()
    if is_causal:
        halves = zip(*(jnp.split(x, 2, axis=1) for x in (query, key, value)), strict=True)
        outputs, state = [], None
        for tokens in halves:
            output, state = ours_streamed(*tokens, None, state=state, **options)
            outputs.append(output)
        close(jnp.concatenate(outputs, axis=1), want)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("weight", [0.0, 30.0, 160.0])
def test_a_chosen_key_leaves_the_others_their_digits(weight, fits, monkeypatch):
    """Its features, up to e^80 times the others', are in the sums that choose it.

    Half of the queries are opposite to it.
    """
    query, key, value, frequencies = inputs(t=12, n=2, k=2, m=64)
    along = jnp.zeros(8).at[0].set(weight**0.5 * 8**0.25)
    key = key.at[:, 3].set(-along)
    query = query.at[:, ::2].set(0.3 * query[:, ::2] + along)
    log_weights = np.zeros((2, 12), np.float32)
    log_weights[:, 3] = weight + 5
    if not fits:
        monkeypatch.setattr(sizes, "AT_ONCE", 0)
    options = dict(exact_keys=1, keys=log_weights)
    attend = partial(ours, key=key, value=value, frequencies=frequencies, **options)
    want = oracle(query, key, value, frequencies, **options)
    np.testing.assert_allclose(attend(query), want, atol=1e-4)
    gradient = jax.grad(lambda query: jnp.sum(attend(query)[:, ::2] ** 2))(query)
    assert np.isfinite(gradient).all()
