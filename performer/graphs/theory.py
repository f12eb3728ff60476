"""Closed-form errors of graph random features and of PageRank by walks; a choice of the walks.

Two walkers of a node both continue with probability q at each step: q = (1 - p)^2 if they are
independent, 1 - 2 p if they never halt at once (qGRF Def. 3.1, p <= 1/2), in between for other
offsets (Thm 3.4). With A the adjacency matrix, f the modulation and m walks, the second moments of
the features, summed over the first nodes i of the walks, are

    T = sum_i E[phi(i) phi(i)^T] = S / m + 1/m^2 sum over ordered pairs of walkers  X(q)
    S = sum_{s,r} f_s f_{s+r} diag(1^T V^s) A^r  and its transpose, r = 0 once
    X = sum_{s,t} f_s f_t c^{min(s,t)} A^{s+t},    c = q / (1 - p)^2

with V_uv = A_uv^2 / (P_uv (1 - p)), P_uv the probability of a step, and S from the visits of one
walk. For two independent ensembles

    E |Phi_1 Phi_2^T - K|^2 = |T|^2 - |K|^2    (Frobenius norms)

This quantifies qGRF Thm 3.2: the gain of antithetic walks on any graph. X is computed from the
eigenvalues of A; the total cost is O(N^3).
"""

import bisect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float

from performer import choices
from performer.graphs import couplings, kernels, walks
from performer.graphs.graph import Graph
from performer.graphs.kernels import Modulation
from performer.graphs.walks import Steps

SMALL = 1e-12
"""Relative size of the terms at which a series is truncated."""
TERMS = 512
"""Maximal number of terms of a modulation."""
PROBABILITIES = (0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02)
"""Halting probabilities that `recommend` tries."""
MOST_WALKS = 2**20
"""Maximal number of walks from a node."""

Matrix = Float[np.ndarray, "n n"]


class Group(NamedTuple):
    """Walkers with common termination variables, as in `couplings.antithetic`."""

    offset: float
    """Difference between neighbours; from p_halt (1 - p_halt) to p_halt in qGRF Thm 3.4."""
    size: int
    """Number of walkers."""


class Recommendation(NamedTuple):
    """Arguments of `graph_random_features` with their error and work."""

    p_halt: float
    num_walks: int
    coupling: str
    error: float
    """Expected error, sqrt(E |Phi_1 Phi_2^T - K|^2) / |K|."""
    visits: float
    """Expected visits of all walks of an ensemble, num_nodes num_walks / p_halt."""
    independent: float
    """Expected error of as many independent walks."""


def survival(p_halt: float, offset: float) -> float:
    """Return q, the probability that neither of two walkers halts at a step (qGRF Eqs 11 and 92).

    Their termination variables are t and mod_1(t + offset), t uniform; a walker halts below p_halt.

    Raises:
        ValueError: for p_halt outside (0, 1).
    """
    couplings.require_probability(p_halt)
    apart = min(offset % 1, -offset % 1)
    both_halt = max(p_halt - apart, 0.0) + max(p_halt - (1 - apart), 0.0)
    return 1 - 2 * p_halt + both_halt


def expected_error(
    graph: Graph,
    kernel: Modulation,
    *,
    num_walks: int,
    p_halt: float,
    coupling: str | Group = "antithetic",
    steps: Steps = "uniform",
) -> float:
    """Return sqrt(E |Phi_1 Phi_2^T - K|^2) / |K| for two ensembles; it may be infinite.

    The kernel is of the normalised adjacency matrix. For one ensemble this is the error without the
    diagonal, or slightly more.

    Args:
        graph: a graph of some thousand nodes at most, since matrices are dense.
        kernel: of `kernels`, or a function length -> (f_0, ...).
        num_walks: m, from each node.
        p_halt: probability to halt at each step.
        coupling: "independent", "antithetic", "ensemble", or a `Group`.
        steps: "uniform" or "weighted".

    Raises:
        ValueError: for an unknown coupling, and as `graph_random_features`.

    Example:
        >>> theory.expected_error(graph, kernels.Diffusion(), num_walks=8, p_halt=0.2)
    """
    choices.positive_integer("num_walks", num_walks)
    return _errors(_spectrum(graph, kernel, steps), p_halt)(num_walks, coupling)


def recommend(
    graph: Graph, kernel: Modulation, tolerance: float, *, steps: Steps = "uniform"
) -> Recommendation:
    """Return p_halt, number of walks and coupling that reach an expected error in fewest visits.

    Among couplings with as many visits, the one with the lowest error is chosen.

    Args:
        graph: a graph of some thousand nodes at most; of a larger one, a representative part.
        kernel: kernel of the normalised adjacency matrix.
        tolerance: expected error to reach, sqrt(E |Phi_1 Phi_2^T - K|^2) / |K|.
        steps: "uniform" or "weighted".

    Raises:
        ValueError: for a tolerance that is not positive or not reached by `MOST_WALKS` walks.

    Example:
        >>> best = theory.recommend(graph, kernels.Diffusion(), 0.1)
        >>> graph_random_features(
        ...     key, graph, kernels.Diffusion(), num_walks=best.num_walks, p_halt=best.p_halt,
        ...     coupling=best.coupling
        ... )
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    spectrum = _spectrum(graph, kernel, steps)
    sufficient = []
    for p_halt in PROBABILITIES:
        error = _errors(spectrum, p_halt)
        for coupling in COUPLINGS:
            size = _group(coupling, p_halt).size
            m = _fewest(lambda m, e=error, c=coupling: e(m, c), tolerance, size)
            if m is not None:
                visits, alone = graph.num_nodes * m / p_halt, error(m, "independent")
                sufficient.append(
                    Recommendation(p_halt, m, coupling, error(m, coupling), visits, alone)
                )
    if not sufficient:
        raise ValueError(
            f"{MOST_WALKS} walks from each node do not reach an error of {tolerance}: the variance"
            " may be infinite; use another kernel, or the dense one"
        )
    return min(sufficient, key=lambda x: (x.visits, x.error))


def pagerank_variance(
    graph: Graph,
    *,
    num_walks: int,
    p_halt: float,
    coupling: str | Group = "antithetic",
    steps: Steps = "uniform",
) -> Float[np.ndarray, " n"]:
    """Return the variance of `pagerank.pagerank` at every node (qGRF Thm 8.1).

    With T the steps and G = p sum_l (1 - p)^l T^l, one walk from j halts at i with probability
    G_ji, and both of a pair with

        sum_l q^l T^l_ji (b T^l_ji + 2 (1 - p - q) p [T^{l+1} (I - (1 - p) T)^{-1}]_ji)

    where b = 2 p - 1 + q is the probability that both halt. (qGRF Eq. 36 is its case b = 0.)

    Raises:
        ValueError: for nodes without edges, and as `couplings.lengths`.
    """
    choices.positive_integer("num_walks", num_walks)
    transition = walks.transition(graph, steps).toarray()
    n = graph.num_nodes
    if not np.allclose(transition.sum(axis=1), 1):
        raise ValueError("a node without edges teleports: leave such nodes out")
    after = np.linalg.inv(np.eye(n) - (1 - p_halt) * transition)
    halts = p_halt * after
    covariance = np.zeros((n, n))
    for count, q in _pairs(coupling, p_halt, num_walks):
        covariance += count * (_both(transition, after, p_halt, q) - halts**2)
    return np.sum(num_walks * (halts - halts**2) + covariance, axis=0) / (n * num_walks) ** 2


COUPLINGS = ("independent", "antithetic", "ensemble")
"""Couplings with closed forms."""


def _group(coupling: str | Group, p_halt: float) -> Group:
    """Return the group of walkers; groups of size 1 are independent."""
    couplings.require_probability(p_halt)
    if isinstance(coupling, Group):
        choices.positive_integer("size", coupling.size)
        return coupling
    if coupling not in COUPLINGS:
        raise ValueError(choices.unknown("coupling of walks", coupling, COUPLINGS))
    if coupling == "ensemble":
        return Group(p_halt, max(int(1 / p_halt + 1e-9), 1))
    return Group(0.5, 2 if coupling == "antithetic" else 1)


def _pairs(coupling: str | Group, p_halt: float, num_walks: int) -> Iterator[tuple[int, float]]:
    """Ordered pairs of walkers: how many, and their q."""
    offset, size = _group(coupling, p_halt)
    groups, rest = divmod(num_walks, size)
    within = 0
    for apart in range(1, size):
        count = 2 * (groups * (size - apart) + max(rest - apart, 0))
        within += count
        if count:
            yield count, survival(p_halt, apart * offset)
    alone = num_walks * (num_walks - 1) - within
    if alone:
        yield alone, (1 - p_halt) ** 2


class _Spectrum(NamedTuple):
    """A of the nodes that have edges, its eigenvalues and eigenvectors, and the modulation."""

    adjacency: Matrix
    chances: Matrix
    """Probabilities of the steps."""
    values: Float[np.ndarray, " n"]
    vectors: Matrix
    f: Float[np.ndarray, " t"]
    exact: float
    """|K|^2, including nodes without edges."""

    def of(self, c: float) -> Float[np.ndarray, " n"]:
        """Return the eigenvalues of X: sum_{s,t} f_s f_t c^{min(s,t)} A^{s+t}."""
        powers = self.values[:, None] ** np.arange(len(self.f)) * self.f
        after = np.cumsum(powers[:, ::-1], axis=1)[:, ::-1] - powers
        return np.sum(c ** np.arange(len(self.f)) * powers * (powers + 2 * after), axis=1)


def _spectrum(graph: Graph, kernel: Modulation, steps: Steps) -> _Spectrum:
    kernels.require_radius(kernel, 1.0)
    joined = np.diff(np.asarray(graph.indptr)) > 0
    normalised = graph.normalised()
    adjacency, chances = (
        x.toarray()[joined][:, joined]
        for x in (normalised.to_scipy(), walks.transition(normalised, steps))
    )
    f = np.asarray(kernels.coefficients(kernel, TERMS), np.float64)
    f = f[: np.flatnonzero(np.abs(f) > SMALL * np.abs(f).max())[-1] + 1]
    values, vectors = scipy.linalg.eigh(adjacency)
    spectrum = _Spectrum(adjacency, chances, values, vectors, f, 0.0)
    alone = np.sum(~joined) * f.sum() ** 4
    return spectrum._replace(exact=float(np.sum(spectrum.of(1.0) ** 2) + alone))


def _of_one_walk(spectrum: _Spectrum, p_halt: float) -> Matrix:
    """Return S, from the visits of one walk of each node."""
    couplings.require_probability(p_halt)
    adjacency, chances, f = spectrum.adjacency, spectrum.chances, spectrum.f
    squares = adjacency**2 / np.where(chances > 0, chances, 1) / (1 - p_halt)
    reach = np.zeros((len(f), len(adjacency)))  # 1^T V^s
    reach[0] = 1
    for s in range(1, len(f)):
        reach[s] = reach[s - 1] @ squares
    total, power = np.zeros_like(adjacency), np.eye(len(adjacency))
    for r in range(len(f)):
        a = (f[: len(f) - r] * f[r:]) @ reach[: len(f) - r]
        total += a[:, None] * power * (0.5 if r == 0 else 1.0)
        power = power @ adjacency
    return total + total.T


def _errors(spectrum: _Spectrum, p_halt: float) -> Callable[[int, str | Group], float]:
    """Return the expected error as a function of (num_walks, coupling)."""
    single = _of_one_walk(spectrum, p_halt)
    drawn = np.sum(spectrum.of(1.0) ** 2)

    def error(num_walks: int, coupling: str | Group) -> float:
        if not np.isfinite(single).all():
            return np.inf
        pairs = sum(
            count * spectrum.of(q / (1 - p_halt) ** 2)
            for count, q in _pairs(coupling, p_halt, num_walks)
        )
        pairs = (spectrum.vectors * (pairs / num_walks**2)) @ spectrum.vectors.T
        excess = np.sum((single / num_walks + pairs) ** 2) - drawn
        return float(np.sqrt(max(excess, 0.0) / spectrum.exact))

    return error


def _fewest(error, tolerance: float, size: int) -> int | None:
    """Return the smallest multiple of `size` with an error within the tolerance, if any."""
    high = 1
    while error(high * size) > tolerance:
        high *= 2
        if high * size > MOST_WALKS:
            return None
    between = range(high // 2 + 1, high)
    place = bisect.bisect_left(between, True, key=lambda k: error(k * size) <= tolerance)
    return (high // 2 + 1 + place) * size


def _both(transition: Matrix, after: Matrix, p_halt: float, q: float) -> Matrix:
    """Return the probability that both walkers of a pair from j halt at i, for all j and i."""
    one_halts, both_halt = 1 - p_halt - q, 2 * p_halt - 1 + q
    total, power, weight = np.zeros_like(transition), np.eye(len(transition)), 1.0
    while weight > SMALL:
        following = power @ transition
        total += weight * power * (both_halt * power + 2 * one_halts * p_halt * following @ after)
        power, weight = following, weight * q
    return total
