"""Kernels of pairs of points: exact values, feature maps and laws of the frequencies.

    gaussian(x, y)       s^2 exp(-r^2 / 2)                                        r = |x - y| / l
    matern(nu)(x, y)     s^2 2^{1 - nu} / Gamma(nu) (sqrt(2 nu) r)^nu K_nu(sqrt(2 nu) r)
    softmax(x, y)        s^2 exp(x.y / l^2)
    arc_cosine(0)(x, y)  s^2 (1 - t / pi)                             t the angle between x and y
    arc_cosine(1)(x, y)  s^2 |x| |y| / (l^2 pi) (sin t + (pi - t) cos t)

with the output scale s and the lengthscale l, one for all dimensions or one for each. Each is a
`Kernel`, as is one of your own; a name ("gaussian", "matern-3/2", ...) is accepted wherever a
`Kernel` is. Derivatives of every order that the kernel has are correct also at equal points, in
forward and reverse mode. At a kink (Matern 1/2 and arc-cosine 0 at equal points) the derivative of
the distance is defined as 0.

Sources: VRC App. B.1 (σ_v is s, the script l is l) and Eq. 83, which misses the power nu on its
first bracket (as printed it is no kernel: it is not 1 at r = 0 unless nu = 1); Munkhoeva et al.
2018 (Quad), Sec. 4.2, after Cho and Saul 2009.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb, perm
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Num

from performer import couplings, features, norms
from performer.choices import checked_arrays, positive_lengthscale, positive_number, unknown
from performer.numerics import root
from performer.typing import Coupling, Frequencies, Key, Value


@dataclass(frozen=True, repr=False)
class Kernel(Value):
    """A kernel k(x, y) = E phi(x; w) phi(y; w), and the features that estimate it.

    Kernels with equal functions and numbers are equal, and hashable: `jax.jit` accepts them as
    static.

    Args:
        exact: (x (n, d), y (k, d)) -> (n, k), of points in units of the lengthscale.
        feature_map: phi, a map of `features`, or a function with the same arguments.
        quantile: the radial law of the frequencies w, as `norms.matern(1.5)`.
        at_zero: phi(x; 0) phi(y; 0) if it is one number for all points; required by `quadrature`.
        even: True if phi(x; w) phi(y; w) is the same for -w; `quadrature` then needs no reflected
            points.

    Example:
        >>> def cauchy(x, y):  # on a line
        ...     return 1 / (1 + (x - y.T) ** 2)
        >>> def exponential(score, d):  # F(l) = 1 - e^{-l}, the law of its |w|
        ...     return -jax.scipy.special.log_ndtr(-score)
        >>> kernel = kernels.Kernel(cauchy, features.trigonometric, exponential)
        >>> phi = kernels.random_features(key, kernel, x[:, :1], 16)  # phi @ phi.T
    """

    exact: Callable[[Array, Array], Array]
    feature_map: Callable[..., Array]
    quantile: norms.Quantile = norms.chi
    at_zero: float | None = None
    even: bool = False

    def __call__(
        self,
        x: Num[ArrayLike, "n d"],
        y: Num[ArrayLike, "k d"],
        *,
        lengthscale: ArrayLike = 1.0,
        output_scale: ArrayLike = 1.0,
    ) -> Float[Array, "n k"]:
        """Return the exact kernel of all pairs.

        Args:
            x: points (n, d). Integers, float16 and bfloat16 are promoted to float32.
            y: points (k, d).
            lengthscale: l, in the units of the points; a number, or (d,), one for each dimension.
            output_scale: s.

        Returns:
            The kernel (n, k), float32 (float64 for float64 points).

        Raises:
            ValueError: for points or a scale of another shape, or a scale that is not positive and
                finite (unchecked if traced).
        """
        x, y = checked_arrays(x=(x, "nd"), y=(y, "kd"))
        lengthscale = positive_lengthscale(lengthscale, x.shape[1])
        unit = jnp.reshape(jnp.asarray(lengthscale, x.dtype), (1, -1))
        scale = jnp.asarray(positive_number("output_scale", output_scale), x.dtype)
        return scale**2 * self.exact(x / unit, y / unit)

    def coupled(self, coupling: str | Coupling = "pnc") -> Coupling:
        """Return the coupling with the radial law of this kernel.

        Raises:
            ValueError: for an unknown coupling, or one whose lengths cannot have another law
                (`couplings.with_quantile`).
        """
        if self.quantile == norms.chi:
            return couplings.get(coupling)
        return couplings.with_quantile(coupling, self.quantile)

    def __repr__(self) -> str:
        if self in _ARC_COSINES:
            return f"kernels.arc_cosine({_ARC_COSINES.index(self)})"
        if isinstance(self.exact, _Matern) and self == matern(self.exact.nu):
            return f"kernels.matern({self.exact.nu})"
        return super().__repr__()


def _products(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y.T, precision="highest")


def _gaussian(x: Array, y: Array) -> Array:
    return jnp.exp(-_summed_squares(x, y) / 2)


def _softmax(x: Array, y: Array) -> Array:
    return jnp.exp(_products(x, y))


gaussian = Kernel(_gaussian, features.trigonometric, at_zero=1.0, even=True)
"""The Gaussian kernel, with trigonometric features. Positive features also estimate it, by the map
`partial(features.positive, kernel="gaussian")`."""

softmax = Kernel(_softmax, features.positive)
"""The exponential kernel of softmax attention, with positive features."""


def matern(nu: float) -> Kernel:
    """Return the Matern kernel of smoothness nu = 1/2, 3/2, 5/2, ..., with trigonometric features.

    Its Bessel function is elementary: with p = nu - 1/2 and s = sqrt(2 nu) r,

        e^{-s} p! / (2p)! sum_{i <= p} (p + i)! / (i! (p - i)!) (2s)^{p - i}

    Its frequencies have the lengths `norms.matern(nu)`.

    Raises:
        ValueError: for another nu.

    Example:
        >>> kernel = kernels.matern(1.5)
        >>> exact = kernel(x, x, lengthscale=0.5)
        >>> phi = kernels.random_features(key, kernel, x, m, lengthscale=0.5)  # phi @ phi.T
    """
    if not (nu >= 0.5 and nu - 0.5 == int(nu - 0.5)):
        raise ValueError(f"nu must be 1/2, 3/2, 5/2, ... for a closed form, got {nu}")
    nu = float(nu)
    return Kernel(_Matern(nu), features.trigonometric, norms.matern(nu), 1.0, even=True)


@dataclass(frozen=True, repr=False)
class _Matern(Value):
    nu: float

    def __call__(self, x: Array, y: Array) -> Array:
        return _matern_correlation(2 * self.nu * _summed_squares(x, y), int(self.nu))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _matern_correlation(squares: Array, degree: int) -> Array:
    """Return the Matern kernel of s^2 = 2 nu r^2, nu = degree + 1/2."""
    s = root(squares)
    decay, polynomial = jnp.exp(-s), jnp.zeros_like(s)
    for i in range(degree, -1, -1):  # Horner's rule, from s^degree down; that of s^0 is 1
        polynomial = polynomial * s + comb(degree, i) * 2**i / perm(2 * degree, i)
    return jnp.where(decay > 0, decay * polynomial, 0.0)  # far away the polynomial may be infinite


@_matern_correlation.defjvp
def _matern_derivative(degree: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Derivative by (s^nu K_nu)' = -s^nu K_{nu-1}, without 1 / s and without cancellation.

    dk_nu / ds^2 = -k_{nu-1} / (4 (nu - 1)). For nu = 1/2 the derivative at s = 0 is defined as 0.
    """
    (squares,), (change,) = primals, tangents
    if degree:
        slope = -_matern_correlation(squares, degree - 1) / (4 * degree - 2)
    else:
        s = root(squares)
        slope = jnp.where(s > 0, -jnp.exp(-s) / (2 * jnp.where(s > 0, s, 1.0)), 0.0)
    return _matern_correlation(squares, degree), slope * change


def arc_cosine(order: int) -> Kernel:
    """Return the arc-cosine kernel of order 0 or 1.

    2 E phi(w.x) phi(w.y) for w ~ N(0, I), phi the step function (1/2 at 0) or the positive part:
    the Gram matrix of infinitely wide layers. Its features are `features.arc_cosine(order)`. The
    origin is at right angles to all points, as in the integral.

    Raises:
        ValueError: for another order.
    """
    if order not in (0, 1):
        raise ValueError(f"the order of an arc-cosine kernel must be 0 or 1, got {order}")
    return _ARC_COSINES[order]


def _arc_cosine_0(x: Array, y: Array) -> Array:
    return 1 - _angles(_directions(x), _directions(y)) / jnp.pi


def _arc_cosine_1(x: Array, y: Array) -> Array:
    lengths = _lengths(x)[:, None] * _lengths(y)[None]
    return _first_order(lengths, _products(x, y), _angles(_directions(x), _directions(y)))


_ARC_COSINES = (
    Kernel(_arc_cosine_0, features.arc_cosine(0), at_zero=0.5),
    Kernel(_arc_cosine_1, features.arc_cosine(1), at_zero=0.0),
)
KERNELS = {
    "gaussian": gaussian,
    "rbf": gaussian,
    "softmax": softmax,
    "matern-1/2": matern(0.5),
    "matern-3/2": matern(1.5),
    "matern-5/2": matern(2.5),
    "arc-cosine-0": arc_cosine(0),
    "arc-cosine-1": arc_cosine(1),
}
"""Kernels by name."""


def get(kernel: str | Kernel) -> Kernel:
    """Return the kernel of that name in `KERNELS`; a `Kernel` is returned as it is.

    Raises:
        ValueError: for an unknown name (the message has the nearest), and for anything else.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        raise ValueError(
            f"kernel must be one of {', '.join(KERNELS)} or a kernels.Kernel, got {kernel!r}"
        )
    if kernel not in KERNELS:
        raise ValueError(unknown("kernel", kernel, KERNELS))
    return KERNELS[kernel]


def frequencies(
    key: Key, kernel: str | Kernel, num_features: int, dim: int, coupling: str | Coupling = "pnc"
) -> Frequencies:
    """Draw frequencies (num_features, dim) with the radial law of the kernel.

    Raises:
        ValueError: for an unknown kernel, sizes that the coupling does not admit, and as
            `Kernel.coupled`.
    """
    return get(kernel).coupled(coupling)(key, num_features, dim)


def random_features(
    key: Key,
    kernel: str | Kernel,
    x: Num[ArrayLike, "n d"],
    num_features: int,
    coupling: str | Coupling = "pnc",
    *,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "n p"]:
    """Compute random features: phi(x) . phi(y) is an unbiased estimate of the kernel.

    The same key draws the same frequencies: use it again for other points.

    Args:
        key: random key.
        kernel: a name or a `Kernel`, as "gaussian" or `matern(1.5)`.
        x: points (n, d).
        num_features: m, the number of frequencies. There are 2 m trigonometric features.
        coupling: joint law of the frequencies: a name, or a coupling.
        lengthscale: in the units of the points; a number, or (d,), one for each dimension.
        output_scale: s.

    Returns:
        phi (n, m) or (n, 2 m), float32 (float64 for float64 points).

    Raises:
        ValueError: as `frequencies` and the feature map.

    Example:
        >>> phi, psi = (kernels.random_features(key, "gaussian", x, m) for x in (x, x[:3] / 2))
        >>> psi @ phi.T  # (3, n)
    """
    (x,) = checked_arrays(x=(x, "nd"))
    w = frequencies(key, kernel, num_features, x.shape[1], coupling)
    return get(kernel).feature_map(x, w, lengthscale=lengthscale, output_scale=output_scale)


@jax.custom_jvp
def _first_order(lengths: Array, products: Array, angle: Array) -> Array:
    """(|x| |y| sin t + (pi - t) x.y) / pi, x.y from the angle: exact for opposite x and y."""
    del products
    return lengths * (jnp.sin(angle) + (jnp.pi - angle) * jnp.cos(angle)) / jnp.pi


@_first_order.defjvp
def _first_order_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Derivative without its term of the angle, |x| |y| cos t - x.y = 0, with a kink at x = y."""
    lengths, products, angle = primals
    lengths_change, products_change, _ = tangents
    change = (jnp.sin(angle) * lengths_change + (jnp.pi - angle) * products_change) / jnp.pi
    return _first_order(lengths, products, angle), change


def _angles(u: Array, v: Array) -> Array:
    """Return angles from |u - v| and |u + v|: exact if small, unlike arccos; pi / 2 for zeros."""
    # Directions of equal points may differ by the rounding of their lengths.
    apart, summed = (root(_summed_squares(u, w, ulps=4)) for w in (v, -v))
    angle = 2 * jnp.arctan2(apart, jnp.where(apart + summed > 0, summed, 1.0))
    return jnp.where(apart + summed > 0, angle, jnp.pi / 2)


def _lengths(x: Array) -> Array:
    return root(jnp.sum(x**2, axis=-1))


def _directions(x: Array) -> Array:
    """Return x / |x| along the last axis; 0 for x = 0."""
    length = _lengths(x)
    return x / jnp.where(length > 0, length, 1.0)[..., None]


@partial(jax.jit, static_argnames="ulps")  # fused: the differences of all pairs are not stored
def _summed_squares(x: Array, y: Array, ulps: int = 1) -> Array:
    return jnp.sum(_differences(x[:, None], y[None], ulps) ** 2, axis=-1)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _differences(x: Array, y: Array, ulps: int) -> Array:
    """Return x - y, and 0 for coordinates that are equal up to the rounding of x / l.

    XLA computes x / l within x / l - x / l by a fused multiply-add, so that it is not 0, and in
    each fusion by another one. At a kink the derivative would be taken at the rounding error.
    """
    difference, rounding = x - y, ulps * jnp.finfo(x.dtype).eps
    return jnp.where(jnp.abs(difference) <= rounding * jnp.abs(x), 0.0, difference)


@_differences.defjvp
def _differences_derivative(ulps: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _differences(*primals, ulps), tangents[0] - tangents[1]
