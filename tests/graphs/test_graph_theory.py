"""Closed forms of the errors of graph random features, against draws and linear systems."""

from functools import partial

import jax
import networkx
import numpy as np
import pytest
from scipy import stats

from performer.graphs import Graph, couplings, features, kernels, pagerank, theory
from tests.support.graph_examples import blocks, copies, example
from tests.support.tiers import tiers

EDGES = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 0), (3, 5)]
WEIGHTS = [1.0, 0.5, 2.0, 1.5, 0.7, 1.0, 3.0]


def weighted():
    return Graph.from_edges(np.array(EDGES), 6, np.array(WEIGHTS))


def ensembles(graph, kernel, draws, **walks):
    """Features (draws, n, n) in float64, all drawn at once on copies of the graph."""
    many, coupling = copies(graph, draws), walks.pop("coupling")
    if isinstance(coupling, theory.Group):
        coupling = partial(couplings.antithetic, **coupling._asdict())
    sampled = features.sample(jax.random.key(0), many, coupling=coupling, **walks)
    return blocks(features.modulate(sampled, kernel).to_scipy(), draws)


CASES = {
    "independent": dict(coupling="independent", p_halt=0.3, num_walks=3),
    "antithetic, one of them alone": dict(coupling="antithetic", p_halt=0.3, num_walks=3),
    "antithetic, halting at once": dict(coupling="antithetic", p_halt=0.6, num_walks=2),
    "ensemble and a part of one": dict(coupling="ensemble", p_halt=0.25, num_walks=6),
    "weighted": dict(coupling="antithetic", p_halt=0.4, num_walks=2, steps="weighted"),
    "four, of whom neighbours halt at once": dict(
        coupling=theory.Group(0.25, 4), p_halt=0.3, num_walks=7
    ),
}


@pytest.mark.parametrize("name", tiers(CASES, list(CASES)[-2:]))
def test_expected_errors(name):
    """The mean of 4,000 pairs of ensembles; false alarms 1e-4 for each case.

    With two orders of a pair counted as one, or antithetic walks taken for independent ones, the
    error is off by more than six standard errors in the cases of pairs.
    """
    graph, kernel = (example() if name == "independent" else weighted()), kernels.Diffusion(1.5)
    phi = ensembles(graph, kernel, 8000, **CASES[name])
    exact = np.asarray(kernel.dense(graph), np.float64)
    products = phi[::2] @ phi[1::2].swapaxes(1, 2)
    squares = np.sum((products - exact) ** 2, axis=(1, 2)) / np.sum(exact**2)
    expected = theory.expected_error(graph, kernel, **CASES[name]) ** 2
    z = (squares.mean() - expected) / stats.sem(squares)
    assert abs(z) < stats.norm.isf(1e-4 / 2), (z, squares.mean(), expected)


def test_second_moments_of_one_walk():
    """S, entry by entry, from all walks of up to 40 steps, step by step."""
    graph, kernel, p_halt = weighted(), kernels.Diffusion(1.5), 0.3
    f = np.asarray(kernel(40), np.float64)
    weights = np.zeros((6, 6))
    for (i, j), weight in zip(EDGES, WEIGHTS, strict=True):
        weights[i, j] = weights[j, i] = weight
    strengths = weights.sum(axis=1)
    adjacency = weights / np.sqrt(strengths * strengths[:, None])
    chances = (weights > 0) / (weights > 0).sum(axis=1, keepdims=True)
    # E[load load' 1[visits]]: of the visit u at step s, and of v at step t >= s.
    total = np.zeros((6, 6))
    seconds = np.eye(6)
    loads = np.where(weights > 0, adjacency / np.where(chances > 0, chances, 1), 0) / (1 - p_halt)
    for s in range(40):
        firsts = np.eye(6)
        for t in range(s, 40):
            part = f[s] * f[t] * seconds.sum(axis=0)[:, None] * firsts
            total += part if s == t else part + part.T
            firsts = firsts @ ((1 - p_halt) * chances * loads)
        seconds = seconds @ ((1 - p_halt) * chances * loads**2)
    spectrum = theory._spectrum(graph, kernel, "uniform")
    np.testing.assert_allclose(theory._of_one_walk(spectrum, p_halt), total, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.5, 0.2, 0.05, 0.9])
def test_survival(offset):
    """Of two walkers on the circle, by counting; qGRF Thm 3.4: independent at p (1 - p)."""
    t = (np.arange(100_000) + 0.5) / 100_000
    for p_halt in (0.1, 0.3, 0.6):
        both = (t >= p_halt) & (np.mod(t + offset, 1) >= p_halt)
        assert abs(theory.survival(p_halt, offset) - both.mean()) < 1e-4
        assert theory.survival(p_halt, p_halt * (1 - p_halt)) == pytest.approx((1 - p_halt) ** 2)


@pytest.mark.parametrize("q", [0.4, 0.49, 0.6])
def test_pagerank_of_pairs(q):
    """Where both walkers halt, from the linear system of the pair's two places."""
    rng, p_halt, n = np.random.default_rng(0), 0.3, 4
    transition = rng.uniform(size=(n, n))
    transition /= transition.sum(axis=1, keepdims=True)
    one, both = 1 - p_halt - q, 2 * p_halt - 1 + q
    alone = p_halt * np.linalg.inv(np.eye(n) - (1 - p_halt) * transition)
    moves = np.kron(transition, transition)
    want = np.zeros((n, n))
    for i in range(n):
        here = np.eye(n)[i]
        later = transition @ alone[:, i]
        gain = both * np.kron(here, here) + one * (np.kron(here, later) + np.kron(later, here))
        value = np.linalg.solve(np.eye(n * n) - q * moves, gain).reshape(n, n)
        want[:, i] = np.diag(value)
    after = np.linalg.inv(np.eye(n) - (1 - p_halt) * transition)
    np.testing.assert_allclose(theory._both(transition, after, p_halt, q), want, rtol=1e-10)


@pytest.mark.thorough
def test_pagerank_variance():
    """Of 4,000 draws: chi^2 of each node's variance at 1e-4 together; qGRF Thm 8.1."""
    graph, draws = weighted(), 4000
    many = copies(graph, draws)
    for coupling, m in (("antithetic", 3), ("ensemble", 5)):
        ranks = pagerank.pagerank(
            jax.random.key(1), many, num_walks=m, p_halt=0.3, coupling=coupling
        )
        ranks = np.asarray(ranks, np.float64).reshape(draws, 6) * draws
        want = theory.pagerank_variance(graph, num_walks=m, p_halt=0.3, coupling=coupling)
        spread = np.sqrt((stats.kurtosis(ranks, axis=0) + 2) / draws)
        z = (ranks.var(axis=0) / want - 1) / spread
        assert np.abs(z).max() < stats.norm.isf(1e-4 / 24), (coupling, z)
        alone = theory.pagerank_variance(graph, num_walks=m, p_halt=0.3, coupling="independent")
        assert np.all(want < alone)


def test_what_is_recommended_reaches_the_tolerance_in_fewer_visits():
    graph, kernel = weighted(), kernels.RegularisedLaplacian(2, 1.0)
    best = theory.recommend(graph, kernel, 0.05)
    walks = dict(num_walks=best.num_walks, p_halt=best.p_halt)
    error = theory.expected_error(graph, kernel, coupling=best.coupling, **walks)
    assert error == pytest.approx(best.error)
    assert best.error <= 0.05 < best.independent
    assert best.independent == theory.expected_error(graph, kernel, coupling="independent", **walks)
    assert best.visits == pytest.approx(6 * best.num_walks / best.p_halt)
    fewer = {**walks, "num_walks": best.num_walks - 5}
    assert theory.expected_error(graph, kernel, coupling=best.coupling, **fewer) > 0.05


def test_of_couplings_that_take_as_many_walks_the_best_is_recommended():
    graph = Graph.from_networkx(networkx.complete_graph(12))
    for tolerance in (0.04, 0.05, 0.06, 0.08):
        best = theory.recommend(graph, kernels.RegularisedLaplacian(2, 0.3), tolerance)
        assert best.coupling == "antithetic" or best.num_walks % 2
