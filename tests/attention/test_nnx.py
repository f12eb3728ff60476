"""PerformerAttention inside nnx.MultiHeadAttention."""

import itertools
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import performer
from performer import Exact, Features, alibi, performer_attention
from performer.calibration import calibrate
from performer.nnx import PerformerAttention, redraw
from tests.support import oracles
from tests.support.tiers import tiers


def layer(coupling="pm", num_heads: int | None = 2, dropout_rate=0.0, options=None, **kwargs):
    rngs = nnx.Rngs(params=0, frequencies=1, dropout=2)
    attention_fn = PerformerAttention(
        16, 4, coupling=coupling, num_heads=num_heads, **options or {}, rngs=rngs
    )
    return nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        attention_fn=attention_fn,
        dropout_rate=dropout_rate,
        rngs=rngs,
        **kwargs,
    )


X = jax.random.normal(jax.random.key(0), (3, 5, 8))


WINDOW: dict = dict(exact=Exact(window=2, first=1))
SLOPES: dict = dict(bias=alibi(np.array([0.5, 0.125])))
PLACES = WINDOW | SLOPES
OF_FOUR = WINDOW | dict(bias=alibi(np.array([0.5, 0.125, 0.0, 2.0])))


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("options", [OF_FOUR, dict(feature_map="hyperbolic")])
def test_options_are_those_of_the_operator(options, is_causal):
    """Of grouped heads; later tokens change nothing that is causal."""
    rngs = nnx.Rngs(params=0, frequencies=1)
    attention_fn = PerformerAttention(16, 4, coupling="pm", num_heads=2, **options, rngs=rngs)
    module = nnx.MultiHeadAttention(
        4, 16, num_kv_heads=2, attention_fn=attention_fn, decode=False, rngs=rngs
    )
    x = jax.random.normal(jax.random.key(1), (3, 7, 16))
    heads, W = [f(x) for f in (module.query, module.key, module.value)], attention_fn.frequencies
    plain = partial(performer_attention, *heads, is_causal=is_causal)
    fields = {x: y for x, y in options.items() if x != "bias"}
    attend = partial(plain, Features(W[...], **fields), bias=options.get("bias"))
    got = module(x, is_causal=is_causal)
    np.testing.assert_allclose(got, module.out(attend()), atol=1e-6)
    assert not np.allclose(got, module.out(plain(W[...])), atol=1e-3)
    if is_causal:
        changed = module(x.at[:, 4:].set(0), is_causal=True)
        np.testing.assert_array_equal(changed[:, :4], got[:, :4])


@pytest.mark.parametrize("options", tiers([PLACES, {}], 1))
def test_decoding_is_causal_attention(options):
    """Token by token through Flax's cache, whose keys after the token do not exist; weights too."""
    module = layer(options=options, decode=True)
    module.init_cache(X.shape)
    step = nnx.jit(lambda module, x: module(x, sow_weights=True))
    steps, rows = [], []
    for i in range(X.shape[1]):
        steps.append(step(module, X[:, i : i + 1]))
        rows.append(nnx.pop(module, nnx.Intermediate)["attention_weights"].get_value()[0])
    want = module(X, decode=False, is_causal=True, sow_weights=True)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), want, atol=1e-5)
    (matrix,) = nnx.state(module, nnx.Intermediate)["attention_weights"].get_value()
    np.testing.assert_allclose(jnp.concatenate(rows, axis=2), matrix, atol=1e-5)


def test_sown_weights_are_those_of_the_implementation():
    """Early queries see keys of norm 25 opposite to them, where only "robust" is accurate."""
    rng = np.random.default_rng(0)
    query, key = np.zeros((2, 1, 8, 1, 8), np.float32)
    query[..., 0], key[0, :, 0, 0] = 25, np.repeat([-25, 25], 4)
    key += 0.1 * rng.normal(size=key.shape)
    value = rng.normal(size=(1, 8, 1, 4)).astype(np.float32)
    options: dict = dict(coupling="orf", scale=1.0, implementation="robust")
    attention = PerformerAttention(16, 8, num_heads=1, **options, rngs=nnx.Rngs(0))
    module = nnx.Module()
    tokens = [jnp.asarray(x) for x in (query, key, value)]
    output = attention(*tokens, is_causal=True, module=module)
    (matrix,) = nnx.state(module, nnx.Intermediate)["attention_weights"].get_value()
    got = np.einsum("bnts,bsnv->btnv", matrix, value)
    np.testing.assert_allclose(got, output, atol=1e-4)


def two_layers(redraw_every):
    rngs = nnx.Rngs(params=0, frequencies=1)
    return nnx.List(
        PerformerAttention(16, 4, num_heads=2, redraw_every=redraw_every, rngs=rngs)
        for _ in range(2)
    )


def test_redraw_every_so_many_steps():
    """From key and step alone, one trace for all steps, layers apart, and only when due."""
    traces = []

    @jax.jit
    def draws(key, step, state):
        traces.append(None)
        model = nnx.merge(graph, state)
        redraw(key, model, step)
        return nnx.state(model)

    graph, state = nnx.split(two_layers(3))
    first = jax.tree.leaves(state)
    history, key = [first], jax.random.key(5)
    for step in range(7):
        state = draws(key, step, state)
        history.append(jax.tree.leaves(state))
    assert len(traces) == 1
    changes = [
        not all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
        for old, new in itertools.pairwise(history)
    ]
    assert changes == [False, False, False, True, False, False, True]
    one, two = history[-1]
    assert not np.allclose(one, two)
    assert not np.allclose(one[0], one[1])
    # A run resumed at step 6 from any earlier state draws the same.
    resumed = jax.tree.leaves(draws(key, 6, nnx.state(two_layers(3))))
    chex.assert_trees_all_equal(resumed, history[-1])
    fold_in = jax.random.fold_in
    want = performer.couplings.draw(fold_in(fold_in(key, 0), 6), "pm-antithetic", 16, 4, 2)
    np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)
    model = two_layers(0)  # draws nothing
    before = jax.tree.leaves(nnx.state(model))
    redraw(key, model, 10)
    chex.assert_trees_all_equal(jax.tree.leaves(nnx.state(model)), before)


def calibrated(num_heads: int | None = 2, method="full", **kwargs):
    rngs = nnx.Rngs(params=0, frequencies=1)
    attention_fn = PerformerAttention(
        16, 4, coupling="orf", num_heads=num_heads, calibration=method, rngs=rngs, **kwargs
    )
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, attention_fn=attention_fn, decode=False, rngs=rngs
    )


def test_calibrated_causal_attention_does_not_see_the_future_in_training():
    """Not even through its statistics: they are used from the next call on."""
    one, two = calibrated(), calibrated()
    for module in (one, two):
        module(X, is_causal=True)
    changed = X.at[:, 3:].add(2.0)
    outputs = one(X, is_causal=True), two(changed, is_causal=True)
    np.testing.assert_array_equal(outputs[0][:, :3], outputs[1][:, :3])


def test_the_pairs_of_the_call_are_measured():
    """With the scale of the layer, within segments, and with the masks of Flax: floats."""
    tokens = jax.random.normal(jax.random.key(1), (3, 2, 5, 2, 4))
    scale = 0.9

    def moments(**options):
        attention = PerformerAttention(
            16, 4, num_heads=2, calibration="full", momentum=0.0, scale=scale, rngs=nnx.Rngs(0)
        )
        attention(*tokens, **options)
        return attention.statistics["moments"][...]

    def want(start=0, end=5, **options):
        some = (x[:, start:end] for x in tokens[:2])
        return oracles.pair_moments(*some, scale=scale, **options)

    check = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    check(moments(), want())
    causal = nnx.make_causal_mask(jnp.ones((2, 5)))
    assert causal.dtype == jnp.float32
    check(moments(mask=causal), want(is_causal=True))
    ids = jnp.array([[4, 4, 4, 1, 1]] * 2)
    for options in {}, {"is_causal": True}:
        packed = (3 * want(0, 3, **options) + 2 * want(3, 5, **options)) / 5
        check(moments(segment_ids=ids, **options), packed)


def test_a_call_is_calibrated_by_the_calls_before():
    """The first one by nothing, the second one by the first alone, whatever the momentum."""
    tokens = jax.random.normal(jax.random.key(1), (3, 2, 5, 2, 4)) + 0.5
    attention = PerformerAttention(
        16, 4, coupling="orf", num_heads=2, calibration="full", rngs=nnx.Rngs(0)
    )
    frequencies = attention.frequencies[...]
    plain = performer_attention(*tokens, frequencies)
    np.testing.assert_allclose(attention(*tokens), plain, rtol=1e-4, atol=1e-5)
    fitted = calibrate(*tokens[:2], coupling="orf")
    want = performer_attention(*tokens, Features(frequencies, fitted))
    attention.eval()
    np.testing.assert_allclose(attention(*tokens), want, rtol=1e-4, atol=1e-5)
    assert np.abs(want - plain).max() > 0.05


@pytest.mark.parametrize("method", ["none", "full"])
def test_weights_are_captured(method):
    """By `nnx.capture`, which adds an entry to every module, also to one that holds arrays."""
    modules = [calibrated(method=method) for _ in range(2)]
    modules[0](X, sow_weights=True)
    (want,) = nnx.pop(modules[0], nnx.Intermediate)["attention_weights"].get_value()
    output, captured = nnx.capture(modules[1], nnx.Intermediate)(X, sow_weights=True)
    np.testing.assert_array_equal(captured["attention_weights"].get_value()[0], want)
    states = [jax.tree.leaves(nnx.state(module)) for module in modules]
    chex.assert_trees_all_equal(*states)
    assert output.shape == X.shape


def test_a_view_is_in_evaluation_mode():
    """Like `nnx.BatchNorm`: a view shares the moments with the model, and must keep them."""
    model = nnx.Dict(norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)), attention=calibrated())
    module = model["attention"]
    module(X)
    moments = module.attention_fn.statistics["moments"][...]
    view = nnx.view(model, deterministic=True, use_running_average=True)
    view["attention"](X + 1)
    np.testing.assert_array_equal(module.attention_fn.statistics["moments"][...], moments)
    nnx.view(view, use_running_average=False)["attention"](X + 1)
    assert not np.array_equal(module.attention_fn.statistics["moments"][...], moments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(is_causal=True), "is_causal is an argument of the call, not of the layer"),
        (dict(momentum=1.0), "momentum must be a number from 0 to below 1, got 1.0"),
        (dict(num_queries=0), "num_queries must be a positive integer, got 0"),
    ],
)
def test_options_that_would_fail_later_are_refused(options, message):
    """In a call, or never: with the momentum 1 nothing is ever calibrated."""
    with pytest.raises(ValueError, match=message):
        PerformerAttention(16, 4, calibration="full", rngs=nnx.Rngs(0), **options)


def test_moments_of_half_precision_are_refused_in_training():
    """Keys of mean 10 and deviation 1 made the output NaN; evaluation serves a model as cast."""
    layer = PerformerAttention(16, 4, num_heads=2, calibration="full", rngs=nnx.Rngs(0))
    tokens = jax.random.normal(jax.random.key(1), (3, 2, 5, 2, 4)).at[1].add(10.0)
    layer(*tokens)
    nnx.update(layer, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(layer)))
    with pytest.raises(ValueError, match="moments of this layer have dtype bfloat16, not exact"):
        layer(*tokens)
    layer.eval()
    assert jnp.isfinite(layer(*tokens)).all()


VALID = jnp.arange(5) < jnp.array([5, 3])[:, None]


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (nnx.make_attention_mask(VALID, VALID), {"mask": VALID[:, None, None]}),
        (nnx.make_causal_mask(VALID), {"is_causal": True}),
        (
            nnx.combine_masks(nnx.make_causal_mask(VALID), nnx.make_attention_mask(VALID, VALID)),
            {"mask": VALID[:, None, None], "is_causal": True},
        ),
    ],
    ids=["padding", "causal", "both"],
)
def test_masks_of_flax_over_pairs(mask, options):
    """Read where their values are known; traced, the error says what to write."""
    attention = PerformerAttention(6, 4, num_heads=2, rngs=nnx.Rngs(0))
    tokens = jax.random.normal(jax.random.key(1), (3, 2, 5, 2, 4))
    want = attention(*tokens, **options)
    np.testing.assert_array_equal(attention(*tokens, mask=mask), want)
    with pytest.raises(ValueError, match=r"For padding pass valid\[:, None, None, :\]"):
        nnx.jit(lambda attention, mask: attention(*tokens, mask=mask))(attention, mask)
    with pytest.raises(ValueError, match="honours masks over keys only"):
        attention(*tokens, mask=mask.at[0, 0, 0, 0].set(0).at[0, 0, 1, 2].set(1))


def test_a_mask_that_is_added_to_logits_is_refused():
    """Its zeros are pairs that exist: as a mask it would be read the wrong way round."""
    attention = PerformerAttention(6, 4, num_heads=2, rngs=nnx.Rngs(0))
    tokens = jax.random.normal(jax.random.key(1), (3, 2, 5, 2, 4))
    added = jnp.where(VALID[:, None, None], 0.0, -1e9)
    for mask in (added, jnp.broadcast_to(added, (2, 1, 5, 5))):
        with pytest.raises(ValueError, match="Bias|honours masks over keys only"):
            attention(*tokens, mask=mask)


def test_parameters_alone_are_no_model():
    """The docstring and the FAQ say what to save."""
    state, params = nnx.state(layer()), nnx.state(layer(), nnx.Param)
    names = [
        {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(x)} for x in (state, params)
    ]
    assert names[0] - names[1] >= {"attention_fn/frequencies"}
    for text in (PerformerAttention.__doc__, Path("docs/faq.md").read_text()):
        assert "nnx.state(model, nnx.Param)" in text


def test_the_layer_is_named_where_people_look():
    with pytest.raises(AttributeError, match="performer.nnx.PerformerAttention"):
        performer.PerformerAttention  # noqa: B018


@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_of_pairs_with_an_axis_of_heads(is_causal):
    """As `jnp.broadcast_to` makes them of one mask for all heads."""
    module = layer(decode=False)
    mask = np.tri(5) if is_causal else np.ones((5, 1)) * [1, 1, 0, 1, 1]
    got = module(X, mask=np.broadcast_to(mask, (3, 2, 5, 5)))
    np.testing.assert_array_equal(got, module(X, mask=mask[None, None]))
