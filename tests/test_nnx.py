"""PerformerAttention inside nnx.MultiHeadAttention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer import performer_attention
from performer.nnx import Frequencies, PerformerAttention


def layer(coupling="pm", num_heads: int | None = 2, dropout_rate=0.0, **kwargs):
    rngs = nnx.Rngs(params=0, frequencies=1, dropout=2)
    attention_fn = PerformerAttention(16, 4, coupling=coupling, num_heads=num_heads, rngs=rngs)
    return nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        attention_fn=attention_fn,
        dropout_rate=dropout_rate,
        rngs=rngs,
        **kwargs,
    )


X = jax.random.normal(jax.random.key(0), (3, 5, 8))


def test_is_performer_attention_between_the_projections():
    module = layer(decode=False)
    frequencies = module.attention_fn.frequencies[...]
    assert frequencies.shape == (2, 16, 4)
    want = module.out(
        performer_attention(module.query(X), module.key(X), module.value(X), frequencies)
    )
    np.testing.assert_allclose(module(X), want, atol=1e-6)


def test_frequencies_are_state_but_no_parameters():
    module = layer(decode=False)
    _, params, frequencies, _ = nnx.split(module, nnx.Param, Frequencies, ...)
    assert len(jax.tree.leaves(frequencies)) == 1
    assert len(jax.tree.leaves(params)) == 8

    gradients = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(module)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)


def test_heads_and_layers_draw_their_own():
    rngs = nnx.Rngs(params=0, frequencies=1)
    first, second = (
        PerformerAttention(16, 4, num_heads=2, rngs=rngs).frequencies[...] for _ in range(2)
    )
    assert not np.allclose(first, second)
    assert not np.allclose(first[0], first[1])


def test_one_draw_shared_by_the_heads():
    module = layer(num_heads=None, decode=False)
    assert module.attention_fn.frequencies[...].shape == (16, 4)
    assert module(X).shape == X.shape


def test_parameters_do_not_depend_on_the_coupling():
    params = [nnx.state(layer(c, decode=False), nnx.Param) for c in ("iid", "pm-antithetic")]
    jax.tree.map(np.testing.assert_array_equal, *params)


def test_key_masks_are_honoured():
    module = layer(decode=False)
    mask = jnp.arange(5)[None, None, None] < 3
    np.testing.assert_allclose(module(X, mask=mask)[:, :3], module(X[:, :3]), atol=1e-6)


def test_decoding_attends_to_the_cache():
    """Flax's cache: one token at a time; the last output is that of attention over all tokens."""
    module = layer(decode=True)
    module.init_cache(X.shape)
    for i in range(X.shape[1]):
        out = module(X[:, i : i + 1])
    np.testing.assert_allclose(out, module(X, decode=False)[:, -1:], atol=1e-5)


def test_what_linear_attention_cannot_do_is_an_error():
    module = layer(decode=False)
    with pytest.raises(ValueError, match="masks over keys only"):
        module(X, mask=jnp.tril(jnp.ones((5, 5), bool))[None, None])
    with pytest.raises(ValueError, match="causal"):
        module(X, is_causal=True)
    with pytest.raises(ValueError, match="sow"):
        module(X, sow_weights=True)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5"):
        layer(decode=False, dropout_rate=0.5)(X, deterministic=False)
    assert layer(decode=False, dropout_rate=0.5)(X, deterministic=True).shape == X.shape
    with pytest.raises(ValueError, match="bias"):
        module.attention_fn(*[X[:, :, None]] * 3, bias=jnp.zeros((1, 1, 5, 5)))
    with pytest.raises(ValueError, match="even number"):
        PerformerAttention(15, 4, coupling="pm-antithetic", rngs=nnx.Rngs(0))
