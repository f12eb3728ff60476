"""Feature maps x -> phi(x; W): random features whose dot products estimate a kernel.

`positive` features are FAVOR+'s (also called random Laplace features). The log form is what
attention uses: it exponentiates only after a maximum was removed.

Sources: Choromanski et al. 2021 (softmax form); SimRF Eq. 7 and VRC Eq. 4 print the Gaussian form.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


def log_positive(
    x: Float[Array, "*b d"] | Int[Array, "*b d"],
    W: Float[Array, "m d"],
    *,
    kernel: Literal["softmax", "gaussian"] = "softmax",
) -> Float[Array, "*b m"]:
    """The exponents of `positive`: w_i.x - |x|^2 / 2 (softmax) or w_i.x - |x|^2 (gaussian)."""
    if kernel not in _SQUARED_NORM_FACTOR:
        raise ValueError(f"unknown kernel {kernel!r}; choices: {', '.join(_SQUARED_NORM_FACTOR)}")
    if x.shape[-1] != W.shape[-1]:
        raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {W.shape[-1]}")
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, W.dtype), jnp.float32)
    x, W = x.astype(dtype), W.astype(dtype)
    squared_norm = jnp.sum(x**2, axis=-1, keepdims=True)
    return jnp.matmul(x, W.T, precision="highest") - _SQUARED_NORM_FACTOR[kernel] * squared_norm
