"""Kernels between the nodes of a graph, as dense matrices: references for small graphs.

Functions of the normalised Laplacian L = I - A (VRC Table 5), by its eigenvalues in O(N^3). The
same names in `modulations` are what random features take. A node without edges has L_ii = 0, so its
regularised Laplacian and diffusion kernels are exactly 1 with itself and 0 with the rest.

VRC App. F.1 prints I - sigma^2 L: read I + sigma^2 L, as in its Table 5, for else there is a pole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse.csgraph
import scipy.sparse.linalg
from jax.core import Tracer
from jaxtyping import Array, Float

from performer.graphs import modulations
from performer.graphs.graph import Graph

Gram = Float[Array, "n n"]
TERMS = 1024
"""So many coefficients of a series tell its radius of convergence."""
MARGIN = 1e-5
"""Relative; what is nearer to the radius of convergence counts as on it."""


def regularised_laplacian(graph: Graph, d: float = 2, sigma: float = 1.0) -> Gram:
    """(I + sigma^2 L)^{-d} (qGRF Eqs 6 and 20), (N, N).

    Raises:
        ValueError: for a negative weight, or parameters that are not positive. (So do the others.)
    """
    modulations.regularised_laplacian(d, sigma)
    return _of_laplacian(graph, lambda eigenvalue: (1 + sigma**2 * eigenvalue) ** -d)


def diffusion(graph: Graph, sigma: float = 1.0) -> Gram:
    """exp(-sigma^2 L / 2), the heat kernel (VRC Table 5); qGRF Eq. 4 has t = sigma^2 / 2."""
    modulations.diffusion(sigma)
    return _of_laplacian(graph, lambda eigenvalue: np.exp(-(sigma**2) * eigenvalue / 2))


def random_walk(graph: Graph, p: int = 2, alpha: float = 2.0) -> Gram:
    """(alpha I - L)^p, alpha >= 2: the p-step random walk kernel."""
    modulations.random_walk(p, alpha)
    return _of_laplacian(graph, lambda eigenvalue: (alpha - eigenvalue) ** p)


def inverse_cosine(graph: Graph) -> Gram:
    """cos(pi L / 4)."""
    return _of_laplacian(graph, lambda eigenvalue: np.cos(np.pi * eigenvalue / 4))


def matern(graph: Graph, nu: float = 1.5, kappa: float = 1.0) -> Gram:
    """(2 nu / kappa^2 I + L)^{-nu} (Borovitskiy et al. 2021); not scaled to a unit diagonal."""
    modulations.matern(nu, kappa)
    return _of_laplacian(graph, lambda eigenvalue: (2 * nu / kappa**2 + eigenvalue) ** -nu)


def resolvent(graph: Graph, d: float = 2) -> Gram:
    """(I - U)^{-d} of the weights U themselves (qGRF Eq. 7).

    Raises:
        ValueError: when the spectral radius of U is not below 1 (by `MARGIN`).
    """
    require_radius(modulations.resolvent(d), spectral_radius(graph))
    return _function(graph, lambda eigenvalue: (1 - eigenvalue) ** -d)


def spectral_radius(graph: Graph) -> float:
    """The largest absolute eigenvalue of the weights, to a relative 1e-6.

    Raises:
        ValueError: when the Lanczos iteration does not find it, as on a path of very many nodes.
    """
    matrix = graph.to_scipy()
    if graph.num_nodes <= 100:
        return float(np.abs(scipy.linalg.eigvalsh(matrix.toarray())).max())
    if not matrix.data.any():
        return 0.0
    # ones, or any other simple start, may be in the null space or orthogonal to what is looked for
    start = np.random.default_rng(0).standard_normal(graph.num_nodes)
    try:
        found = scipy.sparse.linalg.eigsh(
            matrix,
            1,
            v0=start,
            tol=1e-6,  # pyright: ignore[reportArgumentType] (SciPy's default is the integer 0)
            maxiter=1000,
            return_eigenvectors=False,
        )
    except scipy.sparse.linalg.ArpackNoConvergence:
        bound = float(abs(matrix).sum(axis=1).max())
        raise ValueError(
            f"the spectral radius of the weights was not found, only that it is at most {bound:.6g}"
            " (the largest sum of a row)"
        ) from None
    return float(abs(found[0]))


def require_convergence(graph: Graph, modulation: modulations.Modulation) -> None:
    """Raises ValueError when random walks on the weights W have no expectation for the modulation.

    They have one when sum_k |f_k| |W|^k is finite, of the absolute values of all entries: what the
    loads of k steps have in the mean. With negative weights the series of the kernel may converge
    where this one does not.
    """
    absolute = graph._replace(weights=jnp.abs(graph.weights))
    require_radius(modulation, spectral_radius(absolute))


def require_radius(modulation: modulations.Modulation, radius: float) -> None:
    """Raises ValueError unless sum_k |f_k| radius^k is finite.

    The coefficients are taken as |f_k| = C k^a R^{-k} (1 + O(1 / k)), where R and a come from the
    second half of `TERMS` of them. A radius below R passes, one above R is refused, and one
    within `MARGIN` of R passes if a < -1. The coefficients of a traced modulation are not known,
    and pass.
    """
    limit, exponent = _convergence(modulation)
    apart = radius / limit - 1
    if apart > MARGIN or (apart >= -MARGIN and exponent > -1.05):
        raise ValueError(
            f"the series diverges: the spectral radius of the weights is {radius:.6g}, and it"
            f" converges up to {limit:.6g}; scale the weights down (adjacency='weights'), or take"
            " another kernel"
        )


def _convergence(modulation: modulations.Modulation) -> tuple[float, float]:
    """R and a, for |f_k| ~ k^a R^{-k}; R is infinite for a polynomial."""
    with jax.enable_x64(True):  # where they do not vanish so soon
        f = modulation(TERMS)
    if isinstance(f, Tracer):
        return np.inf, 0.0
    f = np.abs(np.asarray(f, np.float64))
    usable = np.flatnonzero((f > 1e-300) & (f < np.inf))
    last = int(usable.max(initial=0))
    if last == 0 or (f[last] > 1e-30 and not f[last + 1 :].any() and last + 1 < TERMS):
        return np.inf, 0.0
    if last < 64:  # the few that are in the range of floats fall, or grow, by leaps and bounds
        return float(f[last] ** (-1 / last)), 0.0
    parts = np.array_split(np.arange(last // 2, last + 1), 16)
    k = np.array([part[np.argmax(f[part])] for part in parts])  # some may be 0, or have other signs
    terms = np.stack([np.ones(16), np.log(k), k / last, last / k], axis=1)
    fitted = np.linalg.lstsq(terms, np.log(f[k]), rcond=None)[0]
    return float(np.exp(-fitted[2] / last)), float(fitted[1])


def _of_laplacian(graph: Graph, function: Callable[[np.ndarray], np.ndarray]) -> Gram:
    return _function(graph.normalised(), lambda eigenvalue: function(1 - eigenvalue))


def _function(graph: Graph, function: Callable[[np.ndarray], np.ndarray]) -> Gram:
    matrix = graph.to_scipy()
    eigenvalues, vectors = scipy.linalg.eigh(matrix.toarray())
    parts = scipy.sparse.csgraph.connected_components(matrix, directed=False)[1]
    gram = (vectors * function(eigenvalues)) @ vectors.T
    return jnp.asarray(np.where(parts[:, None] == parts, gram, 0), float)  # without rounding errors
