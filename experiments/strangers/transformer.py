"""One transformer in plain JAX for the models of other repositories.

Parameters are dicts of arrays, weights (in, out). A layer is

    x + attention(norm(x)), then x + mlp(norm(x))        norm first (the default)
    norm(x + attention(x)), then norm(x + mlp(x))        norm last

Its dict has "query", "key", "value", "out", "up" and "down", each (weight,) or (weight, bias), and
"norm1", "norm2". A norm with a bias is LayerNorm, without one RMSNorm; a layer with a "gate" has
down(activation(gate(x)) * up(x)) as its mlp. Attention is written as softmax of an einsum: the
models hold nothing of Performer, `performer.linearize` reads it from the traced program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Layer = Mapping[str, tuple[Array, ...]]

relu = jax.nn.relu
silu = jax.nn.silu


def gelu(x: Array) -> Array:
    """GELU with the error function, as in PyTorch."""
    return jax.nn.gelu(x, approximate=False)


def dense(parameters: Sequence[Array], x: Array) -> Array:
    """x W, or x W + b."""
    weight, *bias = parameters
    return x @ weight + (bias[0] if bias else 0)


def norm(parameters: Sequence[Array], x: Array, eps: float = 1e-5) -> Array:
    """LayerNorm of (scale, bias), RMSNorm of (scale,)."""
    scale, *bias = parameters
    centred = x - jnp.mean(x, -1, keepdims=True) if bias else x
    deviation = jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)
    return centred / deviation * scale + (bias[0] if bias else 0)


def rotated(x: Float[Array, "b t n h"]) -> Array:
    """Rotary positions (Su et al., 2021) on pairs of neighbours, base 10,000."""
    length, width = x.shape[1], x.shape[-1]
    rates = 10000.0 ** (-jnp.arange(0, width, 2) / width)
    angles = (jnp.arange(length)[:, None] * rates)[:, None]  # (t, 1, h / 2)
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
    return jnp.stack(turned, -1).reshape(x.shape)


def attention(
    layer: Layer,
    x: Float[Array, "b t d"],
    heads: int,
    causal: bool = False,
    rotary: bool = False,
    mask: Array | None = None,
) -> Float[Array, "b t d"]:
    """softmax(q k^T / sqrt(h)) v of each head; fewer key heads are shared by groups of queries."""
    batch, length, _ = x.shape
    query = dense(layer["query"], x).reshape(batch, length, heads, -1)
    width = query.shape[-1]
    key, value = (dense(layer[n], x).reshape(batch, length, -1, width) for n in ("key", "value"))
    if rotary:
        query, key = rotated(query), rotated(key)
    groups = heads // key.shape[2]
    key, value = jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key) / width**0.5
    if causal:
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask[:, None, None], scores, -1e30)
    mixed = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), value)
    return dense(layer["out"], mixed.reshape(batch, length, -1))


def mlp(layer: Layer, x: Array, activation: Callable[[Array], Array]) -> Array:
    """Two dense layers; with a "gate" those of Shazeer (2020)."""
    if "gate" in layer:
        return dense(layer["down"], activation(dense(layer["gate"], x)) * dense(layer["up"], x))
    if "up" not in layer:
        return jnp.zeros_like(x)
    return dense(layer["down"], activation(dense(layer["up"], x)))


def stack(
    layers: Sequence[Layer],
    x: Float[Array, "b t d"],
    heads: int,
    activation: Callable[[Array], Array] = gelu,
    norm_last: bool = False,
    eps: float = 1e-5,
    **attends: Any,
) -> Float[Array, "b t d"]:
    """All layers; `attends` are options of `attention`."""
    for layer in layers:
        if norm_last:
            x = norm(layer["norm1"], x + attention(layer, x, heads, **attends), eps)
            x = norm(layer["norm2"], x + mlp(layer, x, activation), eps)
        else:
            x = x + attention(layer, norm(layer["norm1"], x, eps), heads, **attends)
            x = x + mlp(layer, norm(layer["norm2"], x, eps), activation)
    return x


def patches(images: Float[Array, "b y x c"], size: int, stride: int = 0) -> Array:
    """Patches of images as rows, (b, t, c * size * size): channels first, as in PyTorch."""
    sides = [(length - size) // (stride or size) + 1 for length in images.shape[1:3]]
    starts = [jnp.arange(n)[:, None] * (stride or size) + jnp.arange(size) for n in sides]
    cut = images[:, starts[0][:, None, :, None], starts[1][None, :, None, :]]  # (b, y, x, p, p, c)
    return jnp.moveaxis(cut, -1, 3).reshape(len(images), sides[0] * sides[1], -1)
