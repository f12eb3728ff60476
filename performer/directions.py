"""Direction couplings: the joint law of the unit vectors of the frequencies in one block.

Every function `directions(key, lengths, d) -> (m, d)` draws m <= d unit vectors in float32, each
marginally uniform on the sphere, given the lengths (m,) of the frequencies. Only
`simplex_weighted` uses the lengths.

Sources: Yu et al. 2016 (orthogonal, hadamard); Reid et al., "Simplex random features" (SimRF),
Eqs 8, 9, 16, 17. SimRF's block is DSR: D the lengths, S the simplex, R a Haar matrix; here S R.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from performer import hadamard as hd
from performer.typing import Frequencies, Key, Lengths

TOLERANCE = 1e-5
MAX_SWEEPS = 200
_product = partial(jnp.matmul, precision="highest")  # the default of GPUs costs three digits


def independent(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw independent uniform directions: Gaussian vectors, normalised."""
    return _normalise(jax.random.normal(key, (len(lengths), d), jnp.float32))


def orthogonal(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw the first m rows of a Haar-distributed orthogonal matrix (Yu et al. 2016)."""
    return haar(key, len(lengths), d)


def simplex(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw m of the d vertices of a randomly rotated simplex: every pair has cos = -1/(d - 1).

    SimRF Eq. 9. The d vertices sum to zero and span d - 1 dimensions.

    Raises:
        ValueError: for d = 1, where no simplex exists.
    """
    _needs_a_simplex(d)
    return multiply_simplex(haar(key, d, d).T).T[: len(lengths)]


def simplex_weighted(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw the directions of SimRF+: longer vectors at wider angles, for the shortest sum.

    Starts from the simplex and repeats sweeps of SimRF Eq. 17, w_i <- -|w_i| r_i / |r_i| with r_i
    the sum of the others, until no direction moves by more than `TOLERANCE` (at most `MAX_SWEEPS`
    times); then rotates randomly. This minimises the sum over pairs of |w_i + w_j|^2, the leading
    term of the conformity at small v (Eq. 15). A single direction is uniform.

    Raises:
        ValueError: for d = 1, where no simplex exists.
    """
    _needs_a_simplex(d)
    start = multiply_simplex(jnp.eye(d, dtype=lengths.dtype)).T[: len(lengths)]

    def turn(i: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        units, total = carry  # (m, d), (d,)
        others = total - lengths[i] * units[i]
        unit = jnp.where(jnp.any(others != 0), -_normalise(others), units[i])
        return units.at[i].set(unit), others + lengths[i] * unit

    def sweep(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        units, _, number = carry
        swept, _ = jax.lax.fori_loop(0, len(units), turn, (units, _product(lengths, units)))
        return swept, jnp.max(jnp.linalg.norm(swept - units, axis=-1)), number + 1

    first = (start, jnp.asarray(jnp.inf, start.dtype), jnp.zeros((), jnp.int32))
    units, _, _ = jax.lax.while_loop(
        lambda carry: (carry[1] > TOLERANCE) & (carry[2] < MAX_SWEEPS), sweep, first
    )
    return _product(units, haar(key, d, d))


def hadamard(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw m rows of the HD product H D_3 H D_2 H D_1 of size d, a power of two (SORF).

    The rows are orthonormal, with mean 0 and covariance I/d, but only approximately uniform on the
    sphere. The fourth moment of a coordinate, relative to that of the uniform law, 3/(d(d+2)), is
    2/3 at d = 2, 0.88 at 4, 0.95 at 8, and 1 from d = 16 on (within 1.3%, by 40,000 draws).
    """
    eye = jnp.eye(d, dtype=jnp.float32)
    return hd.multiply(hd.random_signs(key, d), eye).T[: len(lengths)]


def hadamard_simplex(key: Key, lengths: Lengths, d: int) -> Frequencies:
    """Draw m vertices of a simplex turned by an HD product: fast SimRF (Sec. 4.2, App. B.2)."""
    _needs_a_simplex(d)
    eye = jnp.eye(d, dtype=jnp.float32)
    return multiply_simplex(hd.multiply(hd.random_signs(key, d), eye)).T[: len(lengths)]


HADAMARD = (hadamard, hadamard_simplex)
"""Only approximately uniform, for powers of two; `couplings.Padded` serves other sizes."""


def multiply_simplex(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Return S x along the last axis in O(d) (SimRF Algorithm 1); S has the rows s_i of Eq. 9.

    Raises:
        ValueError: for d = 1, where no simplex exists.
    """
    d = x.shape[-1]
    _needs_a_simplex(d)
    root = lambda number: jnp.sqrt(jnp.asarray(number, x.dtype))  # noqa: E731 (the dtype of x)
    last = jnp.sum(x[..., :-1], axis=-1, keepdims=True) / root(d - 1)
    first = root(d / (d - 1)) * x[..., :-1] - (root(d) + 1) / (d - 1) * last
    return jnp.concatenate([first, last], axis=-1)


def haar(key: Key, m: int, d: int) -> Float[Array, "m d"]:
    """Draw the first m <= d rows of a Haar-distributed d x d orthogonal matrix.

    A product of Householder reflections of Gaussian vectors (Stewart 1980): reflector j acts on the
    last d - j coordinates. Each row has the sign of a QR factorisation with a positive diagonal;
    without it positive features are biased at first order. QR itself is not called: two batched QR
    calls inside one jit can deadlock on XLA's CPU backend.
    """
    gaussian = jnp.triu(_gaussian(key, m, d))
    eye = jnp.eye(m, d, dtype=jnp.float32)
    pivot = jnp.diagonal(gaussian)
    sign = jnp.where(pivot < 0, -1.0, 1.0)
    reflectors = gaussian + (sign * jnp.linalg.norm(gaussian, axis=-1))[:, None] * eye
    scales = 2 / jnp.maximum(jnp.sum(reflectors**2, axis=-1), jnp.finfo(jnp.float32).tiny)

    def reflect(i: Int[Array, ""], rows: Array) -> Array:
        u = reflectors[m - 1 - i]
        return rows - scales[m - 1 - i] * jnp.outer(_product(rows, u), u)

    return -sign[:, None] * jax.lax.fori_loop(0, m, reflect, eye)


def _gaussian(key: Key, m: int, d: int) -> Float[Array, "m d"]:
    # Drawn flat, for XLA compiles random bits of two axes five times as slowly on a CPU.
    return jax.random.normal(key, (m * d,), jnp.float32).reshape(m, d)


def _normalise(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)


def _needs_a_simplex(d: int) -> None:
    if d < 2:
        raise ValueError(f"simplex directions need d >= 2, got d = {d}; use orthogonal directions")
