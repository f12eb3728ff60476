"""Learning of the permutation of the sigma-coupling: optimal transport as an assignment problem.

Two walks from node i, and two from j, have lengths in matched quantiles q and sigma(q). Let
psi_q(i) be the mean features of a walk from i, over its directions and over the lengths in the q-th
of n quantiles. The objective for the pair of nodes (VRC Eqs 55 and 58) is

    sum_{q, r} [(psi_q(i) + psi_sigma(q)(i))^T (psi_r(j) + psi_sigma(r)(j))]^2 = f(i) . f(j)
    f(i) = sum_q u_{q, sigma(q)}(i),    u_{q, r} = vec((psi_q + psi_r) (psi_q + psi_r)^T)

quadratic in the matching; its terms q = r alone (Eq. 56) are an assignment problem. VRC estimates
psi by walks; here it is exact (with (q - 1) / n for Eq. 54's lower end (q - 1) / 2). A walk of l
steps has the mean features

    sum_{t <= l} f_t (1 - p_halt)^{-t} A^t e_i,

so psi_q(i) = g_q(A) e_i with a power series g_q. Averages over all pairs of nodes are sums over the
eigenvalues a of A: the linear cost of (q, r) is sum_a (g_q(a) + g_r(a))^4, the quadratic objective
|sum_q u_{q, sigma(q)}|^2 with u_{q, r} = (g_q + g_r)^2 over the eigenvalues.
"""

import itertools

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from performer import choices
from performer.graphs import couplings
from performer.graphs.graph import Graph
from performer.graphs.kernels import Modulation, coefficients

Permutation = Int[np.ndarray, " n"]
ENUMERABLE = 10
"""Largest order whose permutations can be enumerated, in less than a second."""
TERMS = 512
"""Terms of the power series; longer walks, a share (1 - p_halt)^512, are left out."""


def learn(graph: Graph, kernel: Modulation, *, p_halt: float, order: int = 30) -> Permutation:
    """Return the permutation of VRC Eq. 56, averaged over all pairs of nodes (Hungarian algorithm).

    It serves any graph: VRC learns it on an Erdos-Renyi graph of 100 nodes.

    Args:
        graph: a small graph; its eigenvalues are computed.
        kernel: the kernel to estimate, as `kernels.Diffusion()`.
        p_halt: probability of the walks to halt at each step.
        order: n, the number of quantiles.

    Raises:
        ValueError: for p_halt outside (0, 1) or an order below 1.

    Example:
        >>> coupling = couplings.sigma(matching.learn(graph, kernels.Diffusion(), p_halt=0.3))
    """
    return assign(linear_costs(spectral_responses(graph, kernel, p_halt, order)))


def series(kernel: Modulation, p_halt: float, order: int) -> Float[np.ndarray, "n t"]:
    """Return the coefficients of g_q: f_t (1 - p_halt)^{-t} P(length >= t | length in quantile q).

    Quantile q holds the lengths F^{-1}(u) for u in (q / n, (q + 1) / n], F(t - 1) = 1 - (1 -
    p_halt)^t (VRC Eq. 54).
    """
    couplings.require_probability(p_halt)
    choices.positive_integer("order", order)
    above = order - 1 - np.arange(order)[:, None]  # quantiles above the q-th
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = np.exp(-np.arange(TERMS) * np.log1p(-p_halt))  # 1 / P(length >= t)
        excess = np.where(above > 0, above * inverse, 0)  # 0 times infinity is 0 here
    return np.clip(order - excess, 0, inverse) * np.asarray(coefficients(kernel, TERMS), np.float64)


def spectral_responses(
    graph: Graph, kernel: Modulation, p_halt: float, order: int
) -> Float[np.ndarray, "n a"]:
    """Return g_q at every eigenvalue of the normalised adjacency matrix."""
    eigenvalues = scipy.linalg.eigvalsh(graph.normalised().to_scipy().toarray())
    return series(kernel, p_halt, order) @ eigenvalues ** np.arange(TERMS)[:, None]


def linear_costs(responses: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n n"]:
    """Return the cost of matching q and r in VRC Eq. 56, averaged over all pairs of nodes."""
    sums = responses[:, None] + responses[None]
    return np.sum(sums**4, axis=-1)


def assign(costs: Float[np.ndarray, "n n"]) -> Permutation:
    """Return the permutation with the least total cost."""
    return linear_sum_assignment(costs)[1]


def spectral_edges(responses: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n n a"]:
    """Return u_{q, r} for the average over all pairs of nodes."""
    return (responses[:, None] + responses[None]) ** 2


def reduced(
    rng: np.random.Generator, *edges: Float[np.ndarray, "n n b"], size: int
) -> tuple[Float[np.ndarray, "n n r"], ...]:
    """Project all edges by one Gaussian matrix to `size` dimensions (VRC Eq. 62).

    Dot products are nearly kept (Johnson and Lindenstrauss), at a cost that does not grow with the
    graph.
    """
    matrix = rng.standard_normal((edges[0].shape[-1], size)) / np.sqrt(size)
    return tuple(x @ matrix for x in edges)


def objective(
    permutation: Permutation, first: Float[np.ndarray, "n n b"], second: Float[np.ndarray, "n n b"]
) -> float:
    """Return f(i) . f(j), VRC Eqs 55 and 61."""
    q = np.arange(len(permutation))
    return float(first[q, permutation].sum(axis=0) @ second[q, permutation].sum(axis=0))


def enumerate_all(
    first: Float[np.ndarray, "n n b"], second: Float[np.ndarray, "n n b"]
) -> Permutation:
    """Return the permutation that minimises `objective`, by enumeration.

    The first half of the quantiles is matched with a set of columns, the second half with the rest.
    With C_{(q, s), (r, t)} = first_{q, s} . second_{r, t} and the indicators a and b of the edges
    of the halves, the objective is (a + b)^T C (a + b): one matrix product for each set.

    Raises:
        ValueError: for more than `ENUMERABLE` quantiles.
    """
    order, half = len(first), len(first) // 2
    if order > ENUMERABLE:
        raise ValueError(
            f"there are {order}! permutations of {order} quantiles: at most {ENUMERABLE} can be"
            " enumerated; use learn, or project"
        )
    costs = first.reshape(order**2, -1) @ second.reshape(order**2, -1).T
    best, least = None, np.inf
    for columns in itertools.combinations(range(order), half):
        others = [column for column in range(order) if column not in columns]
        low, high = (np.array([*itertools.permutations(part)], int) for part in (columns, others))
        a, b = _indicators(low, 0, order), _indicators(high, half, order)
        within = [np.sum(x @ costs * x, axis=1) for x in (a, b)]
        values = within[0][:, None] + within[1] + a @ (costs + costs.T) @ b.T
        i, j = np.unravel_index(np.argmin(values), values.shape)
        if values[i, j] < least:
            best, least = np.concatenate([low[i], high[j]]), values[i, j]
    assert best is not None
    return best


def _indicators(columns: Int[np.ndarray, "k h"], first: int, order: int) -> np.ndarray:
    """Indicators (k, n^2) of the edges (first, columns[:, 0]), (first + 1, columns[:, 1]), ..."""
    rows = first + np.arange(columns.shape[1])
    indicators = np.zeros((len(columns), order**2))
    np.put_along_axis(indicators, rows * order + columns, 1, axis=1)
    return indicators


def project(
    rng: np.random.Generator, edges: Float[np.ndarray, "n n b"], num_projections: int = 1000
) -> Permutation:
    """Return the permutation that minimises |f|^2, case i = j, by random projections (Lemma C.2).

    u . g for a Gaussian vector g is a linear cost, whose best matching is likely to have a short f.
    Of the matchings found by `num_projections` draws of g, the best under `objective` is returned.
    """
    best, least = None, np.inf
    for _ in range(num_projections):
        candidate = assign(edges @ rng.standard_normal(edges.shape[-1]))
        value = objective(candidate, edges, edges)
        if value < least:
            best, least = candidate, value
    assert best is not None
    return best
