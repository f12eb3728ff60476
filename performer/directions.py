"""Direction couplings: the joint law of the unit vectors of the frequencies in one block.

Every function has the signature `directions(key, lengths, d) -> (m, d)`: m <= d unit vectors, each
marginally uniform on the sphere, given the lengths they will carry (which the laws here ignore).

Sources: Yu et al. 2016 (orthogonal); Reid et al., "Simplex random features" (SimRF), Eqs 8 and 9.
SimRF's block is DSR: D the lengths, S the simplex, R a Haar matrix; the rows of S R are given here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from performer.typing import Frequencies, Key, Lengths


def independent(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Independent uniform directions: Gaussian vectors, normalised."""
    return _normalise(jax.random.normal(key, (len(lengths), d)))


def orthogonal(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """The first m rows of a Haar-distributed orthogonal matrix (Yu et al. 2016)."""
    return haar(key, len(lengths), d)


def simplex(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """m of the d vertices of a randomly rotated simplex: every pair at cos = -1/(d - 1).

    SimRF Eq. 9. The d vertices sum to zero and span d - 1 dimensions.

    Raises:
        ValueError: for d = 1, where no simplex exists.
    """
    if d < 2:
        raise ValueError(f"simplex directions need d >= 2, got d = {d}; use orthogonal directions")
    return simplex_vertices(d)[: len(lengths)] @ haar(key, d, d)


def simplex_vertices(d: int) -> Float[Array, "d d"]:
    """The d unit vectors s_i of SimRF Eq. 9, as rows: a simplex in the first d - 1 coordinates."""
    ones = jnp.append(jnp.ones(d - 1), 0.0)
    first = jnp.sqrt(d / (d - 1)) * jnp.eye(d - 1, d) - (jnp.sqrt(d) + 1) / (d - 1) ** 1.5 * ones
    return jnp.vstack([first, ones / jnp.sqrt(d - 1)])


def haar(key: Key, m: int, d: int) -> Float[Array, "m d"]:
    """m <= d orthonormal rows, the first rows of a Haar-distributed d x d orthogonal matrix.

    A product of Householder reflections of Gaussian vectors (Stewart 1980): reflector j acts on the
    last d - j coordinates, and the sign of each row is set as a QR factorisation with a positive
    diagonal would set it. Without that sign positive features are biased at first order. QR itself
    is avoided: two batched QR calls inside one jit can deadlock on XLA's CPU backend.
    """
    gaussian = jnp.triu(jax.random.normal(key, (m, d)))
    pivot = jnp.diagonal(gaussian)
    sign = jnp.where(pivot < 0, -1.0, 1.0)
    reflectors = gaussian + (sign * jnp.linalg.norm(gaussian, axis=-1))[:, None] * jnp.eye(m, d)
    scales = 2 / jnp.maximum(jnp.sum(reflectors**2, axis=-1), jnp.finfo(jnp.float32).tiny)

    def reflect(i: Int[Array, ""], rows: Float[Array, "m d"]) -> Float[Array, "m d"]:
        u = reflectors[m - 1 - i]
        return rows - scales[m - 1 - i] * jnp.outer(rows @ u, u)

    return -sign[:, None] * jax.lax.fori_loop(0, m, reflect, jnp.eye(m, d))


def _normalise(x: Float[Array, "m d"]) -> Float[Array, "m d"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)
