"""Kernels between the nodes of a graph, as dense matrices: references for small graphs.

Functions of the normalised Laplacian L = I - A (VRC Table 5), by its eigenvalues in O(N^3). The
same names in `modulations` are what random features take. A node without edges has L_ii = 0, so its
regularised Laplacian and diffusion kernels are exactly 1 with itself and 0 with the rest.

VRC App. F.1 prints I - sigma^2 L: read I + sigma^2 L, as in its Table 5, for else there is a pole.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from jaxtyping import Array, Float

from performer.graphs import modulations
from performer.graphs.graph import Graph

Gram = Float[Array, "n n"]


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
        ValueError: when the spectral radius of U is not below 1.
    """
    require_convergence(graph, modulations.resolvent(d))
    return _function(graph, lambda eigenvalue: (1 - eigenvalue) ** -d)


def spectral_radius(graph: Graph) -> float:
    """The largest absolute eigenvalue of the weights."""
    matrix = graph.to_scipy()
    if graph.num_nodes < 3:
        return float(np.max(np.abs(np.linalg.eigvalsh(matrix.toarray())), initial=0.0))
    start = np.ones(graph.num_nodes)
    found = scipy.sparse.linalg.eigsh(matrix, 1, return_eigenvectors=False, v0=start)
    return float(abs(found[0]))


def require_convergence(graph: Graph, modulation: modulations.Modulation) -> None:
    """Raises ValueError when the series of the modulation diverges on the weights of the graph."""
    radius, length = spectral_radius(graph), 1024
    f = np.abs(np.asarray(modulation(length), np.float64))[-2:]
    if f[1] * radius >= f[0] > 0:
        raise ValueError(
            f"the series diverges: the spectral radius of the weights is {radius:.6g};"
            " scale the weights down, or use the normalised adjacency matrix"
        )


def _of_laplacian(graph: Graph, function: Callable[[np.ndarray], np.ndarray]) -> Gram:
    return _function(graph.normalised(), lambda eigenvalue: function(1 - eigenvalue))


def _function(graph: Graph, function: Callable[[np.ndarray], np.ndarray]) -> Gram:
    eigenvalues, vectors = scipy.linalg.eigh(graph.to_scipy().toarray())
    return jnp.asarray((vectors * function(eigenvalues)) @ vectors.T, float)
