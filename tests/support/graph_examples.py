"""Small graphs and float64 references that the tests of `performer.graphs` share."""

import networkx
import numpy as np
import scipy.sparse
from scipy import stats

from performer.graphs import Graph

EDGES = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (6, 7), (7, 8)]
"""A triangle with a tail, a node alone (5), a path."""
WEIGHTS = [1.0, 0.5, 2.0, 1.5, 0.7, 1.0, 3.0]
NUM_NODES = 9
ALARM = 1e-6
"""Rate of false alarms of each statistical test."""


def weights_matrix():
    """W, written entry by entry."""
    matrix = np.zeros((NUM_NODES, NUM_NODES))
    for (i, j), weight in zip(EDGES, WEIGHTS, strict=True):
        matrix[i, j] += weight
        matrix[j, i] += weight
    return matrix


def laplacian(weights):
    """The normalised Laplacian D^{-1/2} (D - W) D^{-1/2}, with 0 for 1 / 0."""
    strengths = weights.sum(axis=1)
    roots = np.array([1 / np.sqrt(s) if s > 0 else 0.0 for s in strengths])
    return roots[:, None] * (np.diag(strengths) - weights) * roots


def example():
    return Graph.from_edges(np.array(EDGES), NUM_NODES, np.array(WEIGHTS))


def karate():
    return Graph.from_networkx(networkx.karate_club_graph(), weight=None)


def copies(graph, count):
    """`count` disjoint copies: one draw on it is as many independent ones."""
    return Graph.from_scipy(scipy.sparse.kron(scipy.sparse.eye_array(count), graph.to_scipy()))


def blocks(matrix, count):
    """The diagonal blocks (count, n, n) of a sparse matrix over `copies`."""
    n = matrix.shape[0] // count
    coo = matrix.tocoo()
    found = np.zeros((count, n, n))
    i, j = coo.coords
    assert np.array_equal(i // n, j // n), "a walk left its component"
    np.add.at(found, (i // n, i % n, j % n), coo.data)
    return found


def mean_loads(walks, num_copies, step):
    """Mean load (copies, n, n) left at (start, node) after so many steps, for each copy."""
    chosen = np.asarray(walks.step) == step
    load, start, node = (np.asarray(x)[chosen] for x in (walks.load, walks.start, walks.node))
    matrix = scipy.sparse.coo_array((load, (start, node)), shape=(walks.num_nodes,) * 2)
    return blocks(matrix, num_copies) / walks.num_walks


def largest_score(scores):
    """Return the |z| that none of so many independent scores exceeds, with alarms at rate ALARM."""
    return stats.norm.isf(ALARM / 2 / scores.size)


def z_scores(samples, expected):
    """Of the mean over the first axis; 0 where samples and expectation are constantly equal."""
    mean = samples.mean(axis=0)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    same = (error < 1e-12) & (np.abs(mean - expected) < 1e-6)
    return np.where(same, 0, (mean - expected) / np.maximum(error, 1e-12))


def masked(q, k, v, w, mask, exists=None):
    """Attention with the weights exp(w.q) exp(w.k - |k|^2 / 2) M_ij, pair by pair in float64.

    q (b, t, n, h), k and v of as many or fewer heads; w (m, h) or (n, m, h), mask (t, t) or
    (n, t, t); exists (b, t), the keys that do.
    """
    q, k, v, w = (np.asarray(x, np.float64) for x in (q, k, v, w))
    n, root = q.shape[2], q.shape[3] ** -0.25
    k, v = (np.repeat(x, n // x.shape[2], axis=2) for x in (k, v))
    w = np.broadcast_to(w, (n, *w.shape[-2:]))
    half = np.sum((k * root) ** 2, axis=-1).swapaxes(1, 2)[..., None] / 2
    left, right = (np.einsum("btnh,nmh->bntm", x * root, w) for x in (q, k))
    weights = np.exp(left) @ np.exp(right - half).swapaxes(2, 3) * mask
    weights = weights if exists is None else weights * exists[:, None, None]
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnv->btnv", weights / np.where(total == 0, 1, total), v)
