"""The drop-ins inside linen.MultiHeadDotProductAttention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from performer import Exact, Features, alibi, couplings, performer_attention
from performer.linen import PerformerAttention, performer_attention_fn
from tests.support.tiers import tiers

X = jax.random.normal(jax.random.key(0), (3, 5, 8))
W = couplings.draw(jax.random.key(1), "orf", 16, 4, num_heads=2)


def layer(frequencies=W, **kwargs):
    own = ("is_causal", "own_bias")
    options = {name: kwargs.pop(name) for name in own if name in kwargs}
    features = Features(frequencies, exact=kwargs.pop("exact", Exact()))
    attention_fn = partial(performer_attention_fn, features=features, **options)
    return linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn, **kwargs)


def projected(params, name):
    return jnp.einsum("btf,fnh->btnh", X, params[name]["kernel"]) + params[name]["bias"]


def test_is_performer_attention_between_the_projections():
    module, mask = layer(is_causal=True), np.arange(5)[None, None, None] < 3
    variables = module.init(jax.random.key(2), X)
    params = variables["params"]
    tokens = [projected(params, name) for name in ("query", "key", "value")]
    mixed = performer_attention(*tokens, W, mask=mask, is_causal=True)
    want = jnp.einsum("btnh,nhf->btf", mixed, params["out"]["kernel"]) + params["out"]["bias"]
    got, state = module.apply(variables, X, mask=mask, sow_weights=True, mutable="intermediates")
    np.testing.assert_allclose(got, want, atol=1e-5)
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((3, 2, 5)), rtol=1e-5)


SLOPES = np.array([0.5, 0.125])


@pytest.mark.parametrize(
    "places", tiers([{"exact": Exact(window=2, first=1), "own_bias": alibi(SLOPES)}, {}], 0)
)
def test_decoding_is_causal_attention(places):
    module = layer(decode=True, **places)
    variables = module.init(jax.random.key(2), X)
    cache, steps = variables["cache"], []
    for i in range(5):
        out, new = module.apply(
            {"params": variables["params"], "cache": cache}, X[:, i : i + 1], mutable="cache"
        )
        cache = new["cache"]
        steps.append(out)
    want = layer(is_causal=True, **places).apply({"params": variables["params"]}, X)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), want, atol=1e-5)
    plain = layer(is_causal=True).apply({"params": variables["params"]}, X)
    assert np.allclose(want, plain, atol=1e-3) == (not places)


class Stack(linen.Module):
    """Two layers, each with its own module as attention_fn."""

    options: dict

    @linen.compact
    def __call__(self, x, **kwargs):
        for _ in range(2):
            attention_fn = PerformerAttention(16, "orf", **self.options)
            x = linen.MultiHeadDotProductAttention(2, attention_fn=attention_fn)(x, **kwargs)
        return x


@pytest.mark.parametrize(
    "options", [{"is_causal": True, "features": {"exact": Exact(window=2)}}, {}]
)
def test_the_module_holds_its_frequencies(options):
    module = linen.MultiHeadDotProductAttention(2, attention_fn=PerformerAttention(16, **options))
    variables = module.init(jax.random.key(3), X)
    w = variables["frequencies"]["attention_fn"]["frequencies"]
    assert w.shape == (2, 16, 4)
    assert set(variables) == {"params", "frequencies"}
    same = layer(w, is_causal="is_causal" in options, **options.get("features", {}))
    mask = np.arange(5)[None, None, None] < 4
    want = same.apply({"params": variables["params"]}, X, mask=mask)
    got, state = module.apply(variables, X, mask=mask, sow_weights=True, mutable="intermediates")
    np.testing.assert_allclose(got, want, atol=1e-6)
    (weights,) = state["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((3, 2, 5)), rtol=1e-5)


def test_a_window_alone_has_no_frequencies():
    """As wide as the sequence it is softmax attention."""
    window = PerformerAttention(0, features={"exact": Exact(window=5)})
    module = linen.MultiHeadDotProductAttention(2, attention_fn=window)
    variables = module.init(jax.random.key(3), X)
    assert set(variables) == {"params"}
    want = linen.MultiHeadDotProductAttention(2).apply(variables, X)
    np.testing.assert_allclose(module.apply(variables, X), want, atol=2e-6)


def test_layers_have_their_own_draws_that_are_not_trained():
    module = Stack({"is_causal": True})
    streams = {"params": jax.random.key(0), "frequencies": jax.random.key(1)}
    variables = jax.jit(module.init)(streams, X)
    first, second = jax.tree.leaves(variables["frequencies"])
    assert first.shape == (2, 16, 4)
    draws = [*first, *second]
    pairs = [(i, j) for i in range(4) for j in range(i)]
    assert not any(np.allclose(draws[i], draws[j]) for i, j in pairs)

    def loss(params, frequencies):
        return jnp.sum(module.apply({"params": params, "frequencies": frequencies}, X) ** 2)

    gradients = jax.jit(jax.grad(loss))(variables["params"], variables["frequencies"])
    assert jax.tree.structure(gradients) == jax.tree.structure(variables["params"])
    norms = [np.linalg.norm(gradients[name]["query"]["kernel"]) for name in gradients]
    assert len(norms) == 2
    assert np.isfinite(norms).all()
    assert min(norms) > 0
    with pytest.raises(ValueError, match="no collection 'frequencies': pass it to apply with the"):
        module.apply({"params": variables["params"]}, X)


def test_the_module_scans_over_layers():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            attention_fn = PerformerAttention(16)
            return linen.MultiHeadDotProductAttention(2, attention_fn=attention_fn)(x), None

    axes = {"params": 0, "frequencies": 0}
    rngs = {"params": True, "frequencies": True}
    scanned = linen.scan(Layer, variable_axes=axes, split_rngs=rngs, length=3)()
    variables = scanned.init(jax.random.key(0), X, None)
    (w,) = jax.tree.leaves(variables["frequencies"])
    assert w.shape == (3, 2, 16, 4)
    assert not np.allclose(w[0], w[1])


def test_what_linear_attention_lacks_is_an_error_of_the_module():
    def refused(match, **options):
        module = linen.MultiHeadDotProductAttention(
            2, attention_fn=PerformerAttention(8), **options
        )
        with pytest.raises(ValueError, match=match):
            module.init(jax.random.key(0), X)

    refused("no attention weights to drop", dropout_rate=0.5, deterministic=False)
    refused("no products of queries with keys", qk_attn_weights_einsum_cls=lambda: jnp.einsum)
