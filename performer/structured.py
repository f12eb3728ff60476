"""Structured frequencies: W x in O(m log d), without the matrix W.

Fast ORF (SORF) is W = D M and fast SimRF W = D S M, M an HD product in place of the Haar matrix, S
the simplex and D the lengths. The couplings "sorf" and "fast-simrf" draw the same W as a matrix.

Source: SimRF Sec. 4.2, App. B.2 (Algorithm 1, Eqs 87 to 90).
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import directions, hadamard, norms
from performer.typing import Frequencies, Key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StructuredFrequencies:
    """m frequencies in R^d as signs and lengths, O(m) numbers. A pytree."""

    signs: Float[Array, "blocks k p"]
    lengths: Float[Array, "blocks p"]
    m: int = dataclasses.field(metadata=dict(static=True))
    d: int = dataclasses.field(metadata=dict(static=True))
    simplex: bool = dataclasses.field(metadata=dict(static=True))

    @jax.jit
    def apply(self, x: Float[Array, "*b d"]) -> Float[Array, "*b m"]:
        """Return W x along the last axis, (..., d) -> (..., m), float64 for a float64 x.

        Raises:
            ValueError: if x is not d wide.
        """
        if x.shape[-1] != self.d:
            raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {self.d}")
        p = self.lengths.shape[-1]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, p - self.d)])

        def block(signs: Array, lengths: Array) -> Float[Array, "*b p"]:
            turned = hadamard.multiply(signs, x)
            turned = directions.multiply_simplex(turned) if self.simplex else turned
            return jnp.broadcast_to(lengths.astype(turned.dtype), turned.shape) * turned

        rows = jax.vmap(block, out_axes=-2)(self.signs, self.lengths)
        return rows.reshape(*x.shape[:-1], self.lengths.size)[..., : self.m]

    def matrix(self) -> Frequencies:
        """Return W as a matrix (m, d)."""
        return self.apply(jnp.eye(self.d, dtype=jnp.float32)).T


@partial(jax.jit, static_argnames=("m", "d", "simplex"))
def draw(key: Key, m: int, d: int, *, simplex: bool = False) -> StructuredFrequencies:
    """Draw structured frequencies: fast SimRF with `simplex`, else SORF.

    With the same key the matrix is that of the coupling "fast-simrf" or "sorf".

    Example:
        >>> frequencies = performer.structured.draw(jax.random.key(0), 4096, 1024)
        >>> projections = frequencies.apply(x)  # (..., 1024) -> (..., 4096)
    """
    p = hadamard.next_power_of_two(d)

    def block(block_key: Key) -> tuple[Array, Array]:  # (k, p), (p,)
        norms_key, directions_key = jax.random.split(block_key)
        return hadamard.random_signs(directions_key, p), norms.independent(norms_key, p, p)

    signs, lengths = jax.vmap(block)(jax.random.split(key, -(-m // p)))
    return StructuredFrequencies(signs, lengths, m, d, simplex)
