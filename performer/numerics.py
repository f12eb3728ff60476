"""Products, exponentials and roots of stated precision, shared by attention and graphs.

Features are split as phi = factor * exp(exponent), see `features.FeatureMap`. The exponent is
(..., t, m), or (..., t, 1) if all features of a token share it; a factor of None is 1.
"""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from performer.features import Split
from performer.typing import float32_or_wider

BFLOAT16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
TINY = 2**12
"""Largest product of the sizes of two operands that are multiplied in float32 instead."""


def dot(equation: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    """Return a product of operands in `dtype`, summed in float32 (float64 for float64 operands).

    The algorithm rounds operands to bfloat16 within the product: gradients stay float32 until they
    are operands themselves.
    """
    wide = float32_or_wider(left, right)
    if dtype == jnp.bfloat16 and _is_cheap(equation, left, right):
        dtype = wide
    # JAX cannot lower narrow operands under strict promotion: sums over an axis that only one of
    # them has, and the gradient of two bfloat16 ones.
    strict = cast(Any, jax.config).jax_numpy_dtype_promotion == "strict"
    if dtype != jnp.bfloat16:
        left, right = left.astype(dtype), right.astype(dtype)
        wide, precision = float32_or_wider(left), "highest"
    else:
        precision = BFLOAT16
    if strict or left.dtype != right.dtype:
        left, right = left.astype(wide), right.astype(wide)
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=wide)


def _is_cheap(equation: str, left: Array, right: Array) -> bool:
    """True for products that cost little: XLA on CPU fails for some of bfloat16.

    It has no sum that is one number, and also makes such sums of products with vectors, where it
    associates several anew. With a vector for each head (one token) it may end the process.
    """
    sizes = (*left.shape, *right.shape)
    if any(map(is_symbolic_dim, sizes)):
        return False
    return math.prod(sizes) <= TINY or _has_vectors(equation, left, right)


def _has_vectors(equation: str, left: Array, right: Array) -> bool:
    """True if an operand is a vector, apart from the axes that both have and the product keeps."""
    inputs, output = equation.replace("...", ".").split("->")
    names = inputs.split(",")
    shared = set(output).intersection(*names)
    for axes, x in zip(names, (left, right), strict=True):
        before, _, after = axes.partition(".")
        kept = (*before, *"." * (x.ndim - len(before + after)), *after)
        sizes = [size for axis, size in zip(kept, x.shape, strict=True) if axis not in shared]
        if sum(size > 1 for size in sizes) <= 1:
            return True
    return False


def operand_dtype(value: Array) -> jnp.dtype:
    """Return the dtype of large products: bfloat16 for bfloat16 values, else float32 or wider.

    The range of float16 is too small for sums over keys.
    """
    return value.dtype if value.dtype == jnp.bfloat16 else float32_or_wider(value)


def rounded(x: Array) -> Array:
    """Return x rounded to bfloat16; linear, so that its transpose rounds gradients."""
    return jax.lax.reduce_precision(x, 8, 7)


def finite(maximum: Array) -> Array:
    """Return maxima to subtract: 0 instead of -inf, so that e^-inf = 0 remains."""
    return jnp.where(jnp.isneginf(maximum), 0.0, maximum)


def exponentials(split: Split, maximum: Array) -> Array:
    """Return phi e^{-maximum}, the maximum broadcast against (..., t, m)."""
    exponent, factor = split
    values = jnp.exp(exponent - finite(maximum))
    return values if factor is None else values * factor


def weighted(split: Split, log_weights: Float[Array, "..."] | None) -> Split:
    """Return features of keys (..., s, m) that count e^{log_weights} times, (..., s)."""
    if log_weights is None:
        return split
    exponent, factor = split
    missing = range(exponent.ndim - 1 - log_weights.ndim)
    log_weights = jnp.expand_dims(log_weights, (*missing, -1))
    # The sum alone is nan without a key, if the exponent has overflowed.
    return jnp.where(jnp.isneginf(log_weights), -jnp.inf, exponent + log_weights), factor


def normalised(numerator: Array, denominator: Array) -> Array:
    """Return numerator / denominator; 0 for a query without keys."""
    return numerator * (1 / jnp.where(denominator == 0, 1.0, denominator))[..., None]


@jax.custom_batching.custom_vmap
def anywhere(lost: Bool[Array, "..."]) -> Bool[Array, ""]:
    """True if any is; a single answer under `vmap` too, so that `cond` stays one branch."""
    return jnp.any(lost)


@anywhere.def_vmap
def _(size, batched, lost):
    return anywhere(lost), False


@jax.custom_jvp
def root(squares: Array) -> Array:
    """Return the square root, with the derivative 0 at 0."""
    # Without two branches: in different fusions XLA may round the same square to 0 and above.
    return jnp.sqrt(squares)


@root.defjvp
def _root_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    value = root(*primals)
    slope = jnp.where(value > 0, 0.5 / jnp.where(value > 0, value, 1.0), 0.0)
    return value, slope * tangents[0]
