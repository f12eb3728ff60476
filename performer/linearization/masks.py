"""Kinds of masks and biases that linear attention has, told from their values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

KINDS = ("of keys", "causal", "of segments", "causal, of segments")
"""Masks that linear attention has, the simplest first."""
NO_SLOPE = 1e-6
"""Slopes of ALiBi up to this number count as 0."""


@partial(jax.jit, static_argnums=2)
def alibi_slopes(
    bias: Float[Array, "b n r s"],
    allowed: Bool[Array, "b n r s"],
    queries: tuple[int, ...] | None = None,
) -> tuple[Float[Array, " n"], Bool[Array, ""]]:
    """Return the slopes, and true if the bias is -slope |i - j| plus a constant for each row.

    Args:
        bias: of some queries.
        allowed: pairs that are not masked.
        queries: their positions; all if None. Without as many queries as keys there is no slope.
    """
    t, s = bias.shape[-2:]
    slopes, distance = jnp.zeros(bias.shape[1], bias.dtype), jnp.zeros((t, s), bias.dtype)
    level = jnp.where(allowed, bias, 0)
    if queries is not None or t == s > 1:
        at = np.arange(t) if queries is None else np.array(queries)
        distance = jnp.abs(jnp.asarray(at[:, None] - np.arange(s)[None])).astype(bias.dtype)
        row, key = np.arange(t)[at > 0], at[at > 0]
        here, before = level[..., row, key], level[..., row, key - 1]
        both = allowed[..., row, key] & allowed[..., row, key - 1]
        total = jnp.sum(jnp.where(both, here - before, 0), axis=(0, 2))
        slopes = total / jnp.maximum(jnp.sum(both, axis=(0, 2), dtype=bias.dtype), 1)
    return slopes, flat(bias, allowed, slopes, distance)


@jax.jit
def flat(bias: Array, allowed: Array, slopes: Array, distance: Array) -> Bool[Array, ""]:
    """True if the bias is -slope distance plus a constant for each row."""
    level = jnp.where(allowed, bias, 0)
    rest = level + (slopes[:, None, None] * distance[None])[None]
    high = jnp.max(jnp.where(allowed, rest, -jnp.inf), axis=-1)
    low = jnp.min(jnp.where(allowed, rest, jnp.inf), axis=-1)
    spread = jnp.max(jnp.where(high >= low, high - low, 0), initial=0)
    return spread <= 1e-3 * (1 + 0.01 * jnp.max(jnp.abs(level)))


@partial(jax.jit, static_argnums=1)
def fits(visible: Bool[Array, "b t s"], kind: str) -> Bool[Array, ""]:
    """True if existing queries and keys, causality and segments determine what is visible."""
    _, t, s = visible.shape
    if kind != "of keys" and t != s:
        return jnp.array(False)
    queries, keys = jnp.any(visible, axis=2), jnp.any(visible, axis=1)
    pairs = jnp.broadcast_to(keys[:, None], visible.shape)
    if "causal" in kind:
        pairs &= jnp.tri(t, s, dtype=bool)[None]
    if "segments" in kind:
        segments = jnp.argmax(visible, axis=-1)
        pairs &= segments[:, :, None] == segments[:, None]
    return jnp.all((visible == pairs) | ~queries[..., None])
