"""Exact kernels of pairs of points: what random features estimate.

    gaussian(x, y) = s^2 exp(-r^2 / 2)                                            r = |x - y| / l
    matern(x, y)   = s^2 2^{1 - nu} / Gamma(nu) (sqrt(2 nu) r)^nu K_nu(sqrt(2 nu) r)
    arc-cosine 0   = s^2 (1 - t / pi)                                 t the angle between x and y
    arc-cosine 1   = s^2 |x| |y| / (l^2 pi) (sin t + (pi - t) cos t)

with the output scale s and the lengthscale l, one for all dimensions or one for each. Every kernel
has the signature `kernel(x, y, *, lengthscale, output_scale) -> (n, k)` for n points x and k
points y; its random features are those of `features` with the same two scales.

Sources: VRC App. B.1 (σ_v is s, the script l is l) and Eq. 83, which misses the power nu on its
first bracket (as printed it is no kernel: it is not 1 at r = 0 unless nu = 1); Munkhoeva et al.
2018 (Quad), Sec. 4.2, after Cho and Saul 2009.
"""

from collections.abc import Callable
from functools import partial
from math import factorial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

Kernel = Callable[..., Float[Array, "n k"]]
"""kernel(x, y, *, lengthscale, output_scale): the matrix of all pairs."""


def gaussian(
    x: Float[Array, "n d"],
    y: Float[Array, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "n k"]:
    """The Gaussian kernel, the mean of both feature maps over frequencies N(0, I).

    Args:
        x: points (n, d).
        y: points (k, d).
        lengthscale: l, in the units of the points; a number, or (d,) with one for each dimension.
        output_scale: s, so that k(x, x) = s^2.

    Returns:
        The kernel of all pairs (n, k), in the dtype of the points.

    Raises:
        ValueError: when a scale is not positive and finite (where its value is known: not in jit).
    """
    return _squared(output_scale) * jnp.exp(-_squared_distances(x, y, lengthscale) / 2)


def matern(nu: float) -> Kernel:
    """The Matern kernel of smoothness nu = 1/2, 3/2, 5/2, ..., to be called as `gaussian` is.

    At these nu the Bessel function is elementary: with p = nu - 1/2 and s = sqrt(2 nu) r,

        e^{-s} p! / (2p)! sum_{i <= p} (p + i)! / (i! (p - i)!) (2s)^{p - i}

    Its frequencies have the lengths `norms.matern(nu)`, of any nu.

    Raises:
        ValueError: for another nu.

    Example:
        >>> exact = performer.kernels.matern(1.5)(x, x, lengthscale=0.5)
        >>> frequencies = couplings.blocks(
        ...     directions.orthogonal, partial(norms.pairwise, quantile=norms.matern(1.5))
        ... )(key, m, d)
        >>> phi = performer.features.trigonometric(x, frequencies, lengthscale=0.5)  # phi @ phi.T
    """
    degree = nu - 0.5
    if not (degree >= 0 and degree == int(degree)):
        raise ValueError(f"nu must be 1/2, 3/2, 5/2, ... for a closed form, got {nu}")
    return partial(_matern, degree=int(degree))


def _matern(
    x: Float[Array, "n d"],
    y: Float[Array, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
    degree: int,
) -> Float[Array, "n k"]:
    squared = (2 * degree + 1) * _squared_distances(x, y, lengthscale)
    s = _root(squared)
    polynomial = jnp.zeros_like(s)
    for i in range(degree + 1):
        factor = factorial(degree + i) / (factorial(i) * factorial(degree - i))
        polynomial = polynomial + factor * (2 * s) ** (degree - i)
    correlation = jnp.exp(-s) * polynomial * (factorial(degree) / factorial(2 * degree))
    return _squared(output_scale) * correlation


def arc_cosine(order: int) -> Kernel:
    """The arc-cosine kernel of order 0 or 1, to be called as `gaussian` is.

    2 E phi(w.x) phi(w.y) for w ~ N(0, I), phi the step function (1/2 at 0) or the positive part:
    the Gram matrix of infinitely wide layers. Its features are `features.arc_cosine(order)`. A
    point at the origin is taken to stand at right angles to all others, as the integral has it.

    Raises:
        ValueError: for another order.
    """
    if order not in (0, 1):
        raise ValueError(f"the order of an arc-cosine kernel must be 0 or 1, got {order}")
    return partial(_arc_cosine, order=order)


def _arc_cosine(
    x: Float[Array, "n d"],
    y: Float[Array, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
    order: int,
) -> Float[Array, "n k"]:
    x, y = (points / checked("lengthscale", lengthscale) for points in (x, y))
    lengths, units = zip(*map(_length_and_direction, (x, y)), strict=True)
    angle = _angles(*units)
    if order == 0:
        return _squared(output_scale) * (1 - angle / jnp.pi)
    shape = (jnp.sin(angle) + (jnp.pi - angle) * jnp.cos(angle)) / jnp.pi
    return _squared(output_scale) * lengths[0][:, None] * lengths[1] * shape


def _angles(u: Array, v: Array) -> Array:
    """From |u - v| and |u + v|, not from the cosine: exact for small angles; pi / 2 for zeros."""
    apart, summed = _root(_summed_squares(u, v)), _root(_summed_squares(u, -v))
    angle = 2 * jnp.arctan2(apart, jnp.where(apart + summed > 0, summed, 1.0))
    return jnp.where(apart + summed > 0, angle, jnp.pi / 2)


def _length_and_direction(x: Array) -> tuple[Array, Array]:
    """|x| and x / |x| along the last axis; 0 and 0 for x = 0."""
    length = _root(jnp.sum(x**2, axis=-1))
    return length, x / jnp.where(length > 0, length, 1.0)[..., None]


def _root(squares: Array) -> Array:
    """The square root, with the derivative 0 at 0."""
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)


def checked(what: str, value: ArrayLike) -> ArrayLike:
    """The value, after a look at it: `what` must be positive and finite.

    Raises:
        ValueError: when it is not; a traced value cannot be looked at and passes.
    """
    if not isinstance(value, Tracer):
        bad = [v for v in np.ravel(np.asarray(value)).tolist() if not 0 < v < float("inf")]
        if bad:
            raise ValueError(f"{what} must be positive and finite, got {bad[0]}")
    return value


def _squared(output_scale: Any) -> Any:
    return checked("output_scale", output_scale) ** 2


def _squared_distances(x: Array, y: Array, lengthscale: Any) -> Array:
    """From differences, not from |x|^2 - 2 x.y + |y|^2: exactly 0 for equal points."""
    lengthscale = checked("lengthscale", lengthscale)
    return _summed_squares(x / lengthscale, y / lengthscale)


@jax.jit  # fused: the differences of all pairs are never in memory
def _summed_squares(x: Array, y: Array) -> Array:
    return jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
