"""PageRank: power iteration against networkx, walks against power iteration."""

import jax
import networkx
import numpy as np
import pytest
from scipy import optimize, stats

from performer.graphs import Graph, couplings, pagerank
from tests.support.graph_examples import NUM_NODES, copies, example, z_scores

ALARM = 1e-6


def of_networkx(graph, p_halt, weight):
    of_networkx = networkx.from_scipy_sparse_array(graph.to_scipy())
    ranks = networkx.pagerank(of_networkx, 1 - p_halt, weight=weight, tol=1e-12, max_iter=1000)
    return np.array([ranks[i] for i in range(graph.num_nodes)])


def test_power_iteration_is_that_of_networkx():
    for p_halt in (0.15, 0.6):
        for steps, weight in (("uniform", None), ("weighted", "weight")):
            found = pagerank.power_iteration(example(), p_halt=p_halt, steps=steps)
            expected = of_networkx(example(), p_halt, weight)
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("coupling", "steps"),
    [("independent", "uniform"), ("antithetic", "weighted"), ("sigma", "uniform")],
)
def test_walks_are_unbiased(steps, coupling):
    """Draws on disjoint copies: the PageRank of a node is that of one copy over their number."""
    count, p_halt = 3000, 0.3
    if coupling == "sigma":
        coupling = couplings.sigma(pagerank.learn(example(), p_halt=p_halt))
    found = pagerank.pagerank(
        jax.random.key(0), copies(example(), count), num_walks=2, p_halt=p_halt,
        coupling=coupling, steps=steps,
    )  # fmt: skip
    samples = np.asarray(found, np.float64).reshape(count, NUM_NODES) * count
    weight = None if steps == "uniform" else "weight"
    scores = z_scores(samples, of_networkx(example(), p_halt, weight))
    assert np.abs(scores).max() < stats.norm.isf(ALARM / 2 / NUM_NODES)
    assert abs(float(found.sum()) - 1) < 1e-4


def test_permutations_of_high_order_reach_the_optimal_transport():
    """VRC Thm D.1 for PageRank on a binary tree, where lengths are discrete; all in closed form.

    A permutation density is the mean of some of twice its order: each doubling is as good or
    better, though 32 is worse than 30. The optimum is a linear program over the pairs of lengths.
    """
    tree, p_halt, longest = networkx.balanced_tree(2, 3), 0.3, 40
    weights = networkx.to_numpy_array(tree)
    transition = weights / weights.sum(axis=1, keepdims=True)
    powers = [np.linalg.matrix_power(transition, length).ravel() for length in range(longest)]
    costs = np.array(powers) @ np.transpose(powers)  # how often both halt at one node
    ends = np.append(1 - (1 - p_halt) ** np.arange(longest), 1)
    law, ones, each = np.diff(ends), np.ones(longest), np.eye(longest)
    marginals = np.concatenate([np.kron(each, ones), np.kron(ones, each)])
    least = optimize.linprog(costs.ravel(), A_eq=marginals, b_eq=np.tile(law, 2)).fun
    values = {}
    for order in (1, 2, 4, 8, 16, 30, 32, 64):
        edges = np.arange(order + 1)[:, None] / order
        overlaps = np.minimum(edges[1:], ends[1:]) - np.maximum(edges[:-1], ends[:-1])
        chances = order * np.maximum(overlaps, 0)
        found = pagerank.learn(Graph.from_networkx(tree), p_halt=p_halt, order=order)
        values[order] = np.sum((chances @ costs) * chances[found]) / order
    assert values[1] == pytest.approx(law @ costs @ law)
    doubled = [values[2**k] for k in range(7)]
    assert np.all(np.diff(doubled) < 0)
    assert values[30] < values[32]
    assert 0 < values[64] - least < 0.01 * (values[1] - least)


def test_the_costs_count_pairs_that_halt_together():
    """Eq. 82 for a path of two nodes: after l steps a walk is where the parity of l says."""
    two = Graph.from_edges([(0, 1)], 2)
    found = pagerank.learn(two, p_halt=0.5, order=2)
    assert found.tolist() == [1, 0], "length 0 with the rest, for they halt apart more often"


def test_a_graph_without_edges():
    """Walks stay, and every node ranks alike."""
    graph = Graph.from_edges(np.zeros((0, 2), int), 3)
    found = pagerank.pagerank(jax.random.key(0), graph, num_walks=2, p_halt=0.2)
    np.testing.assert_allclose(found, 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(pagerank.power_iteration(graph, p_halt=0.2), 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("steps", ["uniform", "weighted"])
def test_a_hub_with_very_many_neighbours(steps):
    """A star in closed form: h = p / N + (1 - p) d l, l = p / N + (1 - p) h / d."""
    d, p = 300_000, 0.15
    leaves = np.arange(1, d + 1)
    star = Graph.from_edges(np.stack([0 * leaves, leaves], axis=1), d + 1, np.full(d, 0.1))
    found = pagerank.power_iteration(star, p_halt=p, steps=steps)
    hub = p / (d + 1) * (1 + (1 - p) * d) / (1 - (1 - p) ** 2)
    np.testing.assert_allclose(found[0], hub, rtol=1e-6)
    np.testing.assert_allclose(found[1:], p / (d + 1) + (1 - p) * hub / d, rtol=1e-5)
