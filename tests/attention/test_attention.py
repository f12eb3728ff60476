"""performer_attention: limits, states, dtypes, transformations, memory and refusals.

The values of each option with every other one are in `test_attention_options`.
"""

import inspect
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import Bias, Exact, Features, performer_attention
from performer.attention import attention_weights, op, refusals, sizes, stream
from performer.calibration import Calibration, calibrate
from tests.support.attention_inputs import (
    SLOPES,
    H,
    M,
    V,
    by_keywords,
    close,
    inputs,
    oracle,
    orthogonal,
    ours,
    ours_streamed,
)
from tests.support.tiers import tiers

# Limits


def test_keys_after_the_last_query_have_no_part():
    query, key, value, frequencies = inputs(t=6, s=9)
    key = key.at[:, 6:].multiply(4)
    attend = partial(ours, is_causal=True)
    output = attend(query, key, value, frequencies)
    close(output, attend(query, key[:, :6], value[:, :6], frequencies), 1e-6)
    close(output, oracle(query, key, value, frequencies, is_causal=True), 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "away"), tiers([(1 / 8, 0.045), (1 / 4, 0.78)], 1))
def test_the_public_code_is_biased_and_looks_into_the_future(scale, away):
    """Distance to the estimate it claims to compute; early outputs move with the last key alone."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 64, 1, 64)) for k in keys[:3])
    attend = partial(oracle, frequencies=orthogonal(keys[3], 128, 64), scale=scale)
    exact, public = (attend(query, key, value, with_epsilon=x) for x in (False, True))
    assert np.linalg.norm(public - exact) / np.linalg.norm(exact) == pytest.approx(away, 0.02)
    attend = partial(attend, is_causal=True, with_epsilon=True)
    early = attend(query, key, value)[:, :32]
    moved = attend(query, key.at[:, -1].multiply(3.0), value)[:, :32]
    assert np.linalg.norm(moved - early) > away / 2 * np.linalg.norm(early)


# Residuals


CROSSED = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(is_causal=True, exact_window=3, exact_first=1),
    "keys and rows": dict(exact_keys=3, exact_rows=2),
    "calibrated": dict(calibration="full"),
    "bias": dict(keys=np.linspace(-2, 2, 14, dtype=np.float32)[None]),
}


@pytest.mark.parametrize("name", CROSSED)
def test_residuals_have_values_and_gradients(name):
    """log of each normaliser against the oracle; derivatives of both results along a direction."""
    tokens, options, rng = inputs(t=14, k=4), dict(CROSSED[name]), np.random.default_rng(0)
    if "calibration" in options:
        options["calibration"] = calibrate(*tokens[:2], coupling="orf")
    attend = partial(ours, frequencies=tokens[3], return_residual=True, **options)
    output, residual = attend(*tokens[:3])
    want = oracle(*tokens, with_residual=True, **options)
    np.testing.assert_allclose(output, want[0], atol=2e-5)
    np.testing.assert_allclose(residual, want[1], atol=2e-5)
    weights = [rng.standard_normal(x.shape).astype(np.float32) for x in want]
    along = [rng.standard_normal(x.shape).astype(np.float32) for x in tokens[:3]]

    def loss(attend, *tokens):
        return sum((x * y).sum() for x, y in zip(attend(*tokens), weights, strict=True))

    slope = jax.jvp(partial(loss, attend), tokens[:3], tuple(map(jnp.asarray, along)))[1]
    gradient = jax.grad(partial(loss, attend), (0, 1, 2))(*tokens[:3])
    exact = partial(oracle, frequencies=tokens[3], with_residual=True, **options)
    ends = [
        loss(
            exact, *(np.asarray(x, np.float64) + s * y for x, y in zip(tokens, along, strict=False))
        )
        for s in (1e-5, -1e-5)
    ]
    difference = (ends[0] - ends[1]) / 2e-5
    backward = sum(np.vdot(x, y) for x, y in zip(gradient, along, strict=True))
    np.testing.assert_allclose([slope, backward], difference, rtol=2e-4, atol=1e-4)


def test_residuals_join_outputs_over_different_keys():
    """Also a sink, which is a key of zeros with the value 0; -inf for a query without keys."""
    query, key, value, frequencies = inputs(t=5, s=9)
    attend = partial(ours, query, frequencies=frequencies, return_residual=True)
    halves = [attend(key[:, part], value[:, part]) for part in (slice(4), slice(4, None))]
    total = jnp.logaddexp(halves[0][1], halves[1][1])
    both = sum(output * jnp.exp(log - total)[..., None] for output, log in halves)
    output, residual = attend(key, value)
    close(both, output)
    close(total, residual)
    sink, log_weight = jnp.zeros_like(key[:, :1]), 0.7
    joined = [jnp.concatenate([x, 0 * y], axis=1) for x, y in ((key, sink), (value, value[:, :1]))]
    of_keys = jnp.zeros((2, 10)).at[:, -1].set(log_weight)
    with_sink, _ = attend(*joined, keys=of_keys)
    # The features of a key of zeros are all 1: only its estimate of e^0 is not exact.
    own = attend(sink, 0 * value[:, :1], keys=jnp.full((2, 1), log_weight))[1]
    close(with_sink, output * jnp.exp(residual - jnp.logaddexp(residual, own))[..., None])
    assert np.all(np.isneginf(attend(key, value, mask=np.zeros(9, bool))[1]))


# Heads one after another


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_one_after_another_have_gradients_of_features(is_causal, heads, monkeypatch):
    """Frequencies that heads share, or have each; weights; log-weights that they share."""
    query, key, value, frequencies = inputs(frequency_heads=heads)
    weights, keys = jnp.linspace(0.5, 1.5, M), jnp.linspace(-1.0, 1.0, 7)

    def squares(query, key, value, frequencies, weights, keys):
        features = Features(frequencies, weights=weights, trainable=True)
        options: Any = dict(bias=Bias(keys=keys[None, :, None]), is_causal=is_causal)
        return jnp.sum(performer_attention(query, key, value, features, **options) ** 2)

    given = query, key, value, frequencies, weights, keys
    gradient = jax.value_and_grad(squares, argnums=range(len(given)))
    want = gradient(*given)
    monkeypatch.setattr(sizes, "heads_at_once", lambda platform, rows, heads, *_: heads // 2)
    text = str(jax.make_jaxpr(squares)(*given))
    assert "scan" in text
    for x, y in zip(jax.tree.leaves(gradient(*given)), jax.tree.leaves(want), strict=True):
        close(x, y, 1e-5)


HEADS = {
    # (platform, tokens x batch of a head, heads, (features, head_dim)): heads at once
    ("cpu", 1576, 12, (128, 64)): 1,
    ("cpu", 577, 12, (128, 64)): 3,
    ("cpu", 2048, 12, (128, 64)): 1,
    ("cpu", 2049, 12, (128, 64)): 12,  # one head does not fit: blocks of tokens
    ("cpu", 197, 12, (128, 64)): 12,  # few tokens
    ("cpu", 1000, 7, (128, 64)): 1,  # a divisor
    ("cpu", 577, 12, (64, 64)): 12,
    ("gpu", 1576, 12, (128, 64)): 12,
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_at_once(case):
    assert sizes.heads_at_once(*case) == HEADS[case]


@pytest.mark.parametrize(("window", "width"), [(0, 8), (16, 2 * H)])
def test_pairs_of_a_window_are_as_wide_as_many_features(window, width, monkeypatch):
    """Heads are computed in groups with a window even if there are few features, or none."""
    query, key, value, frequencies = inputs(t=40, m=8)
    widths = []

    def noted(platform, rows, heads, wide):
        widths.append(wide)
        return heads

    monkeypatch.setattr(sizes, "heads_at_once", noted)
    features = Features(frequencies, exact=Exact(window=window))
    performer_attention(query, key, value, features, is_causal=True)
    assert widths == [(width, H)]


# States


def test_attention_weights_are_the_matrix():
    query, key, value, frequencies = inputs(t=3, s=9)
    matrix = attention_weights(query, key, frequencies)
    assert matrix.shape == (2, 4, 3, 9)
    grouped = matrix.reshape(2, 2, 2, 3, 9)
    got = jnp.einsum("bkgts,bskv->btkgv", grouped, value).reshape(2, 3, 4, V)
    close(got, ours(query, key, value, frequencies))
    with pytest.raises(ValueError, match="attention_weights has no axis_name"):
        attention_weights(query, key, frequencies, axis_name="i")


@pytest.mark.parametrize("sizes", tiers([dict(t=3, s=0), dict(b=0), dict(t=0, s=3)], 1))
def test_empty_arrays(sizes):
    """As in `jax.nn.dot_product_attention`: nothing for no query, zeros where there is no key."""
    query, key, value, frequencies = inputs(**(dict(b=2, t=3) | sizes))
    segments = tuple(np.zeros(x.shape[:2], np.int32) for x in (query, key))
    options = [{}, dict(is_causal=True), dict(segment_ids=segments), dict(feature_map="relu")]
    for option in options:
        got = ours(query, key, value, frequencies, **option)
        assert got.shape == (*query.shape[:3], V)
        assert not got.any()
    assert ours(query, key, value[..., :0], frequencies).shape[-1] == 0
    weights = attention_weights(query, key, frequencies)
    assert weights.shape == (len(query), query.shape[2], query.shape[1], key.shape[1])


@pytest.mark.parametrize(("window", "first"), tiers([(3, 2), (0, 0), (1, 0)], 1))
def test_a_piece_without_tokens_leaves_the_state(window, first):
    """The same before the first token, and in a call without states."""
    tokens, state = inputs(t=4), None
    options = dict(is_causal=True, exact_window=window, exact_first=first)
    for start, end in [(0, 0), (0, 4), (4, 4)]:
        piece, before = [x[:, start:end] for x in tokens[:3]], state
        output, state = ours_streamed(*piece, tokens[3], state=state, **options)
        assert output.shape == (2, end - start, 4, V)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert ours(*piece, tokens[3], **options).shape == (2, 0, 4, V)


# Precision, transformations, memory


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "is_causal"), [(jnp.bfloat16, True), (jnp.float16, False)])
def test_low_precision(dtype, is_causal):
    """The output has the dtype of the values, the state is float32, errors are of rounding.

    Gradients at a norm of 1e4 are finite; causal ones by `robust`.
    """
    args = [x.astype(dtype) for x in inputs(t=70)]
    out, state = ours_streamed(*args, is_causal=is_causal)
    assert out.dtype == dtype
    assert {x.dtype for x in state} == {jnp.dtype(jnp.float32)}
    want = ours(*(x.astype(jnp.float32) for x in args), is_causal=is_causal)
    assert np.linalg.norm(out.astype(jnp.float32) - want) < 0.02 * np.linalg.norm(want)
    huge = [1e4 * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in inputs(t=70)[:2]]

    def loss(q, k):
        robust = "robust" if is_causal else None
        out = ours(q, k, *args[2:], is_causal=is_causal, implementation=robust)
        return jnp.sum(out.astype(jnp.float32))

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    chex.assert_tree_all_finite(run(*(jnp.asarray(x, dtype) for x in huge)))


@pytest.mark.parametrize("is_causal", tiers([True, False], 0))
def test_transformations(is_causal, small_chunks):
    """Forward mode, forward over reverse, remat, vmap and scan give one and the same."""
    query, key, value, frequencies = inputs(t=14)
    attend = partial(ours, is_causal=is_causal)

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
@pytest.mark.parametrize("is_causal", tiers([True, False], 0))
def test_features_are_never_stored(is_causal):
    """Temporary memory of forward + backward is below one set of features, and so of matrices."""
    t, m = 65536, 512
    arrays = [jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)] * 3
    frequencies = jax.ShapeDtypeStruct((m, 16), jnp.float32)
    run = jax.grad(
        lambda q, k, v, w: jnp.sum(ours(q, k, v, w, is_causal=is_causal) ** 2),
        argnums=(0, 1, 2),
    )
    compiled = jax.jit(run).lower(*arrays, frequencies).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < t * m * 4


# Bad input


def ones(*shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype))


SHORT = dict(query=ones(2, 3, 4, H))
PACKED = dict(segment_ids=np.zeros((2, 7), int))
SHIFTED, TILTED = Calibration(shift=ones(H)), Calibration(root=jnp.eye(H))
STATE = dict(streams=True)
CAUSAL, SPLIT = dict(is_causal=True), dict(axis_name="i")
WINDOW, KEYS, CLASS = dict(exact_window=2), dict(exact_keys=2), dict(exact_rows=1)
PLACE = dict(slopes=SLOPES)
PAIR = dict(segment_ids=(np.zeros((2, 7), int), np.ones((2, 7), int)))
TOGETHER = [  # in the order of the table
    (dict(calibration=SHIFTED, feature_map="relu"), "a calibration requires a feature_map that"),
    (dict(calibration=TILTED, feature_map="hyperbolic"), "one of shift and scale alone serves"),
    (dict(calibration=TILTED, query_frequencies=ones(M, H)), "of shift and scale alone: its root"),
    (dict(return_residual=True, feature_map="relu"), "return_residual=True requires a feature_map"),
    (
        dict(frequencies=None),
        r"Features\(None\) .* requires exact=Exact\(window=...\) and no weights",
    ),
    (dict(exact_first=2), r"Exact\(first=2\) requires a window, as in Exact\(window=16, first=2\)"),
    (WINDOW | dict(feature_map="relu"), r"Exact\(window=2\) requires a feature_map that estimates"),
    (
        SHORT | WINDOW,
        r"Exact\(window=2\) requires one key for each query, got 3 queries and 7 keys",
    ),
    (WINDOW | PAIR, r"Exact\(window=2\) requires the same segment_ids"),
    (
        KEYS | CAUSAL,
        r"Exact\(keys=2\) cannot be combined with is_causal=True: .* depend on the future",
    ),
    (KEYS | PACKED, r"Exact\(keys=2\) cannot be combined with segment_ids"),
    (KEYS | PLACE, r"Exact\(keys=2\) cannot be combined with a decay"),
    (CLASS | CAUSAL, r"Exact\(rows=1\) cannot be combined with is_causal=True"),
    (CLASS | PACKED, r"Exact\(rows=1\) cannot be combined with segment_ids"),
    (CLASS | dict(decay=-ones(2, 7, 2)), r"Exact\(rows=1\) cannot be combined with a decay"),
    (
        SHORT | PLACE,
        "a decay of the bias .* requires one key for each query, got 3 queries and 7 keys",
    ),
    (
        SHORT | CAUSAL | dict(segment_ids=(np.zeros((2, 3), int), PAIR["segment_ids"][0])),
        "causal s",
    ),
    (SHORT | CAUSAL | STATE, "a causal state requires one key for each query, got 3 queries and 7"),
    (KEYS | STATE, r"Exact\(keys=2\) requires all queries and keys at once"),
    (CLASS | STATE, r"Exact\(rows=1\) requires all queries and keys at once"),
    (WINDOW | STATE, r"Exact\(window=2\) has a state in causal attention alone"),
    (PLACE | STATE, "a decay has a state in causal attention alone"),
    (SPLIT | dict(key_value_seq_lengths=3), "pass a mask, sharded like the keys"),
    (SPLIT | PACKED, "segment_ids cannot be combined with axis_name"),
    (
        SPLIT | CAUSAL | WINDOW | dict(exact_first=1),
        r"^Exact\(window=2, first=1\) cannot be combi",
    ),
    (SPLIT | PLACE, "^a decay cannot be combined with axis_name"),
    (SPLIT | CAUSAL | SHORT, "axis_name='i' with is_causal=True requires one key .* got 3 queries"),
    (SPLIT | CAUSAL | STATE, "states cannot be combined with axis_name in causal attention"),
]
KINDS = [
    (dict(feature_map="postive"), "unknown feature map 'postive'; did you mean 'positive'"),
    (dict(implementation="xla"), "the path through XLA is 'blocked'"),
    (dict(is_causal="yes"), "is_causal='yes': must be True or False"),
    (dict(calibration={}), "calibration is a dict; expected a performer.calibration.Calibration"),
    *((dict(scale=x), "scale must be positive and finite, got") for x in (np.nan, np.inf, "1", -1)),
    (dict(exact_keys=2.5), r"Exact\(keys=2.5\): must be an integer, static"),
    (dict(exact_keys="2"), r"Exact\(keys='2'\): must be an integer"),
    (WINDOW | dict(exact_first=-1), r"Exact\(first=-1\) must not be negative"),
    # Arrays
    (dict(query=ones(7, H)), r"query has shape \(7, 8\); expected .* query\[:, None\]"),
    (dict(value=[[[1.0]]]), "value is a list; expected an array"),
    (dict(query=ones(2, 7, 4, H, dtype=int)), "query has dtype int.*; attention takes float32"),
    (dict(frequencies="pm"), r"features='pm' is a name; draw them: performer.Features.draw\("),
    (dict(frequencies=3), "features is a int; expected performer.Features"),
    (dict(frequencies=3, exact_rows=1), "frequencies are 3; expected an array"),
    (
        dict(frequencies=ones(H), exact_rows=1),
        r"frequencies have shape \(8,\); expected an array \(num_features",
    ),
    (dict(frequencies=ones(0, H)), "num_features must be at least 1"),
    (
        dict(query=ones(2, 7, 4, 0), key=ones(2, 7, 2, 0), frequencies=ones(M, 0)),
        "head_dim is 0",
    ),
    (dict(frequencies=ones(M, H + 1)), f"for the head_dim {H}, or"),
    (dict(weights=-ones(M)), "weights must not be negative, got -1.0"),
    # Masks
    (dict(mask="causal"), "mask='causal': pass an array of the keys that exist, or is_causal=True"),
    (dict(mask=np.tril(ones(7, 7))), "for a causal mask is_causal=True"),
    (dict(mask=ones(2, 1, 1, 6)), "honours masks over keys only"),
    (
        dict(mask=np.array([0.0, -1e9] + [0.0] * 5)),
        "if it is added to the logits pass it as .*Bias",
    ),
    (dict(key_value_seq_lengths=np.array([2.5, 3])), "dtype float.*; expected integers from 0"),
    (dict(key_value_seq_lengths=np.array([3, -1])), "the entry -1.0; expected integers from 0"),
    (dict(segment_ids=np.zeros((2, 7))), "segment_ids have dtype float.*; expected integers"),
    (dict(keys=ones(2, 7, 4)), r"\(batch, keys, key heads\) = \(2, 7, 2\)"),
    (dict(keys=np.full(7, np.nan)), "the entry (nan|inf); expected floats"),
    (dict(keys=np.full((2, 7), np.inf)), "the entry (nan|inf); expected floats"),
    (dict(keys=np.zeros((2, 7), int)), "the bias of keys has dtype int[0-9]+; expected"),
    (dict(slopes=-SLOPES), "the entry -0.5; expected finite floats"),
    (dict(slopes=ones(2, 2)), r"slopes have shape \(2, 2\), dtype float32; expected"),
    (dict(slopes=ones(3)), r"the decay of the bias has shape \(3,\); expected one number for"),
    (dict(decay=ones(2, 7, 2)), "the entry 1.0; expected floats"),
    (
        dict(bias=ones(2, 4, 7, 7)),
        r"bias is an array of shape \(2, 4, 7, 7\): linear attention cannot",
    ),
]
REFUSED = [*TOGETHER, *KINDS]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_names_the_fix(change, message):
    query, key, value, frequencies = inputs()
    args = dict(query=query, key=key, value=value, frequencies=frequencies) | change
    function = stream if args.pop("streams", False) else performer_attention
    args = (dict(is_causal=False) if function is stream else {}) | args
    with pytest.raises(ValueError, match=message):
        by_keywords(inspect.unwrap(function), **args)


def test_each_refusal_of_the_table_is_met(monkeypatch):
    """The calls above meet each row of the table, in its order."""
    met = []

    def note(call):
        met.append([bool(holds(call)) for holds, _ in refusals.REFUSALS].index(True))

    monkeypatch.setattr(refusals, "check_together", note)
    monkeypatch.setattr(op, "_computed", lambda *_: (None, None, None))
    for change, _ in TOGETHER:
        args = dict(zip(("query", "key", "value", "frequencies"), inputs(), strict=True)) | change
        function = stream if args.pop("streams", False) else performer_attention
        options = dict(is_causal=False) if function is stream else {}
        by_keywords(inspect.unwrap(function), **options | args)
    assert met == [*range(len(refusals.REFUSALS))]


def test_traced_options_are_refused():
    tokens = inputs()
    for name, message in (("scale", "scale is traced"), ("exact_keys", "must be an integer, stat")):
        attend = partial(by_keywords, inspect.unwrap(performer_attention), *tokens)
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x, name=name, attend=attend: attend(**{name: x}))(1)


@pytest.mark.parametrize("name", refusals.INSTEAD)
def test_keywords_of_other_functions_are_explained(name):
    with pytest.raises(TypeError, match="requires features after value: draw them once"):
        performer_attention(*inputs()[:3])
    with pytest.raises(TypeError, match=f"performer_attention has no {name}: "):
        performer_attention(*inputs(), **{name: 1})
    with pytest.raises(TypeError, match="nonsense"):
        performer_attention(*inputs(), nonsense=1)


@pytest.mark.parametrize(
    ("of_state", "of_call", "message"),
    [
        ({}, dict(b=1), "the state holds arrays of shape"),
        (WINDOW, dict(exact_window=3), r"with Exact\(window=2\), this one has Exact\(window=3\)"),
        (WINDOW | PLACE, WINDOW, "both have a decay"),
        (WINDOW, WINDOW | dict(calibration=SHIFTED), "must have the same calibration"),
    ],
)
def test_states_of_other_options_are_refused(of_state, of_call, message):
    of_call = dict(of_call)
    _, state = ours_streamed(*inputs(), **of_state)
    args = inputs(b=of_call.pop("b", 2))
    with pytest.raises(ValueError, match=message):
        ours_streamed(*args, state=state, **of_call)


def test_a_state_without_its_type_is_refused():
    """As restored by a library that keeps dictionaries and lists alone."""
    _, state = ours_streamed(*inputs(), is_causal=False)
    for restored in state._asdict(), list(state):
        with pytest.raises(ValueError, match=r"state is a (dict|list); expected the State"):
            inspect.unwrap(stream)(*inputs(), restored)
