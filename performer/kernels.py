"""Exact kernels of pairs of points: what random features estimate.

    gaussian(x, y) = s^2 exp(-r^2 / 2)                                            r = |x - y| / l
    matern(x, y)   = s^2 2^{1 - nu} / Gamma(nu) (sqrt(2 nu) r)^nu K_nu(sqrt(2 nu) r)
    arc-cosine 0   = s^2 (1 - t / pi)                                 t the angle between x and y
    arc-cosine 1   = s^2 |x| |y| / (l^2 pi) (sin t + (pi - t) cos t)

with the output scale s and the lengthscale l, one for all dimensions or one for each. Every kernel
has the signature `kernel(x, y, *, lengthscale, output_scale) -> (n, k)` for n points x and k
points y; its random features are those of `features` with the same two scales. Derivatives of every
order that the kernel itself has are right at equal points, too, in forward and in reverse; where
it has a kink (Matern 1/2 and arc-cosine 0 at equal points) that of the distance is taken to be 0.

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
from jaxtyping import Array, ArrayLike, Float, Num

from performer.choices import checked_arrays, positive_number, positive_values

Kernel = Callable[..., Float[Array, "n k"]]
"""kernel(x, y, *, lengthscale, output_scale): the matrix of all pairs."""


def gaussian(
    x: Num[ArrayLike, "n d"],
    y: Num[ArrayLike, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "n k"]:
    """The Gaussian kernel, the mean of both feature maps over frequencies N(0, I).

    Args:
        x: points (n, d). Integers, float16 and bfloat16 are promoted to float32.
        y: points (k, d).
        lengthscale: l, in the units of the points; a number, or (d,) with one for each dimension.
        output_scale: s, so that k(x, x) = s^2.

    Returns:
        The kernel of all pairs (n, k), float32 (float64 for float64 points).

    Raises:
        ValueError: for points or a scale of another shape, or a scale that is not positive and
            finite (where its value is known: not in jit).
    """
    x, y = _over_lengthscale(x, y, lengthscale)
    return _squared(output_scale, x.dtype) * jnp.exp(-_summed_squares(x, y) / 2)


def matern(nu: float) -> Kernel:
    """The Matern kernel of smoothness nu = 1/2, 3/2, 5/2, ..., to be called as `gaussian` is.

    At these nu the Bessel function is elementary: with p = nu - 1/2 and s = sqrt(2 nu) r,

        e^{-s} p! / (2p)! sum_{i <= p} (p + i)! / (i! (p - i)!) (2s)^{p - i}

    Its frequencies have the lengths `norms.matern(nu)`, of any nu.

    Raises:
        ValueError: for another nu.

    Example:
        >>> exact = performer.kernels.matern(1.5)(x, x, lengthscale=0.5)
        >>> frequencies = couplings.with_quantile("pnc", norms.matern(1.5))(key, m, d)
        >>> phi = performer.features.trigonometric(x, frequencies, lengthscale=0.5)  # phi @ phi.T
    """
    degree = nu - 0.5
    if not (degree >= 0 and degree == int(degree)):
        raise ValueError(f"nu must be 1/2, 3/2, 5/2, ... for a closed form, got {nu}")
    return partial(_matern, degree=int(degree))


def _matern(
    x: Num[ArrayLike, "n d"],
    y: Num[ArrayLike, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
    degree: int,
) -> Float[Array, "n k"]:
    x, y = _over_lengthscale(x, y, lengthscale)
    squares = (2 * degree + 1) * _summed_squares(x, y)
    return _squared(output_scale, x.dtype) * _matern_correlation(squares, degree)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _matern_correlation(squares: Array, degree: int) -> Array:
    """The Matern kernel of s^2 = 2 nu r^2, nu = degree + 1/2."""
    s = _root(squares)
    decay, polynomial = jnp.exp(-s), jnp.zeros_like(s)
    for i in range(degree, -1, -1):  # Horner's rule, from s^degree down; that of s^0 is 1
        ways = factorial(2 * degree - i) * factorial(degree) * 2**i
        polynomial = polynomial * s + ways / (
            factorial(2 * degree) * factorial(i) * factorial(degree - i)
        )
    return jnp.where(decay > 0, decay * polynomial, 0.0)  # far away the polynomial may be infinite


@_matern_correlation.defjvp
def _matern_derivative(degree: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """By (s^nu K_nu)' = -s^nu K_{nu-1} a kernel of nu - 1 at the same s: no 1 / s, no cancellation.

    dk_nu / ds^2 = -k_{nu-1} / (4 (nu - 1)); that of the root of s^2 at 0, for nu = 1/2, is 0.
    """
    (squares,), (change,) = primals, tangents
    if degree:
        slope = -_matern_correlation(squares, degree - 1) / (4 * degree - 2)
    else:
        s = _root(squares)
        slope = jnp.where(s > 0, -jnp.exp(-s) / (2 * jnp.where(s > 0, s, 1.0)), 0.0)
    return _matern_correlation(squares, degree), slope * change


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
    x: Num[ArrayLike, "n d"],
    y: Num[ArrayLike, "k d"],
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
    order: int,
) -> Float[Array, "n k"]:
    x, y = _over_lengthscale(x, y, lengthscale)
    lengths, units = zip(*map(_length_and_direction, (x, y)), strict=True)
    angle = _angles(*units)
    if order == 0:
        correlation = 1 - angle / jnp.pi
    else:
        products = jnp.matmul(x, y.T, precision="highest")
        correlation = _first_order(lengths[0][:, None] * lengths[1][None], products, angle)
    return _squared(output_scale, x.dtype) * correlation


@jax.custom_jvp
def _first_order(lengths: Array, products: Array, angle: Array) -> Array:
    """(|x| |y| sin t + (pi - t) x.y) / pi, x.y from the angle: exact where x and y are opposite."""
    del products
    return lengths * (jnp.sin(angle) + (jnp.pi - angle) * jnp.cos(angle)) / jnp.pi


@_first_order.defjvp
def _first_order_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Without that of the angle, |x| |y| cos t - x.y = 0: the angle has a kink at equal points."""
    lengths, products, angle = primals
    of_lengths, of_products, _ = tangents
    change = (jnp.sin(angle) * of_lengths + (jnp.pi - angle) * of_products) / jnp.pi
    return _first_order(lengths, products, angle), change


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


def _squared(output_scale: Any, dtype: Any) -> Array:
    return jnp.asarray(positive_number("output_scale", output_scale), dtype) ** 2


def _over_lengthscale(x: Any, y: Any, lengthscale: Any) -> tuple[Array, Array]:
    """Both points, in units of the lengthscale, which is one number or one for each dimension."""
    x, y = checked_arrays(x=(x, "nd"), y=(y, "kd"))
    shape, d = np.shape(positive_values("lengthscale", lengthscale)), x.shape[1]
    if shape not in ((), (d,)):
        raise ValueError(f"lengthscale must be one number or have the shape ({d},), got {shape}")
    unit = jnp.reshape(jnp.asarray(lengthscale, x.dtype), (1, -1))
    return x / unit, y / unit


@jax.jit  # fused: the differences of all pairs are never in memory
def _summed_squares(x: Array, y: Array) -> Array:
    return jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
