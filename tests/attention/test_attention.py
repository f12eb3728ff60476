"""performer_attention: limits, states, dtypes, transformations, memory and refusals.

The values of each option with every other one are in `test_attention_options`.
"""

import inspect
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import performer_attention
from performer.attention import attention_weights, op, refusals
from performer.calibration import Calibration
from performer.testing import reference_attention
from tests.support.attention_inputs import SLOPES, H, M, V, close, inputs, orthogonal
from tests.support.tiers import tiers

# Limits


@pytest.mark.parametrize("stabilizer", ["exact", "google"])
def test_keys_after_the_last_query_have_no_part(stabilizer):
    """The maximum of "google" is one over the keys that a query sees; the oracle had all keys."""
    query, key, value, frequencies = inputs(t=6, s=9)
    key = key.at[:, 6:].multiply(4)
    attend = partial(performer_attention, is_causal=True, stabilizer=stabilizer)
    output = attend(query, key, value, frequencies)
    close(output, attend(query, key[:, :6], value[:, :6], frequencies), 1e-6)
    options = dict(is_causal=True, stabilizer=stabilizer)
    close(output, reference_attention(query, key, value, frequencies, **options), 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("scale", "away"), tiers([(1 / 8, 0.045), (1 / 4, 0.78)], 1))
def test_google_is_biased_and_looks_into_the_future(scale, away):
    """Distance to the estimate it claims to compute; early outputs move with the last key alone."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 64, 1, 64)) for k in keys[:3])
    attend = partial(performer_attention, frequencies=orthogonal(keys[3], 128, 64), scale=scale)
    exact, google = (attend(query, key, value, stabilizer=s) for s in ("exact", "google"))
    assert jnp.linalg.norm(google - exact) / jnp.linalg.norm(exact) == pytest.approx(away, 0.02)
    attend = partial(attend, is_causal=True, stabilizer="google")
    early = attend(query, key, value)[:, :32]
    moved = attend(query, key.at[:, -1].multiply(3.0), value)[:, :32]
    assert jnp.linalg.norm(moved - early) > away / 2 * jnp.linalg.norm(early)


# States


def test_attention_weights_are_the_matrix():
    query, key, value, frequencies = inputs(t=3, s=9)
    matrix = attention_weights(query, key, frequencies)
    assert matrix.shape == (2, 4, 3, 9)
    grouped = matrix.reshape(2, 2, 2, 3, 9)
    got = jnp.einsum("bkgts,bskv->btkgv", grouped, value).reshape(2, 3, 4, V)
    close(got, performer_attention(query, key, value, frequencies))
    for name, level in [("axis_name", "i"), ("return_state", True)]:
        with pytest.raises(ValueError, match=f"attention_weights has no {name}"):
            attention_weights(query, key, frequencies, **{name: level})


@pytest.mark.parametrize("sizes", tiers([dict(t=3, s=0), dict(b=0), dict(t=0, s=3)], 1))
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


@pytest.mark.parametrize(("window", "first"), tiers([(3, 2), (0, 0), (1, 0)], 1))
def test_a_piece_without_tokens_leaves_the_state(window, first):
    """The same before the first token, and in a call without states."""
    tokens, state = inputs(t=4), None
    options = dict(is_causal=True, exact_window=window, exact_first=first)
    for start, end in [(0, 0), (0, 4), (4, 4)]:
        piece, before = [x[:, start:end] for x in tokens[:3]], state
        output, state = performer_attention(
            *piece, tokens[3], initial_state=state, return_state=True, **options
        )
        assert output.shape == (2, end - start, 4, V)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    for implementation in None, "direct":
        options["implementation"] = implementation
        assert performer_attention(*piece, tokens[3], **options).shape == (2, 0, 4, V)


# Precision, transformations, memory


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "is_causal"), [(jnp.bfloat16, True), (jnp.float16, False)])
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


@pytest.mark.parametrize("is_causal", tiers([True, False], 0))
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
@pytest.mark.parametrize("is_causal", tiers([True, False], 0))
def test_features_are_never_stored(is_causal):
    """Temporary memory of forward + backward is below one set of features, and so of matrices."""
    t, m = 65536, 512
    arrays = [jax.ShapeDtypeStruct((1, t, 1, 16), jnp.float32)] * 3
    frequencies = jax.ShapeDtypeStruct((m, 16), jnp.float32)
    run = jax.grad(
        lambda q, k, v, w: jnp.sum(performer_attention(q, k, v, w, is_causal=is_causal) ** 2),
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
GOOGLE, STATE = dict(stabilizer="google"), dict(return_state=True)
CAUSAL, SPLIT = dict(is_causal=True), dict(axis_name="i")
WINDOW, KEYS, CLASS = dict(exact_window=2), dict(exact_keys=2), dict(exact_rows=1)
PLACE = dict(alibi_slopes=SLOPES)
PAIR = dict(segment_ids=(np.zeros((2, 7), int), np.ones((2, 7), int)))
TOGETHER = [  # in the order of the table
    (
        GOOGLE | dict(feature_map="relu"),
        "requires feature_map=features.positive, got features.relu",
    ),
    (GOOGLE | dict(calibration=SHIFTED), "a calibration requires stabilizer='exact'"),
    (dict(calibration=SHIFTED, feature_map="relu"), "a calibration requires a feature_map that"),
    (dict(calibration=TILTED, feature_map="hyperbolic"), "one of shift and scale alone serves"),
    (dict(calibration=TILTED, query_frequencies=ones(M, H)), "of shift and scale alone: its root"),
    (dict(frequencies=None), "frequencies=None .* requires exact_window > 0 and no weights"),
    (dict(exact_first=2), "exact_first=2 requires exact_window > 0"),
    (WINDOW | dict(feature_map="relu"), "exact_window=2 requires a feature_map that estimates"),
    (WINDOW | GOOGLE, "exact_window=2 requires stabilizer='exact'"),
    (SHORT | WINDOW, "exact_window=2 requires one key for each query, got 3 queries and 7 keys"),
    (WINDOW | PAIR, "exact_window=2 requires the same segment_ids"),
    (KEYS | CAUSAL, "exact_keys=2 cannot be combined with is_causal=True: .* depend on the future"),
    (KEYS | PACKED, "exact_keys=2 cannot be combined with segment_ids"),
    (KEYS | PLACE, "exact_keys=2 cannot be combined with alibi_slopes"),
    (CLASS | CAUSAL, "exact_rows=1 cannot be combined with is_causal=True"),
    (CLASS | PACKED, "exact_rows=1 cannot be combined with segment_ids"),
    (CLASS | dict(log_decay=-ones(2, 7, 2)), "exact_rows=1 cannot be combined with log_decay"),
    (SHORT | PLACE, "alibi_slopes requires one key for each query, got 3 queries and 7 keys"),
    (PLACE | GOOGLE, "alibi_slopes requires stabilizer='exact', got 'google'"),
    (
        SHORT | CAUSAL | dict(segment_ids=(np.zeros((2, 3), int), PAIR["segment_ids"][0])),
        "causal s",
    ),
    (GOOGLE | STATE, "use stabilizer='exact' for streaming"),
    (PACKED | STATE, "segment_ids cannot be combined with states"),
    (SHORT | CAUSAL | STATE, "a causal state requires one key for each query, got 3 queries and 7"),
    (KEYS | STATE, "exact_keys=2 requires all queries and keys at once"),
    (CLASS | STATE, "exact_rows=1 requires all queries and keys at once"),
    (WINDOW | STATE, "exact_window=2 has a state in causal attention alone"),
    (PLACE | STATE, "alibi_slopes has a state in causal attention alone"),
    (GOOGLE | SPLIT, "stabilizer='google' cannot be combined with axis_name"),
    (SPLIT | dict(key_value_seq_lengths=3), "pass a mask, sharded like the keys"),
    (SPLIT | PACKED, "segment_ids cannot be combined with axis_name"),
    (
        SPLIT | CAUSAL | WINDOW | dict(exact_first=1),
        "^exact_window=2, exact_first=1 cannot be combi",
    ),
    (SPLIT | PLACE, "^alibi_slopes cannot be combined with axis_name"),
    (SPLIT | CAUSAL | SHORT, "axis_name='i' with is_causal=True requires one key .* got 3 queries"),
    (SPLIT | CAUSAL | STATE, "states cannot be combined with axis_name in causal attention"),
]
KINDS = [
    (dict(feature_map="postive"), "unknown feature map 'postive'; did you mean 'positive'"),
    (dict(implementation="xla"), "the path through XLA is 'blocked'"),
    (dict(stabilizer="googel"), "unknown stabilizer 'googel'; did you mean 'google'"),
    (dict(is_causal="yes"), "is_causal='yes': must be True or False"),
    (dict(calibration={}), "calibration is a dict; expected a performer.calibration.Calibration"),
    *((dict(scale=x), "scale must be positive and finite, got") for x in (np.nan, np.inf, "1", -1)),
    (dict(exact_keys=2.5), "exact_keys=2.5: must be an integer, static"),
    (dict(exact_keys="2"), "exact_keys='2': must be an integer"),
    (WINDOW | dict(exact_first=-1), "exact_first=-1 must not be negative"),
    # Arrays
    (dict(query=ones(7, H)), r"query has shape \(7, 8\); expected .* query\[:, None\]"),
    (dict(value=[[[1.0]]]), "value is a list; expected an array"),
    (dict(query=ones(2, 7, 4, H, dtype=int)), "query has dtype int.*; attention takes float32"),
    (
        dict(frequencies="pm"),
        r"draw them: performer.couplings.get\('pm'\)\(jax.random.key\(0\), 16",
    ),
    (dict(frequencies="pm"), "frequencies='pm' is a name; draw them"),
    (dict(frequencies=3), "frequencies are 3; expected an array"),
    (dict(frequencies=ones(H)), r"frequencies have shape \(8,\); expected an array \(num_features"),
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
    (dict(mask=np.array([0.0, -1e9] + [0.0] * 5)), "pass that as key_log_weights"),
    (dict(key_value_seq_lengths=np.array([2.5, 3])), "dtype float.*; expected integers from 0"),
    (dict(key_value_seq_lengths=np.array([3, -1])), "the entry -1.0; expected integers from 0"),
    (dict(segment_ids=np.zeros((2, 7))), "segment_ids have dtype float.*; expected integers"),
    (dict(key_log_weights=ones(2, 7, 4)), r"\(batch, keys, key heads\) = \(2, 7, 2\)"),
    (dict(key_log_weights=np.full(7, np.nan)), "the entry (nan|inf); expected floats"),
    (dict(key_log_weights=np.full((2, 7), np.inf)), "the entry (nan|inf); expected floats"),
    (dict(key_log_weights=np.zeros((2, 7), int)), "key_log_weights has dtype int[0-9]+; expected"),
    (PLACE | dict(log_decay=0 * ones(2, 7, 2)), "pass one"),
    (dict(alibi_slopes=-SLOPES), "the entry -0.5; expected finite floats"),
    (dict(alibi_slopes=ones(3)), r"alibi_slopes has shape \(3,\), dtype float32; expected"),
    (dict(log_decay=ones(2, 7, 2)), "the entry 1.0; expected floats"),
]
REFUSED = [*TOGETHER, *KINDS]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_names_the_fix(change, message):
    query, key, value, frequencies = inputs()
    args = dict(query=query, key=key, value=value, frequencies=frequencies) | change
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(performer_attention)(**args)


def test_each_refusal_of_the_table_is_met(monkeypatch):
    """The calls above meet each row of the table, in its order."""
    met = []

    def note(call):
        met.append([bool(holds(call)) for holds, _ in refusals.REFUSALS].index(True))

    monkeypatch.setattr(refusals, "check_together", note)
    monkeypatch.setattr(op, "_on_platform", lambda *_: (ones(2, 7, 4, V), None))
    for change, _ in TOGETHER:
        tokens = dict(zip(("query", "key", "value", "frequencies"), inputs(), strict=True))
        inspect.unwrap(performer_attention)(**tokens | change)
    assert met == [*range(len(refusals.REFUSALS))]


def test_traced_options_are_refused():
    tokens = inputs()
    for name, message in (("scale", "scale is traced"), ("exact_keys", "must be an integer, stat")):
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x, name=name: inspect.unwrap(performer_attention)(*tokens, **{name: x}))(
                1
            )


@pytest.mark.parametrize("name", refusals.INSTEAD)
def test_keywords_of_other_functions_are_explained(name):
    with pytest.raises(TypeError, match="requires frequencies after value: draw them once"):
        performer_attention(*inputs()[:3])
    with pytest.raises(TypeError, match=f"performer_attention has no {name}: "):
        performer_attention(*inputs(), **{name: 1})
    with pytest.raises(TypeError, match="nonsense"):
        performer_attention(*inputs(), nonsense=1)


@pytest.mark.parametrize(
    ("of_state", "of_call", "message"),
    [
        ({}, dict(b=1), "initial_state holds arrays of shape"),
        (WINDOW, dict(exact_window=3), "with exact_window=2, this one has exact_window=3"),
        (WINDOW | PLACE, WINDOW, "both have alibi_slopes or log_decay, or neither"),
        (WINDOW, WINDOW | dict(calibration=SHIFTED), "must have the same calibration"),
    ],
)
def test_states_of_other_options_are_refused(of_state, of_call, message):
    options, of_call = dict(is_causal=True, return_state=True), dict(of_call)
    _, state = performer_attention(*inputs(), **options, **of_state)
    args = inputs(b=of_call.pop("b", 2))
    with pytest.raises(ValueError, match=message):
        performer_attention(*args, initial_state=state, **options, **of_call)


def test_a_state_without_its_type_is_refused():
    """As restored by a library that keeps dictionaries and lists alone."""
    _, state = performer_attention(*inputs(), return_state=True)
    for restored in state._asdict(), list(state):
        with pytest.raises(ValueError, match=r"initial_state is a (dict|list); expected the State"):
            inspect.unwrap(performer_attention)(*inputs(), initial_state=restored)
