"""Closed forms: how accurate random features are, coupling by coupling.

All functions run in float64 NumPy and broadcast over their array arguments. Everything rests on the
mean over one pair of frequencies, a function of t alone, with signs s = +-1:

    pair_s(t) = E exp(x.(w_i + s w_j)),   t = |x|^2 (positive features, x = v, their x + y)
    pair_s(t) = E cos(x.(w_i + s w_j)),   t = -|x|^2 (trigonometric features, x = z, their x - y)

For isotropic w_i + s w_j of length r both are E 0F1(; d/2; t r^2 / 4). Averaged over the pairs of
an ensemble, pair_+ is the RF-conformity rho (SimRF Eq. 10, VRC Eq. 15) and (pair_+ + pair_-)/2 is
VRC's zeta (Eq. 17), from which the mean squared errors follow (SimRF Eqs 11 and 77).

Misprints corrected here, each checked against simulation in the tests:

    SimRF Eq. 25      sum v^{2k} / k!            read  sum v^{2k} / (2^k k!)
    SimRF below 25    2^{2k} k Gamma(k + d/2)    read  2^{2k} k! Gamma(k + d/2)
    SimRF Eq. 77      (1 + e^{-z^2})^2           read  (1 - e^{-z^2})^2
    VRC Eq. 18        second (w+ z)^{1 - d/2}    read  (w- z)^{1 - d/2}

SimRF Eqs 11 with 23, 25 and 26 hold for m <= d. Here m is any: rows of different blocks are
independent, and the average runs over all pairs.

Sources: SimRF Sec. 3, 4, App. A; VRC Sec. 3.1, App. A.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from performer.choices import unknown

Array = Any  # float64: an ndarray, or the np.float64 that NumPy makes of one without axes
_ANTITHETIC = "-antithetic"
_SCORES = np.linspace(-8.5, 8.5, 273)  # trapezoid rule in the normal score: error below 1e-14


def conformity(name: str, v: ArrayLike, d: int, m: int) -> Array:
    """RF-conformity rho = E exp(v.(w_i + w_j)), averaged over all ordered pairs i != j.

    Args:
        name: iid, orf, simrf, pnc, pm or simplex*monotone, each also with "-antithetic".
        v: |x + y|, any shape.
        d: dimension.
        m: number of frequencies, at least 2; even if antithetic.

    Returns:
        rho(v), float64, the shape of v. Without any coupling it is e^{v^2} (SimRF Eq. 19).

    Raises:
        ValueError: for a name without theory, or sizes that the coupling does not admit.
    """
    return _mean_pair(name, np.asarray(v, np.float64) ** 2, d, m, (1,))


def kernel_mse(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    m: int,
    *,
    kernel: Literal["gaussian", "softmax"] = "gaussian",
    features: Literal["positive", "trigonometric"] = "positive",
) -> Array:
    """Mean squared error of the kernel estimate phi(x).phi(y).

    positive (SimRF Eq. 11, v = |x + y|; the softmax kernel has e^{-|x|^2 - |y|^2} in front):

        e^{-2|x|^2 - 2|y|^2} / m ((e^{2v^2} - e^{v^2}) + (m - 1)(rho - e^{v^2}))

    trigonometric (SimRF Eq. 77 corrected, z = |x - y|; the softmax kernel has e^{|x|^2 + |y|^2}):

        1/m ((1 - e^{-z^2})^2 / 2 + (m - 1)(zeta - e^{-z^2}))

    Args:
        name: as for `conformity`.
        x: (..., d).
        y: (..., d), broadcast against x.
        m: number of frequencies (trigonometric features are 2m wide).
        kernel: exp(-|x - y|^2 / 2) or exp(x.y).
        features: which feature map.

    Returns:
        The error, float64, in the common shape of x and y without the last axis.
    """
    for what, choice, choices in [
        ("kernel", kernel, ("gaussian", "softmax")),
        ("features", features, ("positive", "trigonometric")),
    ]:
        if choice not in choices:
            raise ValueError(unknown(what, choice, choices))
    x, y = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    d = x.shape[-1]
    norms = np.sum(x**2, axis=-1) + np.sum(y**2, axis=-1)
    if features == "positive":
        t = np.sum((x + y) ** 2, axis=-1)
        prefactor = np.exp(-2 * norms if kernel == "gaussian" else -norms)
        own = np.exp(2 * t) - np.exp(t)
        signs = (1,)
    else:
        t = -np.sum((x - y) ** 2, axis=-1)
        prefactor = np.ones_like(t) if kernel == "gaussian" else np.exp(norms)
        own = (1 - np.exp(t)) ** 2 / 2
        signs = (1, -1)
    pairs = (m - 1) * (_mean_pair(name, t, d, m, signs) - np.exp(t)) if m > 1 else 0.0
    return prefactor / m * (own + pairs)


def orthogonality_gap(
    x: ArrayLike,
    y: ArrayLike,
    m: int,
    *,
    kernel: Literal["gaussian", "softmax"] = "gaussian",
    features: Literal["positive", "trigonometric"] = "positive",
) -> Array:
    """MSE(iid) - MSE(orf): SimRF Eq. 25 (corrected) and Eq. 26, for any m. Arguments as above."""
    iid, orf = (kernel_mse(n, x, y, m, kernel=kernel, features=features) for n in ("iid", "orf"))
    return iid - orf


def pair_length_pdf(name: Literal["iid", "orf", "simrf"], r: ArrayLike, d: int) -> Array:
    """Density of |w_i + w_j| for two frequencies of one block (SimRF Eqs 18 and 20)."""
    r = np.asarray(r, np.float64)
    if name == "iid":  # |w_i + w_j| / sqrt 2 is chi_d
        return np.exp((d - 1) * np.log(r) - r**2 / 4 - (d - 1) * np.log(2) - special.gammaln(d / 2))
    if name not in ("orf", "simrf"):
        raise ValueError(unknown("coupling", name, ("iid", "orf", "simrf")))
    cosine = 0.0 if name == "orf" else _simplex_cosine(d)
    # r^2 = R^2 (1 + sin(2 phi) cos(theta)) with R^2 ~ chi^2_{2d}; average the density over phi.
    sines, weights = _double_angle_rule(d)
    spread = 1 + sines * cosine
    log_pdf = (2 * d - 1) * np.log(r[..., None]) - r[..., None] ** 2 / (2 * spread)
    log_pdf = log_pdf - d * np.log(spread) - (d - 1) * np.log(2) - special.gammaln(d)
    return np.exp(log_pdf) @ weights


def transport_cost(lengths: ArrayLike, t: ArrayLike, d: int) -> Array:
    """The cost that a coupling of the lengths of orthogonal frequencies minimises on average.

    VRC Eq. 6 times Gamma(d/2):  sum_{i != j} 0F1(; d/2; t (l_i^2 + l_j^2) / 4).

    Args:
        lengths: (..., m), the lengths of m <= d orthogonal frequencies.
        t: v^2 for random Laplace (positive) features, -z^2 for random Fourier features; broadcast
            against the leading axes of `lengths`.
        d: dimension.

    Returns:
        The cost, float64.
    """
    squares = np.asarray(lengths, np.float64) ** 2
    t = np.asarray(t, np.float64)[..., None, None] / 4
    pairs = special.hyp0f1(d / 2, t * (squares[..., :, None] + squares[..., None, :]))
    own = np.trace(pairs, axis1=-2, axis2=-1)
    return np.sum(pairs, axis=(-2, -1)) - own


def _mean_pair(name: str, t: Array, d: int, m: int, signs: tuple[int, ...]) -> Array:
    """pair_s(t), averaged over the signs and over the ordered pairs i != j of m frequencies."""
    base = name.removesuffix(_ANTITHETIC)
    if m < 2:
        raise ValueError(f"a pair needs m >= 2 frequencies, got m = {m}")
    if base == name:
        return np.mean([_mean_pair_of_blocks(base, t, d, m, s) for s in signs], axis=0)
    if m % 2:
        raise ValueError(f"antithetic couplings need an even number of features, got m = {m}")
    # [W, -W]: w with its own negative, m ordered pairs; else two rows of W, each sign twice over.
    half = m // 2
    own = np.mean([np.ones_like(t) if s == 1 else np.exp(2 * t) for s in signs], axis=0)
    if half == 1:
        return own
    others = np.mean([_mean_pair_of_blocks(base, t, d, half, s) for s in (1, -1)], axis=0)
    return (m * own + 4 * half * (half - 1) * others) / (m * (m - 1))


def _mean_pair_of_blocks(base: str, t: Array, d: int, m: int, sign: int) -> Array:
    """Average over ordered pairs of m rows in blocks of d; different blocks are independent."""
    if base not in _PAIRS:
        raise ValueError(unknown("coupling with theory", base, tuple(_PAIRS)))
    if base.startswith("sim"):
        _simplex_cosine(d)
    sizes = [min(d, m - start) for start in range(0, m, d)]
    within = sum(size * (size - 1) for size in sizes)
    coupled = sum(2 * (size // 2) for size in sizes) if base == "pnc" else 0
    total = (m * (m - 1) - within) * np.exp(t)
    if within > coupled:
        total = total + (within - coupled) * _PAIRS[base](t, d, sign)
    if coupled:
        total = total + coupled * _negatively_coupled(t, d)
    return total / (m * (m - 1))


def _independent_lengths(t: Array, d: int, cosine: float) -> Array:
    """Two chi_d lengths at a fixed angle: the mean over phi of 1F1(d; d/2; t (1 + sin cos) / 2).

    SimRF Eqs 21, 23 and 24, summed over k under the integral; with cosine 0 there is nothing to
    average.
    """
    if cosine == 0:
        return _kummer(t / 2, d)
    sines, weights = _double_angle_rule(d)
    return _kummer(t[..., None] / 2 * (1 + sines * cosine), d) @ weights


def _negatively_coupled(t: Array, d: int) -> Array:
    """An orthogonal pair with F(a) + F(b) = 1 (VRC Eq. 7), integrated over the normal score."""
    tail = special.ndtr(-np.abs(_SCORES))
    inverses = special.gammaincinv(d / 2, tail), special.gammainccinv(d / 2, tail)
    squares = 2 * np.where(_SCORES < 0, *inverses)
    weights = np.exp(-(_SCORES**2) / 2) / np.sqrt(2 * np.pi) * (_SCORES[1] - _SCORES[0])
    return special.hyp0f1(d / 2, t[..., None] / 4 * (squares + squares[::-1])) @ weights


def _simplex_cosine(d: int) -> float:
    if d < 2:
        raise ValueError(f"simplex directions need d >= 2, got d = {d}")
    return -1 / (d - 1)


# pair_s(t) for two frequencies of the same block (for pnc: of different pairs). With equal lengths
# a at an angle, r^2 = 2 a^2 (1 + s cos) and E 0F1(; d/2; t r^2 / 4) = e^{t (1 + s cos)}.
_PAIRS: dict[str, Callable[[Array, int, int], Array]] = {
    "iid": lambda t, d, sign: np.exp(t),
    "orf": lambda t, d, sign: _independent_lengths(t, d, 0.0),
    "simrf": lambda t, d, sign: _independent_lengths(t, d, sign * _simplex_cosine(d)),
    "pnc": lambda t, d, sign: _independent_lengths(t, d, 0.0),
    "pm": lambda t, d, sign: np.exp(t),
    "simplex*monotone": lambda t, d, sign: np.exp(t * (1 + sign * _simplex_cosine(d))),
}


def _double_angle_rule(d: int, nodes: int = 80) -> tuple[Array, Array]:
    """Nodes s = sin(phi), weights summing to 1, for the density ~ sin(phi)^{d-1} on (0, pi).

    In s the density is s^{d-1} (1 - s)^{-1/2} (1 + s)^{-1/2} on (0, 1): a Gauss-Jacobi rule, the
    last factor being smooth.
    """
    x, weights = special.roots_jacobi(nodes, -0.5, d - 1)
    sines = (1 + x) / 2
    weights = weights / np.sqrt(1 + sines)
    return sines, weights / weights.sum()


def _kummer(s: Array, d: int) -> Array:
    """1F1(d; d/2; s), for s < 0 through e^s 1F1(-d/2; d/2; -s), whose terms stay below e^{-s}.

    It falls like |s|^{-d}: below -700, where the terms would overflow, it stays at some 1e-9.
    """
    positive = _series(np.maximum(s, 0.0), lambda k: (d + k) / (d / 2 + k))
    size = np.clip(-s, 0.0, 700.0)
    negative = np.exp(-size) * _series(size, lambda k: (k - d / 2) / (d / 2 + k))
    return np.where(s >= 0, positive, negative)


def _series(s: Array, ratio: Callable[[int], float]) -> Array:
    """sum_k c_k s^k / k! with c_0 = 1 and c_{k+1} / c_k = ratio(k), until terms vanish."""
    total = np.ones_like(s)
    term = np.ones_like(s)
    k = 0
    while True:
        term = term * (ratio(k) * s / (k + 1))
        total = total + term
        k += 1
        if np.all(np.abs(term) <= 1e-17 * np.maximum(np.abs(total), 1e-3)):
            return total
