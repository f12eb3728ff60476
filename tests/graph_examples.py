"""Small graphs and float64 references that the tests of `performer.graphs` share."""

import networkx
import numpy as np
import scipy.sparse

from performer.graphs import Graph

EDGES = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (6, 7), (7, 8)]
"""A triangle with a tail, a node alone (5), a path."""
WEIGHTS = [1.0, 0.5, 2.0, 1.5, 0.7, 1.0, 3.0]
NUM_NODES = 9


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


def z_scores(samples, expected):
    """Of the mean over the first axis; 0 where samples and expectation are constantly equal."""
    mean = samples.mean(axis=0)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    same = (error < 1e-12) & (np.abs(mean - expected) < 1e-6)
    return np.where(same, 0, (mean - expected) / np.maximum(error, 1e-12))
