"""performer_attention with ALiBi and with decay, against a float64 oracle of all pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import performer_attention
from performer.attention import _decay
from performer.attention.state import State, combine
from tests.attention_inputs import close, inputs
from tests.attention_pairs import allowed, near, oracle

SLOPES = np.array([0.5, 0.3, 0.0, 2.0], np.float32)


def alibi(t, slopes=SLOPES):
    """Press et al. 2022: -slope |i - j|."""
    i = np.arange(t)
    return -np.asarray(slopes, np.float64)[None, :, None, None] * np.abs(i[:, None] - i)


def decay_of_pairs(log_decay):
    """a_(j+1) + ... + a_i, pair by pair."""
    log_decay = np.asarray(log_decay, np.float64)
    b, t, n = log_decay.shape
    out = np.zeros((b, n, t, t))
    for i, j in np.ndindex(t, t):
        between = log_decay[:, min(i, j) + 1 : max(i, j) + 1]
        out[:, :, i, j] = between.sum(axis=1)
    return out


def random_decays(b=2, t=14, n=2, seed=0):
    rng = np.random.default_rng(seed)
    return -rng.exponential(0.2, (b, t, n)).astype(np.float32)


def none(t):
    return np.zeros((t, t), bool)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_alibi(is_causal, window):
    """A slope for each query head, though they share keys; a chunk of 64 is longer and shorter."""
    for t in (1, 14, 70) if window == 0 else (1, 14):
        tokens = inputs(t=t)
        exact = near(t, window, 1, is_causal) if window else none(t)
        got = performer_attention(
            *tokens,
            is_causal=is_causal,
            alibi_slopes=SLOPES,
            exact_window=window,
            exact_first=int(window > 0),
        )
        close(got, oracle(*tokens, exact, allowed(t, is_causal), bias=alibi(t)))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_decay_of_the_data(is_causal, window):
    """For each key head, with gates that close; beside masks and log-weights of keys."""
    for t in (14,) if window else (14, 70):  # chunks are 64 long
        tokens, log_decay = inputs(t=t), random_decays(t=t)
        log_decay[0, 6] = log_decay[1, t - 5, 1] = -np.inf
        log_decay[1, 3] = -60.0
        log_weights = np.random.default_rng(1).standard_normal((2, t, 2)).astype(np.float32)
        log_weights[0, 2] = -np.inf
        bias = decay_of_pairs(log_decay).repeat(2, axis=1)
        exact = near(t, window, 2, is_causal) if window else none(t)
        options = dict(exact_window=window, exact_first=2) if window else {}
        got = performer_attention(
            *tokens,
            is_causal=is_causal,
            log_decay=log_decay,
            key_log_weights=log_weights,
            **options,
        )
        pairs = exact, allowed(t, is_causal)
        close(got, oracle(*tokens, *pairs, bias=bias, log_weights=log_weights))


@pytest.mark.parametrize("is_causal", [True, False])
def test_within_the_window_it_is_softmax_with_the_bias(is_causal):
    query, key, value, frequencies = inputs(t=24, k=4)
    value = jnp.concatenate([value, value[..., :3]], axis=-1)
    bias = jnp.asarray(alibi(24), jnp.float32)
    want = jax.nn.dot_product_attention(query, key, value, bias, is_causal=is_causal)
    got = performer_attention(
        query,
        key,
        value,
        frequencies,
        is_causal=is_causal,
        alibi_slopes=SLOPES,
        exact_window=24,
    )
    close(got, want, 1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 3])
def test_segments_count_their_own_tokens(is_causal, window):
    tokens = inputs(t=17)
    ids = np.stack([np.arange(17) * 3 // 17, np.random.default_rng(0).integers(0, 4, 17)])
    options = dict(exact_window=window, exact_first=1) if window else {}
    got = performer_attention(
        *tokens, segment_ids=ids, is_causal=is_causal, alibi_slopes=SLOPES, **options
    )
    exact, seen, bias = [], [], []
    for row in ids:
        place = np.argsort(np.argsort(row, kind="stable"), kind="stable")
        rank = np.array([np.sum((row == row[i]) & (np.arange(17) < i)) for i in range(17)])
        exact.append(near(17, 3, 0, False, place) | (rank < 1) if window else none(17))
        seen.append((row[:, None] == row) & allowed(17, is_causal))
        bias.append(-SLOPES[:, None, None] * np.abs(rank[:, None] - rank))
    close(got, oracle(*tokens, np.stack(exact), np.stack(seen), bias=np.stack(bias)))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("pieces", [(5, 9), (1,) * 14, (4, 1, 1, 7, 1)])
def test_streaming(pieces, window):
    """A state fades over chunks without a key, too: whole ones of 3 are masked."""
    query, key, value, frequencies = tokens = inputs(t=14)
    log_decay, mask = random_decays(), np.ones((2, 14), bool)
    log_decay[0, 7] = -np.inf
    mask[0, 6:9] = mask[1, 2:10] = False
    options = dict(is_causal=True, exact_window=window, exact_first=2 if window else 0)
    exact = near(14, window, 2) if window else none(14)
    weights = np.where(mask, 0, -np.inf)[..., None].repeat(2, axis=-1)
    bias = decay_of_pairs(log_decay).repeat(2, axis=1)
    want = oracle(*tokens, exact, allowed(14, True), bias=bias, log_weights=weights)
    attend = jax.jit(partial(performer_attention, return_state=True, **options))
    outputs, state, start = [], None, 0
    for length in pieces:
        part = slice(start, start + length)
        output, state = attend(
            *(x[:, part] for x in (query, key, value)),
            frequencies,
            mask=mask[:, None, None, part],
            log_decay=log_decay[:, part],
            initial_state=state,
        )
        outputs.append(output)
        start += length
    close(jnp.concatenate(outputs, axis=1), want)


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
        faded = _decay.faded(state, jnp.array([-rate], jnp.float32))
        return combine(faded, one)

    state = jax.jit(lambda x: jax.lax.fori_loop(0, 10**6, step, x))(heavy)
    size = np.asarray(state.normaliser, np.float64) * np.exp(np.asarray(state.maximum, np.float64))
    rate = float(np.float32(rate))
    np.testing.assert_allclose(size, np.exp(0.7) / -np.expm1(-rate), rtol=2**-24 / rate + 1e-6)
    np.testing.assert_allclose(state.numerator[..., 0], state.normaliser, rtol=1e-5)


@pytest.mark.parametrize(("window", "first"), [(0, 0), (4, 2), (4, 11)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_split_over_devices(is_causal, window, first, eight_devices):
    """A device has 8 tokens: the first 11 keys lie on two of them."""
    tokens, log_decay = inputs(t=32), jnp.asarray(random_decays(t=32))
    log_decay = log_decay.at[0, 11].set(-jnp.inf)
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "s")
    options = dict(is_causal=is_causal, exact_window=window, exact_first=first)

    def attend(query, key, value, frequencies, log_decay, axis_name=None):
        return performer_attention(
            query, key, value, frequencies, log_decay=log_decay, axis_name=axis_name, **options
        )

    split = jax.shard_map(
        partial(attend, axis_name="s"),
        mesh=mesh,
        in_specs=(spec, spec, spec, jax.P(), spec),
        out_specs=spec,
    )
    close(jax.jit(split)(*tokens, log_decay), attend(*tokens, log_decay))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients(is_causal, window):
    """Of the decays and of the tokens, against differences of the oracle in float64."""
    tokens, log_decay = inputs(t=14), random_decays()
    options = dict(is_causal=is_causal, exact_window=window, exact_first=1 if window else 0)
    exact = near(14, window, 1, is_causal) if window else none(14)

    def loss(log_decay, *tokens):
        return jnp.sum(jnp.sin(performer_attention(*tokens, log_decay=log_decay, **options)))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(log_decay, *tokens)
    wide = [np.asarray(x, np.float64) for x in (log_decay, *tokens)]
    for number in range(4):
        along = np.random.default_rng(number).standard_normal(wide[number].shape)

        def moved(step, number=number, along=along):
            decay, *rest = (x + step * along if i == number else x for i, x in enumerate(wide))
            bias = decay_of_pairs(decay).repeat(2, axis=1)
            return np.sin(oracle(*rest, exact, allowed(14, is_causal), bias=bias)).sum()

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        size = np.linalg.norm(gradients[number])
        assert abs(np.vdot(gradients[number], along) - slope) < 1e-4 * size, number
        assert size > 0.02


@pytest.mark.optimised("asserts bits")
@pytest.mark.parametrize("window", [0, 3])
def test_the_future_changes_nothing_bit_for_bit(window):
    query, key, value, frequencies = inputs(t=14)
    log_decay = jnp.asarray(random_decays())
    attend = partial(
        performer_attention, is_causal=True, exact_window=window, exact_first=1 if window else 0
    )
    want = attend(query, key, value, frequencies, log_decay=log_decay)
    for last in range(1, 14, 4):
        changed = [x.at[:, last:].multiply(-7.0) for x in (query, key, value)]
        got = attend(*changed, frequencies, log_decay=log_decay.at[:, last:].multiply(3.0))
        np.testing.assert_array_equal(got[:, :last], want[:, :last])


def test_other_features_and_a_second_look():
    """Kernels that are no softmax fade as well, and so do rows that `robust` forms again."""
    tokens = inputs(t=14)
    bias = alibi(14)
    matrix = np.einsum(
        "btnm,bsnm->bnts",
        *(
            np.maximum(np.einsum("btnh,mh->btnm", x.repeat(r, axis=2), tokens[3]), 0)
            for x, r in zip(map(np.asarray, tokens[:2]), (1, 2), strict=True)
        ),
    )
    matrix = np.where(allowed(14, True), matrix * np.exp(bias), 0)
    total = matrix.sum(axis=-1, keepdims=True)
    matrix = matrix / np.where(total == 0, 1, total)
    want = np.einsum("bnts,bsnv->btnv", matrix, np.asarray(tokens[2]).repeat(2, axis=2))
    got = performer_attention(*tokens, is_causal=True, alibi_slopes=SLOPES, feature_map="relu")
    close(got, want)
    large = inputs(t=14, scale=30.0)
    got = performer_attention(
        *large, is_causal=True, alibi_slopes=SLOPES, implementation="robust", scale=1.0
    )
    close(got, oracle(*large, none(14), allowed(14, True), bias=bias, scale=1.0), 1e-3)


REFUSED = {
    "pass one": dict(alibi_slopes=SLOPES, log_decay=np.zeros((2, 5, 2), np.float32)),
    r"alibi_slopes has shape \(3,\)": dict(alibi_slopes=SLOPES[:3]),
    "the entry -0.5; expected finite floats": dict(alibi_slopes=-SLOPES),
    r"log_decay has shape \(2, 4, 2\)": dict(log_decay=np.zeros((2, 4, 2), np.float32)),
    "the entry 1.0; expected floats": dict(log_decay=np.ones((2, 5, 2), np.float32)),
    "the entry nan; expected floats": dict(log_decay=np.full((2, 5, 2), np.nan, np.float32)),
    "stabilizer='exact', got 'google'": dict(alibi_slopes=SLOPES, stabilizer="google"),
    "state in causal attention alone": dict(alibi_slopes=SLOPES, return_state=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        performer_attention(*inputs(t=5), **REFUSED[message])


def test_states_with_and_without_decay_are_told_apart():
    tokens = inputs(t=4)
    attend = partial(
        performer_attention, *tokens, is_causal=True, return_state=True, exact_window=2
    )
    _, state = attend(alibi_slopes=SLOPES)
    with pytest.raises(ValueError, match="both have alibi_slopes or log_decay, or neither"):
        attend(initial_state=state)
    with pytest.raises(ValueError, match="one key for each query"):
        performer_attention(*inputs(t=4, s=5), alibi_slopes=SLOPES)
