"""performer_attention_fn inside linen.MultiHeadDotProductAttention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from performer import couplings, performer_attention
from performer.linen import performer_attention_fn
from tests.support.tiers import tiers

X = jax.random.normal(jax.random.key(0), (3, 5, 8))
W = couplings.draw(jax.random.key(1), "orf", 16, 4, num_heads=2)


def layer(frequencies=W, **kwargs):
    own = ("is_causal", "exact_window", "exact_first", "alibi_slopes")
    options = {name: kwargs.pop(name) for name in own if name in kwargs}
    attention_fn = partial(performer_attention_fn, frequencies=frequencies, **options)
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
    "places", tiers([{"exact_window": 2, "exact_first": 1, "alibi_slopes": SLOPES}, {}], 0)
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
