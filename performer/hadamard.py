"""Hadamard transforms and HD products: orthogonal matrices that apply in O(d log d).

An HD product is H D_3 H D_2 H D_1, H the normalised Walsh-Hadamard matrix and D_i diagonal
matrices of random signs. It approximates a Haar matrix, for sizes that are powers of two.

Sources: Yu et al. 2016 (SORF); SimRF App. B.2, Eqs 89 and 90, k = 3, and Algorithm 1.
"""

import math
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer.typing import Key, float32_or_wider

NUM_BLOCKS = 3


def next_power_of_two(d: int) -> int:
    """Return the smallest power of two that is at least d."""
    return 1 << (d - 1).bit_length()


def transform(x: Float[Array, "*b p"]) -> Float[Array, "*b p"]:
    """Return H x along the last axis, p a power of two: H symmetric, H H = I (SimRF Eq. 90).

    The result is float64 for a float64 x, else float32. H_p is a Kronecker product: x is folded to
    axes of at most 16, each multiplied by a small dense matrix, O(p log p) in few, wide operations.
    """
    p = x.shape[-1]
    if p & (p - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got size {p}")
    exponent = p.bit_length() - 1
    factors = [2 ** min(4, exponent - i) for i in range(0, exponent, 4)]
    folded = x.reshape(*x.shape[:-1], *factors).astype(float32_or_wider(x))
    for axis, factor in enumerate(factors, start=x.ndim - 1):
        signs = reduce(np.kron, [[[1, 1], [1, -1]]] * (factor.bit_length() - 1), np.ones((1, 1)))
        matrix = jnp.asarray(signs, folded.dtype) / math.sqrt(factor)
        product = jnp.tensordot(folded, matrix, axes=([axis], [0]), precision="highest")
        folded = jnp.moveaxis(product, -1, axis)
    return folded.reshape(x.shape)


def random_signs(key: Key, p: int) -> Float[Array, "k p"]:
    """Draw the diagonals of D_1, D_2, D_3."""
    return rademacher(key, (NUM_BLOCKS, p))


def rademacher(key: Key, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draw float32 signs, independent of jax_enable_x64 unlike `jax.random.rademacher`."""
    positive = jax.random.bernoulli(key, jnp.float32(0.5), (math.prod(shape),))
    return jnp.where(positive, jnp.float32(1), jnp.float32(-1)).reshape(shape)


def multiply(signs: Float[Array, "k p"], x: Float[Array, "*b p"]) -> Float[Array, "*b p"]:
    """Return H D_k ... H D_1 x along the last axis."""
    x = x.astype(float32_or_wider(x))
    for diagonal in signs.astype(x.dtype):
        x = transform(jnp.broadcast_to(diagonal, x.shape) * x)
    return x
