"""Feature maps x -> phi(x; W): random features whose dot products estimate a kernel.

`positive` features are FAVOR+'s, also called random Laplace features; `trigonometric` ones are
random Fourier features.

Sources: Rahimi and Recht 2007; Choromanski et al. 2021 (positive, softmax form). SimRF Eq. 7 and
VRC Eq. 4 print the Gaussian form of the positive features.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from performer.choices import unknown

_SQUARED_NORM_FACTOR = {"softmax": 0.5, "gaussian": 1.0}


def positive(
    x: Float[Array, "*b d"] | Int[Array, "*b d"],
    W: Float[Array, "m d"],
    *,
    kernel: Literal["softmax", "gaussian"] = "softmax",
    weights: Float[Array, " m"] | None = None,
) -> Float[Array, "*b m"]:
    """Positive random features: phi(x).phi(y) is an unbiased estimate of the kernel.

        softmax   k(x, y) = exp(x.y)            phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2 / 2)
        gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2)

    with a_i = 1 / m unless `weights` gives other, non-negative ones (importance sampling).

    Args:
        x: inputs (..., d). Integers, float16 and bfloat16 are promoted to float32.
        W: frequencies (m, d), each row N(0, I_d): the draw of a coupling.
        kernel: which of the two kernels.
        weights: a_i, (m,), or None for 1 / m each.

    Returns:
        Features (..., m), float32 (float64 for float64 inputs).

    Raises:
        ValueError: for an unknown kernel, or when the widths of `x` and `W` differ.
    """
    log_features = log_positive(x, W, kernel=kernel)
    if weights is None:
        return jnp.exp(log_features) / jnp.sqrt(W.shape[0])
    return jnp.exp(log_features) * jnp.sqrt(weights)


def trigonometric(
    x: Float[Array, "*b d"] | Int[Array, "*b d"],
    W: Float[Array, "m d"],
    *,
    kernel: Literal["gaussian", "softmax"] = "gaussian",
    weights: Float[Array, " m"] | None = None,
) -> Float[Array, "*b two_m"]:
    """Random Fourier features: phi(x).phi(y) is an unbiased estimate of the kernel.

        gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x) = sqrt(a_i) [sin(w_i.x), cos(w_i.x)]
        softmax   k(x, y) = exp(x.y)             the same times exp(|x|^2 / 2)

    VRC Eq. 3, all sines first. With frequencies of another radial law (`norms.matern`) "gaussian"
    gives that law's kernel. Estimates can be negative: attention wants `positive`.

    Args and Raises as for `positive`.

    Returns:
        Features (..., 2m), float32 (float64 for float64 inputs).
    """
    projections, squared_norm = _project(x, W, kernel)
    features = jnp.concatenate([jnp.sin(projections), jnp.cos(projections)], axis=-1)
    if kernel == "softmax":
        features = features * jnp.exp(squared_norm / 2)
    if weights is None:
        return features / jnp.sqrt(W.shape[0])
    return features * jnp.sqrt(jnp.tile(weights, 2))


def log_positive(
    x: Float[Array, "*b d"] | Int[Array, "*b d"],
    W: Float[Array, "m d"],
    *,
    kernel: Literal["softmax", "gaussian"] = "softmax",
) -> Float[Array, "*b m"]:
    """The exponents of `positive`: w_i.x - |x|^2 / 2 (softmax) or w_i.x - |x|^2 (gaussian)."""
    projections, squared_norm = _project(x, W, kernel)
    return projections - _SQUARED_NORM_FACTOR[kernel] * squared_norm


def _project(
    x: Array, W: Float[Array, "m d"], kernel: str
) -> tuple[Float[Array, "*b m"], Float[Array, "*b 1"]]:
    """W x and |x|^2, in float32 or wider."""
    if kernel not in _SQUARED_NORM_FACTOR:
        raise ValueError(unknown("kernel", kernel, _SQUARED_NORM_FACTOR))
    if x.shape[-1] != W.shape[-1]:
        raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {W.shape[-1]}")
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, W.dtype), jnp.float32)
    x, W = x.astype(dtype), W.astype(dtype)
    return jnp.matmul(x, W.T, precision="highest"), jnp.sum(x**2, axis=-1, keepdims=True)
