"""The state (c, s, z): what queries see of the keys, and the monoid it forms.

Arrays are heads first here, (k, b, ..., t, h), so that a projection with one draw per head is one
batched product. Features come split as phi = factor * exp(exponent), see `features.split`; the
exponent is (..., t, m), or (..., t, 1) where all features of a token share it, and the factor is
None where it is 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Split = tuple[Float[Array, "..."], Float[Array, "..."] | None]
FeatureMap = Callable[[Array], Split]


class State(NamedTuple):
    """What the queries see of the keys, per batch entry and key head, in float32.

    Its size does not depend on how many keys it holds. The leaves of `performer_attention`'s
    states are (b, k, m), (b, k, m) and (b, k, m, v), without b where its inputs have none; m is the
    number of features (twice the number of frequencies for `hyperbolic` and `trigonometric`).
    """

    maximum: Float[Array, "*b m"]
    """c_j: the largest exponent of feature j over the keys; -inf without any key."""
    normaliser: Float[Array, "*b m"]
    """s_j = sum_k phi_j(k) e^{-c_j}."""
    numerator: Float[Array, "*b m v"]
    """z_j = sum_k phi_j(k) e^{-c_j} v(k)."""


def empty(shape: tuple[int, ...], value_width: int) -> State:
    """The state of no keys, the neutral element of `combine`; `shape` is (*batch, m)."""
    zeros = jnp.zeros(shape)
    return State(zeros - jnp.inf, zeros, jnp.zeros((*shape, value_width)))


def combine(left: State, right: State) -> State:
    """The state of the keys of both: an associative and commutative operation."""
    maximum = jnp.maximum(left.maximum, right.maximum)
    return State(
        maximum,
        *(a + b for a, b in zip(*(_rescaled(x, maximum) for x in (left, right)), strict=True)),
    )


def _rescaled(state: State, maximum: Array) -> tuple[Array, Array]:
    """(s, z) relative to another maximum."""
    factor = jnp.exp(state.maximum - finite(maximum))
    return state.normaliser * factor, state.numerator * factor[..., None]


def finite(maximum: Array) -> Array:
    """Maxima as they may be subtracted: 0 where there was nothing, which leaves e^-inf = 0."""
    return jnp.where(jnp.isneginf(maximum), 0.0, maximum)


def exponentials(split: Split, maximum: Array) -> Array:
    """phi e^{-maximum}, the maximum broadcast against (..., t, m)."""
    exponent, factor = split
    values = jnp.exp(exponent - finite(maximum))
    return values if factor is None else values * factor


def masked(split: Split, mask: Bool[Array, "..."] | None) -> Split:
    """Features of the keys without those where the mask (..., s) is False."""
    exponent, factor = split
    return split if mask is None else (jnp.where(mask[..., None], exponent, -jnp.inf), factor)


def dot(equation: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    """A float32 product of operands in `dtype`, exact whatever the backend's default is."""
    return jnp.einsum(
        equation,
        left.astype(dtype),
        right.astype(dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )


def operand_dtype(value: Array) -> jnp.dtype:
    """What the large products are computed in: bfloat16 for bfloat16 values, else float32.

    float16 has not the range for sums over the keys.
    """
    return jnp.dtype(jnp.bfloat16 if value.dtype == jnp.bfloat16 else jnp.float32)


def of_keys(split: Split, value: Float[Array, "..."]) -> State:
    """Every feature attends over the keys: features of (..., s, m), values (..., s, v)."""
    exponent, _ = split
    # The maximum cancels, so its gradient is zero.
    maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-2))
    dtype = operand_dtype(value)
    weights = exponentials(split, maximum[..., None, :]).astype(dtype)
    normaliser = jnp.sum(weights, axis=-2, dtype=jnp.float32)
    numerator = dot("...sm,...sv->...mv", weights, value, dtype)
    return State(jnp.broadcast_to(maximum, normaliser.shape), normaliser, numerator)


def summarise(
    key_map: FeatureMap,
    key: Float[Array, "k b s h"],
    value: Float[Array, "k b s v"],
    mask: Bool[Array, "b s"] | None,
    block: int,
) -> State:
    """The state of all keys, `block` keys at a time; their features are never stored."""
    count, length = blocks(key.shape[-2], block)
    if mask is None and count * length > key.shape[-2]:
        mask = jnp.ones((key.shape[1], key.shape[2]), bool)

    @jax.checkpoint
    def of_block(key, value, mask):
        return of_keys(masked(key_map(key), mask), value)

    if count == 1:
        return of_block(key, value, mask)
    xs = (split_time(key, 2, count, length), split_time(value, 2, count, length))
    xs += (None if mask is None else split_time(mask, 1, count, length),)
    shape = jax.eval_shape(of_block, *jax.tree.map(lambda x: x[0], xs))
    start = empty(shape.normaliser.shape, value.shape[-1])
    return jax.lax.scan(lambda state, x: (combine(state, of_block(*x)), None), start, xs)[0]


def attend(
    query_map: FeatureMap,
    query: Float[Array, "k b t h"],
    state: State,
    dtype: jnp.dtype,
    block: int,
) -> Float[Array, "k b t v"]:
    """Every query attends over the features: sum_j a_j z_j / sum_j a_j s_j."""

    @jax.checkpoint
    def of_block(query, state):
        exponent, factor = query_map(query)
        exponent = exponent + state.maximum[..., None, :]
        maximum = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
        weights = exponentials((exponent, factor), maximum).astype(dtype)
        numerator = dot("...tm,...mv->...tv", weights, state.numerator, dtype)
        denominator = dot("...tm,...m->...t", weights, state.normaliser, jnp.dtype(jnp.float32))
        return ratio(numerator, denominator)

    count, length = blocks(query.shape[-2], block)
    if count == 1:
        return of_block(query, state)
    queries = split_time(query, 2, count, length)
    outputs = jax.lax.map(lambda x: of_block(x, state), queries)
    return join_time(outputs, 2)[:, :, : query.shape[-2]]


def ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 for a query that sees no key."""
    return numerator / jnp.where(denominator == 0, 1.0, denominator)[..., None]


def blocks(length: int, block: int, multiple: int = 1) -> tuple[int, int]:
    """Number and length of equal blocks, at most `block` long, each a multiple of `multiple`."""
    count = max(1, -(-length // block))
    return count, -(-length // (count * multiple)) * multiple


def split_time(x: Array, axis: int, count: int, length: int) -> Array:
    """Pad with zeros (False) and cut into `count` blocks, which become the first axis."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * length - x.shape[axis])
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], count, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join_time(x: Array, axis: int) -> Array:
    """The inverse of `split_time`, without the cut."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
