"""Objectives of the sigma-coupling against loops over nodes and quantiles; solvers against all."""

import itertools

import jax
import networkx
import numpy as np
import pytest

from performer.graphs import Graph, couplings, features, kernels, matching
from tests.support.graph_examples import blocks, copies, example, laplacian, weights_matrix

P_HALT, ORDER = 0.35, 5
F = kernels.RegularisedLaplacian(2, 1.0)
GRAPH = Graph.from_networkx(networkx.erdos_renyi_graph(12, 0.4, seed=1))
ADJACENCY = np.eye(9) - laplacian(weights_matrix())


def node_responses(graph, node):
    """psi_q(node), over the nodes of the graph (VRC Eq. 54)."""
    values, vectors = np.linalg.eigh(np.asarray(graph.normalised().to_scipy().toarray()))
    series = matching.series(F, P_HALT, ORDER)
    spectral = series @ values ** np.arange(series.shape[1])[:, None]
    return spectral * vectors[node] @ vectors.T


def node_edges(responses):
    """u_{q, r} of one node (VRC Eq. 60), of its responses."""
    sums = responses[:, None] + responses[None]
    return (sums[..., :, None] * sums[..., None, :]).reshape(*sums.shape[:2], -1)


def mean_features(node, quantile, terms=400):
    """VRC Eqs 52 and 54 by the definition: a mean over lengths of sums over their steps."""
    f = np.asarray(F(terms), np.float64)
    powers = [np.eye(9)[node]]
    for _ in range(terms - 1):
        powers.append(ADJACENCY @ powers[-1])
    partial_sums = np.cumsum([f[t] * (1 - P_HALT) ** -t * powers[t] for t in range(terms)], axis=0)
    total, low = np.zeros(9), 0.0
    for length in range(terms):
        high = 1 - (1 - P_HALT) ** (length + 1)
        overlap = min(high, (quantile + 1) / ORDER) - max(low, quantile / ORDER)
        total += max(overlap, 0) * ORDER * partial_sums[length]
        low = high
    return total


def test_responses_are_mean_features():
    for node in (0, 3, 5):
        found = node_responses(example(), node)
        expected = [mean_features(node, q) for q in range(ORDER)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_averages_over_all_pairs_of_nodes():
    """The linear costs, and the quadratic objective, by loops over nodes (VRC Eqs 55 and 56)."""
    of_nodes = [node_responses(GRAPH, i) for i in range(12)]
    spectral = matching.spectral_responses(GRAPH, F, P_HALT, ORDER)
    costs, permutation = np.zeros((ORDER, ORDER)), np.array([3, 0, 4, 1, 2])
    quadratic = 0.0
    for i, j in itertools.product(range(12), repeat=2):
        for q, r in itertools.product(range(ORDER), repeat=2):
            a, b = of_nodes[i], of_nodes[j]
            costs[q, r] += ((a[q] + a[r]) @ (b[q] + b[r])) ** 2
            quadratic += ((a[q] + a[permutation[q]]) @ (b[r] + b[permutation[r]])) ** 2
    np.testing.assert_allclose(matching.linear_costs(spectral), costs, rtol=1e-8)
    edges = matching.spectral_edges(spectral)
    np.testing.assert_allclose(matching.objective(permutation, edges, edges), quadratic, rtol=1e-8)


def test_solvers_find_the_best_of_all():
    a, b = (node_edges(node_responses(GRAPH, i)) for i in (0, 3))
    values = {p: matching.objective(np.array(p), a, b) for p in itertools.permutations(range(5))}
    best = matching.enumerate_all(a, b)
    assert values[tuple(best)] == min(values.values()) < np.median(list(values.values()))
    rng = np.random.default_rng(0)
    small = matching.reduced(rng, a, b, size=2000)
    assert small[0].shape == (5, 5, 2000)
    ratios = np.sum(small[0] ** 2, axis=-1) / np.sum(a**2, axis=-1)
    assert np.abs(ratios - 1).max() < 0.2, "six standard deviations"
    after = matching.enumerate_all(*small)
    assert values[tuple(after)] < 1.02 * min(values.values())
    same = {p: matching.objective(np.array(p), a, a) for p in itertools.permutations(range(5))}
    found = matching.project(rng, a, num_projections=200)
    assert same[tuple(found)] == min(same.values())


def test_one_projection_need_not_do():
    """Lemma C.2 has a chance for each; the best of many is kept, and it is no worse than one."""
    edges = matching.spectral_edges(matching.spectral_responses(GRAPH, F, P_HALT, 7))
    values = [
        matching.objective(matching.project(np.random.default_rng(s), edges, count), edges, edges)
        for s in range(5)
        for count in (1, 300)
    ]
    assert max(values[1::2]) < np.mean(values[::2])
    best = matching.objective(matching.enumerate_all(edges, edges), edges, edges)
    assert min(values) >= best * (1 - 1e-12)


def test_the_assignment_is_optimal_and_short_walks_meet_long_ones():
    spectral = matching.spectral_responses(GRAPH, F, P_HALT, ORDER)
    costs = matching.linear_costs(spectral)
    totals = [costs[np.arange(5), list(p)].sum() for p in itertools.permutations(range(5))]
    found = matching.learn(GRAPH, F, p_halt=P_HALT, order=ORDER)
    np.testing.assert_allclose(costs[np.arange(5), found].sum(), min(totals), rtol=1e-12)
    assert found[-1] < 3 <= found[0]


@pytest.mark.thorough
def test_learned_pairs_have_a_lower_error_than_independent_ones():
    """On the graph they were learned on, two walks at p = .35: many standard errors."""
    exact, count = np.asarray(kernels.RegularisedLaplacian().dense(GRAPH)), 150
    sigma = couplings.sigma(matching.learn(GRAPH, F, p_halt=P_HALT))
    errors = {}
    for name, coupling in (("independent", couplings.independent), ("sigma", sigma)):
        options = dict(num_walks=2, p_halt=P_HALT, coupling=coupling)
        found = features.graph_random_features(
            jax.random.key(0), copies(GRAPH, count), F, **options
        )
        phi = blocks(found.left.to_scipy(), count)
        errors[name] = np.linalg.norm(phi @ phi.swapaxes(1, 2) - exact, axis=(1, 2))
    gain = np.mean(errors["independent"]) - np.mean(errors["sigma"])
    assert gain > 3 * np.sqrt(sum(np.var(x) / len(x) for x in errors.values()))
