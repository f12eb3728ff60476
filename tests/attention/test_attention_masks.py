"""performer_attention: which keys a query sees, exactly; precision, gradients and extremes.

Values of masks, packed segments and streams, option by option, are in `test_attention_options`.
"""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer.attention import sizes
from performer.calibration import calibrate
from tests.support.attention_inputs import (
    MAPS,
    OWN,
    H,
    M,
    close,
    far_apart,
    inputs,
    oracle,
    orthogonal,
    ours,
    random_decays,
)
from tests.support.tiers import tiers

# As users run it: for the test of precision.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
optimised = jax.jit(ours, static_argnames="is_causal", compiler_options=OPTIMISED)


@pytest.mark.parametrize("is_causal", [True, False])
def test_what_stands_at_masked_keys_does_not_matter(is_causal, small_chunks):
    """Not even if it is no number: in outputs, and in gradients of whatever has one."""
    query, key, value, frequencies = inputs(t=9)
    mask = np.arange(9) < 5
    fitted = calibrate(query, key, method="shift+scale+proposal")
    of_heads = jnp.broadcast_to(frequencies, (2, M, H))

    @jax.jit
    def run(key, value):
        def loss(*args):
            *tokens, fitted = args
            output = ours(
                *tokens,
                mask=mask[None, None, None],
                calibration=fitted,
                is_causal=is_causal,
            )
            return jnp.sum(jnp.sin(output)), output

        gradient = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
        return gradient(query, key, value, of_heads, fitted)

    want = run(key, value)
    chex.assert_tree_all_finite(want)
    for junk in (np.nan, np.inf, 1e4):
        dirty = [jnp.where(mask[:, None, None], x, junk) for x in (key, value)]
        chex.assert_trees_all_equal(run(*dirty), want)


@pytest.mark.parametrize("is_causal", tiers([True, False], 1))
def test_implementations_agree(is_causal, monkeypatch):
    """On 700 tokens, which make several blocks of several chunks, or one chunk."""
    args = inputs(b=4, t=700)
    attend = partial(ours, *args, is_causal=is_causal)
    blocked = attend(implementation="blocked")
    np.testing.assert_array_equal(attend(), blocked)
    monkeypatch.setattr(sizes, "chunk_and_block", lambda *_: (1401, 1401))
    close(attend(implementation="blocked"), blocked, 2e-5)


WINDOW = dict(exact_window=3, exact_first=2)
FUTURE = {
    "positive": {},
    "relu": dict(feature_map="relu"),
    "own, log-weights": dict(feature_map=OWN),
    "window, decay": WINDOW,
    "robust": dict(implementation="robust", scale=1.0),
}


@pytest.mark.optimised("asserts bits")
@pytest.mark.parametrize("name", tiers(FUTURE, ["window, decay"]))
def test_the_future_changes_nothing_bit_for_bit(name, small_chunks):
    """Queries, keys, values, log-weights and decays of later tokens."""
    query, key, value, frequencies = far_apart(60.0, 30) if name == "robust" else inputs(t=30)
    log_weights = 30 * np.random.default_rng(7).standard_normal((2, 30)).astype(np.float32)
    tokens = dict(query=query, key=key, value=value)
    tokens |= dict(keys=log_weights) if "log-weights" in name else {}
    tokens |= dict(decay=random_decays(t=30)) if "decay" in name else {}
    attend = partial(ours, frequencies=frequencies, is_causal=True, **FUTURE[name])
    before = np.asarray(attend(**tokens))
    for t, other in ((1, 1e4), (4, -1e4), (13, -np.inf), (29, 1e4)):
        later = np.arange(30) >= t
        of_tokens = later[:, None, None]
        changed = {
            x: np.where(of_tokens, 100 * np.asarray(tokens[x]) + 7, tokens[x])
            for x in ("query", "key", "value")
        }
        if "log-weights" in name:
            changed["keys"] = np.where(later, np.float32(other), log_weights)
        if "decay" in name:
            decays = tokens["decay"]
            changed["decay"] = np.where(later[:, None], 3 * decays, decays)
        after = np.asarray(attend(**jax.tree.map(jnp.asarray, changed)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.allclose(after[:, t:], before[:, t:])


def adversarial(t=64):
    """Early keys so long that late ones' kernels dwarf theirs by e^100, in one chunk of 64."""
    query, key, value, frequencies = inputs(t=t, k=4)
    return query, key.at[:, : t // 2].multiply(9.0), value, frequencies


def test_early_queries_keep_their_precision():
    args = adversarial()
    want = oracle(*args, is_causal=True)
    got = ours(*args, is_causal=True)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("is_causal", tiers([True, False], 0))
def test_relative_error_against_float64(is_causal):
    """At most 1e-5 for unit normal q, k times 1, 3 and 5 (head_dim 64)."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 96, 1, 64)) for k in keys[:3])
    frequencies = orthogonal(keys[3], 128, 64)
    for scale in (1.0, 3.0, 5.0):
        args = (scale * query, scale * key, value, frequencies)
        want = oracle(*args, is_causal=is_causal)
        got = optimised(*args, is_causal=is_causal)
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


# Gradients


IDS = np.repeat([[0, 1, 2]], [5, 1, 8], axis=1).repeat(2, axis=0)
GRADIENTS = {
    "both ways, log-weights": {},
    "causal, log-weights": dict(is_causal=True),
    "packed, log-weights": dict(segment_ids=IDS),
    "packed, window": dict(segment_ids=IDS, **WINDOW),
    "causal, window, decay": dict(is_causal=True, **WINDOW),
    "both ways, window, decay": WINDOW,
    "robust": dict(is_causal=True, implementation="robust", scale=1.0),
}


LARGEST = ("packed, log-weights", "causal, window, decay")
"""Cases of the core; the programs of the others are parts of theirs."""


@pytest.mark.parametrize("name", tiers(GRADIENTS, LARGEST))
def test_gradients(name, small_chunks):
    """Of each array along a direction, against differences of the oracle in float64."""
    options = GRADIENTS[name]
    tokens = far_apart(60.0) if name == "robust" else inputs(t=14)
    arrays = dict(zip(("query", "key", "value", "frequencies"), tokens, strict=True))
    rng = np.random.default_rng(7)
    if "log-weights" in name:
        log_weights = 3 * rng.standard_normal((2, 14, 2)).astype(np.float32)
        log_weights[:, 2] = -np.inf
        arrays["keys"] = jnp.asarray(log_weights)
    if "decay" in name:
        arrays["decay"] = jnp.asarray(random_decays())
    rows = slice(9, 10) if name == "robust" else slice(None)

    def loss(arrays):
        return jnp.sum(jnp.sin(ours(**arrays, **options)[:, rows]))

    of_product = ("implementation",)

    def exact(**arrays):
        given = {name: x for name, x in options.items() if name not in of_product}
        return np.sin(oracle(**arrays, **given)[:, rows]).sum()

    gradients = jax.jit(jax.grad(loss))(arrays)
    if "log-weights" in name:
        np.testing.assert_array_equal(gradients["keys"][:, 2], 0)
    wide = {x: np.asarray(array, np.float64) for x, array in arrays.items()}
    for x, gradient in gradients.items():
        along, step = rng.standard_normal(gradient.shape), 1e-6
        ends = [exact(**wide | {x: wide[x] + sign * step * along}) for sign in (1, -1)]
        slope, size = (ends[0] - ends[1]) / (2 * step), np.linalg.norm(gradient)
        tolerance = 1e-3 if name == "robust" else 2e-5 if len(gradients) == 4 else 1e-4
        assert abs(np.vdot(gradient, along) - slope) < tolerance * size, x
        assert size > (0 if name == "robust" else 0.05), x


# Extremes


EVERY = np.ones((2, 1, 1, 9), np.int32)
OPTIONS = {
    "masked": ({}, np.array([[1] * 4 + [0] * 5, [0] * 9])),
    "causal, masked": (dict(is_causal=True), np.array([[0, 0, 1, 0, 0, 1, 1, 1, 0], [0] * 9])),
    "packed": (dict(segment_ids=np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2]] * 2)), None),
}
# Every map once; the other programs with maps of two kinds, the first of each in the core. One
# program serves a mask and none, where all keys exist.
FINITE = [
    ("causal, masked", "positive"),
    ("masked", "positive"),
    ("packed", "trigonometric"),
    *(("causal, masked", feature_map) for feature_map in MAPS[1:]),
    *(("masked", "relu"), ("packed", "positive")),
]


@pytest.mark.parametrize(("name", "feature_map"), tiers(FINITE, 2))
def test_finite_for_any_finite_input(name, feature_map, small_chunks):
    """Outputs and gradients, norms from 0 to 10^4, equal keys; rows that see keys sum to 1.

    Where attention depends on positions, by `robust`: rows would be NaN without it.
    """
    query, key, value, frequencies = inputs(t=9, k=4)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    options, mask = OPTIONS[name]
    if name != "masked":
        options = options | dict(implementation="robust")
    masks = [None] if mask is None else [mask[:, None, None], EVERY]

    @jax.jit
    def run(query, key, value, mask):
        def loss(*args):
            out = ours(*args, frequencies, feature_map=feature_map, mask=mask, **options)
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


def test_masks_with_an_axis_of_heads():
    """A mask that all heads share is one of keys; others are log-weights of each key head."""
    query, key, value, frequencies = inputs(t=5, s=5, n=4, k=4)
    exists = np.random.default_rng(0).random((2, 4, 1, 5)) < 0.6
    attend = partial(ours, query, key, value, frequencies)
    shared = np.broadcast_to(exists[:, :1], (2, 4, 1, 5))
    np.testing.assert_array_equal(attend(mask=shared), attend(mask=exists[:, :1]))
    with pytest.raises(
        ValueError, match=r"Bias\(keys=...\) .*, -inf where there is no key; for any"
    ):
        attend(mask=exists)
    got = attend(keys=np.where(np.moveaxis(exists[:, :, 0], 1, 2), 0, -np.inf))
    for head in range(4):
        one = [x[:, :, head : head + 1] for x in (query, key, value)]
        want = oracle(*one, frequencies, mask=exists[:, head, None])
        close(got[:, :, head : head + 1], want, 1e-5)


@pytest.mark.parametrize(
    "options", [dict(mask=np.arange(5) < 3), dict(key_value_seq_lengths=[3, 5])]
)
def test_the_search_for_infinities_reports_no_mask(options):
    with jax.debug_infs(True):
        ours(*inputs(t=5, s=5), **{k: np.asarray(x) for k, x in options.items()})


def test_the_reference_takes_weights_of_no_keys():
    """The oracle of calls without keys, whose output is 0."""
    query, key = np.ones((2, 3, 4, 8)), np.ones((2, 0, 2, 8))
    for shape in ((2, 0, 2), (2, 0, 1), (2, 0)):
        weights = np.zeros(shape, np.float32)
        output = oracle(query, key, key, np.ones((6, 8)), keys=weights)
        np.testing.assert_array_equal(output, np.zeros(query.shape))
