"""Feature maps x -> phi(x; W): random features whose dot products estimate a kernel.

`positive` features are those of FAVOR+ (random Laplace features); `hyperbolic` features are the
same for W and -W together; `trigonometric` features are random Fourier features. `relu`, `elu` and
`arc_cosine` estimate kernels other than softmax ("generalised attention").

Every map, also one of your own, is a `FeatureMap`: a function that attention uses too. It is
defined as factor * exp(exponent), which attention computes apart so that nothing overflows.

Sources: Rahimi and Recht 2007 (trigonometric); Choromanski et al. 2021 (positive and hyperbolic,
softmax form, Lemma 1; relu, Sec. 3.1); Katharopoulos et al. 2020 (elu). SimRF Eq. 7 and VRC Eq. 4
print the Gaussian form of the positive features.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Num

from performer.choices import positive_lengthscale, positive_number, real_array, unknown
from performer.typing import Value, float32_or_wider

Kernel = Literal["softmax", "gaussian"]
KERNELS = "softmax", "gaussian"
Split = tuple[Float[Array, "..."], Float[Array, "..."] | None]


def _check_kernel(kernel: str | None) -> None:
    if kernel not in (None, *KERNELS):
        raise ValueError(unknown("kernel", kernel, KERNELS))


@dataclasses.dataclass(frozen=True, repr=False)
class FeatureMap(Value):
    """A feature map phi(x)_i = sqrt(a_i) factor_i exp(exponent_i), a function of x and W.

    Maps of this module, and what phi(x).phi(y) estimates:

        positive       exp(w.x - |x|^2 / 2)                        softmax
        hyperbolic     exp(+-w.x - |x|^2 / 2)                      softmax
        trigonometric  exp(|x|^2 / 2) sin(w.x), the same with cos  softmax
        relu           max(w.x, 0)                                 an arc-cosine kernel
        elu            elu(w.x) + 1
        arc_cosine(0)  step(w.x)                                   an arc-cosine kernel

    Maps with equal functions and numbers are equal, and hashable: `jax.jit` accepts them as static.

    Args:
        split: (W x, |x|^2 / 2) -> (exponent, factor), of shapes (..., m) and (..., 1) -> (..., f m)
            each, f = `features_per_frequency`; all features of the first kind come first. An
            exponent (..., 1) is shared by all features; a factor None is 1. The factor may be
            negative only with an exponent (..., 1).
        features_per_frequency: f.
        kernel: the kernel that a call estimates by default; None unless the map estimates
            exp(x.y). With a kernel, |x|^2 / 2 must be a common summand of the exponents: attention
            omits it for queries, which are normalised.
        weight: factor of a_i in the features; attention ignores it.
        exponential: True if each feature is one of `positive`. Required by calibration, which
            samples them.

    Raises:
        ValueError: for an unknown kernel.

    Example:
        >>> def squares(projections, half):  # (w.x)^2: never negative
        ...     return jnp.zeros_like(half), projections**2
        >>> feature_map = features.FeatureMap(squares)
        >>> phi = feature_map(q, w)
        >>> squared = performer.Features(w, feature_map=feature_map)
        >>> output = performer.performer_attention(q, k, v, squared)
    """

    split: Callable[[Array, Array], Split]
    features_per_frequency: int = 1
    kernel: Kernel | None = None
    weight: float = 1.0
    exponential: bool = False

    def __post_init__(self) -> None:
        _check_kernel(self.kernel)

    @property
    def estimates_softmax(self) -> bool:
        """True if phi(x).phi(y) estimates exp(x.y), so that attention is softmax attention."""
        return self.kernel is not None

    def __call__(
        self,
        x: Num[ArrayLike, "*b d"],
        W: Float[ArrayLike, "m d"],
        *,
        kernel: Kernel | None = None,
        weights: Float[ArrayLike, " m"] | None = None,
        lengthscale: ArrayLike = 1.0,
        output_scale: ArrayLike = 1.0,
    ) -> Float[Array, "*b fm"]:
        """Return the features of x / lengthscale, times output_scale.

        Args:
            x: inputs (..., d). Integers, float16 and bfloat16 are promoted to float32.
            W: frequencies (m, d), each row N(0, I_d), drawn by a coupling. They, the weights and
                the scales are cast to the dtype of the computation, set by x alone.
            kernel: "softmax", exp(x.y), or "gaussian", exp(-|x - y|^2 / 2), for maps that estimate
                them; the default of the map if None.
            weights: a_i (m,), non-negative (importance sampling); 1 / m each if None.
            lengthscale: in the units of x; a number, or (d,) with one for each dimension.
            output_scale: square root of the Gaussian kernel's k(x, x).

        Returns:
            Features (..., features_per_frequency m), float32 (float64 for float64 inputs).

        Raises:
            ValueError: for an unknown kernel or one that this map does not estimate, for different
                widths of `x` and `W`, for weights of another shape or below 0, or for a scale of
                another shape or not positive and finite.
        """
        _check_kernel(kernel)
        if kernel is not None and self.kernel is None:
            raise ValueError(f"{self} has a kernel of its own, got kernel={kernel!r}: leave it out")
        projections, half = _project(real_array("x", x), W, lengthscale)
        return self.from_projections(
            projections, half, kernel=kernel, weights=weights, output_scale=output_scale
        )

    def from_projections(
        self,
        projections: Float[Array, "*b m"],
        half: Float[Array, "*b 1"],
        *,
        kernel: Kernel | None = None,
        weights: Float[ArrayLike, " m"] | None = None,
        output_scale: ArrayLike = 1.0,
    ) -> Float[Array, "*b fm"]:
        """Return the features given W x and |x|^2 / 2; the other arguments are those of a call."""
        m = projections.shape[-1]
        exponent, factor = self.split(projections, half)
        if (kernel or self.kernel) == "gaussian":
            # exp(-|x - y|^2 / 2) = exp(x.y) exp(-|x|^2 / 2) exp(-|y|^2 / 2)
            exponent = exponent - half
        values = jnp.exp(exponent) if factor is None else jnp.exp(exponent) * factor
        if weights is None:
            weights = jnp.full(m, 1 / m)
        elif jnp.shape(weights) != (m,):
            raise ValueError(f"weights must have the shape ({m},), got {jnp.shape(weights)}")
        elif not isinstance(weights, Tracer) and (least := np.min(weights, initial=0)) < 0:
            raise ValueError(f"weights must not be negative, got {least}")
        weights = self.weight * jnp.asarray(weights).astype(values.dtype)
        roots = jnp.sqrt(jnp.tile(weights, self.features_per_frequency))
        scale = jnp.asarray(positive_number("output_scale", output_scale), values.dtype)
        return values * jnp.broadcast_to(roots, values.shape) * scale

    def __repr__(self) -> str:
        if self in _ARC_COSINES:
            return f"features.arc_cosine({_ARC_COSINES.index(self)})"
        return super().__repr__()


def _positive(projections: Array, half: Array) -> Split:
    return projections - half, None


def _hyperbolic(projections: Array, half: Array) -> Split:
    return jnp.concatenate([projections, -projections], axis=-1) - half, None


def _trigonometric(projections: Array, half: Array) -> Split:
    return half, jnp.concatenate([jnp.sin(projections), jnp.cos(projections)], axis=-1)


def _relu(projections: Array, half: Array) -> Split:
    return jnp.zeros_like(half), jax.nn.relu(projections)


def _elu(projections: Array, half: Array) -> Split:
    return jnp.minimum(projections, 0), jnp.maximum(projections, 0) + 1


def _step(projections: Array, half: Array) -> Split:
    return jnp.zeros_like(half), jnp.heaviside(projections, 0.5)


positive = FeatureMap(_positive, kernel="softmax", exponential=True)
"""Positive random features: phi(x).phi(y) is an unbiased estimate of the kernel.

    softmax   k(x, y) = exp(x.y)             phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2 / 2)
    gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x)_i = sqrt(a_i) exp(w_i.x - |x|^2)

with a_i = 1 / m unless `weights` are given, x / lengthscale in place of x, all times output_scale:
`kernels.gaussian` with these scales. The default of `kernel` is "softmax".
"""

hyperbolic = FeatureMap(_hyperbolic, 2, kernel="softmax", weight=0.5)
"""Positive features of [W, -W], in that order, from the projections on W alone.

They equal those of an antithetic coupling with 2m rows, for half the projections (Choromanski et
al. 2021, the hyperbolic cosine of Lemma 1). phi has 2m entries with a_i = 1 / (2m); the two signs
of a frequency share its entry of `weights` (m,) equally.
"""

trigonometric = FeatureMap(_trigonometric, 2, kernel="gaussian")
"""Random Fourier features: phi(x).phi(y) is an unbiased estimate of the kernel.

    gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x) = sqrt(a_i) [sin(w_i.x), cos(w_i.x)]
    softmax   k(x, y) = exp(x.y)             the same times exp(|x|^2 / 2)

VRC Eq. 3, all sines first, 2m features. The default of `kernel` is "gaussian". With frequencies of
another radial law (`norms.matern`) the estimate is of that law's kernel, `kernels.matern` with the
same scales. Estimates can be negative: use `positive` in attention.
"""

relu = FeatureMap(_relu)
"""phi(x)_i = sqrt(a_i) max(w_i.x, 0): an estimate of the arc-cosine kernel of order 1.

k(x, y) = |x| |y| (sin t + (pi - t) cos t) / (2 pi) with t the angle between x and y (Cho and Saul
2009, whose kernel is twice this one).
"""

elu = FeatureMap(_elu)
"""phi(x)_i = sqrt(a_i) (elu(w_i.x) + 1), always positive.

With W = I these are the features of linear attention up to a factor (Katharopoulos et al. 2020,
Eq. 7).
"""


def arc_cosine(order: int) -> FeatureMap:
    """Return the feature map of `kernels.arc_cosine(order)`, order 0 or 1.

    phi(x)_i = sqrt(2 a_i) step(w_i.x), with step(0) = 1/2, or sqrt(2 a_i) max(w_i.x, 0) (Munkhoeva
    et al. 2018, Sec. 4.2).

    Raises:
        ValueError: for another order.
    """
    if order not in (0, 1):
        raise ValueError(f"the order of an arc-cosine kernel must be 0 or 1, got {order}")
    return _ARC_COSINES[order]


_ARC_COSINES = (FeatureMap(_step, weight=2.0), FeatureMap(_relu, weight=2.0))
MAPS = {
    "positive": positive,
    "hyperbolic": hyperbolic,
    "trigonometric": trigonometric,
    "relu": relu,
    "elu+1": elu,
}
"""Maps by the names that attention accepts."""


def get(feature_map: str | FeatureMap) -> FeatureMap:
    """Return the map of a name in `MAPS`; a `FeatureMap` is returned as it is.

    Raises:
        ValueError: for an unknown name (the message has the nearest), and for anything else.
    """
    if isinstance(feature_map, FeatureMap):
        return feature_map
    word = str(feature_map)
    if word not in MAPS:
        choices = ", ".join(MAPS)
        raise ValueError(unknown("feature map", word, MAPS, f"{choices}, any features.FeatureMap"))
    return MAPS[word]


def _project(
    x: Array, W: Float[ArrayLike, "m d"], lengthscale: ArrayLike
) -> tuple[Float[Array, "*b m"], Float[Array, "*b 1"]]:
    """Return W x and |x|^2 / 2 for x / lengthscale, in float32, or float64 for a float64 x."""
    dtype = float32_or_wider(x)
    W = jnp.asarray(W).astype(dtype)
    if x.shape[-1] != W.shape[-1]:
        raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {W.shape[-1]}")
    lengthscale = jnp.asarray(positive_lengthscale(lengthscale, x.shape[-1]), dtype)
    x = x.astype(dtype) / jnp.broadcast_to(lengthscale, x.shape)
    return jnp.matmul(x, W.T, precision="highest"), jnp.sum(x**2, axis=-1, keepdims=True) / 2
