"""The assertions of performer.testing on attention: right functions pass, faults are named."""

import contextlib
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import logsumexp

import performer.nnx
from performer import Bias, Exact, Features, alibi, couplings, performer_attention, testing
from performer.attention import stream
from performer.attention.kernels import which
from tests.support.attention_inputs import inputs, ours
from tests.support.tiers import tiers

ROBUST = partial(performer_attention, implementation="robust")
RIGHT = {
    "blocked": (performer_attention, ("causal norms",)),  # its docstring says so
    "robust": (ROBUST, ()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
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
    fn, skip = (
        partial(ours, implementation="robust", feature_map=feature_map),
        ("norms", "causal norms"),
    )
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
    scale=None,
    scaled=True,
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
    sees_masked=False,
    weight_of_masked=-jnp.inf,
    without_keys=0.0,
    overflows=False,
    width=None,
    examples=None,
    batch_axes="in order",
):
    """The estimate pair by pair, with a fault at each keyword from `scaled` on."""
    lead = query.shape[:-3]
    if batch_axes == "swapped" and len(lead) == 2:
        query = jnp.swapaxes(query, 0, 1)  # of other keys
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    mask = None if mask is None or sees_masked else mask.reshape(-1, *mask.shape[-3:])
    given = value.dtype
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    q, k, v, w = (x.astype(wide) for x in (query, key, value, frequencies))
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5 if scaled else 1.0
    q, k, groups = q * root, k * root, q.shape[2] // k.shape[2]
    q, k, w = (x[..., :width] for x in (q, k, w))
    detached = {"query": q, "value": v}
    if detach in detached:
        q, v = (jax.lax.stop_gradient(x) if x is detached[detach] else x for x in (q, v))
    repeat = (
        jnp.repeat if heads == "consecutive" else lambda x, n, axis: jnp.concatenate([x] * n, 2)
    )
    k, v = (repeat(x, groups, axis=2) for x in (k, v))
    if mask is not None and weight_of_masked == -jnp.inf:
        exists = mask[:, 0, 0, :, None, None]
        v = v * exists if overflows else jnp.where(exists, v, 0)
        k = jnp.where(exists, k, 0) if keys_masked else k
    if overflows:  # masked by a product with 0, which leaves NaN
        features = (
            jnp.exp(key.astype(wide) @ w.T)
            * jnp.exp(-jnp.sum(key.astype(wide) ** 2, -1))[..., None]
        )
        v = v + 0 * jnp.repeat(features, groups, axis=2).sum(-1, keepdims=True)
    of_query = jnp.einsum("btnh,mh->bntm", q, w, precision="highest")
    of_key = jnp.einsum("bsnh,mh->bnsm", k, w, precision="highest")
    if half_norm:
        of_key = of_key - jnp.sum(k**2, axis=-1).swapaxes(1, 2)[..., None] / 2
    if detach == "key":
        of_key = jax.lax.stop_gradient(of_key)
    allowed = jnp.ones((1, 1, q.shape[1], k.shape[1]), bool)
    if is_causal:
        allowed = jnp.tri(q.shape[1], k.shape[1], see, dtype=bool)[None, None]
    if is_causal and block:  # the state of the last block alone
        query_block, key_block = (jnp.arange(x.shape[1]) // block for x in (q, k))
        allowed = allowed & (query_block[:, None] - key_block <= 1)
    soft = 0.0
    if mask is not None and weight_of_masked > -jnp.inf:
        soft = jnp.where(mask != 0, 0.0, weight_of_masked)
    elif mask is not None and keys_masked:
        allowed = allowed & (mask != 0)
    if top == "features":
        logits = logsumexp(of_query[:, :, :, None] + of_key[:, :, None], axis=-1) + soft
        logits = jnp.where(allowed, logits, -jnp.inf)
        best = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        kernel = jnp.exp(logits - jnp.where(jnp.isinf(best), 0, best))
    else:  # one maximum for all, and an epsilon
        of_query, of_key = (jnp.exp(x - jnp.max(x)) + epsilon for x in (of_query, of_key))
        kernel = jnp.where(allowed, jnp.einsum("bntm,bnsm->bnts", of_query, of_key), 0)
    total = jnp.sum(kernel, axis=-1, keepdims=True) + (epsilon if top == "features" else 0)
    out = jnp.einsum("bnts,bsnv->btnv", kernel / jnp.where(total == 0, 1, total), v)
    out = jnp.where(jnp.moveaxis(total, 1, 2) == 0, without_keys, out)
    out = out if stop is None else jnp.where(jnp.arange(out.shape[1])[:, None, None] < stop, out, 0)
    if examples is not None:
        out = jnp.where(jnp.arange(len(out))[:, None, None, None] < examples, out, 0)
    if batch_axes == "swapped" and len(lead) == 2:
        out = jnp.swapaxes(out.reshape(lead[1], lead[0], *out.shape[1:]), 0, 1)
    return (out * (1 + gain)).reshape(*lead, *out.shape[-3:]).astype(given)


FAULTS = {
    "no scale": (dict(scaled=False), "shapes .*without the factor 1 / sqrt"),
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
    "no gradient of keys": (dict(detach="key"), r"gradients \(.* the derivative .* of the key is"),
    "no gradient of queries": (dict(detach="query"), r"gradients \(.* of the query is 0, "),
    "no gradient of values": (dict(detach="value"), r"gradients \(.* of the value is 0, "),
    "rows without keys are 1": (dict(without_keys=1.0), r"mask \(masked=True\): batch entry 1"),
    "rows without keys are NaN": (dict(without_keys=jnp.nan), r"mask .* \d+ outputs are not finit"),
    "masked keys weigh little": (dict(weight_of_masked=-20.0), r"mask \(masked=True"),
    "masked keys overflow": (dict(overflows=True), r"mask \(masked=True, junk=50.0.* not finite"),
    "a gain that no suspect explains": (dict(gain=1e-5), r"one token \((?!.*This is).*$"),
}


def test_the_slow_estimate_passes():
    testing.assert_attention_matches(wrong)


@pytest.mark.parametrize("name", tiers(FAULTS, list(FAULTS)[:8:2]))
def test_faults_of_a_kernel_are_named(name):
    fault, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        testing.assert_attention_matches(partial(wrong, **fault))


class Call(NamedTuple):
    """Properties of a call, for functions that are wrong for some calls alone."""

    grouped: bool
    masked: bool
    causal: bool
    more_keys: bool
    more_queries: bool
    long: bool
    narrow: bool
    wide: bool
    scaled: bool
    several_axes: bool


def call_of(query, key, value, frequencies, mask=None, is_causal=False, scale=None):
    (*lead, t, n, h), (s, k) = query.shape, key.shape[-3:-1]
    return Call(
        n > k, mask is not None, is_causal, s > t, t > s, max(t, s) > 128,
        query.dtype == jnp.bfloat16, h > 16, scale is not None, len(lead) > 1,
    )  # fmt: skip


def only(properties, **fault):
    """The estimate, with a fault in calls that have all these properties."""

    def fn(*tokens, **options):
        call = call_of(*tokens, **options)
        holds = all(getattr(call, name) for name in properties.split())
        return wrong(*tokens, **options, **fault if holds else {})

    return fn


LATE = [  # wrong for two properties together, or a property and gradients
    ("grouped causal", dict(see=99)),
    ("grouped masked", dict(heads="in turn")),
    ("grouped", dict(detach="key")),
    ("causal masked", dict(detach="key")),
    ("causal more_keys", dict(see=99)),
    ("more_queries causal", dict(stop=6)),
    ("long masked", dict(sees_masked=True)),
    ("long causal", dict(see=99)),
    ("long", dict(detach="query")),
    ("long", dict(detach="value")),
    ("narrow causal", dict(see=99)),
    ("narrow masked", dict(sees_masked=True)),
    ("narrow", dict(gain=-0.03)),
    ("narrow", dict(detach="value")),
    ("narrow scaled", dict(scaled=False)),
    ("wide", dict(width=16)),
    ("wide masked", dict(weight_of_masked=-20.0)),
    ("several_axes", dict(batch_axes="swapped")),
    ("several_axes causal", dict(see=0 - 1)),
    ("wide causal", dict(examples=2)),
    ("scaled causal", dict(scaled=False)),
    ("grouped narrow", dict(detach="query")),
]


@pytest.fixture
def crossed_alone(monkeypatch):
    """The crossed cases alone: what they find, the others have not."""
    attention = testing.attention
    monkeypatch.setattr(attention, "CASES", {name: () for name in attention.CASES})
    return lambda fn, **skip: testing.assert_attention_matches(
        fn, skip=("jit", "vmap", "scan", *skip.get("skip", ()))
    )


@pytest.mark.parametrize(
    ("properties", "fault"), tiers(LATE, LATE[:4] + LATE[6:13:3], ids=lambda x: f"{x[0]} {x[1]}")
)
def test_faults_of_crossed_properties_are_found(properties, fault, crossed_alone):
    with pytest.raises(AssertionError, match=r"(crossed|gradients) \("):
        crossed_alone(only(properties, **fault))


def test_each_pair_of_properties_is_crossed():
    """Sizes above 16 are not crossed with long sequences, where the reference would be slow."""
    calls = []
    for case in testing.attention.CROSSED:
        calls.append(call_of(*case.arrays(), **case.options())._asdict())
    for a, b in itertools.combinations(Call._fields, 2):
        if {a, b} not in ({"more_keys", "more_queries"}, {"long", "wide"}):
            apart = {"more_keys", "more_queries", "long"} >= {a, b}
            assert apart or any(call[a] and call[b] for call in calls), (a, b)
            assert any(call[a] and not call[b] for call in calls), (a, b)


def test_what_is_skipped_is_not_crossed(crossed_alone):
    """Functions of one property each still pass with the others skipped."""

    def plain(query, key, value, frequencies):
        assert query.ndim == 4
        assert query.shape == key.shape
        assert query.dtype == jnp.float32
        return wrong(query, key, value, frequencies)

    names = ["mask", "causal", "cross attention", "grouped heads", "bfloat16", "scale"]
    crossed_alone(plain, skip=[*names, "batch axes"])


def turned(fn, *tokens, **options):
    """Queries, keys and frequencies in another basis."""
    query, key, value, frequencies = tokens
    basis = np.linalg.qr(np.random.default_rng(8).normal(size=(query.shape[-1],) * 2))[0]
    query, key, frequencies = (
        (x.astype(jnp.float32) @ basis).astype(x.dtype) if x.dtype == jnp.float32 else x
        for x in (query, key, frequencies)
    )
    return fn(query, key, value, frequencies, **options)


def by_head(fn, query, key, value, frequencies, **options):
    """One query head after the other."""
    groups = query.shape[-2] // key.shape[-2]
    heads = [
        fn(query[..., i : i + 1, :], *(x[..., i // groups, None, :] for x in (key, value)),
           frequencies, **options)
        for i in range(query.shape[-2])
    ]  # fmt: skip
    return jnp.concatenate(heads, axis=-2)


def by_example(fn, query, key, value, frequencies, mask=None, **options):
    """`lax.map` over the last batch axis."""
    axis = query.ndim - 4

    def one(x):
        tokens, mask = x
        tokens = [y[None] for y in tokens]
        return fn(*tokens, frequencies, mask=None if mask is None else mask[None], **options)[0]

    for _ in range(axis):
        one = partial(jax.lax.map, one)
    return jax.lax.map(one, ((query, key, value), mask))


def padded(fn, query, key, value, frequencies, mask=None, **options):
    """Up to a multiple of 16 tokens, with NaN at keys that do not exist."""
    t, s = query.shape[-3], key.shape[-3]
    mask = jnp.ones((*key.shape[:-3], 1, 1, s), bool) if mask is None else mask
    more = [-x % 16 for x in (t, s, s)]
    query, key, value = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, n), (0, 0), (0, 0)])
        for x, n in zip((query, key, value), more, strict=True)
    )
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, more[1])])
    return fn(query, key, value, frequencies, mask=mask, **options)[..., :t, :, :]


def reversed_queries(fn, query, key, value, frequencies, is_causal=False, **options):
    """The queries from the last to the first, unless they see earlier keys alone."""
    turn = (lambda x: x) if is_causal else partial(jnp.flip, axis=-3)
    return turn(fn(turn(query), key, value, frequencies, is_causal=is_causal, **options))


def repeated_heads(fn, query, key, value, frequencies, **options):
    """A key head for each query head."""
    groups = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
    return fn(query, key, value, frequencies, **options)


def of_float32(fn, *tokens, **options):
    return fn(*(x.astype(jnp.float32) for x in tokens), **options).astype(tokens[2].dtype)


def halved(fn, query, key, value, frequencies, **options):
    """Values in two parts."""
    half = value.shape[-1] // 2
    parts = value[..., :half], value[..., half:]
    return jnp.concatenate([fn(query, key, x, frequencies, **options) for x in parts], axis=-1)


def twice(fn, query, key, value, frequencies, mask=None, is_causal=False, **options):
    """Each key twice, unless positions count."""
    if not is_causal:
        key, value = (jnp.concatenate([x, x], axis=-3) for x in (key, value))
        mask = None if mask is None else jnp.concatenate([mask, mask], axis=-1)
    return fn(query, key, value, frequencies, mask=mask, is_causal=is_causal, **options)


def landmarks(query, key, value, frequencies, scale=None):
    """Two softmax attentions of JAX through the features."""
    lead, wide = query.shape[:-3], jnp.float32
    query, key, value = (x.reshape(-1, *x.shape[-3:]).astype(wide) for x in (query, key, value))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    v, width = value.shape[-1], max(value.shape[-1], query.shape[-1])
    query, key, value, frequencies = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
        for x in (query, key, value, frequencies)
    )
    w = jnp.broadcast_to(frequencies[:, None], (*frequencies.shape[:1], *query.shape[2:]))
    w = jnp.broadcast_to(w, (len(query), *w.shape)).astype(wide)
    bias = -(root**2) / 2 * jnp.moveaxis(jnp.sum(key**2, axis=-1), 1, 2)[:, :, None]
    with jax.default_matmul_precision("highest"):
        attend = partial(jax.nn.dot_product_attention, scale=1.0)
        landmarks = attend(w, root * key, value, bias=bias)
        sums = logsumexp(root * jnp.einsum("bmnh,bsnh->bnms", w, key) + bias, axis=-1)
        out = attend(root * query, w, landmarks, bias=sums[:, :, None])[..., :v]
    return out.reshape(*lead, *out.shape[1:])


CHANGES = [turned, by_head, by_example, padded, reversed_queries, repeated_heads, of_float32]
CHANGES += [halved, twice]
UNUSUAL = {change.__name__: partial(change, ROBUST) for change in CHANGES} | {
    "the slow estimate": wrong,
    "blocked": performer_attention,
    "jit": jax.jit(ROBUST, static_argnames=("is_causal", "scale")),
    "checkpoint": lambda *x, **options: jax.checkpoint(partial(ROBUST, **options))(*x),
    "other frequencies first": lambda q, k, v, w, **o: ROBUST(q, k, v, w[::-1], **o),
    "all keys and then some": partial(padded, partial(padded, wrong)),
    "a decay of 0": lambda q, k, v, w, **o: ROBUST(
        q,
        k,
        v,
        w,
        **o,
        **dict(bias=alibi(np.zeros(k.shape[-2], np.float32))) if q.shape == k.shape else {},
    ),
    "one segment": lambda q, k, v, w, **o: (
        ROBUST(q, k, v, w, segment_ids=np.zeros(k.shape[:-2], int), **o)
        if q.shape[:-2] == k.shape[:-2]
        else ROBUST(q, k, v, w, **o)
    ),
    "log-weights": lambda q, k, v, w, **o: ROBUST(
        q, k, v, w, bias=Bias(keys=np.full(k.shape[:-2], 3.0)), **o
    ),
    "weights": lambda q, k, v, w, **o: ROBUST(
        q, k, v, Features(w, weights=jnp.full(len(w), 2.0)), **o
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNUSUAL)
def test_right_but_unusual_functions_pass(name, crossed_alone):
    crossed_alone(UNUSUAL[name])


@pytest.mark.thorough
def test_two_softmax_attentions_pass(crossed_alone):
    """Not with masks: for a query without keys the gradient of JAX's function is NaN."""
    crossed_alone(landmarks, skip=("causal", "mask", "bfloat16"))


@pytest.mark.parametrize("name", ["jit", "vmap", "scan"])
def test_each_entry_of_a_transformation_counts(name, monkeypatch, crossed_alone):
    """The second entry has queries twice as long."""

    def fn(query, *others):
        far = jnp.mean(query**2) > 2
        return wrong(query, *others) * jnp.where(far, 1.01, 1.0)

    monkeypatch.setattr(testing.attention, "CROSSED", ())
    skip = {"jit", "vmap", "scan"} - {name}
    testing.assert_attention_matches(wrong, skip=skip)
    with pytest.raises(AssertionError, match=rf"{name} \("):
        testing.assert_attention_matches(fn, skip=skip)


def test_unknown_skips_are_refused():
    with pytest.raises(ValueError, match=r"skip has \['maks'\]; expected names of"):
        testing.assert_attention_matches(wrong, skip=("maks",))


def leak_at(token, query, key, value, frequencies):
    """Causal attention, where the query before a token also sees its value."""
    output = performer_attention(query, key, value, frequencies, is_causal=True)
    position = token % value.shape[1]
    return output.at[:, position - 1].add(value[:, position])


def test_leaks_from_the_future_are_found():
    testing.assert_causal(partial(performer_attention, is_causal=True))
    for leak in (dict(see=1), dict(top="all", epsilon=1e-6)):
        with pytest.raises(AssertionError, match="change the output of token"):
            testing.assert_causal(partial(wrong, is_causal=True, **leak))
    for token in (-1, 11, 128):
        with pytest.raises(AssertionError, match="change the output of token"):
            testing.assert_causal(partial(leak_at, token))
    two = [jnp.asarray(x) for x in testing.attention.Case(t=2, s=2).arrays()]
    testing.assert_causal(partial(performer_attention, is_causal=True), *two)
    with pytest.raises(AssertionError, match="does not depend on the tokens"):
        testing.assert_causal(lambda query, key, value, frequencies: jnp.ones_like(query))


def test_one_token_shows_no_leak():
    """As with axis 0, which is a batch of 1."""
    with pytest.raises(ValueError, match="axis 0 has 1 tokens: give two or more, or another axis"):
        testing.assert_causal(performer_attention, *[jnp.ones((1, 5, 2, 4))] * 3, axis=0)


@pytest.mark.parametrize("fault", ["none", "state", "position", "the last piece"])
def test_streams(fault):
    causal = partial(performer_attention, is_causal=True)

    def step(state, *tokens):
        output, new = stream(*tokens, state)
        wrong = fault == "the last piece" and output.shape[1] == 14
        return output * (1 + wrong), state if fault == "state" else new

    if fault == "none":
        return testing.assert_streams(causal, step)
    whole = causal if fault != "position" else partial(causal, bias=alibi(np.ones(2)))
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


def test_couplings_that_ignore_their_key_are_found(monkeypatch):
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
    seeds = []
    monkeypatch.setattr(
        testing.attention, "_mean_error", lambda *x, **_: seeds.append(x[5]) or (len(seeds), 0.1)
    )
    testing.assert_lower_attention_error("orf", "orf", query, key, 16)
    assert len(set(seeds)) == 2
    monkeypatch.undo()
    all_exact = dict(exact=Exact(keys=20), at_most=1e-6, draws=8)
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
    converted, _ = performer.nnx.linearize(model, batches, exact=Exact(keys=9))
    testing.assert_layers_close(model, converted, batches, at_most=1e-9, min_agreement=1.0)
    assert model.first.attention_fn is nnx.dot_product_attention
    frequencies = converted.second.attention_fn.frequencies
    far, _ = performer.nnx.linearize(model, batches, num_features=8)
    converted.second.attention_fn = far.second.attention_fn
    assert frequencies is not converted.second.attention_fn.frequencies
    with pytest.raises(AssertionError, match="above 1e-09: second, output; equal argmax"):
        testing.assert_layers_close(model, converted, batches, at_most=1e-9)
    with pytest.raises(AssertionError, match="above 9: output"):
        testing.assert_layers_close(lambda x: x, lambda x: x * np.nan, batches, at_most=9.0)
    converted.second.attention_fn = lambda *x, **_: x[0] * np.nan
    with pytest.raises(AssertionError, match="above 9: second, output"):
        testing.assert_layers_close(model, converted, batches, at_most=9.0)
    with pytest.raises(AssertionError, match=r"required 100\.0%"):
        testing.assert_layers_close(
            lambda x: x, lambda x: -x, batches, at_most=9.0, min_agreement=1.0
        )
