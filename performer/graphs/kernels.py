"""Kernels between the nodes of a graph: modulations of random walks, and dense matrices.

A power series of the adjacency matrix A, K = sum_k c_k A^k, is a square, K = (sum_k f_k A^k)^2 with
f * f = c. Random features multiply a walk of k steps by f_k (VRC Eq. 50; Reid et al. 2024, "General
graph random features"). `kernel(length)` returns this *modulation* (f_0, ...), differentiable in
the parameters of the kernel; `kernel.dense(graph)` returns K by the eigenvalues in O(N^3).

    RegularisedLaplacian    (I + sigma^2 L)^{-d}
    Diffusion               exp(-sigma^2 L / 2)
    RandomWalk              (alpha I - L)^p
    InverseCosine           cos(pi L / 4)
    Matern                  (2 nu / kappa^2 I + L)^{-nu}
    Resolvent               (I - U)^{-d} of the weights U themselves
    FromSeries              any sum_k c_k A^k

All but `Resolvent` are functions of the normalised Laplacian L = I - A (VRC Table 5). Roots of
series, for example of (1 - rho a)^{-d}, have closed forms for every d, also odd ones, for which
qGRF Eq. 44 multiplies independent estimates. A node without edges has L_ii = 0: its regularised
Laplacian and diffusion kernels are exactly 1 with itself and 0 with other nodes.

The variance of an estimate is finite if sum_k f_k^2 rho(A)^{2k} / (1 - p_halt)^k is. The roots of
`RandomWalk` with odd p and of `InverseCosine` decay only like a power of k: use a small p_halt, or
expect rare, large errors.

VRC App. F.1 prints I - sigma^2 L, which has a pole: read I + sigma^2 L, as in its Table 5.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse.csgraph
import scipy.sparse.linalg
from jax.core import Tracer
from jax.scipy.special import gammaln
from jaxtyping import Array, ArrayLike, Float

from performer.choices import positive_values
from performer.graphs.graph import Graph
from performer.typing import Value

Modulation = Callable[[int], Float[Array, " length"]]
"""modulation(length) -> (f_0, ..., f_{length-1}): a `Kernel`, or any other function."""
Gram = Float[Array, "n n"]
TERMS = 1024
"""Number of coefficients used to estimate a radius of convergence."""
MARGIN = 1e-5
"""Relative distance to the radius of convergence below which a radius counts as equal to it."""


class Kernel(Value, ABC):
    """A function of the normalised Laplacian, by its eigenvalues and by the series of its root.

    A kernel of your own is a frozen dataclass with `__call__` and `_eigenvalue`. The constructor
    raises ValueError unless all parameters are positive and finite (unchecked if traced).
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            positive_values(name, value)

    @abstractmethod
    def __call__(self, length: int) -> Float[Array, " length"]:
        """Return the modulation (f_0, ..., f_{length-1})."""

    def dense(self, graph: Graph) -> Gram:
        """Return K (N, N) in JAX's default dtype, computed in float64.

        Raises:
            ValueError: for a negative weight.
        """
        return _matrix_function(graph.normalised(), lambda a: self._eigenvalue(1 - a))

    @abstractmethod
    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        """Return the eigenvalues of K, given those of L."""


@dataclass(frozen=True, repr=False)
class RegularisedLaplacian(Kernel):
    """(I + sigma^2 L)^{-d} (qGRF Eqs 6 and 20); root in Eqs 40 and 41."""

    d: float = 2
    sigma: ArrayLike = 1.0

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        scale = 1 + self.sigma**2
        return _binomial(-self.d / 2, -(self.sigma**2 / scale), scale ** (-self.d / 2), length)

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return (1 + self.sigma**2 * laplacian) ** -self.d


@dataclass(frozen=True, repr=False)
class Diffusion(Kernel):
    """exp(-sigma^2 L / 2), the heat kernel (VRC Table 5); qGRF Eq. 4 has t = sigma^2 / 2.

    f_k = exp(-sigma^2 / 4) (sigma^2 / 4)^k / k!
    """

    sigma: ArrayLike = 1.0

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        k = jnp.arange(length, dtype=float)  # by logarithms, as f_0 is 0 in float32 from sigma = 20
        scale = 2 * k * jnp.log(jnp.divide(self.sigma, 2))
        return jnp.exp(scale - self.sigma**2 / 4 - gammaln(k + 1))

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return np.exp(-(self.sigma**2) * laplacian / 2)


@dataclass(frozen=True, repr=False)
class RandomWalk(Kernel):
    """(alpha I - L)^p = ((alpha - 1) I + A)^p, the p-step random walk kernel.

    Positive semi-definite for alpha >= 2. To fit alpha, fit the excess over 2:
    `lambda excess: RandomWalk(p, 2 + excess)`.

    Raises:
        ValueError: for alpha below 2 (if traced, f is NaN), or p that is not positive.
    """

    p: int = 2
    alpha: ArrayLike = 2.0

    def __post_init__(self) -> None:
        positive_values("p", self.p)
        alpha = self.alpha
        if not isinstance(alpha, Tracer) and not 2 <= np.min(np.asarray(alpha)) < np.inf:
            raise ValueError(f"alpha must be at least 2, or the kernel is indefinite, got {alpha}")

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        alpha = self.alpha
        if isinstance(alpha, Tracer):
            alpha = jnp.where(alpha >= 2, alpha, jnp.nan)
        return _binomial(self.p / 2, 1 / (alpha - 1), (alpha - 1) ** (self.p / 2), length)

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return (self.alpha - laplacian) ** self.p


@dataclass(frozen=True, repr=False)
class InverseCosine(Kernel):
    """cos(pi L / 4) = (cos(pi A / 4) + sin(pi A / 4)) / sqrt(2)."""

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        k = np.arange(length)
        signs = np.where(k % 4 < 2, 1.0, -1.0)
        powers = np.cumprod(np.concatenate([[1.0], np.pi / 4 / np.arange(1, length)]))
        return root(signs * powers[:length] / np.sqrt(2), 2)

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return np.cos(np.pi * laplacian / 4)


@dataclass(frozen=True, repr=False)
class Matern(Kernel):
    """(2 nu / kappa^2 I + L)^{-nu} (Borovitskiy et al. 2021); not scaled to a unit diagonal."""

    nu: float = 1.5
    kappa: ArrayLike = 1.0

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        nu, kappa = self.nu, self.kappa
        factor = (kappa**2 / (2 * nu)) ** (nu / 2)
        return jnp.multiply(factor, RegularisedLaplacian(nu, kappa / (2 * nu) ** 0.5)(length))

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return (2 * self.nu / self.kappa**2 + laplacian) ** -self.nu


@dataclass(frozen=True, repr=False)
class Resolvent(Kernel):
    """(I - U)^{-d} (qGRF Eq. 7), for `adjacency="weights"`; f_k = 1 for d = 2."""

    d: float = 2

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        return _binomial(-self.d / 2, -1.0, 1.0, length)

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        return laplacian**-self.d

    def dense(self, graph: Graph) -> Gram:
        """Return K for the weights as they are.

        Raises:
            ValueError: if the spectral radius of U is not below 1 (by `MARGIN`).
        """
        require_radius(self, spectral_radius(graph))
        return _matrix_function(graph, lambda u: self._eigenvalue(1 - u))


@dataclass(frozen=True, repr=False)
class FromSeries(Kernel):
    """Any kernel sum_k c_k A^k; `dense` uses `TERMS` terms.

    Args:
        series: length -> (c_0, ..., c_{length-1}).

    Raises:
        ValueError: if c_0 is not positive (there is no real root); in `dense`, if the series
            diverges at 1, an eigenvalue of A.
    """

    series: Callable[[int], ArrayLike]

    def __post_init__(self) -> None:
        first = np.asarray(self.series(1))[0]
        if not float(first) > 0:
            raise ValueError(f"the series must begin with c_0 > 0, got {first}")

    def __call__(self, length: int) -> Array:
        """Return the modulation."""
        return root(self.series(length), 2)

    def _eigenvalue(self, laplacian: np.ndarray) -> Any:
        require_radius(self, 1.0)
        return np.polynomial.polynomial.polyval(1 - laplacian, np.asarray(self.series(TERMS)))


def coefficients(kernel: Modulation, length: int) -> Any:
    """Return (f_0, ..., f_{length-1}); ValueError if there are fewer."""
    f = kernel(length)
    if (count := np.shape(f)[-1]) < length:
        raise ValueError(
            f"{kernel!r} has {count} coefficients where {length} are needed: add zeros, as"
            " jnp.pad(f, (0, length - len(f)))"
        )
    return f


def spectral_radius(graph: Graph) -> float:
    """Return the largest absolute eigenvalue of the weights, to a relative 1e-6.

    Raises:
        ValueError: if the Lanczos iteration does not converge, as on a path of very many nodes.
    """
    matrix = graph.to_scipy()
    if not matrix.data.any():
        return 0.0
    if graph.num_nodes <= 100:
        return float(np.abs(scipy.linalg.eigvalsh(matrix.toarray())).max())
    # Simple starts such as ones may be in the null space or orthogonal to the eigenvector.
    start = np.random.default_rng(0).standard_normal(graph.num_nodes)
    options: Any = dict(v0=start, tol=1e-6, maxiter=1000, return_eigenvectors=False)
    try:
        return float(abs(scipy.sparse.linalg.eigsh(matrix, 1, **options)[0]))
    except scipy.sparse.linalg.ArpackNoConvergence:
        bound = float(abs(matrix).sum(axis=1).max())
        raise ValueError(
            f"the spectral radius of the weights was not found, only that it is at most {bound:.6g}"
            " (the largest sum of a row)"
        ) from None


def require_convergence(graph: Graph, kernel: Modulation) -> None:
    """Raise ValueError if random walks on the weights W have no expectation for the kernel.

    The expectation exists if sum_k |f_k| |W|^k is finite, |W| with the absolute entries: the mean
    loads of k steps. With negative weights the series of the kernel may converge though this one
    diverges.
    """
    absolute = graph._replace(weights=jnp.abs(graph.weights))
    require_radius(kernel, spectral_radius(absolute))


def require_radius(kernel: Modulation, radius: float) -> None:
    """Raise ValueError unless sum_k |f_k| radius^k is finite (unchecked for a traced kernel).

    The model is |f_k| = C k^a R^{-k} (1 + O(1 / k)), with R and a fitted to the second half of
    `TERMS` coefficients. A radius below R is accepted; within `MARGIN` of R only if a < -1.
    """
    limit, exponent = _convergence(kernel)
    apart = radius / limit - 1
    if apart > MARGIN or (apart >= -MARGIN and exponent > -1.05):
        raise ValueError(
            f"the series diverges: the spectral radius of the weights is {radius:.6g}, and it"
            f" converges up to {limit:.6g}; scale the weights down (adjacency='weights'), or use"
            " another kernel"
        )


def _convergence(kernel: Modulation) -> tuple[float, float]:
    """Return R and a of |f_k| ~ k^a R^{-k}; R is infinite for a polynomial."""
    with jax.enable_x64(True):  # they vanish later
        f = coefficients(kernel, TERMS)
    if isinstance(f, Tracer):
        return np.inf, 0.0
    f = np.abs(np.asarray(f, np.float64))
    usable = np.flatnonzero((f > 1e-300) & (f < np.inf))
    last = int(usable.max(initial=0))
    if last == 0 or (f[last] > 1e-30 and not f[last + 1 :].any() and last + 1 < TERMS):
        return np.inf, 0.0
    if last < 64:  # the few in the range of floats decay or grow very fast
        return float(f[last] ** (-1 / last)), 0.0
    sections = np.array_split(np.arange(last // 2, last + 1), 16)
    k = np.array([section[np.argmax(f[section])] for section in sections])  # some may be 0
    terms = np.stack([np.ones(16), np.log(k), k / last, last / k], axis=1)
    fitted = np.linalg.lstsq(terms, np.log(f[k]), rcond=None)[0]
    return float(np.exp(-fitted[2] / last)), float(fitted[1])


def _binomial(power: float, ratio: ArrayLike, first: ArrayLike, length: int) -> Array:
    """Return the coefficients of first * (1 + ratio a)^power, expanded in a."""
    k = jnp.arange(1, length)
    ratios = (power - k + 1) / k * ratio
    return jnp.cumprod(jnp.concatenate([jnp.asarray(first, ratios.dtype)[None], ratios]))


def root(c: ArrayLike, power: int) -> Array:
    """Return f with f * ... * f = c, `power` times: the series of c(a)^{1 / power} (by Miller)."""
    c = np.asarray(c, np.float64)
    f = np.zeros(len(c))
    f[0] = c[0] ** (1 / power)
    for k in range(1, len(c)):
        j = np.arange(1, k + 1)
        f[k] = np.sum((j / power - (k - j)) * c[1 : k + 1] * f[k - 1 :: -1]) / (k * c[0])
    return jnp.asarray(f, float)


def _matrix_function(graph: Graph, function: Callable[[np.ndarray], Any]) -> Gram:
    matrix = graph.to_scipy()
    eigenvalues, vectors = scipy.linalg.eigh(matrix.toarray())
    components = scipy.sparse.csgraph.connected_components(matrix, directed=False)[1]
    gram = (vectors * function(eigenvalues)) @ vectors.T
    return jnp.asarray(
        np.where(components[:, None] == components, gram, 0), float
    )  # without rounding errors
