"""performer_attention: heads, feature maps, states, stabilisers, dtypes, transformations.

Everything against float64 oracles that form every pair of tokens.
"""

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
from performer.attention import State, _sizes, attention_weights
from performer.attention.calibration import Calibration
from tests import oracles
from tests.attention_inputs import MAPS, H, M, V, causal, close, inputs, orthogonal

# Heads and shapes


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("k", "frequency_heads"), [(1, None), (2, 2), (2, 4), (4, 4)])
def test_grouped_heads(k, frequency_heads, is_causal):
    args = inputs(k=k, frequency_heads=frequency_heads)
    want = oracles.kernel_attention(*args, allowed=causal(7) if is_causal else None)
    close(performer_attention(*args, is_causal=is_causal), want)


@pytest.mark.parametrize(("t", "s"), [(3, 9), (9, 3), (1, 9)])
def test_cross_attention(t, s):
    """A causal query sees the keys up to its own number, as in jax.nn.dot_product_attention."""
    args = inputs(t=t, s=s)
    close(performer_attention(*args), oracles.kernel_attention(*args))
    want = oracles.kernel_attention(*args, allowed=causal(t, s))
    close(performer_attention(*args, is_causal=True), want)


def test_any_number_of_batch_axes():
    query, key, value, frequencies = inputs(b=6)
    options = dict(
        key_value_seq_lengths=jnp.array([7, 5, 1, 0, 2, 3]),
        segment_ids=jax.random.randint(jax.random.key(3), (6, 7), 0, 2),
    )
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
    choices = [jnp.arange(2.0 * M).reshape(2, M)]
    if feature_map in ("positive", "relu") and not is_causal:  # in the exponent and as a factor
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
    many = orthogonal(jax.random.key(0), 16384, H)
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


def test_keys_may_come_in_any_order():
    query, key, value, frequencies = inputs(t=9)
    order = jax.random.permutation(jax.random.key(1), 9)
    want = performer_attention(query, key, value, frequencies)
    close(performer_attention(query, key[:, order], value[:, order], frequencies), want)
    close(performer_attention(query[:, order], key, value, frequencies), want[:, order])


NEUTRAL = {
    "mask": np.ones((2, 1, 1, 7), bool),
    "key_value_seq_lengths": np.full(2, 7),
    "segment_ids": np.zeros((2, 7), np.int32),
    "shift": jnp.zeros(H),
    "weights": jnp.ones(M),
    "scale": H**-0.5,
    "calibration": Calibration(
        shift=jnp.zeros(H), scale=jnp.eye(H), inverse_scale=jnp.eye(H), mean=jnp.zeros(H),
        root=jnp.eye(H),
    ),
    "initial_state": State(jnp.full((2, 2, M), -jnp.inf), jnp.zeros((2, 2, M)),
        jnp.zeros((2, 2, M, V))),
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_argument_is_none(name):
    """So that one program with neutral arguments may serve a table of cases."""
    args = inputs()
    got = performer_attention(*args, **{name: NEUTRAL[name]})
    close(got, performer_attention(*args), 1e-6)


# States


def test_states_serve_bidirectional_attention_and_combine():
    query, key, value, frequencies = inputs(t=12)
    attend = partial(performer_attention, frequencies=frequencies, return_state=True)
    want, whole = attend(query, key, value)
    _, first = attend(query, key[:, :6], value[:, :6])
    got, both = attend(query, key[:, 6:], value[:, 6:], initial_state=first)
    close(got, want)
    _, second = attend(query, key[:, 6:], value[:, 6:])
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
    frequencies = orthogonal(keys[3], 128, 64)
    attend = partial(performer_attention, frequencies=frequencies, scale=0.25)
    exact, google = (attend(query, key, value, stabilizer=s) for s in ("exact", "google"))
    assert np.linalg.norm(google - exact) > 0.5 * np.linalg.norm(exact)
    attend = partial(attend, is_causal=True, stabilizer="google")
    early = attend(query, key, value)[:, :32]
    moved = attend(query, key.at[:, -1].multiply(3.0), value)[:, :32]
    assert np.linalg.norm(moved - early) > 0.5 * np.linalg.norm(early)


# Precision, transformations


@pytest.mark.parametrize(
    ("dtype", "is_causal"), [(jnp.bfloat16, True), (jnp.float16, True), (jnp.float16, False)]
)
def test_low_precision(dtype, is_causal):
    """The output has the dtype of the values, the state is float32, errors are of rounding."""
    args = [x.astype(dtype) for x in inputs(t=70)]
    out, state = performer_attention(*args, is_causal=is_causal, return_state=True)
    assert out.dtype == dtype
    assert {x.dtype for x in state} == {jnp.dtype(jnp.float32)}
    want = performer_attention(*(x.astype(jnp.float32) for x in args), is_causal=is_causal)
    assert np.linalg.norm(out.astype(jnp.float32) - want) < 0.02 * np.linalg.norm(want)
    huge = [1e4 * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in inputs(t=70)[:2]]

    def loss(q, k):
        out = performer_attention(q, k, *args[2:], is_causal=is_causal)
        return jnp.sum(out.astype(jnp.float32))

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    chex.assert_tree_all_finite(run(*(jnp.asarray(x, dtype) for x in huge)))


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
        oracle = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        want = oracle(*wide)
        want = [np.asarray(x) for x in want]
    loss = lambda *a: jnp.sum(jnp.sin(performer_attention(*a, **options)))  # noqa: E731
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
    for mine, exact in zip(got, want, strict=True):
        assert np.linalg.norm(mine - exact) < 2e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("is_causal", [False, True])
def test_transformations(is_causal, small_chunks):
    """Forward mode, forward over reverse, remat, vmap and scan give one and the same."""
    query, key, value, frequencies = inputs(t=14)
    attend = partial(performer_attention, is_causal=is_causal)

    def loss(query):
        return jnp.sum(jnp.sin(attend(query, key, value, frequencies)))

    along = jax.jit(lambda x: jax.jvp(jax.value_and_grad(loss), (x,), (x,)))
    (_, gradient), (slope, curvature) = along(query)
    np.testing.assert_allclose(slope, jnp.vdot(gradient, query), rtol=1e-3, atol=1e-4)
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(query), gradient)
    chex.assert_tree_all_finite(curvature)
    both = jnp.stack([frequencies, -frequencies])
    mapped = jax.jit(jax.vmap(attend))(query, key, value, both)
    for i in range(2):
        close(mapped[i], attend(query, key, value, both[i])[i])

    def step(_, query):
        return None, attend(query, key, value, frequencies)

    _, scanned = jax.jit(lambda queries: jax.lax.scan(step, None, queries))(
        jnp.stack([query, 2 * query])
    )
    close(scanned[1], attend(2 * query, key, value, frequencies))


@pytest.mark.optimised("asserts memory")
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
        compiled = jax.jit(run).lower(*arrays, frequencies).compile()
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
        close(jax.jit(jax.vmap(attend))(query[None])[0], attend(query))


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
        patch.setattr(_sizes, "chunk_and_block", lambda *_: sizes)
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
        (dict(mask=np.array([0.0, -1e9] + [0.0] * 5)), "pass that as key_log_weights"),
        (dict(key_value_seq_lengths=np.ones(3, int)), r"key_value_seq_lengths has shape \(3,\)"),
        (dict(segment_ids=np.zeros((2, 6), int)), r"segment_ids have the shapes"),
        (
            dict(key_log_weights=np.zeros((7, 2))),
            r"expected one that broadcasts to \(batch, keys\)",
        ),
        (dict(key_log_weights=np.zeros((2, 7, 4))), r"\(batch, keys, key heads\) = \(2, 7, 2\)"),
        (dict(key_log_weights=np.ones(7, bool)), "dtype bool and the entry None; expected floats"),
        (dict(key_log_weights=np.full(7, np.nan)), "the entry (nan|inf); expected floats"),
        (dict(key_log_weights=np.full((2, 7), np.inf)), "the entry (nan|inf); expected floats"),
        (dict(weights=-jnp.ones(M)), "weights must not be negative, got -1.0"),
        (dict(weights=jnp.full(M, jnp.nan)), "weights must not be negative, got nan"),
        (dict(weights=jnp.ones(M + 1)), "weights have shape"),
        (dict(shift=jnp.ones(H + 1)), "shift has shape"),
        (
            dict(shift=jnp.ones(H), feature_map="relu"),
            "a shift or a calibration needs a feature_map",
        ),
        (dict(stabilizer="google", feature_map="relu"), "is for feature_map=features.positive"),
        (dict(stabilizer="google", return_state=True), "use stabilizer='exact' for streaming"),
        (dict(segment_ids=np.zeros((2, 7), int), return_state=True), "do not go together"),
        (dict(query=jnp.ones((2, 3, 4, H)), is_causal=True, return_state=True), "3 queries and 7"),
        (dict(query=jnp.ones((2, 7, 3, H))), "heads of query a multiple of those of key"),
        (dict(key=jnp.ones((1, 7, 2, H))), "batch and head_dim must be the same"),
        (dict(frequencies=jnp.ones((3, M, H))), r"one draw for each of the 2 key or 4 heads"),
        (dict(axis_name="i", key_value_seq_lengths=3), "split a mask as the keys"),
        (dict(axis_name="i", stabilizer="google"), "it has no state to keep"),
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


EMPTY = [dict(b=0), dict(t=0, s=3), dict(t=3, s=0), dict(t=0, s=0)]


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_arrays(sizes):
    """As in `jax.nn.dot_product_attention`: nothing for no query, zeros where there is no key."""
    query, key, value, frequencies = inputs(**(dict(b=2, t=3) | sizes))
    segments = tuple(np.zeros(x.shape[:2], np.int32) for x in (query, key))
    options = [{}, dict(is_causal=True), dict(segment_ids=segments), dict(feature_map="relu")]
    for option in options:
        got = performer_attention(query, key, value, frequencies, **option)
        assert got.shape == (*query.shape[:3], V)
        assert not got.any()
    assert performer_attention(query, key, value[..., :0], frequencies).shape[-1] == 0
    weights = attention_weights(query, key, frequencies)
    assert weights.shape == (len(query), query.shape[2], query.shape[1], key.shape[1])


def test_a_stream_passes_over_empty_calls():
    args = inputs(t=3)
    _, state = performer_attention(*args, is_causal=True, return_state=True)
    nothing = inputs(t=0)[:3]
    out, same = performer_attention(
        *nothing, args[3], is_causal=True, initial_state=state, return_state=True
    )
    assert out.shape == (2, 0, 4, V)
    chex.assert_trees_all_equal(same, state)
    for empty in (inputs(b=0, t=3)[:3], (*args[:2], args[2][..., :0])):
        _, state = performer_attention(*empty, args[3], is_causal=True, return_state=True)
        assert state.numerator.shape == (len(empty[0]), 2, M, empty[2].shape[-1])


def test_a_matrix_has_no_state_and_no_devices():
    query, key, _, frequencies = inputs()
    for name, level in [("axis_name", "i"), ("return_state", True)]:
        with pytest.raises(ValueError, match=f"attention_weights has no {name}"):
            attention_weights(query, key, frequencies, **{name: level})
