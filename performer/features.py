"""Feature maps x -> phi(x; W): random features whose dot products estimate a kernel.

`positive` features are FAVOR+'s, also called random Laplace features; `hyperbolic` ones are the
same for W and -W together; `trigonometric` ones are random Fourier features. `relu`, `elu` and
`arc_cosine` make other kernels than softmax ("generalised attention").

Every map is a `FeatureMap`, one of your own too, and serves as a function and in attention: it is
written once, as factor * exp(exponent), for attention to compute with the two apart, so that
nothing overflows.

Sources: Rahimi and Recht 2007 (trigonometric); Choromanski et al. 2021 (positive and hyperbolic,
softmax form, Lemma 1; relu, Sec. 3.1); Katharopoulos et al. 2020 (elu). SimRF Eq. 7 and VRC Eq. 4
print the Gaussian form of the positive features.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from performer.choices import positive_values, unknown
from performer.typing import expression, float32_or_wider

__all__ = [
    "MAPS",
    "FeatureMap",
    "arc_cosine",
    "elu",
    "get",
    "hyperbolic",
    "positive",
    "relu",
    "trigonometric",
]

Points = Float[Array, "*b d"] | Int[Array, "*b d"]
Kernel = Literal["softmax", "gaussian"]
Split = tuple[Float[Array, "..."], Float[Array, "..."] | None]


@dataclasses.dataclass(frozen=True, repr=False)
class FeatureMap:
    """A feature map, phi(x)_i = sqrt(a_i) factor_i exp(exponent_i), a function of x and W.

        positive       exp(w.x - |x|^2 / 2)                        softmax
        hyperbolic     exp(+-w.x - |x|^2 / 2)                      softmax
        trigonometric  exp(|x|^2 / 2) sin(w.x), the same with cos  softmax
        relu           max(w.x, 0)                                 an arc-cosine kernel
        elu            elu(w.x) + 1
        arc_cosine(0)  step(w.x)                                   an arc-cosine kernel

    are those of this module; the last column says what phi(x).phi(y) estimates. A record is equal
    to another whose functions and numbers are, and hashable: `jax.jit` takes it for static.

    Args:
        split: (W x, |x|^2 / 2) -> (exponent, factor), of shapes (..., m) and (..., 1) -> (..., f m)
            each, where f is `features_per_frequency`: first all features of the first kind. An
            exponent (..., 1) is that of all features, a factor None is 1. The factor may be
            negative only beside an exponent (..., 1).
        features_per_frequency: f.
        kernel: the default of the two kernels that a call estimates, for a map that estimates
            exp(x.y); None for one that does not. With a kernel, |x|^2 / 2 must be a common summand
            of the exponents: for queries, which are normalised, attention leaves it out.
        weight: times a_i, in the features; attention does not see it.
        exponential: the features are those of `positive`, one by one: what a calibration samples,
            and what the stabiliser "google" is written for.

    Example:
        >>> def squares(projections, half):  # of w.x: never negative, whatever the signs
        ...     return jnp.zeros_like(half), projections**2
        >>> feature_map = features.FeatureMap(squares)
        >>> phi = feature_map(q, w)
        >>> output = performer.performer_attention(q, k, v, w, feature_map=feature_map)
    """

    split: Callable[[Array, Array], Split]
    features_per_frequency: int = 1
    kernel: Kernel | None = None
    weight: float = 1.0
    exponential: bool = False

    @property
    def estimates_softmax(self) -> bool:
        """phi(x).phi(y) estimates exp(x.y): attention is that of softmax, wherever keys shift."""
        return self.kernel is not None

    def __call__(
        self,
        x: Points,
        W: Float[Array, "m d"],
        *,
        kernel: Kernel | None = None,
        weights: Float[Array, " m"] | None = None,
        lengthscale: ArrayLike = 1.0,
        output_scale: ArrayLike = 1.0,
    ) -> Float[Array, "*b fm"]:
        """Features of x / lengthscale, times output_scale.

        Args:
            x: inputs (..., d). Integers, float16 and bfloat16 are promoted to float32.
            W: frequencies (m, d), each row N(0, I_d): the draw of a coupling. These, the weights
                and the scales are cast to the dtype of the computation, which that of x alone
                decides.
            kernel: "softmax", exp(x.y), or "gaussian", exp(-|x - y|^2 / 2), for maps that estimate
                them; the default of the map if None.
            weights: a_i, (m,), non-negative (importance sampling); 1 / m each if None.
            lengthscale: in the units of x; a number, or (d,) with one for each dimension.
            output_scale: the square root of the Gaussian kernel's k(x, x).

        Returns:
            Features (..., features_per_frequency m), float32 (float64 for float64 inputs).

        Raises:
            ValueError: for a kernel that is unknown, or that this map does not estimate; when the
                widths of `x` and `W` differ; or for a scale that is not positive and finite.
        """
        if kernel not in (None, "softmax", "gaussian"):
            raise ValueError(unknown("kernel", kernel, ("softmax", "gaussian")))
        if kernel is not None and self.kernel is None:
            raise ValueError(f"{self} has a kernel of its own, got kernel={kernel!r}: leave it out")
        projections, half = _project(x, W, lengthscale)
        exponent, factor = self.split(projections, half)
        if (kernel or self.kernel) == "gaussian":
            # exp(-|x - y|^2 / 2) = exp(x.y) exp(-|x|^2 / 2) exp(-|y|^2 / 2)
            exponent = exponent - half
        values = jnp.exp(exponent) if factor is None else jnp.exp(exponent) * factor
        if weights is None:
            weights = jnp.full(W.shape[0], 1 / W.shape[0])
        weights = self.weight * weights.astype(values.dtype)
        roots = jnp.sqrt(jnp.tile(weights, self.features_per_frequency))
        scale = jnp.asarray(positive_values("output_scale", output_scale), values.dtype)
        return values * jnp.broadcast_to(roots, values.shape) * scale

    def __repr__(self) -> str:
        """An expression that evaluates to the map, its name if it has one."""
        if self in NAMES:
            return f"features.{NAMES[self]}"
        shown = [f"split={expression(self.split)}"]
        for field in dataclasses.fields(self)[1:]:
            if getattr(self, field.name) != field.default:
                shown.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"features.FeatureMap({', '.join(shown)})"


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

with a_i = 1 / m unless `weights` gives other ones, for x / lengthscale in the place of x, all times
output_scale: `kernels.gaussian` with these scales. `kernel` is "softmax" if None.
"""

hyperbolic = FeatureMap(_hyperbolic, 2, kernel="softmax", weight=0.5)
"""Positive features of [W, -W], in that order, from the projections on W alone.

The same features as those of an antithetic coupling with 2m rows, for half the projections
(Choromanski et al. 2021, the hyperbolic cosine of Lemma 1). phi has 2m entries with a_i = 1 / (2m);
`weights` (m,) are those of a frequency and shared equally by its two signs.
"""

trigonometric = FeatureMap(_trigonometric, 2, kernel="gaussian")
"""Random Fourier features: phi(x).phi(y) is an unbiased estimate of the kernel.

    gaussian  k(x, y) = exp(-|x - y|^2 / 2)  phi(x) = sqrt(a_i) [sin(w_i.x), cos(w_i.x)]
    softmax   k(x, y) = exp(x.y)             the same times exp(|x|^2 / 2)

VRC Eq. 3, all sines first, 2m features; `kernel` is "gaussian" if None. With frequencies of another
radial law (`norms.matern`) "gaussian" gives that law's kernel, `kernels.matern` with the same two
scales. Estimates can be negative: attention wants `positive`.
"""

relu = FeatureMap(_relu)
"""phi(x)_i = sqrt(a_i) max(w_i.x, 0): an estimate of the arc-cosine kernel of order 1.

k(x, y) = |x| |y| (sin t + (pi - t) cos t) / (2 pi) with t the angle between x and y (Cho and Saul
2009, whose kernel is twice this one).
"""

elu = FeatureMap(_elu)
"""phi(x)_i = sqrt(a_i) (elu(w_i.x) + 1), always positive.

With W = I these are, up to the factor, the features of linear attention (Katharopoulos et al. 2020,
Eq. 7).
"""


def arc_cosine(order: int) -> FeatureMap:
    """The feature map of `kernels.arc_cosine(order)`, order 0 or 1.

    phi(x)_i = sqrt(2 a_i) step(w_i.x), with step(0) = 1/2, or sqrt(2 a_i) max(w_i.x, 0) (Munkhoeva
    et al. 2018, Sec. 4.2).

    Raises:
        ValueError: for another order.
    """
    if order not in (0, 1):
        raise ValueError(f"the order of an arc-cosine kernel must be 0 or 1, got {order}")
    return FeatureMap(_relu if order else _step, weight=2.0)


MAPS = {
    "positive": positive,
    "hyperbolic": hyperbolic,
    "trigonometric": trigonometric,
    "relu": relu,
    "elu+1": elu,
}
"""By the word that attention takes."""
NAMES = {value: name for name, value in globals().items() if isinstance(value, FeatureMap)}
NAMES |= {arc_cosine(order): f"arc_cosine({order})" for order in (0, 1)}


def get(feature_map: str | FeatureMap) -> FeatureMap:
    """The map of a word of `MAPS`; a `FeatureMap` as it is.

    Raises:
        ValueError: for an unknown word, with the nearest one, and for anything else.
    """
    if isinstance(feature_map, FeatureMap):
        return feature_map
    word = str(feature_map)
    if word not in MAPS:
        choices = ", ".join(MAPS)
        raise ValueError(unknown("feature map", word, MAPS, f"{choices}, any features.FeatureMap"))
    return MAPS[word]


def _project(
    x: Array, W: Float[Array, "m d"], lengthscale: ArrayLike
) -> tuple[Float[Array, "*b m"], Float[Array, "*b 1"]]:
    """W x and |x|^2 / 2 for x / lengthscale, in float32, or float64 for a float64 x."""
    if x.shape[-1] != W.shape[-1]:
        raise ValueError(f"inputs have width {x.shape[-1]} but frequencies have {W.shape[-1]}")
    dtype = float32_or_wider(x)
    lengthscale = jnp.asarray(positive_values("lengthscale", lengthscale), dtype)
    x, W = x.astype(dtype) / jnp.broadcast_to(lengthscale, x.shape), W.astype(dtype)
    return jnp.matmul(x, W.T, precision="highest"), jnp.sum(x**2, axis=-1, keepdims=True) / 2
