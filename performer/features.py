"""Feature maps x -> phi(x; W): random features whose dot products estimate a kernel.

`positive` features are FAVOR+'s, also called random Laplace features; `hyperbolic` ones are the
same for W and -W together; `trigonometric` ones are random Fourier features. `relu` and `elu` make
other kernels than softmax ("generalised attention").

Every map is written once, in `SPLITS`, as factor * exp(exponent): attention computes with the two
apart, so that nothing overflows.

Sources: Rahimi and Recht 2007 (trigonometric); Choromanski et al. 2021 (positive and hyperbolic,
softmax form, Lemma 1; relu, Sec. 3.1); Katharopoulos et al. 2020 (elu). SimRF Eq. 7 and VRC Eq. 4
print the Gaussian form of the positive features.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from performer.choices import positive_values, unknown
from performer.typing import float32_or_wider

Inputs = Float[Array, "*b d"] | Int[Array, "*b d"]
Kernel = Literal["softmax", "gaussian"]
Split = tuple[Float[Array, "..."], Float[Array, "..."] | None]


def _both_signs(projections: Array) -> Array:
    return jnp.concatenate([projections, -projections], axis=-1)


# (W x, |x|^2 / 2) -> (exponent, factor); an exponent of width 1 is that of all features, a factor
# of None is 1. The first three estimate exp(x.y).
SPLITS: dict[str, Callable[[Array, Array], Split]] = {
    "positive": lambda p, half: (p - half, None),
    "hyperbolic": lambda p, half: (_both_signs(p) - half, None),
    "trigonometric": lambda p, half: (half, jnp.concatenate([jnp.sin(p), jnp.cos(p)], axis=-1)),
    "relu": lambda p, half: (jnp.zeros_like(half), jax.nn.relu(p)),
    "elu+1": lambda p, half: (jnp.minimum(p, 0), jnp.maximum(p, 0) + 1),
}
SOFTMAX = ("positive", "hyperbolic", "trigonometric")
TWO_FOR_EACH = ("hyperbolic", "trigonometric")


def positive(
    x: Inputs,
    W: Float[Array, "m d"],
    *,
    kernel: Kernel = "softmax",
    weights: Float[Array, " m"] | None = None,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "*b m"]:
    """Positive random features: phi(x).phi(y) is an unbiased estimate of the kernel.

        softmax   k(x, y) = exp(x.y)            phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2 / 2)
        gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2)

    with a_i = 1 / m unless `weights` gives other, non-negative ones (importance sampling), for
    x / lengthscale in the place of x, all times output_scale: `kernels.gaussian` with these scales.

    Args:
        x: inputs (..., d). Integers, float16 and bfloat16 are promoted to float32.
        W: frequencies (m, d), each row N(0, I_d): the draw of a coupling. These, the weights and
            the scales are cast to the dtype of the computation, which that of x alone decides.
        kernel: which of the two kernels.
        weights: a_i, (m,), or None for 1 / m each.
        lengthscale: in the units of x; a number, or (d,) with one for each dimension.
        output_scale: the square root of the Gaussian kernel's k(x, x).

    Returns:
        Features (..., m), float32 (float64 for float64 inputs).

    Raises:
        ValueError: for an unknown kernel, when the widths of `x` and `W` differ, or for a scale
            that is not positive and finite.
    """
    return _features("positive", x, W, kernel, weights, lengthscale, output_scale)


def hyperbolic(
    x: Inputs,
    W: Float[Array, "m d"],
    *,
    kernel: Kernel = "softmax",
    weights: Float[Array, " m"] | None = None,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "*b two_m"]:
    """Positive features of [W, -W], in that order, from the projections on W alone.

    The same features as those of an antithetic coupling with 2m rows, for half the projections
    (Choromanski et al. 2021, the hyperbolic cosine of Lemma 1). phi has 2m entries with
    a_i = 1 / (2m); `weights` (m,) are those of a frequency and shared equally by its two signs.

    Args, Returns and Raises as for `positive`, with 2m features.
    """
    return _features("hyperbolic", x, W, kernel, weights, lengthscale, output_scale)


def trigonometric(
    x: Inputs,
    W: Float[Array, "m d"],
    *,
    kernel: Literal["gaussian", "softmax"] = "gaussian",
    weights: Float[Array, " m"] | None = None,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Float[Array, "*b two_m"]:
    """Random Fourier features: phi(x).phi(y) is an unbiased estimate of the kernel.

        gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x) = sqrt(a_i) [sin(w_i.x), cos(w_i.x)]
        softmax   k(x, y) = exp(x.y)             the same times exp(|x|^2 / 2)

    VRC Eq. 3, all sines first. With frequencies of another radial law (`norms.matern`) "gaussian"
    gives that law's kernel, `kernels.matern` with the same two scales. Estimates can be
    negative: attention wants `positive`.

    Args and Raises as for `positive`.

    Returns:
        Features (..., 2m), float32 (float64 for float64 inputs).
    """
    return _features("trigonometric", x, W, kernel, weights, lengthscale, output_scale)


def relu(
    x: Inputs, W: Float[Array, "m d"], *, weights: Float[Array, " m"] | None = None
) -> Float[Array, "*b m"]:
    """phi(x)_i = sqrt(a_i) max(w_i.x, 0): an estimate of the arc-cosine kernel of order 1.

    k(x, y) = |x| |y| (sin t + (pi - t) cos t) / (2 pi) with t the angle between x and y (Cho and
    Saul 2009, whose kernel is twice this one). Args, Returns and Raises as for `positive`.
    """
    return _features("relu", x, W, "softmax", weights)


def elu(
    x: Inputs, W: Float[Array, "m d"], *, weights: Float[Array, " m"] | None = None
) -> Float[Array, "*b m"]:
    """phi(x)_i = sqrt(a_i) (elu(w_i.x) + 1), always positive.

    With W = I these are, up to the factor, the features of linear attention (Katharopoulos et al.
    2020, Eq. 7). Args, Returns and Raises as for `positive`.
    """
    return _features("elu+1", x, W, "softmax", weights)


def arc_cosine(order: int) -> Callable[..., Float[Array, "*b m"]]:
    """The feature map of `kernels.arc_cosine(order)`, order 0 or 1.

    phi(x)_i = sqrt(2 a_i) step(w_i.x), with step(0) = 1/2, or sqrt(2 a_i) max(w_i.x, 0) (Munkhoeva
    et al. 2018, Sec. 4.2). It takes x, W, `weights`, `lengthscale` and `output_scale` as `positive`
    does, and returns (..., m).

    Raises:
        ValueError: for another order.
    """
    if order not in (0, 1):
        raise ValueError(f"the order of an arc-cosine kernel must be 0 or 1, got {order}")

    def feature_map(
        x: Inputs,
        W: Float[Array, "m d"],
        *,
        weights: Float[Array, " m"] | None = None,
        lengthscale: ArrayLike = 1.0,
        output_scale: ArrayLike = 1.0,
    ) -> Float[Array, "*b m"]:
        projections, _ = _project(x, W, "softmax", lengthscale)
        values = jnp.heaviside(projections, 0.5) if order == 0 else jax.nn.relu(projections)
        if weights is None:
            weights = jnp.full(W.shape[0], 1 / W.shape[0])
        return _scaled(values, jnp.sqrt(2 * weights.astype(values.dtype)), output_scale)

    return feature_map


def _features(
    name: str,
    x: Array,
    W: Array,
    kernel: str,
    weights: Array | None,
    lengthscale: ArrayLike = 1.0,
    output_scale: ArrayLike = 1.0,
) -> Array:
    projections, half = _project(x, W, kernel, lengthscale)
    exponent, factor = SPLITS[name](projections, half)
    if kernel == "gaussian":  # exp(-|x - y|^2 / 2) = exp(x.y) exp(-|x|^2 / 2) exp(-|y|^2 / 2)
        exponent = exponent - half
    values = jnp.exp(exponent) if factor is None else jnp.exp(exponent) * factor
    if weights is None:
        weights = jnp.full(W.shape[0], 1 / W.shape[0])
    weights = weights.astype(values.dtype)
    if name == "hyperbolic":
        weights = weights / 2
    roots = jnp.sqrt(jnp.tile(weights, 2) if name in TWO_FOR_EACH else weights)
    return _scaled(values, roots, output_scale)


def _scaled(values: Array, roots: Array, output_scale: ArrayLike) -> Array:
    """Features times the root of the weight of each and the output scale."""
    scale = jnp.asarray(positive_values("output_scale", output_scale), values.dtype)
    return values * jnp.broadcast_to(roots, values.shape) * scale


def _project(
    x: Array, W: Float[Array, "m d"], kernel: str, lengthscale: ArrayLike = 1.0
) -> tuple[Float[Array, "*b m"], Float[Array, "*b 1"]]:
    """W x and |x|^2 / 2 for x / lengthscale, in float32, or float64 for a float64 x."""
    if kernel not in ("softmax", "gaussian"):
        raise ValueError(unknown("kernel", kernel, ("softmax", "gaussian")))
    if x.shape[-1] != W.shape[-1]:
        raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {W.shape[-1]}")
    dtype = float32_or_wider(x)
    lengthscale = jnp.asarray(positive_values("lengthscale", lengthscale), dtype)
    x, W = x.astype(dtype) / jnp.broadcast_to(lengthscale, x.shape), W.astype(dtype)
    return jnp.matmul(x, W.T, precision="highest"), jnp.sum(x**2, axis=-1, keepdims=True) / 2
