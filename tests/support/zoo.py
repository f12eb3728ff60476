"""Attention as strangers write it, for tests of `performer.linearize`.

Each model returns a function and its batches: two tuples of arguments. LINEAR is a table of some.
WAYS and LEFT are functions of queries, keys and values. Lines are kept short of helpers that one
would not find in public code.
"""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.experimental import pallas as pl

B, T, S, WIDTH, HEADS, HEAD = 2, 12, 9, 16, 4, 4
TRIL = np.tril(np.ones((T, T), bool))
LENGTHS = np.array([12, 7])


def array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def batches(*leading, shape=(B, T, WIDTH)):
    """Two batches: what leads, and other inputs in each."""
    return [(*leading, array(100 + i, *shape)) for i in range(2)]


def projections(seed=0, width=WIDTH, key_heads=HEADS, **more):
    shapes = {
        "q": (width, HEADS, HEAD),
        "k": (width, key_heads, HEAD),
        "v": (width, key_heads, HEAD),
        "o": (HEADS, HEAD, width),
    } | more
    return {
        name: array(seed + i, *shape) / width**0.5 * (1.5 if name in "qk" else 1)
        for i, (name, shape) in enumerate(shapes.items())
    }


def project(p, x, memory=None):
    memory = x if memory is None else memory
    q = jnp.einsum("btd,dnh->btnh", x, p["q"])
    k, v = (jnp.einsum("btd,dnh->btnh", memory, p[name]) for name in "kv")
    return q, k, v


def out(p, x):
    return jnp.einsum("btnh,nhd->btd", x, p["o"])


def with_projections(attend, *more, **options):
    """`attend(q, k, v)` between projections."""
    return (lambda p, x: out(p, attend(*project(p, x)))), batches(projections(**options), *more)


def with_mask(q, k, v, mask=None):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)


def plain():
    return with_projections(lambda q, k, v: with_mask(q, k, v, TRIL))


class Attention(nnx.Module):
    """A layer as in Bonsai: projections by nnx, attention by einsum."""

    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.proj = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = jnp.einsum("bhqd,bhkd->bhqk", q, k) * HEAD**-0.5
        attn = jax.nn.softmax(attn, axis=-1)
        x = jnp.einsum("bhqk,bhkd->bhqd", attn, v)
        return self.proj(x.transpose(0, 2, 1, 3).reshape(b, n, c))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attn = Attention(rngs)
        self.fc1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.fc2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x))))


def nnx_scan():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return Block(rngs)

    graphdef, state = nnx.split(stack(nnx.Rngs(0)))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(block, x):
        return block(x)

    return (lambda state, x: forward(nnx.merge(graphdef, state), x)), batches(state)


def encoder_decoder():
    """Padding in the encoder, causal in the decoder, and cross attention that knows padding."""
    p = {name: projections(i) for i, name in enumerate(("encoder", "decoder", "cross"))}

    def model(p, lengths, x, y):
        exists = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None, :]
        x = x + out(p["encoder"], with_mask(*project(p["encoder"], x), exists))
        causal = jnp.tril(jnp.ones((y.shape[1], y.shape[1]), bool))
        y = y + out(p["decoder"], with_mask(*project(p["decoder"], y), causal))
        return y + out(p["cross"], with_mask(*project(p["cross"], y, x), exists))

    lengths, y = jnp.asarray(LENGTHS), array(7, B, S, WIDTH)
    return model, [(*rest, y) for rest in batches(p, lengths)]


def cross():
    """Cross attention to keys of which some are padding."""

    def attend(p, lengths, y, x):
        exists = (jnp.arange(T) < lengths[:, None])[:, None, None, :]
        return with_mask(*project(p, y, x), exists)

    return attend, batches(projections(), jnp.asarray(LENGTHS), array(7, B, S, WIDTH))


def equinox_layer():
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))

    def model(layer, x):
        return jax.vmap(lambda x: layer(x, x, x, mask=jnp.asarray(TRIL)))(x)

    return model, batches(layer)


def haiku_layer():
    def forward(x):
        layer = hk.MultiHeadAttention(HEADS, HEAD, w_init=hk.initializers.VarianceScaling(2.0))
        return x + layer(x, x, x, mask=jnp.asarray(TRIL)[None, None])

    model = hk.transform(forward)
    params = jax.jit(model.init)(jax.random.key(0), array(0, B, T, WIDTH))
    return (lambda params, x: model.apply(params, None, x)), batches(params)


def scanned():
    """Layers with one stack of parameters."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(projections(10 * i) for i in range(3)))

    def model(stacked, x):
        def layer(x, p):
            return x + out(p, with_mask(*project(p, x), TRIL)), jnp.mean(x)

        return jax.lax.scan(layer, x, stacked)

    return model, batches(stacked)


def checkpointed():
    """A checkpoint with a policy, in a scan."""
    model, arguments = plain()
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(model, policy=policy)
    stack = lambda p, x: jax.lax.scan(lambda x, _: (x + layer(p, x), None), x, length=2)[0]  # noqa: E731
    return stack, arguments


def perceiver():
    """Latents without a batch axis attend to a batch of inputs."""

    def model(p, x):
        q = jnp.einsum("ld,dnh->lnh", p["latents"], p["q"])
        k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "kv")
        weights = jax.nn.softmax(jnp.einsum("lnh,bsnh->bnls", q, k) / 2, axis=-1)
        return out(p, jnp.einsum("bnls,bsnh->blnh", weights, v))

    return model, batches(projections(latents=(T, WIDTH)))


SEGMENTS = jnp.asarray([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
"""Packed documents, and others with the same shape."""
OTHER_SEGMENTS = jnp.asarray([[3] * 7 + [1] * 5, [0] * 4 + [5] * 4 + [6] * 4])


def packed(causal=False):
    def model(p, segments, x):
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        mask = mask & TRIL if causal else mask
        return out(p, with_mask(*project(p, x), mask))

    return model, batches(projections(), SEGMENTS)


def packed_causal():
    return packed(causal=True)


def any_mask():
    """Masks are an argument."""

    def model(p, mask, x):
        return out(p, with_mask(*project(p, x), mask[:, None]))

    return model, batches(projections(), jnp.broadcast_to(jnp.asarray(TRIL), (B, T, T)))


def bfloat16():
    def attend(q, k, v):
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
        return with_mask(q, k, v, TRIL).astype(jnp.float32)

    return with_projections(attend)


def normalised():
    """Queries and keys of length 1, and a temperature of each head that is learned."""

    def model(p, x):
        q, k, v = project(p, x)
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.exp(p["temperature"])[:, None, None]
        return out(p, jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v))

    return model, batches(projections(temperature=(HEADS,)))


def gpt():
    """Causal attention over the prompt; with a cache, of a token over what the cache holds."""

    def model(p, x, cache=None, position=None):
        q, k, v = project(p, x)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        if cache is not None:
            at = (0, position, 0, 0)
            k, v = (jax.lax.dynamic_update_slice(*y, at) for y in zip(cache, (k, v), strict=True))
            mask = jnp.arange(k.shape[1]) <= position
        return x + out(p, with_mask(q, k, v, mask)), (k, v)

    return model, batches(projections())


def switched(by):
    """A flag, an array, decides on the mask, on the scale, or on which heads count."""

    def model(p, flag, x):
        q, k, v = project(p, x)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
        if by == "mask":
            scores = jnp.where(TRIL | ~flag, scores, -1e9)
        if by == "hidden":  # masked where the flag is set
            scores = jnp.where(~TRIL & flag, -1e9, scores)
        if by == "scale":
            scores = jnp.where(flag, scores, scores / 3)
        weights = jax.nn.softmax(scores)
        if by == "heads":
            weights = weights * jnp.where(flag, jnp.ones(HEADS), jnp.arange(HEADS))[:, None, None]
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return model, batches(projections(), jnp.bool_(True))


def dropout_in_training():
    """Two programs, by a flag."""

    def model(p, x, train):
        q, k, v = project(p, x)
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        if train:
            keep = jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape)
            weights = jnp.where(keep, weights / 0.8, 0)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return model, [(*rest, False) for rest in batches(projections())]


def linen_layer():
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    params = jax.jit(layer.init)(jax.random.key(0), array(0, B, T, WIDTH))
    return (lambda params, x: layer.apply(params, x)), batches(params)


# Ways to write it, of queries, keys and values (b, t, heads, h)


def matmuls(q, k, v):
    """Heads before time, `@`, and a softmax written out."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * HEAD**-0.5
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    return jnp.swapaxes(weights @ v, 1, 2)


def batch_of_heads(*heads):
    """Batch and heads in one axis, as for torch.bmm; softmax of -inf; padding."""
    q, k, v = (y.transpose(0, 2, 1, 3).reshape(-1, T, HEAD) for y in heads)
    scores = jax.lax.batch_matmul(q * HEAD**-0.5, jnp.swapaxes(k, 1, 2))
    exists = jnp.repeat(jnp.arange(T) < LENGTHS[:, None], HEADS, axis=0)[:, None]
    weights = jax.nn.softmax(jnp.where(exists, scores, -jnp.inf))
    return jax.lax.batch_matmul(weights, v).reshape(B, HEADS, T, HEAD).transpose(0, 2, 1, 3)


def multi_query(q, k, v):
    """One key head, without an axis."""
    scores = jnp.einsum("btnh,bsh->bnts", q, k[:, :, 0]) / 2 + jnp.where(TRIL, 0, -1e10)
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(scores), v[:, :, 0])


def rope(x):
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(HEAD // 2) / (HEAD // 2))
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def gemma(q, k, v):
    q, k = rope(q) * HEAD**-0.5, rope(k[:, :, :2])
    logits = jnp.einsum("btkgh,bskh->btkgs", q.reshape(B, T, 2, HEADS // 2, HEAD), k)
    mask = jnp.tril(jnp.ones((B, T, T)))
    logits += jnp.where(mask == 1, 0.0, -2e38)[:, :, None, None, :]
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return jnp.einsum("btkgs,bskh->btkgh", weights, v[:, :, :2]).reshape(B, T, HEADS, HEAD)


def jax_causal(q, k, v):
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def alibi(q, k, v):
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2 - slopes[:, None, None] * distance
    weights = jax.nn.softmax(jnp.where(TRIL, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def vmapped(q, k, v):
    """Attention of one example and one head."""

    def single(q, k, v):
        return jax.nn.softmax(jnp.where(TRIL, q @ k.T / 2, -1e30)) @ v

    return jax.vmap(jax.vmap(single, (1, 1, 1), 1))(q, k, v)


def flax_function(q, k, v):
    """Flax's function with Flax's masks, and heads of which all but the last are batch axes."""
    q, k, v = (x.reshape(1, B, T, HEADS, HEAD) for x in (q, k, v))
    mask = linen.make_causal_mask(jnp.ones((1, B, T)))
    return linen.dot_product_attention(q, k, v, mask=mask)[0]


def sink(q, k, v):
    """A logit of no key, joined to the scores."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
    scores = jnp.concatenate([scores, jnp.zeros((B, HEADS, T, 1))], axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores)[..., :-1], v)


def log_weights(q, k, v):
    """Softmax by log_softmax and exp; the scale on both sides."""
    q, k = q / HEAD**0.25, k / HEAD**0.25
    weights = jnp.exp(jax.nn.log_softmax(jnp.einsum("bsnh,btnh->bnst", k, q), axis=2))
    return jnp.einsum("bnst,bsnh->btnh", weights, v)


WAYS = (matmuls, batch_of_heads, multi_query, gemma, jax_causal, alibi, vmapped, flax_function)
WAYS += (log_weights, sink)


def ways():
    """All of them side by side, before a softmax that is none of attention."""
    attend = lambda q, k, v: sum(jax.nn.softmax(way(q, k, v)) for way in WAYS)  # noqa: E731
    return with_projections(attend)


# Attention that stays exact


def t5_bias(q, k, v):
    """Added to slopes of ALiBi, so that slopes alone are no reason to leave it."""
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    bias = array(40, HEADS, 2 * T)[:, distance + T] - 3 * jnp.abs(distance)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def sliding_window(q, k, v):
    return with_mask(q, k, v, TRIL & (np.abs(np.arange(T)[:, None] - np.arange(T)) < 3))


def soft_cap(q, k, v):
    scores = 2 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / 2)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def dropout(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.8, 0), v)


def squared(q, k, v):
    """Weights that do not sum to 1."""
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)) ** 2
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def conditional(q, k, v):
    return jax.lax.cond(q[0, 0, 0, 0] > 9, lambda: v, lambda: with_mask(q, k, v))


def flash_kernel(q, k, v):
    def kernel(q, k, v, o):
        o[...] = jax.nn.softmax(q[...] @ k[...].T) @ v[...]

    shape = jax.ShapeDtypeStruct((T, HEAD), q.dtype)
    one = pl.pallas_call(kernel, out_shape=shape, interpret=True, name="flash_attention")
    return jnp.broadcast_to(one(q[0, :, 0], k[0, :, 0], v[0, :, 0])[None, :, None], v.shape)


@jax.custom_vjp
def flash_attention(q, k, v):
    """A derivative of one's own around a kernel that is opaque."""
    shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
    return jax.pure_callback(lambda q, k, v: np.asarray(v), shape, q, k, v)


flash_attention.defvjp(lambda *x: (flash_attention(*x), x), lambda x, g: (g, g, g))


def foreign_function(q, k, v):
    """No such kernel is registered: it cannot be run."""
    return jax.ffi.ffi_call("flash_attn_fwd", jax.ShapeDtypeStruct(q.shape, q.dtype))(q, k, v)


def talking_heads(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    weights = jnp.einsum("bnts,nm->bmts", weights, array(41, HEADS, HEADS))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def regrouped(*heads):
    """Batch and heads in one axis, which is split for the mask, as in ports from torch."""
    q, k, v = (y.transpose(0, 2, 1, 3).reshape(-1, T, HEAD) for y in heads)
    scores = jnp.where(TRIL, (q @ k.mT).reshape(B, HEADS, T, T), -1e9).reshape(-1, T, T)
    return (jax.nn.softmax(scores) @ v).reshape(B, HEADS, T, HEAD).transpose(0, 2, 1, 3)


def beside(*left):
    """Attention that stays exact beside attention that is replaced."""

    def model(q, k, v):
        return with_mask(q, k, v, TRIL), [attend(q, k, v) for attend in left]

    heads = [[array(30 + 3 * i + j, B, T, HEADS, HEAD) for j in range(3)] for i in (0, 1)]
    return model, [tuple(x) for x in heads]


LINEAR = {
    **{ways: len(WAYS), encoder_decoder: 3, scanned: 3, checkpointed: 2, perceiver: 1},
    **{nnx_scan: 2, linen_layer: 1, equinox_layer: 1, haiku_layer: 1, packed: 1},
    **{bfloat16: 1, normalised: 1},
}
"""Model -> layers of attention, all of which are replaced; other models have tests of their own."""
LEFT = {
    t5_bias: "a bias that is no mask",
    sliding_window: "neither of keys, nor causal, nor of packed sequences",
    soft_cap: "changed by tanh",
    dropout: "as by dropout",
    squared: "changed after the softmax, by integer_pow",
    conditional: "inside cond",
    flash_kernel: "a kernel, .*flash_attention",
    flash_attention: "a kernel, .*flash_attention",
    foreign_function: "a kernel, .*flash_attn",
    talking_heads: "not read as attention",
    regrouped: "not read as attention",
}
"""Attention -> why it stays exact."""
