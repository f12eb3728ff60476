"""performer_attention: which keys a query sees. Masks, packed segments, causal, streaming.

Everything against float64 oracles that form every pair of tokens.
"""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import performer_attention
from performer.attention import _sweep
from tests import oracles
from tests.attention_inputs import MAPS, V, causal, close, far_apart, inputs, orthogonal

# As users run it: for the test of precision.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
optimised = jax.jit(performer_attention, static_argnames="is_causal", compiler_options=OPTIMISED)


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
        allowed = causal(10) if is_causal else None
        want = oracles.kernel_attention(query, key, value, frequencies, allowed=allowed)
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


def test_causal_segments_of_queries_and_keys_apart(small_chunks):
    """A pair is one causal order: query i sees the keys j <= i with its number; traced, too."""
    args = inputs(t=13)
    rng = np.random.default_rng(2)
    ids, of_keys = rng.integers(0, 3, (2, 2, 13))
    attend = jax.jit(lambda *pair: performer_attention(*args, segment_ids=pair, is_causal=True))
    for pair in [(ids, of_keys), (ids, ids.copy())]:
        allowed = (pair[0][:, :, None] == pair[1][:, None]) & causal(13)
        close(attend(*pair), oracles.kernel_attention(*args, allowed=allowed))


# Causal attention and streaming


@pytest.mark.parametrize("t", [1, 4, 12, 13, 40])
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


@pytest.mark.optimised("asserts bits")
@pytest.mark.parametrize("feature_map", MAPS)
def test_the_future_changes_nothing_bit_for_bit(feature_map, small_chunks):
    *tokens, frequencies = inputs(t=30)
    attend = partial(
        performer_attention, frequencies=frequencies, is_causal=True, feature_map=feature_map
    )
    before = np.asarray(attend(*tokens))
    for t in (1, 4, 13, 29):
        later = np.arange(30)[:, None, None] >= t
        changed = [np.where(later, 100 * np.asarray(x) + 7, x) for x in tokens]
        after = np.asarray(attend(*map(jnp.asarray, changed)))
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
    """At most 1e-5 for unit normal q, k times 1, 3 and 5 (head_dim 64)."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 96, 1, 64)) for k in keys[:3])
    frequencies = orthogonal(keys[3], 128, 64)
    args = (scale * query, scale * key, value, frequencies)
    want = oracles.kernel_attention(*args, allowed=causal(96) if is_causal else None)
    got = optimised(*args, is_causal=is_causal)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("feature_map", ["positive", "hyperbolic", "relu"])
def test_streaming_gives_the_same_numbers(feature_map, small_chunks):
    args = inputs(t=21, frequency_heads=2)
    query, key, value, frequencies = args
    options = dict(is_causal=True, feature_map=feature_map)
    want = performer_attention(*args, **options)
    attend = partial(performer_attention, frequencies=frequencies, return_state=True, **options)
    outputs, state, start = [], None, 0
    for size in (10, 5, 1, 5) if feature_map == "positive" else (20, 1):
        part = slice(start, start + size)
        out, state = attend(query[:, part], key[:, part], value[:, part], initial_state=state)
        outputs.append(out)
        start += size
        assert state.numerator.shape == (2, 2, 24 if feature_map == "hyperbolic" else 12, V)
    assert start == 21
    close(jnp.concatenate(outputs, axis=1), want)


# Extremes


EVERY = np.ones((2, 1, 1, 9), np.int32)
OPTIONS = {
    "bidirectional": ({}, None),
    "causal": (dict(is_causal=True), None),
    "packed": (dict(segment_ids=np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2]] * 2)), None),
    "masked": ({}, np.array([[1] * 4 + [0] * 5, [0] * 9])),
    "causal, masked": (dict(is_causal=True), np.array([[0, 0, 1, 0, 0, 1, 1, 1, 0], [0] * 9])),
}
# Every map once; the other programs with a map of each kind, its features in the exponent, as
# factors, as both. One program serves a mask and no mask, where all keys exist.
KINDS = ("positive", "relu")
FINITE = [
    *(("causal, masked", feature_map) for feature_map in MAPS),
    *((name, kind) for name in ("masked", "packed") for kind in (*KINDS, "trigonometric")),
    *((name, kind) for name in ("bidirectional", "causal") for kind in KINDS),
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
            exists = np.ones((2, 9), bool) if mask is None else mask.reshape(2, 9) != 0
            causal = "is_causal" in options
            sees = np.cumsum(exists, axis=1) > 0 if causal else exists.any(axis=1, keepdims=True)
            sums = np.asarray(out[..., -1])
            want = np.broadcast_to(sees[..., None], sums.shape).astype(float)
            np.testing.assert_allclose(sums, want, rtol=1e-5)


@pytest.mark.parametrize("norm", [1.0, 1e2, 1e4])
def test_one_key_is_returned_whatever_its_norm(norm, small_chunks):
    query, key, value, frequencies = inputs(t=6, k=4)
    first = performer_attention(norm * query, -norm * key, value, frequencies, is_causal=True)
    close(first[:, 0], value[:, 0])
    one = performer_attention(norm * query, -norm * key[:, :1], value[:, :1], frequencies)
    close(one, jnp.broadcast_to(value[:, :1], value.shape))


@pytest.mark.parametrize(
    ("feature_map", "is_causal"), [("positive", True), ("positive", False), ("elu+1", True)]
)
def test_robust_attention_is_exact_for_any_norm(feature_map, is_causal, small_chunks):
    """Causal and packed, against the first-order bound of float32; the default is not."""
    ids = np.repeat([[0, 1, 2]], [5, 1, 8], axis=1).repeat(2, axis=0)
    options = dict(is_causal=is_causal, scale=1.0, feature_map=feature_map)
    *_, frequencies = far_apart(1.0)
    off = {"robust": [], None: []}
    for implementation, ratios in off.items():
        attend = partial(
            performer_attention,
            frequencies=frequencies,
            segment_ids=None if is_causal else ids,
            implementation=implementation,
            **options,
        )
        for norm in (1.0, 20.0, 60.0, 1e3):
            *tokens, _ = far_apart(norm)
            want, bound = oracles.full_attention(
                *tokens, frequencies, segments=None if is_causal else (ids, ids), **options
            )
            error = np.abs(attend(*tokens) - want).max(axis=-1)
            ratios.append((error / (2.0**-24 * bound)).max())
    assert max(off["robust"]) < 4
    assert off[None][0] < 4
    assert feature_map != "positive" or max(off[None][1:]) > 100  # what it is for


def test_robust_attention_is_causal_bit_for_bit_and_has_its_gradients(small_chunks):
    *tokens, frequencies = far_apart(60.0)

    @jax.jit
    def run(*tokens):
        def loss(*tokens):
            out = performer_attention(
                *tokens, frequencies, is_causal=True, scale=1.0, implementation="robust"
            )
            return jnp.sum(out[:, 9]), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*tokens)

    gradients, before = run(*tokens)
    later = np.arange(14)[:, None, None] >= 10
    for junk in (0.0, 100.0):
        _, after = run(*(jnp.where(later, junk * x, x) for x in tokens))
        np.testing.assert_array_equal(after[:, :10], before[:, :10])
    rng, wide = np.random.default_rng(0), [np.asarray(x, np.float64) for x in tokens]
    along = [rng.normal(size=x.shape) for x in wide]

    def moved(step):
        tokens = [x + step * y for x, y in zip(wide, along, strict=True)]
        out, _ = oracles.full_attention(*tokens, frequencies, is_causal=True, scale=1.0)
        return out[:, 9].sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    got = sum(np.vdot(x, y) for x, y in zip(gradients, along, strict=True))
    assert abs(got - slope) < 1e-3 * np.sqrt(sum(np.vdot(x, x) for x in gradients))


# Planted faults


def leaky_mask(split, log_weights):
    """Masked keys stay in the maximum and in the normaliser."""
    return split


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
        (
            _sweep,
            "weighted",
            leaky_mask,
            partial(test_masks_lengths_and_removed_keys_are_the_same, True, None),
        ),
        (_sweep, "combine", broken_combine, partial(test_causal_of_any_length, 40, None)),
        (
            _sweep,
            "_passed",
            lambda own, *others: passed_inclusive(own, *others),
            partial(test_the_future_changes_nothing_bit_for_bit, "positive", None),
        ),
    ],
)
def test_planted_faults_are_caught(module, name, fault, case, monkeypatch, small_chunks):
    jax.clear_caches()
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        case()
    monkeypatch.undo()
    jax.clear_caches()


_passed = _sweep._passed


def passed_inclusive(own, carry, after):
    """The state of a chunk's own keys before the chunk: the future leaks."""
    (past, segments), last = _passed(own, carry, after)
    axis = past.maximum.ndim - 2

    def shifted(x, y):
        rest = jax.lax.slice_in_dim(x, 1, x.shape[axis], axis=axis)
        return jnp.concatenate([rest, jnp.expand_dims(y, axis)], axis=axis)

    return (jax.tree.map(shifted, past, last.far), segments), last
