"""Errors of random features in closed form, by coupling.

All functions run in float64 NumPy and broadcast over their array arguments. NaN and overflow to inf
stay in their own entry. The basis is the mean over one pair of frequencies, a function of t alone,
with signs s = +-1:

    pair_s(t) = E exp(x.(w_i + s w_j)),   t = |x|^2 (positive features, x = v, their x + y)
    pair_s(t) = E cos(x.(w_i + s w_j)),   t = -|x|^2 (trigonometric features, x = z, their x - y)

For isotropic w_i + s w_j of length r both are E 0F1(; d/2; t r^2 / 4). Averaged over the pairs of
an ensemble, pair_+ is the RF-conformity rho (SimRF Eq. 10, VRC Eq. 15) and (pair_+ + pair_-)/2 is
VRC's zeta (Eq. 17). They determine the mean squared errors (SimRF Eqs 11 and 77).

Corrected misprints, each checked against simulation in the tests:

    SimRF Eq. 25      sum v^{2k} / k!            read  sum v^{2k} / (2^k k!)
    SimRF below 25    2^{2k} k Gamma(k + d/2)    read  2^{2k} k! Gamma(k + d/2)
    SimRF Eq. 77      (1 + e^{-z^2})^2           read  (1 - e^{-z^2})^2
    VRC Eq. 18        second (w+ z)^{1 - d/2}    read  (w- z)^{1 - d/2}

SimRF Eqs 11 with 23, 25 and 26 hold for m <= d. Here m is arbitrary: rows of different blocks are
independent, and the average includes all pairs.

Sources: SimRF Sec. 3, 4, App. A; VRC Sec. 3.1, App. A.
"""

from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from performer import couplings, directions, norms
from performer.choices import unknown
from performer.couplings import Antithetic, Blocks
from performer.typing import Coupling

Array = Any  # float64: an ndarray, or the np.float64 that NumPy makes of one without axes
NAMES = ("iid", "orf", "simrf", "pnc", "pm", "simplex*monotone")
"""Couplings with a theory, each also with "-antithetic"."""
_SCORES = np.linspace(-8.5, 8.5, 273)  # trapezoid rule in the normal score: error below 1e-14


def conformity(coupling: str | Coupling, v: ArrayLike, d: int, m: int) -> Array:
    """Return the RF-conformity rho = E exp(v.(w_i + w_j)), averaged over ordered pairs i != j.

    Args:
        coupling: one of `NAMES`, also with "-antithetic"; by name or as a value.
        v: |x + y|, any shape.
        d: dimension.
        m: number of frequencies, at least 2; even if antithetic.

    Returns:
        rho(v), float64, with the shape of v. For "iid" it is e^{v^2} (SimRF Eq. 19), inf from
        v = 26.7 on.

    Raises:
        ValueError: for a coupling without theory, or sizes that the coupling does not admit.
    """
    with np.errstate(over="ignore"):
        t = np.minimum(np.asarray(v, np.float64) ** 2, np.finfo(np.float64).max)
        return _mean_pair(coupling, t, d, m, (1,))


def kernel_mse(
    coupling: str | Coupling,
    x: ArrayLike,
    y: ArrayLike,
    m: int,
    *,
    kernel: Literal["gaussian", "softmax"] = "gaussian",
    features: Literal["positive", "trigonometric"] = "positive",
) -> Array:
    """Return the mean squared error of the kernel estimate phi(x).phi(y).

    positive (SimRF Eq. 11, v = |x + y|; the softmax kernel has e^{-|x|^2 - |y|^2} in front):

        e^{-2|x|^2 - 2|y|^2} / m ((e^{2v^2} - e^{v^2}) + (m - 1)(rho - e^{v^2}))

    trigonometric (SimRF Eq. 77 corrected, z = |x - y|; the softmax kernel has e^{|x|^2 + |y|^2}):

        1/m ((1 - e^{-z^2})^2 / 2 + (m - 1)(zeta - e^{-z^2}))

    Args:
        coupling: as for `conformity`.
        x: (..., d).
        y: (..., d), broadcast against x.
        m: number of frequencies (trigonometric features are 2m wide).
        kernel: exp(-|x - y|^2 / 2) or exp(x.y).
        features: the feature map.

    Returns:
        The error, float64, in the common shape of x and y without the last axis.
    """
    for kind, choice, choices in [
        ("kernel", kernel, ("gaussian", "softmax")),
        ("features", features, ("positive", "trigonometric")),
    ]:
        if choice not in choices:
            raise ValueError(unknown(kind, choice, choices))
    x, y = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    d, coupling = x.shape[-1], _known(coupling, m)
    norms = np.sum(x**2, axis=-1) + np.sum(y**2, axis=-1)
    # The prefactor goes into all exponents, since it may be 0 times inf.
    with np.errstate(over="ignore", invalid="ignore"):
        if features == "positive":
            t = np.sum((x + y) ** 2, axis=-1)
            log_factor = -2 * norms if kernel == "gaussian" else -norms
            single = np.exp(t + log_factor) * np.expm1(t)
            signs = (1,)
        else:
            t = -np.sum((x - y) ** 2, axis=-1)
            log_factor = np.where(t == 0, 0.0, norms * (kernel == "softmax"))  # no error at t = 0
            single = np.exp(log_factor) * np.expm1(t) ** 2 / 2
            signs = (1, -1)
        if m == 1:
            return single
        pairs = _mean_pair(coupling, t, d, m, signs, log_factor) - np.exp(t + log_factor)
        error = single / m + (m - 1) / m * pairs
    return np.where(np.isinf(single), single, error)[()]  # pairs are far below squares


def pair_length_pdf(name: Literal["iid", "orf", "simrf"], r: ArrayLike, d: int) -> Array:
    """Return the density of |w_i + w_j| at r for one block (SimRF Eqs 18 and 20)."""
    r = np.asarray(r, np.float64)
    if name == "iid":  # |w_i + w_j| / sqrt 2 is chi_d
        constant = (d - 1) * np.log(2) + special.gammaln(d / 2)
        return np.exp(special.xlogy(d - 1, r) - r**2 / 4 - constant)
    if name not in ("orf", "simrf"):
        raise ValueError(unknown("coupling", name, ("iid", "orf", "simrf")))
    cosine = 0.0 if name == "orf" else _simplex_cosine(d)
    # r^2 = R^2 (1 + sin(2 phi) cos(theta)) with R^2 ~ chi^2_{2d}; average the density over phi.
    sines, weights = _double_angle_rule(d)
    spread = 1 + sines * cosine
    log_pdf = special.xlogy(2 * d - 1, r[..., None]) - r[..., None] ** 2 / (2 * spread)
    log_pdf = log_pdf - d * np.log(spread) - (d - 1) * np.log(2) - special.gammaln(d)
    return np.exp(log_pdf) @ weights


def _known(coupling: str | Coupling, m: int) -> Blocks | Antithetic:
    """Return the coupling, or raise ValueError without a theory of m of its frequencies."""
    coupling = couplings.get(coupling)
    inner = coupling.coupling if isinstance(coupling, Antithetic) else coupling
    if not isinstance(inner, Blocks) or inner not in map(couplings.get, NAMES):
        raise ValueError(
            f"no theory of {inner!r}; there is one of {', '.join(NAMES)}, and of their antithetic"
            " versions"
        )
    if isinstance(coupling, Antithetic) and m % 2:
        raise ValueError(f"antithetic couplings need an even number of features, got m = {m}")
    return cast(Any, coupling)


def _mean_pair(
    coupling: str | Coupling,
    t: Array,
    d: int,
    m: int,
    signs: tuple[int, ...],
    log_factor: ArrayLike = 0.0,
) -> Array:
    """Return exp(log_factor) pair_s(t), averaged over signs and ordered pairs of m frequencies."""
    f, coupling = np.asarray(log_factor), _known(coupling, m)
    if m < 2:
        raise ValueError(f"a pair needs m >= 2 frequencies, got m = {m}")
    if isinstance(coupling, Blocks):
        return np.mean([_mean_pair_of_blocks(coupling, t, d, m, s, f) for s in signs], axis=0)
    # [W, -W]: m ordered pairs of w and -w; else two rows of W, each sign twice.
    opposite, half = np.mean([np.exp(f + (1 - s) * t) for s in signs], axis=0), m // 2
    if half == 1:
        return opposite
    others = _mean_pair(coupling.coupling, t, d, half, (1, -1), f)
    return (m * opposite + 4 * half * (half - 1) * others) / (m * (m - 1))


def _mean_pair_of_blocks(coupling: Blocks, t: Array, d: int, m: int, sign: int, f: Array) -> Array:
    """Return the average over ordered pairs of m rows in independent blocks of d."""
    within = _pair_of_a_block(coupling, t, d, sign, f)
    sizes = [min(d, m - start) for start in range(0, m, d)]
    number = sum(size * (size - 1) for size in sizes)
    coupled = sum(2 * (size // 2) for size in sizes) if coupling.norms == norms.pairwise else 0
    terms = [
        (m * (m - 1) - number, lambda: np.exp(t + f)),
        (number - coupled, lambda: within),
        (coupled, lambda: _negatively_coupled(t, d, f)),
    ]
    return sum(count * term() for count, term in terms if count) / (m * (m - 1))


def _pair_of_a_block(coupling: Blocks, t: Array, d: int, sign: int, f: Array) -> Array:
    """Return pair_s(t) for two frequencies of one block; for pnc, two with independent lengths.

    For equal lengths a, r^2 = 2 a^2 (1 + s cos), and the mean is e^{t (1 + s cos)}. For independent
    lengths it is the mean over phi of 1F1(d; d/2; t (1 + sin(2 phi) s cos) / 2): SimRF Eqs 21, 23
    and 24, summed over k under the integral.
    """
    if coupling.directions is directions.independent:
        return np.exp(t + f)
    cosine = sign * _simplex_cosine(d) if coupling.directions is directions.simplex else 0.0
    if coupling.norms == norms.monotone:
        return np.exp(t * (1 + cosine) + f)
    if cosine == 0:
        return _times(f, _kummer(d, t / 2))
    sines, weights = _double_angle_rule(d)
    return _times(f, _kummer(d, t[..., None] / 2 * (1 + sines * cosine)) @ weights)


def _negatively_coupled(t: Array, d: int, f: Array) -> Array:
    """Return pair_s(t) for an orthogonal pair with F(a) + F(b) = 1 (VRC Eq. 7)."""
    tail = special.ndtr(-np.abs(_SCORES))
    inverses = special.gammaincinv(d / 2, tail), special.gammainccinv(d / 2, tail)
    squares = 2 * np.where(_SCORES < 0, *inverses)
    weights = np.exp(-(_SCORES**2) / 2) / np.sqrt(2 * np.pi) * (_SCORES[1] - _SCORES[0])
    z = t[..., None] / 4 * (squares + squares[::-1])
    return _times(f, special.hyp0f1(d / 2, np.minimum(z, 1e200)) @ weights)  # inf far below 1e200


def _kummer(d: int, s: Array) -> Array:
    """Return 1F1(d; d/2; s); clipped, for SciPy's time grows with s; it is inf from 710 on."""
    return special.hyp1f1(d, d / 2, np.clip(s, -1e6, 1e3))


def _times(f: Array, mean: Array) -> Array:
    """Return e^f times the mean; 0 where e^f is 0, although the mean may overflow."""
    factor = np.exp(f)
    return np.where(factor == 0, 0.0, factor * mean)


def _simplex_cosine(d: int) -> float:
    if d < 2:
        raise ValueError(f"simplex directions need d >= 2, got d = {d}")
    return -1 / (d - 1)


def _double_angle_rule(d: int, nodes: int = 80) -> tuple[Array, Array]:
    """Return nodes s = sin(phi) and normalised weights for the density ~ sin(phi)^{d-1}.

    In s it is s^{d-1} (1 - s)^{-1/2} (1 + s)^{-1/2} on (0, 1): a Gauss-Jacobi rule times the last
    factor, which is smooth.
    """
    x, weights = special.roots_jacobi(nodes, -0.5, d - 1)
    sines = (1 + x) / 2
    weights = weights / np.sqrt(1 + sines)
    return sines, weights / weights.sum()
