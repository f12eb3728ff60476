"""Every option of `graph_random_features` with each other one, against dense float64 algebra.

A covering array: for any two options and any values of the two, some row has both. Each row draws
`COPIES` disjoint copies of a small graph, which are as many independent estimates, and compares the
means of Phi v and of K v, for three vectors v, with what eigenvalues of a matrix written here say.
"""

import jax
import numpy as np
import pytest
from scipy import stats

from performer.graphs import Graph, couplings, graph_random_features, kernels
from tests.support.covering import covering_array
from tests.support.graph_examples import blocks, laplacian
from tests.support.tiers import tiers

ALARM = 1e-6
"""The rate of false alarms of all rows together, as far as their means have a normal law."""
COPIES = 1500

GRAPHS = {
    # a triangle with a tail, a loop and a double edge; a node alone; a path; a node with a loop
    "mixed": (
        [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (3, 4), (1, 1), (6, 7), (7, 8), (9, 9)],
        [1.0, 0.5, 2.0, 1.5, 0.7, 0.3, 0.8, 1.0, 3.0, 2.0],
        10,
    ),
    "no edges": ([], [], 3),
    "one node": ([], [], 1),
}
KERNELS = {
    # the kernel, and the root of the kernel as a function of an eigenvalue of A
    "Diffusion": (kernels.Diffusion(0.9), lambda a: np.exp(-0.81 / 4 * (1 - a))),
    "random walk": (kernels.RandomWalk(2, 2.5), lambda a: 1.5 + a),
    "Matern": (kernels.Matern(1.5, 1.0), lambda a: (4 - a) ** -0.75),
}
FACTORS = {
    "kernel": [*KERNELS],
    "coupling": ["independent", "antithetic", "ensemble", "sigma"],
    "num_walks": [1, 5],
    "steps": ["uniform", "weighted"],
    "adjacency": ["normalised", "weights"],
    "unbiased_diagonal": [False, True],
    "parallel": [False, True],  # each edge as two halves
}
OPTIONS = ("num_walks", "steps", "adjacency", "unbiased_diagonal")


def all_rows():
    """Of the mixed graph; and of those where nothing is drawn, in one coupling and kernel."""
    fixed = {"coupling": "antithetic", "kernel": "Matern", "num_walks": 1, "parallel": False}
    few = {"graph": ["no edges", "one node"]} | {n: v for n, v in FACTORS.items() if n not in fixed}
    mixed, others = (covering_array(factors, lambda *_: False) for factors in (FACTORS, few))
    return [row | {"graph": "mixed"} for row in mixed] + [row | fixed for row in others]


ROWS = all_rows()


def root_and_matrix(row):
    """The graph's matrix, entry by entry, and the root of the kernel, both in float64."""
    edges, weights, n = GRAPHS[row["graph"]]
    matrix = np.zeros((n, n))
    for (i, j), weight in zip(edges, weights, strict=True):
        matrix[i, j] += 0.25 * weight
        matrix[j, i] += 0.25 * weight * (i != j)
    of_walks = matrix if row["adjacency"] == "weights" else np.eye(n) - laplacian(matrix)
    eigenvalues, vectors = np.linalg.eigh(of_walks)
    return (vectors * KERNELS[row["kernel"]][1](eigenvalues)) @ vectors.T


def draw(row, count, seed):
    """Phi_1, and Phi_2 if there is one, as blocks (count, n, n); without edges one is enough."""
    edges, weights, n = GRAPHS[row["graph"]]
    count = count if edges else 1
    shifts = n * np.arange(count)[:, None, None]
    ends = (np.array(edges, int).reshape(1, -1, 2) + shifts).reshape(-1, 2)
    sizes = np.tile(0.25 * np.array(weights), count)
    if row["parallel"]:
        ends, sizes = np.concatenate([ends, ends]), np.tile(sizes / 2, 2)
    coupling = row["coupling"]
    found = graph_random_features(
        jax.random.key(seed),
        Graph.from_edges(ends, n * count, sizes),
        KERNELS[row["kernel"]][0],
        p_halt=0.4,
        coupling=couplings.sigma(np.array([3, 2, 0, 1])) if coupling == "sigma" else coupling,
        **{name: row[name] for name in OPTIONS},
    )
    parts = (found.left, found.right)
    return [blocks(part.to_scipy(), count) for part in parts if part is not None]


def scores(samples, expected):
    """z of the means; where all samples are alike, whether they are right instead."""
    samples = np.asarray(samples, np.float64)
    spread = np.ptp(samples, axis=0)
    fixed = spread <= 1e-6 * np.abs(expected)
    np.testing.assert_allclose(samples[0][fixed], expected[fixed], rtol=1e-5, atol=1e-6)
    error = samples.std(axis=0) / np.sqrt(len(samples))
    return ((samples.mean(axis=0) - expected) / np.where(fixed, np.inf, error)).ravel()


def all_scores(row, seed):
    """Of Phi_1 v, Phi_2 v and K v; without the diagonal of K when one ensemble makes it."""
    root = root_and_matrix(row)
    n = len(root)
    v = np.concatenate([np.ones((n, 1)), np.random.default_rng(0).standard_normal((n, 2))], axis=1)
    left, *others = draw(row, COPIES, seed)
    if not others:
        off = 1 - np.eye(n)
        return np.concatenate([
            scores(left @ v, root @ v),
            scores((left @ left.swapaxes(1, 2) * off) @ v, (root @ root * off) @ v),
        ])  # fmt: skip
    right = others[0]
    product = left @ right.swapaxes(1, 2)
    gram = (product + product.swapaxes(1, 2)) / 2
    pairs = ((left, root), (right, root), (gram, root @ root))
    return np.concatenate([scores(found @ v, expected @ v) for found, expected in pairs])


@pytest.mark.parametrize("number", tiers(range(len(ROWS)), 10))
def test_a_row(number):
    found = all_scores(ROWS[number], number)
    count = sum(6 * len(root_and_matrix(row)) for row in ROWS)  # or half as many again
    assert np.abs(found).max() < stats.norm.isf(ALARM / 3 / count), ROWS[number]
