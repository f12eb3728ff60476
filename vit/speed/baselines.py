"""Baselines of `performer_attention` in the benchmark.

`public` is the published algorithm of Choromanski et al. 2021, written anew from its description:
float32 features of all tokens, W broadcast to every batch entry and head, one maximum over all keys
of a head, an epsilon. Causal attention takes one step of a scan per token, once for the numerator
and once for the denominator; as in the published JAX code, the backward pass scans from the end and
takes the tokens out of the sums again. It stands for the time and memory of the published code.

All take heads in the second last axis, (b, n, h, d), as `performer_attention` does. On a GPU the
public algorithm and exact attention have the backend's default precision, as their users do.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from performer import Exact, Features, couplings, performer_attention

M, D = 128, 64
"""Frequencies, width of a head."""
EPSILON = 1e-6


def public(query, key, value, frequencies, *, is_causal=False):
    """Compute random-feature attention as published."""
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))  # (b, h, n, d)
    query = _public_features(query, frequencies, maximum_over=(-1,))
    key = _public_features(key, frequencies, maximum_over=(-1, -2))
    if is_causal:
        query, key, value = (x.transpose(2, 0, 1, 3) for x in (query, key, value))  # (n, b, h, .)
        ones = jnp.ones((*key.shape[:-1], 1))
        output = prefix_products(query, key, value) / prefix_products(query, key, ones)
        return output.transpose(1, 0, 2, 3).astype(value.dtype)
    numerator = jnp.einsum("bhnm,bhmd->bhnd", query, jnp.einsum("bhnm,bhnd->bhmd", key, value))
    denominator = jnp.einsum("bhnm,bhm->bhn", query, jnp.sum(key, axis=2))
    return (numerator / denominator[..., None]).transpose(0, 2, 1, 3).astype(value.dtype)


def _public_features(x, frequencies, maximum_over):
    x = x.astype(jnp.float32) * x.shape[-1] ** -0.25  # q.k / sqrt(d) = (q / d^.25).(k / d^.25)
    thick = jnp.broadcast_to(frequencies, (*x.shape[:2], *frequencies.shape))
    projections = jnp.einsum("bhnd,bhmd->bhnm", x, thick)
    half_norm = jnp.sum(x**2, axis=-1, keepdims=True) / 2
    maximum = jnp.max(projections, axis=maximum_over, keepdims=True)
    scale = frequencies.shape[0] ** -0.5
    return scale * (jnp.exp(projections - half_norm - maximum) + EPSILON)


@jax.custom_vjp
def prefix_products(query, key, value):
    """Return q_i . sum_{j <= i} k_j v_j^T: features (n, b, h, m), values (n, b, h, d)."""
    return _prefix_products(query, key, value)[0]


def _prefix_products(query, key, value):
    def step(total, token):
        q, k, v = token
        total = total + jnp.einsum("bhm,bhd->bhmd", k, v)
        return total, jnp.einsum("bhm,bhmd->bhd", q, total)

    zeros = jnp.zeros((*key.shape[1:], value.shape[-1]))
    total, output = jax.lax.scan(step, zeros, (query, key, value))
    return output, (total, query, key, value)


def _prefix_products_backward(saved, gradients):
    """Return dq = A g, dk = B v, dv = B^T k, with A_i the sums and B_i = sum_{j >= i} q_j g_j^T."""
    last, *tokens = saved

    def step(carry, token):
        total, later = carry
        q, k, v, g = token
        later = later + jnp.einsum("bhm,bhd->bhmd", q, g)
        dq = jnp.einsum("bhmd,bhd->bhm", total, g)
        dk = jnp.einsum("bhmd,bhd->bhm", later, v)
        dv = jnp.einsum("bhmd,bhm->bhd", later, k)
        return (total - jnp.einsum("bhm,bhd->bhmd", k, v), later), (dq, dk, dv)

    xs = (*tokens, gradients)
    return jax.lax.scan(step, (last, jnp.zeros_like(last)), xs, reverse=True)[1]


prefix_products.defvjp(_prefix_products, _prefix_products_backward)


def exact(query, key, value, frequencies, **options):
    """Compute softmax attention."""
    return jax.nn.dot_product_attention(query, key, value, **options)


blocked = partial(performer_attention, implementation="blocked")


def windowed(window, query, key, value, frequencies, **options):
    """Compute random-feature attention with an exact window."""
    features = Features(frequencies, exact=Exact(window))
    return blocked(query, key, value, features, **options)


IMPLEMENTATIONS = {
    "ours": blocked,
    "public": public,
    "exact": exact,
    "ours, causal": partial(blocked, is_causal=True),
    "public, causal": partial(public, is_causal=True),
    "exact, causal": partial(exact, is_causal=True),
    "cuDNN": partial(exact, implementation="cudnn"),
    "cuDNN, causal": partial(exact, implementation="cudnn", is_causal=True),
    "kernel": partial(performer_attention, implementation="pallas"),
    "kernel, causal": partial(performer_attention, implementation="pallas", is_causal=True),
}
for _w in (16, 32, 64):
    IMPLEMENTATIONS[f"window {_w}"] = partial(windowed, _w)
    IMPLEMENTATIONS[f"window {_w}, causal"] = partial(windowed, _w, is_causal=True)


def inputs(tokens: int, heads: int, batch: int = 1, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Return query, key, value, frequencies, and the gradient with respect to the output."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, tokens, heads, D)
    query, key, value, gradient = (jax.random.normal(k, shape, dtype) for k in keys[:4])
    return [query, key, value, couplings.get("pm")(keys[4], M, D), gradient]
