"""Learning of the permutation of the sigma-coupling: optimal transport as an assignment problem.

Two walks from node i, and two from j, have lengths in matched quantiles q and sigma(q). With
psi_q(i) the features that a walk from i has in the mean over its directions and over lengths in the
q-th of n quantiles, the objective for the pair of nodes (VRC Eqs 55 and 58) is

    sum_{q, r} [(psi_q(i) + psi_sigma(q)(i))^T (psi_r(j) + psi_sigma(r)(j))]^2 = f(i) . f(j)
    f(i) = sum_q u_{q, sigma(q)}(i),    u_{q, r} = vec((psi_q + psi_r) (psi_q + psi_r)^T)

quadratic in the matching; only its terms q = r (Eq. 56) make an assignment problem. VRC samples
walks to estimate psi; here it is exact (and Eq. 54's lower end (q - 1) / 2 is read (q - 1) / n). A
walk of l steps has the mean features

    sum_{t <= l} f_t (1 - p_halt)^{-t} A^t e_i,

so psi_q(i) = g_q(A) e_i with a power series g_q, and the averages over all pairs of nodes are sums
over the eigenvalues a of A: the linear cost of (q, r) is sum_a (g_q(a) + g_r(a))^4, the quadratic
objective |sum_q u_{q, sigma(q)}|^2 with u_{q, r} = (g_q + g_r)^2 over the eigenvalues.
"""

import itertools

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from performer import choices
from performer.graphs import couplings
from performer.graphs.graph import Graph
from performer.graphs.kernels import Modulation

Permutation = Int[np.ndarray, " n"]
ENUMERABLE = 10
"""All permutations of so many are tried, in less than a second."""
TERMS = 512
"""Terms of the power series; lengths beyond, (1 - p_halt)^512 of them, are left out."""


def learn(graph: Graph, kernel: Modulation, *, p_halt: float, order: int = 30) -> Permutation:
    """Return the permutation of VRC Eq. 56, averaged over all pairs of nodes (Hungarian algorithm).

    It may then be used on any graph: VRC learns it on an Erdos-Renyi graph of 100 nodes.

    Args:
        graph: small, for its eigenvalues are taken.
        kernel: that is to be estimated, as `kernels.Diffusion()`.
        p_halt: that the walks will have.
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
    return np.clip(order - excess, 0, inverse) * np.asarray(kernel(TERMS), np.float64)


def spectral_responses(
    graph: Graph, kernel: Modulation, p_halt: float, order: int
) -> Float[np.ndarray, "n a"]:
    """g_q at every eigenvalue of the normalised adjacency matrix."""
    eigenvalues = scipy.linalg.eigvalsh(graph.normalised().to_scipy().toarray())
    return series(kernel, p_halt, order) @ eigenvalues ** np.arange(TERMS)[:, None]


def linear_costs(responses: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n n"]:
    """Return the cost of matching q and r in VRC Eq. 56, averaged over all pairs of nodes."""
    sums = responses[:, None] + responses[None]
    return np.sum(sums**4, axis=-1)


def assign(costs: Float[np.ndarray, "n n"]) -> Permutation:
    """Return the permutation of the least total cost."""
    return linear_sum_assignment(costs)[1]


def spectral_edges(responses: Float[np.ndarray, "n a"]) -> Float[np.ndarray, "n n a"]:
    """u_{q, r} of the average over all pairs of nodes."""
    return (responses[:, None] + responses[None]) ** 2


def reduced(
    rng: np.random.Generator, *edges: Float[np.ndarray, "n n b"], size: int
) -> tuple[Float[np.ndarray, "n n r"], ...]:
    """All edges by one Gaussian matrix to `size` dimensions (VRC Eq. 62): dot products nearly stay.

    Johnson and Lindenstrauss; the objective then costs nothing that grows with the graph.
    """
    matrix = rng.standard_normal((edges[0].shape[-1], size)) / np.sqrt(size)
    return tuple(x @ matrix for x in edges)


def objective(
    permutation: Permutation, first: Float[np.ndarray, "n n b"], second: Float[np.ndarray, "n n b"]
) -> float:
    """VRC Eqs 55 and 61: f(i) . f(j)."""
    q = np.arange(len(permutation))
    return float(first[q, permutation].sum(axis=0) @ second[q, permutation].sum(axis=0))


def enumerate_all(
    first: Float[np.ndarray, "n n b"], second: Float[np.ndarray, "n n b"]
) -> Permutation:
    """Return the permutation that minimises `objective`, by trying all.

    The first half of the quantiles goes to one set of columns and the second to the others; with
    C_{(q, s), (r, t)} = first_{q, s} . second_{r, t}, and a and b the indicators of the edges of
    the halves, the objective is (a + b)^T C (a + b): a matrix product for each set.

    Raises:
        ValueError: when there are too many, n > 10.
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
        own = [np.sum(x @ costs * x, axis=1) for x in (a, b)]
        values = own[0][:, None] + own[1] + a @ (costs + costs.T) @ b.T
        i, j = np.unravel_index(np.argmin(values), values.shape)
        if values[i, j] < least:
            best, least = np.concatenate([low[i], high[j]]), values[i, j]
    assert best is not None
    return best


def _indicators(columns: Int[np.ndarray, "k h"], first: int, order: int) -> np.ndarray:
    """Indicators (k, n^2) of the edges (first, columns[:, 0]), (first + 1, columns[:, 1]), ..."""
    rows = first + np.arange(columns.shape[1])
    found = np.zeros((len(columns), order**2))
    np.put_along_axis(found, rows * order + columns, 1, axis=1)
    return found


def project(
    rng: np.random.Generator, edges: Float[np.ndarray, "n n b"], num_projections: int = 1000
) -> Permutation:
    """Return the permutation that minimises |f|^2, case i = j, by random projections (Lemma C.2).

    u . g for a Gaussian vector g is a linear cost; its best matching is likely to be that of the
    shortest f. The best of those found under `objective` is returned. The entries of f that every
    permutation has in common are of no consequence; g is drawn anew for each projection.
    """
    best, least = None, np.inf
    for _ in range(num_projections):
        candidate = assign(edges @ rng.standard_normal(edges.shape[-1]))
        value = objective(candidate, edges, edges)
        if value < least:
            best, least = candidate, value
    assert best is not None
    return best
