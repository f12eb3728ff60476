"""The transformer against plain sums over pairs, and piece by piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from performer import Exact
from performer.nnx import Transformer
from performer.testing import reference_attention

DEPTH, WIDTH, HEADS, M, WORDS = 2, 24, 2, 10, 7
TOKENS = jax.random.randint(jax.random.key(1), (2, 9), 0, WORDS)
CONTEXT = jax.random.normal(jax.random.key(2), (2, 6, WIDTH))
EXISTS = (jnp.arange(6) < jnp.array([[4], [6]]))[:, None, None]


def transformer(**options):
    rngs = nnx.Rngs(params=0, frequencies=1)
    return Transformer(DEPTH, WIDTH, HEADS, M, rngs=rngs, **options)


def decoder(**options):
    near = Exact(window=4, first=1)
    return transformer(vocab_size=WORDS, is_causal=True, cross=True, exact=near, **options)


def by_pairs(model, x, context=None, exists=None):
    """The equations in float64, position by position, with `reference_attention` for the rows."""
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), parameters)

    def norm(scale, x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale["scale"]

    def turned(x):
        """The complex number (x_i, x_{i + h/2}) times e^{i position / 10,000^(2 i / h)}."""
        half = x.shape[-1] // 2
        waves = 10_000.0 ** (-np.arange(half) / half)
        turns = np.exp(1j * np.arange(x.shape[1])[:, None] * waves)[None, :, None]
        z = (x[..., :half] + 1j * x[..., half:]) * turns
        return np.concatenate([z.real, z.imag], axis=-1)

    def attention(p, layer, x, read, turn, **pairs):
        query, key, value = (
            np.einsum("btw,wnh->btnh", y, p[name]["kernel"])
            for y, name in ((x, "query"), (read, "key"), (read, "value"))
        )
        if turn:
            query, key = turned(query), turned(key)
        rows = reference_attention(query, key, value, layer.attention_fn.features, **pairs)
        return np.einsum("btnh,nhw->btw", rows, p["out"]["kernel"])

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = np.asarray(x, np.float64) if model.embed is None else wide["embed"]["embedding"][x]
    for i, block in enumerate(model.blocks):
        p = wide["blocks"][i]
        y = norm(p["attention_norm"], x)
        x = x + attention(p["attention"], block.attention, y, y, True, is_causal=model.is_causal)
        if context is not None:
            y, read = norm(p["cross_norm"], x), np.asarray(context, np.float64)
            x = x + attention(p["cross"], block.cross, y, read, False, mask=np.asarray(exists))
        mlp = p["mlp"]["layers"]
        x = x + gelu(norm(mlp[0], x) @ mlp[1]["kernel"]) @ mlp[3]["kernel"]
    x = norm(wide["norm"], x)
    return x if model.head is None else x @ wide["head"]["kernel"]


def test_an_encoder_is_its_equations():
    encoder = transformer()
    np.testing.assert_allclose(encoder(CONTEXT), by_pairs(encoder, CONTEXT), atol=2e-5)


def test_a_decoder_is_its_equations():
    """Causal, with exact pairs near, and keys of the context that do not exist."""
    model = decoder()
    got = model(TOKENS, context=CONTEXT, context_mask=EXISTS)
    want = by_pairs(model, np.asarray(TOKENS), CONTEXT, EXISTS)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_stream_is_a_call():
    """In pieces of 4, 1, 3 and 1; the context is read once. Calibrated layers keep theirs."""
    model = decoder(calibration="full")
    model(TOKENS, context=CONTEXT, context_mask=EXISTS)
    model.eval()
    want = model(TOKENS, context=CONTEXT, context_mask=EXISTS)
    pieces = jnp.split(TOKENS, [4, 5, 8], axis=1)
    logits, states = model.stream(pieces[0], context=CONTEXT, context_mask=EXISTS)
    step, got = nnx.jit(lambda model, x, states: model.stream(x, states)), [logits]
    for piece in pieces[1:]:
        logits, states = step(model, piece, states)
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, atol=1e-5)
    assert int(states.position) == 9


def test_gradients_reach_all_parameters_and_no_frequency():
    model = decoder()

    def loss(model):
        return jnp.sum(model(TOKENS, context=CONTEXT)[..., 0])

    gradients = jax.tree.leaves(nnx.grad(loss)(model))
    assert len(gradients) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert all(np.any(x) for x in gradients)


def test_what_does_not_fit_is_refused():
    model, alone = decoder(), transformer(is_causal=True)
    _, states = model.stream(TOKENS, context=CONTEXT)
    cases = {
        "cross=True attends to a context": [
            lambda: model(TOKENS),
            lambda: model.stream(TOKENS),
        ],
        "context is read by cross attention": [
            lambda: alone(CONTEXT, context=CONTEXT),
            lambda: alone.stream(CONTEXT, context=CONTEXT),
            lambda: model.stream(TOKENS, states, context=CONTEXT),
        ],
        "only a Transformer with is_causal=True": [lambda: transformer().stream(CONTEXT)],
        "width=27 must be a multiple of 2 num_heads = 6": [
            lambda: Transformer(1, 27, 3, 8, rngs=nnx.Rngs(0))
        ],
    }
    for message, calls in cases.items():
        for call in calls:
            with pytest.raises(ValueError, match=message):
                call()
