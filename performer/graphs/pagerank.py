"""PageRank by random walks and by power iteration.

The PageRank of node i is the probability that a random walk halts there. The walk starts at a
uniform node; at each step it halts with probability p_halt, else moves to a neighbour (qGRF Eqs 24
to 30, VRC Eqs 75 to 79; our 1 - p_halt is alpha of networkx, the damping factor). The walks that
leave one node may be coupled.

From a node without neighbours a walk moves to a uniform node, as in networkx. This needs no draws:
with n of N such nodes it multiplies the result by N / (N - (1 - p_halt) n), and a share p_halt of
it remains at these nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer.graphs import couplings, features, matching, walks
from performer.graphs.couplings import Coupling
from performer.graphs.graph import Graph
from performer.typing import Key


def pagerank(
    key: Key,
    graph: Graph,
    *,
    num_walks: int,
    p_halt: float,
    coupling: str | Coupling = "antithetic",
    steps: walks.Steps = "uniform",
) -> Float[Array, " n"]:
    """Estimate the PageRank of every node without bias, from num_walks walks of each (Eq. 30).

    Args:
        key: random key.
        graph: the graph; only `steps="weighted"` uses its weights.
        num_walks: number of walks from each node.
        p_halt: probability to halt, or to teleport: 0.15 for the usual damping of 0.85.
        coupling: coupling of the lengths: a name, or `couplings.sigma(learn(...))`.
        steps: "uniform" over the neighbours, or "weighted".

    Raises:
        ValueError: as `features.sample`.
    """
    sampled = features.sample(
        key, graph, num_walks=num_walks, p_halt=p_halt, coupling=coupling, steps=steps,
        adjacency="weights",
    )  # fmt: skip
    last = sampled.last.astype(jnp.int32)  # sums of ones stop at 2^24 in float32
    halted = jax.ops.segment_sum(last, sampled.node, graph.num_nodes)
    halted = halted / (graph.num_nodes * num_walks)
    # Walks stayed at nodes without neighbours; these teleport.
    alone = graph.degrees == 0
    factor = graph.num_nodes / (graph.num_nodes - (1 - p_halt) * alone.sum())
    return factor * jnp.where(alone, p_halt * halted, halted)


def power_iteration(
    graph: Graph, *, p_halt: float, steps: walks.Steps = "uniform", tolerance: float = 1e-7
) -> Float[Array, " n"]:
    """Compute PageRank by x <- p_halt / N + (1 - p_halt) T^T x, from x = 1 / N.

    Each step multiplies the sum of absolute errors, at first at most 2, by 1 - p_halt, until it is
    below the tolerance. In float64, since sums over the neighbours of a hub have many terms.

    Raises:
        ValueError: for p_halt outside (0, 1), and as `walks.transition`.
    """
    couplings.require_probability(p_halt)
    transition, n = walks.transition(graph, steps), graph.num_nodes
    alone = transition.sum(axis=1) == 0
    x = np.full(n, 1 / n)
    for _ in range(int(np.ceil(np.log(tolerance / 2) / np.log1p(-p_halt)))):
        shared = p_halt + (1 - p_halt) * x[alone].sum()
        x = shared / n + (1 - p_halt) * (transition.T @ x)
    return jnp.asarray(x, graph.weights.dtype)


def learn(graph: Graph, *, p_halt: float, order: int = 10) -> matching.Permutation:
    """Learn the permutation of VRC Eq. 82, summed over the nodes i at which walks may halt.

    With R_q[j, i] the probability that a walk from j with its length in quantile q halts at i, the
    cost of matching q and r is sum_{ij} R_q[j, i] R_r[j, i]. R_q is exact here, from the powers of
    T; VRC samples it. For small graphs: it takes (order, N, N) numbers.

    Raises:
        ValueError: for p_halt outside (0, 1) or an order below 1.
    """
    chances = _length_chances(p_halt, order)
    transition = walks.transition(graph, "uniform").toarray()
    transition += np.diag(transition.sum(axis=1) == 0)  # a node without neighbours keeps its walks
    power, halting = np.eye(graph.num_nodes), np.zeros((order, *transition.shape))
    for chance in chances.T:
        halting += chance[:, None, None] * power
        power = power @ transition
    rows = halting.reshape(order, -1)
    return matching.assign(rows @ rows.T)


def _length_chances(p_halt: float, order: int) -> Float[np.ndarray, "n t"]:
    """Return P(length = t | length in quantile q), until 1e-9 of the last quantile is left.

    For p_halt below 0.05 `matching.series` ends earlier, and its last term has the rest.
    """
    reached = matching.series(lambda length: jnp.ones(length), p_halt, order)
    survival = reached * (1 - p_halt) ** np.arange(reached.shape[1])
    kept = int(np.sum(survival[-1] > 1e-9))
    return -np.diff(survival, axis=1, append=0)[:, :kept]
