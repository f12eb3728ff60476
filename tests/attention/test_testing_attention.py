"""The assertions of performer.testing on attention: right functions pass, faults are named."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import logsumexp

import performer.nnx
from performer import couplings, performer_attention, testing
from performer.attention.kernels import which
from tests.support.attention_inputs import inputs
from tests.support.tiers import tiers

ROBUST = partial(performer_attention, implementation="robust")
RIGHT = {
    "blocked": (performer_attention, ("causal norms",)),  # its docstring says so
    "robust": (ROBUST, ()),
    "direct": (partial(performer_attention, implementation="direct"), ("causal norms",)),
}


@pytest.mark.parametrize("name", tiers(RIGHT, ["robust"]))
def test_right_functions_pass(name):
    fn, skip = RIGHT[name]
    testing.assert_attention_matches(fn, skip=skip)


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_interpreted_kernels_pass(platform, monkeypatch):
    """What they do not serve, float16 on a TPU, is computed without them, with a warning."""
    monkeypatch.setattr(which, "INTERPRET", platform)
    fn = partial(performer_attention, implementation="pallas")
    skip = "causal norms", "scan", "vmap"  # batches of kernels are not interpreted
    which.warn.cache_clear()
    warned = pytest.warns(UserWarning, match="implementation='pallas' does not support")
    with warned if platform == "tpu" else contextlib.nullcontext():
        testing.assert_attention_matches(fn, skip=skip)


@pytest.mark.thorough
@pytest.mark.parametrize("feature_map", ["hyperbolic", "relu", "trigonometric"])
def test_other_feature_maps_pass(feature_map):
    """With sines a normaliser cancels to 1e-4 of its terms: its output is 6,000 times a value."""
    fn, skip = partial(ROBUST, feature_map=feature_map), ("norms", "causal norms")
    skip += ("gradients",) if feature_map == "trigonometric" else ()
    testing.assert_attention_matches(fn, feature_map=feature_map, skip=skip)


def wrong(
    query,
    key,
    value,
    frequencies,
    mask=None,
    is_causal=False,
    *,
    scale=True,
    half_norm=True,
    heads="consecutive",
    see=0,
    keys_masked=True,
    epsilon=0.0,
    top="features",
    dtype=None,
    stop=None,
    detach="",
    gain=0.0,
    block=0,
):
    """The estimate pair by pair, with a fault at each keyword."""
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    q, k, v, w = (x.astype(wide) for x in (query, key, value, frequencies))
    root = q.shape[-1] ** -0.25 if scale else 1.0
    q, k, groups = q * root, k * root, q.shape[2] // k.shape[2]
    repeat = (
        jnp.repeat if heads == "consecutive" else lambda x, n, axis: jnp.concatenate([x] * n, 2)
    )
    k, v = (repeat(x, groups, axis=2) for x in (k, v))
    if mask is not None:
        exists = mask[:, 0, 0, :, None, None]
        v = jnp.where(exists, v, 0)
        k = jnp.where(exists, k, 0) if keys_masked else k
    of_query = jnp.einsum("btnh,mh->bntm", q, w, precision="highest")
    of_key = jnp.einsum("bsnh,mh->bnsm", k, w, precision="highest")
    if half_norm:
        of_key = of_key - jnp.sum(k**2, axis=-1).swapaxes(1, 2)[..., None] / 2
    if detach and {"mask": mask is not None, "causal": is_causal}.get(detach, True):
        of_key = jax.lax.stop_gradient(of_key)
    allowed = jnp.ones((1, 1, q.shape[1], k.shape[1]), bool)
    if is_causal:
        allowed = jnp.tri(q.shape[1], k.shape[1], see, dtype=bool)[None, None]
    if is_causal and block:  # the state of the last block alone
        query_block, key_block = (jnp.arange(x.shape[1]) // block for x in (q, k))
        allowed = allowed & (query_block[:, None] - key_block <= 1)
    if mask is not None and keys_masked:
        allowed = allowed & (mask != 0)
    if top == "features":
        logits = logsumexp(of_query[:, :, :, None] + of_key[:, :, None], axis=-1)
        logits = jnp.where(allowed, logits, -jnp.inf)
        best = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        kernel = jnp.exp(logits - jnp.where(jnp.isinf(best), 0, best))
    else:  # one maximum for all, and an epsilon
        of_query, of_key = (jnp.exp(x - jnp.max(x)) + epsilon for x in (of_query, of_key))
        kernel = jnp.where(allowed, jnp.einsum("bntm,bnsm->bnts", of_query, of_key), 0)
    total = jnp.sum(kernel, axis=-1, keepdims=True) + (epsilon if top == "features" else 0)
    out = jnp.einsum("bnts,bsnv->btnv", kernel / jnp.where(total == 0, 1, total), v)
    out = out if stop is None else jnp.where(jnp.arange(out.shape[1])[:, None, None] < stop, out, 0)
    return (out * (1 + gain)).astype(value.dtype)


FAULTS = {
    "no scale": (dict(scale=False), "shapes .*without the factor 1 / sqrt"),
    "no half norm": (dict(half_norm=False), r"shapes \("),
    "heads in turn": (dict(heads="in turn"), "grouped heads .*take the key heads in turn"),
    "the next key is seen": (dict(see=1), r"causal \("),
    "all keys are seen": (dict(see=99), r"causal \(.*attention that sees later keys"),
    "the own key is not seen": (dict(see=-1), r"causal \("),
    "values masked, keys not": (dict(keys_masked=False), r"mask \(.*stay in the normaliser"),
    "an epsilon": (dict(epsilon=1e-2), r"shapes \(.*come from an epsilon"),
    "a global maximum": (dict(top="all", epsilon=1e-6), r"(shapes|norms) \("),
    "a global maximum without epsilon": (dict(top="all"), r"norms \(norm=100.*one maximum for all"),
    "only 8 queries": (dict(stop=8), r"shapes \(default sizes\): batch entry \d, query 8"),
    "only 256 queries": (dict(stop=256), r"shapes \(.*t=300.*query 2[56]\d"),
    "a state of one block": (dict(block=128), r"causal \(.*t=300.*query 2[5-9]\d"),
    "bfloat16 inside": (dict(dtype=jnp.bfloat16), r"shapes \(.* or from products in low precisi"),
    "no gradient of keys": (
        dict(detach="always"),
        r"gradients \(default .* the derivative .* of the key",
    ),
    "no gradient of keys if masked": (
        dict(detach="mask"),
        r"gradients \(masked=True\): .* the key",
    ),
    "no gradient of keys if causal": (
        dict(detach="causal"),
        r"gradients \(is_causal=True\): .* key",
    ),
    "a gain that no suspect explains": (dict(gain=1e-5), r"one token \((?!.*This is).*$"),
}


def test_the_slow_estimate_passes():
    testing.assert_attention_matches(wrong)


@pytest.mark.parametrize("name", tiers(FAULTS, list(FAULTS)[:8:2]))
def test_faults_of_a_kernel_are_named(name):
    fault, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        testing.assert_attention_matches(partial(wrong, **fault))


def test_unknown_skips_are_refused():
    with pytest.raises(ValueError, match=r"skip has \['maks'\]; expected names of"):
        testing.assert_attention_matches(wrong, skip=("maks",))


def test_leaks_from_the_future_are_found():
    testing.assert_causal(partial(performer_attention, is_causal=True))
    for leak in (dict(see=1), dict(top="all", epsilon=1e-6)):
        with pytest.raises(AssertionError, match="change the output of token"):
            testing.assert_causal(partial(wrong, is_causal=True, **leak))
    two = [jnp.asarray(x) for x in testing.attention.Case(t=2, s=2).arrays()]
    testing.assert_causal(partial(performer_attention, is_causal=True), *two)
    with pytest.raises(AssertionError, match="does not depend on the tokens"):
        testing.assert_causal(lambda query, key, value, frequencies: jnp.ones_like(query))


def test_one_token_shows_no_leak():
    """As with axis 0, which is a batch of 1."""
    with pytest.raises(ValueError, match="axis 0 has 1 tokens: give two or more, or another axis"):
        testing.assert_causal(performer_attention, *[jnp.ones((1, 5, 2, 4))] * 3, axis=0)


@pytest.mark.parametrize("fault", ["none", "state", "position"])
def test_streams(fault):
    causal = partial(performer_attention, is_causal=True)

    def step(state, *tokens):
        output, new = causal(*tokens, initial_state=state, return_state=True)
        return output, state if fault == "state" else new

    if fault == "none":
        return testing.assert_streams(causal, step)
    whole = causal if fault == "state" else partial(performer_attention, alibi_slopes=np.ones(2))
    with pytest.raises(AssertionError, match=r"piece \d \(tokens .* is away from the whole by"):
        testing.assert_streams(whole, step)


def of_equal_lengths(key, m, d):
    """Directions of ORF with lengths half of what they must be."""
    return couplings.get("orf")(key, m, d) / 2


def test_consistency():
    """The error of fixed lengths falls to a floor; halved lengths estimate another kernel."""
    testing.assert_attention_consistent("orf")
    for coupling in ("fixed", of_equal_lengths):
        with pytest.raises(AssertionError, match=r"falls as m\^-0\.\d+ \(\+- .*\), expected m\^-1"):
            testing.assert_attention_consistent(coupling)


def test_errors_on_given_queries_and_keys():
    query, key, *_ = inputs(b=1, t=20, k=4, scale=0.7)
    check = partial(testing.assert_attention_error, query, key, "iid", 16, draws=200)
    value, spread = testing.attention._mean_error(query, key, "iid", 16, 200, 0)
    check(at_most=value + spread)
    check(at_most=value - 3 * spread)  # within what chance explains
    with pytest.raises(AssertionError, match=r"is 0\.\d+ \+- .*, above .* by \d+\.\d standard err"):
        check(at_most=value - 5 * spread)
    lower = partial(testing.assert_lower_attention_error, query=query, key=key, num_features=16)
    lower("pm-antithetic", "iid")
    for pair in (("iid", "iid"), ("iid", "pm-antithetic")):
        with pytest.raises(AssertionError, match="not lower than .* standard errors apart"):
            lower(*pair)


def of_one_key(key, m, d):
    return couplings.get("orf")(jax.random.key(0), m, d)


def test_couplings_that_ignore_their_key_are_found():
    """Such errors have no spread: the lower of two would be a matter of luck."""
    query, key, *_ = inputs(b=1, t=20, k=4, scale=0.7)
    sizes = dict(num_features=(64, 128), draws=8)
    for check in (
        lambda: testing.assert_attention_error(query, key, of_one_key, 16, at_most=9, draws=8),
        lambda: testing.assert_lower_attention_error(of_one_key, "iid", query, key, 16, draws=8),
        lambda: testing.assert_attention_consistent(of_one_key, **sizes),
    ):
        with pytest.raises(AssertionError, match="same for 8 keys: .* depend on the key"):
            check()
    all_exact = dict(exact_keys=20, at_most=1e-6, draws=8)
    testing.assert_attention_error(query, key, "orf", 16, **all_exact)  # no spread, no error


class Model(nnx.Module):
    def __init__(self):
        options = dict(num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0))
        self.first, self.second = (nnx.MultiHeadAttention(**options) for _ in range(2))

    def __call__(self, x):
        x = x + self.first(x)
        return x + self.second(x)


def test_layers_of_a_converted_model():
    """A layer that is far away is named; the model stays as it was."""
    rng, model = np.random.default_rng(0), Model()
    batches = [3 * rng.standard_normal((4, 9, 16), np.float32) for _ in range(2)]
    converted, _ = performer.nnx.linearize(model, batches, exact_keys=9)
    testing.assert_layers_close(model, converted, batches, at_most=1e-9, min_agreement=1.0)
    assert model.first.attention_fn is nnx.dot_product_attention
    frequencies = converted.second.attention_fn.frequencies
    far, _ = performer.nnx.linearize(model, batches, num_features=8)
    converted.second.attention_fn = far.second.attention_fn
    assert frequencies is not converted.second.attention_fn.frequencies
    with pytest.raises(AssertionError, match="above 1e-09: second, output; equal argmax"):
        testing.assert_layers_close(model, converted, batches, at_most=1e-9)
    with pytest.raises(AssertionError, match=r"required 100\.0%"):
        testing.assert_layers_close(
            lambda x: x, lambda x: -x, batches, at_most=9.0, min_agreement=1.0
        )
