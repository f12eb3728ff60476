"""performer_attention: heads, feature maps, masks, packed segments, causal and streaming attention.

Everything against float64 oracles that form every pair of tokens.
"""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import performer
from performer import performer_attention
from performer.attention import attention_weights, op, sweep
from tests import oracles

H, V, M = 8, 5, 12
MAPS = ("positive", "hyperbolic", "trigonometric", "relu", "elu+1")


def inputs(b=2, t=7, s=None, n=4, k=2, frequency_heads=None, scale=1.0, seed=0):
    s = t if s is None else s
    rng = np.random.default_rng(seed)  # NumPy's: nothing to compile for each new shape
    lead = (M, H) if frequency_heads is None else (frequency_heads, M, H)
    shapes = [(b, t, n, H), (b, s, k, H), (b, s, k, V), lead]
    query, key, value, frequencies = (rng.standard_normal(shape, np.float32) for shape in shapes)
    scale = np.float32(scale)
    return tuple(map(jnp.asarray, (scale * query, scale * key, value, frequencies)))


# Where only what a transformation makes of a program counts, or the program is not run at all.
QUICKLY = {"xla_backend_optimization_level": 0}


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def causal(t, s=None):
    return np.tril(np.ones((1, t, t if s is None else s), bool))


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 tokens and blocks of three chunks, so that short sequences have many."""
    monkeypatch.setattr(op, "_block_sizes", lambda *_: (4, 12))


# Heads and shapes


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("k", "frequency_heads"),
    [(1, None), (1, 1), (1, 4), (2, None), (2, 2), (2, 4), (4, None), (4, 4)],
)
def test_grouped_heads(k, frequency_heads, is_causal):
    args = inputs(k=k, frequency_heads=frequency_heads)
    want = oracles.kernel_attention(*args, allowed=causal(7) if is_causal else None)
    close(performer_attention(*args, is_causal=is_causal), want)


@pytest.mark.parametrize(("t", "s"), [(3, 9), (9, 3), (1, 9), (9, 1)])
def test_cross_attention(t, s):
    """A causal query sees the keys up to its own number, as in jax.nn.dot_product_attention."""
    args = inputs(t=t, s=s)
    close(performer_attention(*args), oracles.kernel_attention(*args))
    want = oracles.kernel_attention(*args, allowed=causal(t, s))
    close(performer_attention(*args, is_causal=True), want)


def test_any_number_of_batch_axes():
    query, key, value, frequencies = inputs(b=6)
    lengths = jnp.array([7, 5, 1, 0, 2, 3])
    segments = jax.random.randint(jax.random.key(3), (6, 7), 0, 2)
    for options in [{}, dict(key_value_seq_lengths=lengths), dict(segment_ids=segments)]:
        want = performer_attention(query, key, value, frequencies, **options)
        two = {name: x.reshape(2, 3, *x.shape[1:]) for name, x in options.items()}
        got = performer_attention(
            *(x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value)), frequencies, **two
        )
        np.testing.assert_array_equal(got.reshape(want.shape), want)
        none = {name: x[1] for name, x in options.items()}
        got = performer_attention(query[1], key[1], value[1], frequencies, **none)
        close(got, want[1])
    _, state = performer_attention(
        query[0], key[0], value[0], frequencies, is_causal=True, return_state=True
    )
    assert state.maximum.shape == (2, M)
    assert state.numerator.shape == (2, M, V)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps_and_weights(feature_map, is_causal, small_chunks):
    args = inputs(t=17, frequency_heads=2, scale=0.7)
    # Without weights, causal attention with every map is tested by streaming and packed segments.
    choices = [jnp.arange(2.0 * M).reshape(2, M)] + [None] * (not is_causal)
    if feature_map in ("positive", "relu"):  # of each kind, in the exponent and as a factor
        choices.append(jnp.arange(M, dtype=jnp.float32))
    for weights in choices:
        options = dict(feature_map=feature_map, weights=weights)
        want = oracles.kernel_attention(*args, allowed=causal(17) if is_causal else None, **options)
        got = performer_attention(*args, is_causal=is_causal, **options)
        # Trigonometric kernels cancel: their rows lose digits where the sum is small.
        close(got, want, 2e-3 if feature_map == "trigonometric" else 2e-5)


def test_hyperbolic_is_antithetic_positive():
    query, key, value, frequencies = inputs()
    both = jnp.concatenate([frequencies, -frequencies])
    close(
        performer_attention(query, key, value, frequencies, feature_map="hyperbolic"),
        performer_attention(query, key, value, both),
    )


def test_linear_attention_of_katharopoulos():
    query, key, value, _ = inputs(k=4)
    got = performer_attention(query, key, value, jnp.eye(H), scale=1.0, feature_map="elu+1")
    phi_q, phi_k = (np.asarray(jax.nn.elu(x) + 1, np.float64) for x in (query, key))
    kernel = np.einsum("btnh,bsnh->bnts", phi_q, phi_k)
    kernel /= kernel.sum(axis=-1, keepdims=True)
    close(got, np.einsum("bnts,bsnv->btnv", kernel, np.asarray(value, np.float64)))


@pytest.mark.parametrize("feature_map", ["positive", "hyperbolic", "trigonometric"])
def test_shift_moves_the_keys_and_not_the_limit(feature_map):
    query, key, value, frequencies = inputs(k=4)
    shift = jnp.stack([0.3 * jnp.ones(H)] * 4) * jnp.arange(4)[:, None]
    options = dict(feature_map=feature_map)
    close(
        performer_attention(query, key, value, frequencies, shift=shift, **options),
        oracles.kernel_attention(query, key - shift, value, frequencies, **options),
        2e-3 if feature_map == "trigonometric" else 2e-5,
    )
    many = performer.couplings.get("orf")(jax.random.key(0), 16384, H)
    small = [0.5 * x for x in (query, key)]
    exact = oracles.softmax_attention(*(np.asarray(x, np.float64) for x in (*small, value)))
    got = performer_attention(*small, value, many, shift=shift, **options)
    assert np.linalg.norm(got - exact) < 0.05 * np.linalg.norm(exact)


def test_attention_weights_are_the_matrix():
    query, key, value, frequencies = inputs(t=3, s=9)
    matrix = attention_weights(query, key, frequencies)
    assert matrix.shape == (2, 4, 3, 9)
    grouped = matrix.reshape(2, 2, 2, 3, 9)
    got = jnp.einsum("bkgts,bskv->btkgv", grouped, value).reshape(2, 3, 4, V)
    close(got, performer_attention(query, key, value, frequencies))


# Masks and segments


@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_lengths_and_removed_keys_are_the_same(is_causal, small_chunks):
    query, key, value, frequencies = inputs(t=9)
    lengths = np.array([4, 0])
    mask = np.arange(9) < lengths[:, None]
    allowed = mask[:, None] & causal(9) if is_causal else np.repeat(mask[:, None], 9, axis=1)
    want = oracles.kernel_attention(query, key, value, frequencies, allowed=allowed)
    masks = [dict(key_value_seq_lengths=lengths)]
    masks += [dict(mask=mask[:, None, None].astype(dtype)) for dtype in (bool, np.float32)]
    masks += [dict(mask=mask[:, None, None], key_value_seq_lengths=9)]
    for options in masks:
        got = performer_attention(query, key, value, frequencies, is_causal=is_causal, **options)
        close(got, want)
        np.testing.assert_array_equal(got[1], 0)
    if not is_causal:
        removed = performer_attention(query[:1], key[:1, :4], value[:1, :4], frequencies)
        close(got[:1], removed)


def test_padding_changes_nothing(small_chunks):
    """Padded tokens at the end, masked, whatever they hold: the same outputs."""
    query, key, value, frequencies = inputs(t=10)
    pads = [(0, 0), (0, 7), (0, 0), (0, 0)]
    junk = [jnp.asarray(np.pad(x, pads, constant_values=50.0)) for x in (query, key, value)]
    mask = np.arange(17)[None, None, None] < 10
    for is_causal in (False, True):
        want = performer_attention(query, key, value, frequencies, is_causal=is_causal)
        got = performer_attention(*junk, frequencies, mask=mask, is_causal=is_causal)[:, :10]
        close(got, want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_stands_at_masked_keys_does_not_matter(is_causal, small_chunks):
    """Not even if it is no number, in outputs and in gradients."""
    query, key, value, frequencies = inputs(t=9)
    mask = jnp.arange(9) < 5
    options = dict(mask=mask[None, None, None])

    @jax.jit
    def run(key, value):
        def loss(*args):
            out = performer_attention(*args, frequencies, is_causal=is_causal, **options)
            return jnp.sum(out**2), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    want = run(key, value)
    for junk in (np.nan, np.inf, 1e4):
        dirty = [jnp.where(mask[:, None, None], x, junk) for x in (key, value)]
        chex.assert_trees_all_equal(run(*dirty), want)


def test_keys_may_come_in_any_order():
    query, key, value, frequencies = inputs(t=9)
    order = jax.random.permutation(jax.random.key(1), 9)
    want = performer_attention(query, key, value, frequencies)
    close(performer_attention(query, key[:, order], value[:, order], frequencies), want)
    close(performer_attention(query[:, order], key, value, frequencies), want[:, order])


@pytest.mark.parametrize("feature_map", ["positive", "trigonometric", "relu"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_segments(is_causal, feature_map, small_chunks):
    args = inputs(t=29, frequency_heads=2)
    sorted_ids = np.repeat([0, 3, 4, 9], [11, 1, 9, 8])
    ids = np.stack([sorted_ids, np.random.default_rng(0).permutation(sorted_ids)])
    allowed = ids[:, :, None] == ids[:, None]
    allowed = allowed & causal(29) if is_causal else allowed
    options = dict(feature_map=feature_map)
    want = oracles.kernel_attention(*args, allowed=allowed, **options)
    got = performer_attention(*args, segment_ids=ids, is_causal=is_causal, **options)
    close(got, want, 2e-3 if feature_map == "trigonometric" else 1e-5)


def test_packed_cross_attention(small_chunks):
    query, key, value, frequencies = inputs(t=6, s=23)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 4, (2, 6)), rng.integers(1, 5, (2, 23))
    mask = rng.random((2, 23)) < 0.7
    allowed = (ids[0][:, :, None] == ids[1][:, None]) & mask[:, None]
    got = performer_attention(
        query, key, value, frequencies, segment_ids=ids, mask=mask[:, None, None]
    )
    close(got, oracles.kernel_attention(query, key, value, frequencies, allowed=allowed))
    assert (np.asarray(got)[ids[0] == 0] == 0).all()  # no key has the number 0


# Causal attention and streaming


@pytest.mark.parametrize("t", [1, 3, 4, 5, 12, 13, 40])
def test_causal_of_any_length(t, small_chunks):
    args = inputs(t=t)
    want = oracles.kernel_attention(*args, allowed=causal(t))
    close(performer_attention(*args, is_causal=True), want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_implementations_agree(is_causal):
    """On 700 tokens, which make several blocks of several chunks."""
    args = inputs(b=4, t=700)
    attend = partial(performer_attention, *args, is_causal=is_causal)
    blocked = attend(implementation="blocked")
    np.testing.assert_array_equal(attend(), blocked)
    close(attend(implementation="direct"), blocked, 2e-5)


@pytest.mark.parametrize("feature_map", MAPS)
def test_the_future_changes_nothing_bit_for_bit(feature_map, small_chunks):
    query, key, value, frequencies = inputs(t=30)
    attend = partial(
        performer_attention, frequencies=frequencies, is_causal=True, feature_map=feature_map
    )
    before = attend(query, key, value)
    for t in (1, 4, 13, 29):
        after = attend(*(x.at[:, t:].set(100 * x[:, t:] + 7) for x in (query, key, value)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.allclose(after[:, t:], before[:, t:])


def adversarial(t=64):
    """Early keys so long that late ones' kernels dwarf theirs by e^100, in one chunk of 64."""
    query, key, value, frequencies = inputs(t=t, k=4)
    return query, key.at[:, : t // 2].multiply(9.0), value, frequencies


def test_early_queries_keep_their_precision():
    args = adversarial()
    want = oracles.kernel_attention(*args, allowed=causal(64))
    got = performer_attention(*args, is_causal=True)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("scale", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_relative_error_against_float64(is_causal, scale):
    """C10 of the targets: at most 1e-5 for unit normal q, k times 1, 3 and 5 (head_dim 64)."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 96, 1, 64)) for k in keys[:3])
    frequencies = performer.couplings.get("orf")(keys[3], 128, 64)
    args = (scale * query, scale * key, value, frequencies)
    want = oracles.kernel_attention(*args, allowed=causal(96) if is_causal else None)
    got = performer_attention(*args, is_causal=is_causal)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("feature_map", ["positive", "hyperbolic", "relu", "elu+1"])
def test_streaming_gives_the_same_numbers(feature_map, small_chunks):
    args = inputs(t=21, frequency_heads=2)
    query, key, value, frequencies = args
    options = dict(is_causal=True, feature_map=feature_map)
    want = performer_attention(*args, **options)
    attend = partial(performer_attention, frequencies=frequencies, return_state=True, **options)
    outputs, state, start = [], None, 0
    for size in (10, 5, 1, 1, 1, 2, 1) if feature_map == "positive" else (10, 10, 1):
        part = slice(start, start + size)
        out, state = attend(query[:, part], key[:, part], value[:, part], initial_state=state)
        outputs.append(out)
        start += size
        assert state.numerator.shape == (2, 2, 24 if feature_map == "hyperbolic" else 12, V)
    assert start == 21
    close(jnp.concatenate(outputs, axis=1), want)


def test_states_serve_bidirectional_attention_and_combine():
    query, key, value, frequencies = inputs(t=12)
    attend = partial(performer_attention, frequencies=frequencies, return_state=True)
    want, whole = attend(query, key, value)
    _, first = attend(query, key[:, :5], value[:, :5])
    got, both = attend(query, key[:, 5:], value[:, 5:], initial_state=first)
    close(got, want)
    _, second = attend(query, key[:, 5:], value[:, 5:])
    combined = performer.attention.combine(first, second)
    chex.assert_trees_all_close(combined, whole, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(both, whole, rtol=1e-5, atol=1e-5)


def test_no_keys_at_all():
    """Zeros; and with a state, the queries see what it holds."""
    query, key, value, frequencies = inputs(t=5)
    nothing = performer_attention(query, key[:, :0], value[:, :0], frequencies)
    np.testing.assert_array_equal(nothing, jnp.zeros_like(nothing))
    want, state = performer_attention(query, key, value, frequencies, return_state=True)
    got = performer_attention(query, key[:, :0], value[:, :0], frequencies, initial_state=state)
    close(got, want)


# Stabilisers


@pytest.mark.parametrize("is_causal", [False, True])
def test_google_is_the_public_algorithm(is_causal, small_chunks):
    args = inputs(t=14, k=4, scale=2.0)
    want = oracles.public_attention(*args, is_causal=is_causal)
    got = performer_attention(*args, is_causal=is_causal, stabilizer="google")
    close(got, want, 3e-5)


def test_google_is_biased_and_looks_into_the_future():
    """Far from the estimate it claims to compute; early outputs move with the last key alone."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 64, 1, 64)) for k in keys[:3])
    frequencies = performer.couplings.get("orf")(keys[3], 128, 64)
    attend = partial(performer_attention, frequencies=frequencies, scale=0.25)
    exact, google = (attend(query, key, value, stabilizer=s) for s in ("exact", "google"))
    assert np.linalg.norm(google - exact) > 0.5 * np.linalg.norm(exact)
    attend = partial(attend, is_causal=True, stabilizer="google")
    early = attend(query, key, value)[:, :32]
    moved = attend(query, key.at[:, -1].multiply(3.0), value)[:, :32]
    assert np.linalg.norm(moved - early) > 0.5 * np.linalg.norm(early)


# Precision, extremes, transformations

EVERY = np.ones((2, 1, 1, 9), np.int32)
OPTIONS = {
    "bidirectional": ({}, None),
    "causal": (dict(is_causal=True), None),
    "packed": (dict(segment_ids=np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2]] * 2)), None),
    "masked": ({}, np.array([[1] * 4 + [0] * 5, [0] * 9])),
    "causal, masked": (dict(is_causal=True), np.array([[0, 0, 1, 0, 0, 1, 1, 1, 0], [0] * 9])),
}
# One program of each map serves a mask and no mask, where all keys exist; without any array for
# the mask the programs are of two maps, one with its features in the exponent, one as factors.
FINITE = [
    (options, feature_map)
    for options in OPTIONS
    for feature_map in MAPS
    if options not in ("bidirectional", "causal") or feature_map in ("positive", "relu")
]


@pytest.mark.parametrize(("name", "feature_map"), FINITE)
def test_finite_for_any_finite_input(name, feature_map, small_chunks):
    """Outputs and gradients, norms from 0 to 10^4, equal keys; rows that see keys sum to 1."""
    query, key, value, frequencies = inputs(t=9, k=4)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    options, mask = OPTIONS[name]
    masks = [None] if mask is None else [mask[:, None, None], EVERY]

    @jax.jit
    def run(query, key, value, mask):
        def loss(*args):
            out = performer_attention(
                *args, frequencies, feature_map=feature_map, mask=mask, **options
            )
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    cases = [(norm * unit[0], norm * unit[1]) for norm in (0.0, 1.0, 30.0, 1e2, 1e4)]
    cases += [(query, jnp.broadcast_to(key[:, :1], key.shape)), (1e3 * query, -1e3 * query)]
    for (q, k), mask in itertools.product(cases, masks):
        gradients, out = run(q, k, value, mask)
        chex.assert_tree_all_finite((out, gradients))
        if feature_map in ("positive", "hyperbolic"):
            sums = np.asarray(out[..., -1])
            assert np.all(np.isclose(sums, 1, rtol=1e-5) | (sums == 0))
            if mask is None or mask is EVERY:
                np.testing.assert_allclose(sums, 1, rtol=1e-5)


@pytest.mark.parametrize("norm", [1.0, 1e2, 1e4])
def test_one_key_is_returned_whatever_its_norm(norm, small_chunks):
    query, key, value, frequencies = inputs(t=6, k=4)
    first = performer_attention(norm * query, -norm * key, value, frequencies, is_causal=True)
    close(first[:, 0], value[:, 0])
    one = performer_attention(norm * query, -norm * key[:, :1], value[:, :1], frequencies)
    close(one, jnp.broadcast_to(value[:, :1], value.shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision(dtype, is_causal):
    """The output has the dtype of the values, the state is float32, errors are of rounding."""
    args = [x.astype(dtype) for x in inputs(t=70)]
    out, state = performer_attention(*args, is_causal=is_causal, return_state=True)
    assert out.dtype == dtype
    assert {x.dtype for x in state} == {jnp.dtype(jnp.float32)}
    want = performer_attention(*(x.astype(jnp.float32) for x in args), is_causal=is_causal)
    assert np.linalg.norm(out.astype(jnp.float32) - want) < 0.02 * np.linalg.norm(want)
    huge = [1e4 * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in inputs(t=70)[:2]]

    def loss(q, k):
        out = performer_attention(q, k, *args[2:], is_causal=is_causal)
        return jnp.sum(out.astype(jnp.float32))

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    chex.assert_tree_all_finite(run(*(x.astype(dtype) for x in huge)))


def plain(query, key, value, frequencies, allowed):
    """The estimate with no stabiliser at all, for float64."""
    root = query.shape[-1] ** -0.25
    phi_q, phi_k = (
        jnp.exp(
            jnp.einsum("bsnh,mh->bnsm", root * x, frequencies)
            - jnp.sum((root * x) ** 2, -1).swapaxes(1, 2)[..., None] / 2
        )
        for x in (query, key)
    )
    kernel = jnp.where(allowed, phi_q @ phi_k.swapaxes(-1, -2), 0)
    return jnp.einsum("bnts,bsnv->btnv", kernel / kernel.sum(-1, keepdims=True), value)


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), "segments"], ids=str)
def test_gradients_against_float64(options, small_chunks):
    args = inputs(t=22, n=2, k=2)
    allowed = np.ones((1, 1, 22, 22), bool)
    if options == "segments":
        ids = np.repeat([[1, 2, 3]], [5, 9, 8], axis=1)
        allowed, options = ids[:, None, :, None] == ids[:, None, None], dict(segment_ids=ids)
        options["segment_ids"] = np.repeat(ids, 2, axis=0)
    elif options:
        allowed = causal(22)[:, None]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        loss = lambda *a: jnp.sum(jnp.sin(plain(*a, allowed)))  # noqa: E731
        oracle = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), compiler_options=QUICKLY)
        want = oracle(*wide)
        want = [np.asarray(x) for x in want]
    loss = lambda *a: jnp.sum(jnp.sin(performer_attention(*a, **options)))  # noqa: E731
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
    for mine, exact in zip(got, want, strict=True):
        assert np.linalg.norm(mine - exact) < 2e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transformations(is_causal, small_chunks):
    """Forward mode, reverse over forward, remat, vmap and scan give one and the same."""
    query, key, value, frequencies = inputs(t=14)

    def attend(query):
        return performer_attention(query, key, value, frequencies, is_causal=is_causal)

    def loss(query):
        return jnp.sum(jnp.sin(attend(query)))

    quickly = partial(jax.jit, compiler_options=QUICKLY)
    along = lambda f: quickly(lambda x: jax.jvp(f, (x,), (x,)))(query)  # noqa: E731
    gradient, curvature = along(jax.grad(loss))
    _, slope = along(loss)
    np.testing.assert_allclose(slope, jnp.vdot(gradient, query), rtol=1e-3, atol=1e-4)
    close(quickly(jax.grad(jax.checkpoint(loss)))(query), gradient)
    chex.assert_tree_all_finite(curvature)
    mapped = jax.vmap(
        lambda q, k, v: performer_attention(q, k, v, frequencies, is_causal=is_causal)
    )
    close(quickly(mapped)(query, key, value), attend(query))
    scan = lambda q: jax.lax.scan(lambda _, q: (None, attend(q)), None, q)  # noqa: E731
    _, scanned = quickly(scan)(jnp.stack([query, 2 * query]))
    close(scanned[1], attend(2 * query))
    per_draw = jax.vmap(lambda w: performer_attention(query, key, value, w, is_causal=is_causal))
    close(quickly(per_draw)(jnp.stack([frequencies, -frequencies]))[0], attend(query))


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_are_never_stored(is_causal):
    """Temporary memory of forward + backward: linear in the length, below one set of features."""

    def temporary(t, m=512):
        arrays = [jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)] * 3
        frequencies = jax.ShapeDtypeStruct((m, 16), jnp.float32)
        run = jax.grad(
            lambda q, k, v, w: jnp.sum(performer_attention(q, k, v, w, is_causal=is_causal) ** 2),
            argnums=(0, 1, 2),
        )
        compiled = jax.jit(run).lower(*arrays, frequencies).compile(QUICKLY)
        return compiled.memory_analysis().temp_size_in_bytes

    features = 65536 * 512 * 4
    long = temporary(65536)
    assert long < features
    assert long < 4.2 * temporary(16384)


def test_constants_under_jit_and_vmap():
    """Masks, weights, lengths and segments that a traced function closes over."""
    query, key, value, frequencies = inputs()
    mask = jnp.arange(7.0)[None, None, None] > 2
    for options in [
        dict(
            mask=mask.astype(jnp.float32),
            weights=jnp.arange(M, dtype=jnp.float32),
            key_value_seq_lengths=np.array([4, 5]),
        ),
        dict(mask=np.asarray(mask), segment_ids=np.zeros((2, 7), int)),
    ]:
        attend = lambda q, o=options: performer_attention(q, key, value, frequencies, **o)  # noqa: E731
        want = attend(query)
        close(jax.jit(attend)(query), want)
        close(jax.vmap(attend)(query[None])[0], want)


# Properties


# What is compiled: b, t, s, k, groups, frequency heads, dtype, causal, segments, (chunk, block).
# Every pair of dtype, causal, segments and heads of the frequencies is there.
SHAPES = [
    (1, 1, 1, 1, 1, None, "float32", False, False, (2, 2)),
    (2, 13, 5, 2, 3, "n", "float32", False, False, (3, 9)),
    (1, 4, 13, 1, 2, "k", "bfloat16", False, False, (1, 2)),
    (2, 7, 11, 2, 1, None, "float16", False, False, (6, 6)),
    (2, 13, 13, 1, 3, None, "bfloat16", True, False, (4, 8)),
    (1, 10, 10, 2, 2, "k", "float32", True, False, (3, 3)),
    (2, 3, 3, 1, 2, "n", "float16", True, False, (5, 15)),
    (2, 12, 12, 2, 2, "k", "float16", False, True, (5, 5)),
    (1, 13, 13, 1, 3, "n", "bfloat16", False, True, (2, 6)),
    (2, 9, 9, 2, 3, None, "float32", True, True, (1, 3)),
    (2, 11, 11, 2, 1, "k", "float32", True, True, (4, 12)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_properties(shape, data):
    """Any shape, grouping, mask, dtype and chunk size: the oracle's numbers."""
    b, t, s, k, groups, heads, dtype, is_causal, packed, sizes = shape
    heads, dtype = {None: None, "k": k, "n": k * groups}[heads], getattr(jnp, dtype)
    mask = data.draw(arrays(bool, (b, s)))
    ids = data.draw(arrays(int, (b, t), elements=st.integers(0, 2))) if packed else None
    scale = data.draw(st.sampled_from([0.1, 1.0, 2.0]))
    args = [x.astype(dtype) for x in inputs(b, t, s, k * groups, k, heads, scale)]
    allowed = np.repeat(mask[:, None], t, axis=1)
    allowed = allowed & causal(t) if is_causal else allowed
    allowed = allowed if ids is None else allowed & (ids[:, :, None] == ids[:, None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_block_sizes", lambda *_: sizes)
        got = performer_attention(
            *args, mask=mask[:, None, None], segment_ids=ids, is_causal=is_causal
        )
    root = H**-0.25
    # The rounding of W after the scale is part of what is computed.
    rounded = np.asarray((args[3] * root).astype(dtype), np.float64) / root
    wide = [np.asarray(x, np.float64) for x in args[:3]]
    want = oracles.kernel_attention(*wide, rounded, allowed=allowed)
    tolerance = {jnp.float32: 3e-5, jnp.bfloat16: 3e-2, jnp.float16: 3e-3}[dtype]
    assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * np.abs(args[2]).max()


# Planted faults


def leaky_mask(split, mask):
    """Masked keys stay in the maximum and in the normaliser."""
    return split


def chunk_maximum(mu, allowed, rows):
    return jnp.broadcast_to(jnp.max(mu, axis=-1, keepdims=True), (*mu.shape[:-1], rows))


def broken_combine(left, right):
    """States added without bringing them to the same maximum."""
    return type(left)(
        jnp.maximum(left.maximum, right.maximum),
        left.normaliser + right.normaliser,
        left.numerator + right.numerator,
    )


@pytest.mark.parametrize(
    ("module", "name", "fault", "case"),
    [
        (sweep, "_largest", chunk_maximum, test_early_queries_keep_their_precision),
        (
            sweep,
            "masked",
            leaky_mask,
            partial(test_masks_lengths_and_removed_keys_are_the_same, True, None),
        ),
        (sweep, "combine", broken_combine, partial(test_causal_of_any_length, 40, None)),
        (
            sweep,
            "_prefix",
            lambda initial, own, continues: sweep_prefix_inclusive(initial, own, continues),
            partial(test_the_future_changes_nothing_bit_for_bit, "positive", None),
        ),
    ],
)
def test_planted_faults_are_caught(module, name, fault, case, monkeypatch, small_chunks):
    if case is test_early_queries_keep_their_precision:
        monkeypatch.setattr(op, "_block_sizes", lambda *_: (64, 64))
    jax.clear_caches()
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        case()
    monkeypatch.undo()
    jax.clear_caches()


_prefix = sweep._prefix


def sweep_prefix_inclusive(initial, own, continues):
    """The state of a chunk's own keys before the chunk: the future leaks."""
    past, last = _prefix(initial, own, continues)
    axis = initial.maximum.ndim - 1

    def shifted(x, y):
        rest = jax.lax.slice_in_dim(x, 1, x.shape[axis], axis=axis)
        return jnp.concatenate([rest, jnp.expand_dims(y, axis)], axis=axis)

    return jax.tree.map(shifted, past, last), last


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bias=1.0), "cannot add a bias to q.k; use exact attention"),
        (dict(feature_map="postive"), "unknown feature map 'postive'; did you mean 'positive'"),
        (dict(stabilizer="googel"), "unknown stabilizer 'googel'; did you mean 'google'"),
        (dict(implementation="dirct"), "unknown implementation 'dirct'; did you mean 'direct'"),
        (dict(scale=float("nan")), "scale must be positive, got nan"),
        (dict(mask=np.tril(np.ones((7, 7)))), "pass is_causal=True"),
        (dict(mask=np.array([0.0, -1e9] + [0.0] * 5)), "mask has the negative value"),
        (dict(key_value_seq_lengths=np.ones(3, int)), r"key_value_seq_lengths has shape \(3,\)"),
        (dict(segment_ids=np.zeros((2, 6), int)), r"segment_ids have the shapes"),
        (dict(weights=-jnp.ones(M)), "weights must not be negative, got -1.0"),
        (dict(weights=jnp.ones(M + 1)), "weights have shape"),
        (dict(shift=jnp.ones(H + 1)), "shift has shape"),
        (dict(shift=jnp.ones(H), feature_map="relu"), "shift changes attention with feature_map"),
        (dict(stabilizer="google", feature_map="relu"), "is for feature_map='positive'"),
        (dict(stabilizer="google", return_state=True), "use stabilizer='exact' for streaming"),
        (dict(segment_ids=np.zeros((2, 7), int), return_state=True), "do not go together"),
        (dict(query=jnp.ones((2, 3, 4, H)), is_causal=True, return_state=True), "3 queries and 7"),
        (dict(query=jnp.ones((2, 7, 3, H))), "heads of query a multiple of those of key"),
        (dict(key=jnp.ones((1, 7, 2, H))), "their batch axes must be the same"),
        (dict(frequencies=jnp.ones((3, M, H))), r"one draw for each of the 2 key or 4 heads"),
        (dict(axis_name="i", key_value_seq_lengths=3), "split a mask as the keys"),
        (dict(axis_name="i", stabilizer="google"), "no state to exchange"),
        (dict(query=jnp.ones((2, 7, 4, H), int)), "query has dtype int32; attention takes float32"),
    ],
)
def test_bad_input_names_the_fix(change, message):
    query, key, value, frequencies = inputs()
    args = dict(query=query, key=key, value=value, frequencies=frequencies) | change
    with pytest.raises(ValueError, match=message):
        performer_attention.__wrapped__(**args)


def test_a_state_of_other_shapes_is_refused():
    args = inputs()
    _, state = performer_attention(*args, return_state=True)
    with pytest.raises(ValueError, match="initial_state holds arrays of shape"):
        performer_attention(*inputs(b=1), initial_state=state)
