"""Modulation functions: what makes graph random features estimate one kernel or another.

A kernel that is a power series of the adjacency matrix A, K = sum_k c_k A^k, is the square of
another, K = (sum_k f_k A^k)^2 with f * f = c; its random features weigh a walk of k steps by f_k
(VRC Eq. 50; Reid et al. 2024, "General graph random features"). A modulation is a function
length -> (f_0, ..., f_{length-1}).

All but `resolvent` are of the normalised Laplacian L = I - A (VRC Table 5), with the square root of
the kernel expanded in A; the roots of (1 - rho a)^{-d} and its like have closed forms for every d,
odd ones too, where qGRF Eq. 44 multiplies independent estimates.

    regularised_laplacian   (I + sigma^2 L)^{-d}
    diffusion               exp(-sigma^2 L / 2)
    random_walk             (alpha I - L)^p
    inverse_cosine          cos(pi L / 4)
    matern                  (2 nu / kappa^2 I + L)^{-nu}
    resolvent               (I - U)^{-d} of the weights U themselves

The variance of an estimate is finite when sum_k f_k^2 rho(A)^{2k} / (1 - p_halt)^k is. The roots of
`random_walk` with odd p, and of `inverse_cosine`, fall off only like a power of k: estimate these
with a small p_halt, or expect rare and large errors.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import gammaln
from jaxtyping import Array, ArrayLike, Float

from performer.choices import positive_values

Modulation = Callable[[int], Float[Array, " length"]]
"""modulation(length) -> (f_0, ..., f_{length-1})."""


def regularised_laplacian(d: float = 2, sigma: ArrayLike = 1.0) -> Modulation:
    """Of (I + sigma^2 L)^{-d} (qGRF Eqs 20, 40 and 41): the series of its power -d / 2."""
    positive_values("d", d)
    sigma = positive_values("sigma", sigma)
    rho = sigma**2 / (1 + sigma**2)
    return _binomial(-d / 2, -rho, (1 + sigma**2) ** (-d / 2))


def diffusion(sigma: ArrayLike = 1.0) -> Modulation:
    """Of exp(-sigma^2 L / 2): f_k = exp(-sigma^2 / 4) (sigma^2 / 4)^k / k!."""
    sigma = positive_values("sigma", sigma)

    def modulation(length: int) -> Array:
        k = jnp.arange(length, dtype=float)  # by logarithms, as f_0 is 0 in float32 from sigma = 20
        return jnp.exp(2 * k * jnp.log(jnp.divide(sigma, 2)) - sigma**2 / 4 - gammaln(k + 1))

    return modulation


def random_walk(p: int = 2, alpha: ArrayLike = 2.0) -> Modulation:
    """Of (alpha I - L)^p = ((alpha - 1) I + A)^p, positive semi-definite for alpha >= 2.

    To fit alpha, take a parameter that keeps it there: lambda excess: random_walk(p, 2 + excess).

    Raises:
        ValueError: for alpha below 2, or p that is not positive; f is NaN for a traced alpha below.
    """
    positive_values("p", p)
    if isinstance(alpha, Tracer):
        alpha = jnp.where(alpha >= 2, alpha, jnp.nan)
    elif not 2 <= float(jnp.min(jnp.asarray(alpha))) < float("inf"):
        raise ValueError(f"alpha must be at least 2, or the kernel is indefinite, got {alpha}")
    return _binomial(p / 2, 1 / (alpha - 1), (alpha - 1) ** (p / 2))


def inverse_cosine() -> Modulation:
    """Of cos(pi L / 4) = (cos(pi A / 4) + sin(pi A / 4)) / sqrt(2)."""

    def series(length: int) -> np.ndarray:
        k = np.arange(length)
        signs = np.where(k % 4 < 2, 1.0, -1.0)
        powers = np.cumprod(np.concatenate([[1.0], np.pi / 4 / np.arange(1, length)]))
        return signs * powers[:length] / np.sqrt(2)

    return from_series(series)


def matern(nu: float = 1.5, kappa: ArrayLike = 1.0) -> Modulation:
    """Of (2 nu / kappa^2 I + L)^{-nu} (Borovitskiy et al. 2021)."""
    positive_values("nu", nu)
    kappa = positive_values("kappa", kappa)
    factor = (kappa**2 / (2 * nu)) ** (nu / 2)
    laplacian = regularised_laplacian(nu, kappa / (2 * nu) ** 0.5)
    return lambda length: jnp.multiply(factor, laplacian(length))


def resolvent(d: float = 2) -> Modulation:
    """Of (I - U)^{-d} (qGRF Eq. 7), for `adjacency="weights"`; f_k = 1 for d = 2."""
    positive_values("d", d)
    return _binomial(-d / 2, -1.0, 1.0)


def from_series(series: Callable[[int], ArrayLike]) -> Modulation:
    """Of any kernel sum_k c_k A^k, by f_k = (c_k - sum_{0<j<k} f_j f_{k-j}) / (2 f_0).

    Args:
        series: length -> (c_0, ..., c_{length-1}).

    Raises:
        ValueError: when c_0 is not positive; then there is no real root.
    """
    if not float(np.asarray(series(1))[0]) > 0:
        raise ValueError(f"the series must begin with c_0 > 0, got {np.asarray(series(1))[0]}")

    def modulation(length: int) -> Array:
        c = np.asarray(series(length), np.float64)
        f = np.zeros(length)
        f[0] = np.sqrt(c[0])
        for k in range(1, length):
            f[k] = (c[k] - f[1:k] @ f[k - 1 : 0 : -1]) / (2 * f[0])
        return jnp.asarray(f, float)

    return modulation


def _binomial(power: float, ratio: ArrayLike, first: ArrayLike) -> Modulation:
    """first * (1 + ratio a)^power, expanded in a."""

    def modulation(length: int) -> Array:
        k = jnp.arange(1, length)
        return _products(first, (power - k + 1) / k * ratio)

    return modulation


def _products(first: ArrayLike, ratios: Array) -> Array:
    return jnp.cumprod(jnp.concatenate([jnp.asarray(first, ratios.dtype)[None], ratios]))
