"""Norm couplings: the joint law of the lengths of the frequencies in one block.

A frequency w ~ N(0, I_d) has a length |w| ~ chi_d and an independent, uniform direction. A
norm coupling is a function `norms(key, m, d) -> (m,)`, in float32. Norm couplings differ in the
joint law of normal scores g ~ N(0, 1); a `Quantile` maps each score to the length l with
F(l) = Phi(g). The Gaussian kernel has the chi_d quantile. Another isotropic kernel differs only in
the quantile: `couplings.with_quantile("pnc", norms.matern(1.5))`.

The norm couplings here are values: frozen, equal if their parts are, with a repr that evaluates to
them. A plain function of that signature is also accepted.

Source: Reid et al., "Variance-reducing couplings for random features" (VRC), Sec. 3 and App. G.
Their ω_i (plain, not bold) is a length here, their F_{χ_d} the chi_d distribution function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer.typing import Key, Lengths, Value

Quantile = Callable[[Float[Array, "..."], int], Float[Array, "..."]]
"""quantile(score, d): the length l with F(l) = Phi(score), of the shape of `score`."""

Scores = Callable[[Key, int], Float[Array, " m"]]
"""scores(key, m): m normal scores, each N(0, 1)."""

LogQuantile = Callable[[np.ndarray, int], np.ndarray]

_STEP = 1 / 16  # an exact binary fraction: score - node is exact in float32
_LIMIT = 8.0  # the table covers normal scores in [-8, 8]; float32 draws stay within 5.5
_DEGREE = 4


@dataclass(frozen=True, repr=False)
class Tabulated(Value):
    """A quantile as a jit- and vmap-able table, made from its logarithm in float64 NumPy.

    On cells of width 1/16 in the score the logarithm is a polynomial of degree 4, fitted when the
    function is traced (d is static). For the laws here the relative error is below 3e-7 for scores
    in [-8, 8], and the derivative with respect to the score is that of the quantile.

    Args:
        log_quantile: (scores, d) -> log of the lengths, float64, exact in both tails: use
            Phi(-score) for 1 - Phi(score).
    """

    log_quantile: LogQuantile

    def __call__(self, score: Float[Array, "*s"], d: int) -> Float[Array, "*s"]:
        """Return the lengths at normal scores, in their dtype."""
        at_nodes, coefficients = (
            jnp.asarray(table, score.dtype) for table in _table(self.log_quantile, d)
        )
        nearest = jnp.clip(jnp.round((score + _LIMIT) / _STEP), 0, len(at_nodes) - 1)
        offset, cell = score - (nearest * _STEP - _LIMIT), nearest.astype(jnp.int32)
        log_ratio = jnp.zeros_like(score)
        for power in range(_DEGREE, 0, -1):
            log_ratio = (log_ratio + coefficients[power - 1][cell]) * offset
        return at_nodes[cell] * jnp.exp(log_ratio)

    def __repr__(self) -> str:
        quantile = self.log_quantile
        return (
            f"norms.matern({quantile.nu!r})"
            if isinstance(quantile, _LogMatern)
            else super().__repr__()
        )


@lru_cache(maxsize=256)
def _table(log_quantile: LogQuantile, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the quantiles at the nodes and the coefficients of log(quantile / its node's)."""
    nodes = np.arange(-_LIMIT, _LIMIT + _STEP, _STEP)
    offsets = _STEP / 2 * np.cos(np.pi * np.arange(_DEGREE + 1) / _DEGREE)  # contains the midpoint
    powers = np.vander(offsets, _DEGREE + 1, increasing=True)
    fit = np.linalg.solve(powers, log_quantile(nodes[:, None] + offsets, d).T)
    return np.exp(fit[0]), fit[1:]


def _log_chi(score: np.ndarray, d: int) -> np.ndarray:
    """Return log l with P(chi_d < l) = Phi(score), float64."""
    from scipy import special  # slow to import

    tail = special.ndtr(-np.abs(score))
    inverses = special.gammaincinv(d / 2, tail), special.gammainccinv(d / 2, tail)
    return np.log(2 * np.where(score < 0, *inverses)) / 2


@dataclass(frozen=True, repr=False)
class _LogMatern(Value):
    """l^2 / d ~ F(d, 2 nu): b = l^2 / (l^2 + 2 nu) ~ Beta(d/2, nu), 1 - b ~ Beta(nu, d/2)."""

    nu: float

    def __call__(self, score: np.ndarray, d: int) -> np.ndarray:
        """Return log l, float64."""
        from scipy import special  # slow to import

        tail = special.ndtr(-np.abs(score))
        lower = special.betaincinv(d / 2, self.nu, tail)
        upper = special.betaincinv(self.nu, d / 2, tail)
        odds = np.where(score < 0, lower / (1 - lower), (1 - upper) / upper)
        return np.log(2 * self.nu * odds) / 2


chi = Tabulated(_log_chi)
"""The chi_d quantile: frequencies N(0, I_d), the Gaussian and the softmax kernel."""


def matern(nu: float) -> Tabulated:
    """Return the radial law of the Matern kernel of smoothness nu, lengthscale 1 (VRC App. G).

    The frequencies are then multivariate t with 2 nu degrees of freedom, here in radians; VRC Eq.
    84 has them in cycles. The mean of exp(w.x) is infinite: use trigonometric features.

    Raises:
        ValueError: unless nu is positive.
    """
    if not nu > 0:
        raise ValueError(f"nu (the smoothness of a Matern kernel) must be positive, got {nu}")
    return Tabulated(_LogMatern(nu))


def root_mean_square(score: Float[Array, "*s"], d: int) -> Float[Array, "*s"]:
    """Return sqrt(d) for every score: the lengths of `fixed`."""
    return jnp.full_like(score, d**0.5)


def independent_scores(key: Key, m: int) -> Float[Array, " m"]:
    """Draw m independent normal scores."""
    return jax.random.normal(key, (m,), jnp.float32)


def pairwise_scores(key: Key, m: int) -> Float[Array, " m"]:
    """Draw independent pairs g, -g in rows (0, 1), (2, 3), ...; with m odd the last is free."""
    scores = jax.random.normal(key, ((m + 1) // 2,), jnp.float32)
    return jnp.stack([scores, -scores], axis=-1).reshape(-1)[:m]


@dataclass(frozen=True, repr=False)
class FromScores(Value):
    """Lengths quantile(g, d) of normal scores g with the joint law `scores`."""

    scores: Scores
    """(key, m) -> (m,)."""
    quantile: Quantile = chi
    """The law of each length."""
    common: bool = False
    """One score and one length, shared by the m rows."""

    def __call__(self, key: Key, m: int, d: int) -> Lengths:
        """Draw the lengths (m,) of frequencies in R^d."""
        lengths = self.quantile(self.scores(key, 1 if self.common else m), d)
        return jnp.broadcast_to(lengths, (m,))


independent = FromScores(independent_scores)
"""Independent lengths, as in orthogonal random features (ORF)."""
pairwise = FromScores(pairwise_scores)
"""Pairwise norm coupling (PNC): F(l_0) + F(l_1) = 1 in rows (0, 1), (2, 3), ... exactly.

VRC Def. 3.3 and Eq. 7. The pairs are independent of one another; with m odd the last is free.
"""
monotone = FromScores(independent_scores, common=True)
"""Positive monotone coupling (PM): one length, shared by all m rows (VRC App. B.3)."""
fixed = FromScores(independent_scores, root_mean_square, common=True)
"""All lengths sqrt(d), the root mean square of chi_d.

The frequencies are then not Gaussian and kernel estimates are biased: trigonometric features
estimate 0F1(; d/2; -d z^2 / 4) instead of e^{-z^2 / 2}, positive ones 0F1(; d/2; d v^2 / 4) instead
of e^{v^2 / 2}. The bias is O(1/d) whatever m is; in attention less radial noise often outweighs it.
"""
