"""Structured matrices: products in O(d log d), without the matrix.

`draw`: fast ORF (SORF) is W = D M and fast SimRF W = D S M, M an HD product in place of the
Haar matrix, S the simplex and D the lengths. The couplings "sorf" and "fast-simrf" draw the same W
as a matrix.

`random_butterfly`: random orthogonal matrices B. For d a power of two, B has d - 1 angles, each of
which joins two blocks of size k (Def. 3.1),

    B^(2k) = [[B^(k), 0], [0, B'^(k)]] [[c I, -s I], [s I, c I]],   c = cos(theta), s = sin(theta),

where B' has its own angles. Every *column* of B is uniform on the sphere if c^2 ~ Beta(k/2, k/2)
with random signs of c and s (at k = 1 a uniform angle): the columns of B^(2k) are (c u, s v) and
(-s u, c v), u a column of B and v of B', by induction independent and uniform. The halves of a
Gaussian point have such directions u and v, and |g_1|^2 / |g|^2 ~ Beta(k/2, k/2). So the angles are
drawn from one Gaussian point, each the angle between the lengths of two halves. The signs also make
the entries of B uncorrelated, like those of a Haar matrix.

Corrections: the paper calls B Haar distributed, but O(d) has d(d - 1)/2 dimensions, not d - 1. It
prints theta_i = u_i / u_{i+1} for u uniform on the sphere; an arctan is missing, and the ratio is
right only for k = 1. Deviations: B^(1) is a random sign, Haar on O(1), the paper's is 1. Joins are
counted level by level, the widest first; the paper's theta_2, theta_1, theta_3 are our 0, 1, 2 at
d = 4.

The rows of B are not uniform, so B x is not for every unit vector x: at x = (1, ..., 1) / sqrt(d)
the fourth moment of a coordinate is (d + 1)(d + 2) / (6 d) times that of the uniform distribution.
`random_butterfly` has the figures of products B P B P B P; `directions.haar` is exact.

Sources: SimRF Sec. 4.2, App. B.2 (Algorithm 1, Eqs 87 to 90); Munkhoeva et al. 2018,
"Quadrature-based features for kernel approximation", Sec. 3, Def. 3.1 and supplement Sec. 9.1.
Their B-hat is B' here; t is its number of products.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from performer import directions, hadamard, norms
from performer.choices import positive_integer
from performer.typing import Frequencies, Key, float32_or_wider


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
        >>> from performer import structured
        >>> frequencies = structured.draw(jax.random.key(0), 4096, 1024)
        >>> projections = frequencies.apply(x)  # (..., 1024) -> (..., 4096)
    """
    p = hadamard.next_power_of_two(d)

    def block(block_key: Key) -> tuple[Array, Array]:  # (k, p), (p,)
        norms_key, directions_key = jax.random.split(block_key)
        return hadamard.random_signs(directions_key, p), norms.independent(norms_key, p, p)

    signs, lengths = jax.vmap(block)(jax.random.split(key, -(-m // p)))
    return StructuredFrequencies(signs, lengths, m, d, simplex)


class Butterfly(NamedTuple):
    """A d x d orthogonal matrix, B or (B P)_1 ... (B P)_t, as O(t d) numbers. A pytree.

    Holds the angles in radians, the signs B^(1) and the permutations, (P x)_i = x[order[i]].
    """

    angles: Float[Array, "t joins"]
    signs: Float[Array, "t d"]
    orders: Int[Array, "t d"] | None

    def apply(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Return B x along the last axis, (..., d) -> (..., d), float64 for a float64 x.

        Raises:
            ValueError: if x is not d wide.
        """
        columns = _columns(self, x)
        # No lax.scan over the products: XLA's CPU backend is over 10 times slower inside one.
        for i in reversed(range(len(self.angles))):
            if self.orders is not None:
                columns = columns[self.orders[i]]
            columns = _rotate(self.angles[i], columns)
            columns = self.signs[i, :, None].astype(columns.dtype) * columns
        return columns.T.reshape(x.shape)

    def apply_transpose(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Return B^T x, as `apply` otherwise: w.x = v.(B^T x) for the frequency w = B v."""
        columns = _columns(self, x)
        for i in range(len(self.angles)):
            columns = self.signs[i, :, None].astype(columns.dtype) * columns
            columns = _rotate(self.angles[i], columns, back=True)
            if self.orders is not None:
                columns = columns.at[self.orders[i]].set(columns, unique_indices=True)
        return columns.T.reshape(x.shape)

    def matrix(self) -> Float[Array, "d d"]:
        """Return B as a matrix (d, d)."""
        return self.apply(jnp.eye(self.signs.shape[-1], dtype=jnp.float32)).T


def random_butterfly(key: Key, d: int, *, products: int = 3) -> Butterfly:
    """Draw B, or with products t > 1 the product (B P)_1 ... (B P)_t, P uniform permutations.

    For d a power of two every column is exactly uniform on the sphere. Otherwise the factors are
    those of the next power of two, cut to d x d, which leaves zeros in the columns of B. Products
    (Sec. 9.1; t = 3 in the paper's experiments) nearly correct that. Measured fourth moment of a
    coordinate, relative to the uniform distribution, mean of all coordinates (standard error):

                                          t = 1   t = 2      t = 3
        columns, d = 15                   1.09    1.002      1.000      0 to 3.2 in entries of B
        last column, d = 1025             86      1.0000(4)  1.001(1)
        (1, ..., 1) / sqrt(d), d = 15     2.21    1.023      1.0007(5)
        (1, ..., 1) / sqrt(d), d = 16     3.19    1.0003(5)  1.0000(4)
        (1, ..., 1) / sqrt(d), d = 1025   170     1.11(3)    1.000(1)

    Args:
        key: a PRNG key.
        d: the size of the matrix.
        products: t, the number of butterfly matrices; a single one has no permutation.

    Raises:
        ValueError: for d < 1 or products < 1.

    Example:
        >>> from performer.structured import random_butterfly
        >>> butterfly = random_butterfly(jax.random.key(0), 1024)
        >>> projections = butterfly.apply_transpose(x)  # (..., 1024) -> (..., 1024)
    """
    p = hadamard.next_power_of_two(positive_integer("d (the dimension)", d))
    products = positive_integer("products", products)
    angles_key, signs_key, orders_key = jax.random.split(key, 3)
    angles = jax.vmap(lambda k: _random_angles(k, p))(jax.random.split(angles_key, products))
    signs = hadamard.rademacher(signs_key, (products, d))
    if products == 1:
        return Butterfly(angles, signs, None)
    order = lambda k: jax.random.permutation(k, jnp.arange(d, dtype=jnp.int32))  # noqa: E731
    return Butterfly(angles, signs, jax.vmap(order)(jax.random.split(orders_key, products)))


@partial(jax.jit, static_argnums=1)
def _random_angles(key: Key, p: int) -> Float[Array, " joins"]:
    """Draw the angle of each join, between the signed lengths of two halves of a Gaussian point."""
    point_key, signs_key = jax.random.split(key)
    squares = jax.random.normal(point_key, (p,), jnp.float32) ** 2
    halves = [squares.reshape(joins, 2, -1).sum(axis=-1) for joins in _joins(p)]
    lengths = jnp.sqrt(jnp.concatenate([jnp.zeros((0, 2), jnp.float32), *halves]))
    signed = lengths * hadamard.rademacher(signs_key, lengths.shape)
    return jnp.arctan2(signed[:, 1], signed[:, 0])


@partial(jax.jit, static_argnames="back")
def _rotate(
    angles: Float[Array, " joins"], x: Float[Array, "d n"], *, back: bool = False
) -> Float[Array, "d n"]:
    """Apply the factors of B with B^(1) = 1, the widest joins first; `back` for B^T.

    A coordinate whose partner is cut away is kept (c = 1).
    """
    d, p = len(x), len(angles) + 1
    c, s = jnp.cos(angles.astype(x.dtype)), jnp.sin(angles.astype(x.dtype))
    x = jnp.pad(x, ((0, p - d), (0, 0)))
    for joins in reversed(_joins(p)) if back else _joins(p):
        halves = x.reshape(joins, 2, p // (2 * joins), -1)
        first, second = halves[:, 0], halves[:, 1]
        paired = jnp.arange(p).reshape(joins, 2, -1, 1)[:, 1] < d
        cos = jnp.where(paired, c[joins - 1 : 2 * joins - 1, None, None], 1)
        sin = jnp.where(paired, s[joins - 1 : 2 * joins - 1, None, None], 0) * (-1 if back else 1)
        # No flip of the halves: XLA would fuse the flips of all levels, 2^levels times the work.
        turned = [cos * first - sin * second, sin * first + cos * second]
        x = jnp.stack(turned, axis=1).reshape(p, -1)
    return x[:d]


def _joins(p: int) -> list[int]:
    """Return the joins of each level, n = 1, 2, ..., p/2; level n has the angles [n-1, 2n-1)."""
    return [2**level for level in range(p.bit_length() - 1)]


def _columns(butterfly: Butterfly, x: Float[Array, "*b d"]) -> Float[Array, "d n"]:
    """Return the inputs as columns, so that rotations run along the batch."""
    d = butterfly.signs.shape[-1]
    if x.shape[-1] != d:
        raise ValueError(f"inputs have width {x.shape[-1]} but the butterfly matrix has {d}")
    return x.reshape(-1, d).T.astype(float32_or_wider(x))
