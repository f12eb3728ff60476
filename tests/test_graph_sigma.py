"""The experiments on sigma-coupled walks: what they measure is what they say."""

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from graph_examples import laplacian
from matplotlib import pyplot as plt
from scipy import stats

from experiments.graphs import gp as graph_gp
from experiments.graphs import sigma as graph_sigma
from performer import gp
from performer.graphs import Graph, couplings, features, kernels
from tests.small import read_csv

pytestmark = pytest.mark.thorough


def _graphs():
    made = {"star": networkx.star_graph(4), "tailed": networkx.lollipop_graph(3, 4)}
    return {name: Graph.from_networkx(graph) for name, graph in made.items()}


def _kernel(graph):
    n = graph.num_nodes
    return np.linalg.matrix_power(np.linalg.inv(np.eye(n) + laplacian(_weights(graph))), 2)


def _weights(graph):
    return np.asarray(graph.to_dense(), np.float64)


def test_kernel_errors(monkeypatch):
    """One repeat is one estimate of the library; more are of as many keys and copies."""
    graphs = _graphs()
    exacts = graph_sigma.exact_kernels(graphs)
    for name, graph in graphs.items():
        exact = _kernel(graph)
        (error,) = graph_sigma.kernel_errors({name: graph}, exacts, 1, "antithetic", 0.4)[name]
        kernel = kernels.RegularisedLaplacian(2, 1.0)
        gram = features.graph_random_features(
            jax.random.key(0), graph, kernel, num_walks=2, p_halt=0.4, coupling="antithetic"
        ).gram()
        want = np.linalg.norm(gram - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(want, rel=1e-5)
    monkeypatch.setattr(graph_sigma, "NODES", 30)
    found = graph_sigma.kernel_errors(graphs, exacts, 5, "independent", 0.4)
    assert [len(set(of.tolist())) for of in found.values()] == [5, 5]


@pytest.mark.parametrize("coupled", [False, True])
def test_pagerank_errors(coupled):
    """The mean square is that of indicators: sum_ij Var(walks of j that halt at i) / N^2.

    At p_halt = 1/2 the permutation (1, 0) makes one of two walks halt at once, and the other not:
    they halt at the same node with the probability to return. (6 standard errors.)
    """
    p, graphs, repeats = 0.5, _graphs(), 4000
    coupling = couplings.sigma(np.array([1, 0])) if coupled else "independent"
    found = graph_sigma.pagerank_errors(graphs, repeats, coupling, p)
    for name, graph in graphs.items():
        weights, n = _weights(graph), graph.num_nodes
        transition = weights / weights.sum(axis=1, keepdims=True)
        halting = p * np.linalg.inv(np.eye(n) - (1 - p) * transition)
        want = np.sum(halting * (1 - halting)) / 2 / n**2
        if coupled:
            later = (halting - p * np.eye(n)) / (1 - p)
            want += (np.trace(later) - np.sum(halting**2)) / 2 / n**2
        squares = found[name] ** 2
        assert len(squares) == repeats
        assert abs(squares.mean() - want) < 6 * squares.std() / repeats**0.5
        assert squares.std() / repeats**0.5 < 0.02 * want


def test_figures_of_couplings(tmp_path):
    """A coupling that is worse by construction, in all its ratios."""
    graphs, permutation = _graphs(), np.array([1, 0])

    def errors(coupling, p_halt):
        factor = {"independent": 1.0, "antithetic": 2 * p_halt}.get(coupling, 3 * p_halt)
        return {name: factor * np.array([1.0, 1.1, 1.2]) for name in graphs}

    out, chosen = tmp_path / "new" / "figure_10", {0.25: permutation, 0.5: permutation}
    said = graph_sigma.figure(graphs, errors, chosen, out)
    rows = read_csv(out.with_suffix(".csv"))
    assert [(row["graph"], row["p_halt"]) for row in rows] == [
        (name, p) for name in graphs for p in ("0.25", "0.5")
    ]
    ratios = [(row["antithetic / independent"], row["sigma / independent"]) for row in rows]
    means = [[float(text.split()[0]) for text in pair] for pair in ratios]
    np.testing.assert_allclose(means, [[0.5, 0.75], [1, 1.5]] * 2)
    assert rows[0]["independent"] == "1.100 ± 0.058"
    assert out.with_suffix(".md").read_text() == said
    graph_sigma.figure_3(chosen, tmp_path / "figure_3")
    assert (tmp_path / "figure_3.png").exists()
    assert out.with_suffix(".png").exists()


def test_figure_8(tmp_path, monkeypatch):
    """All ways find permutations of the least objective; the reversal, when no quantiles tie."""
    monkeypatch.setattr(graph_sigma, "ORDERS", (2, 3, 11))
    graph_sigma.figure_8({"tailed": _graphs()["tailed"]}, 40, tmp_path / "figure_8")
    rows = read_csv(tmp_path / "figure_8.csv")
    ways = ["linear", "projected", "quadratic", "reduced"]
    found = [(row["n"], row["learned"]) for row in rows]
    assert found == [(n, w) for n in "23" for w in ways] + [("11", w) for w in ways[:2]]
    rows = rows[:8]
    assert [row["permutation"] for row in rows] == ["1 0"] * 4 + ["2 1 0"] * 4
    assert {row["Cayley distance"] for row in rows} == {"0"}
    assert all(float(row["excess of the objective"]) < 1e-9 for row in rows)
    assert all(0.4 < float(row["error / independent"]) < 1.1 for row in rows)
    assert (tmp_path / "figure_8.png").exists()


def _ladder(number=0, nodes=12):
    graph = Graph.from_networkx(networkx.ladder_graph(nodes))
    values = np.cos(np.arange(2 * nodes) / 4)
    return graph_gp.split(graph, np.arange(2 * nodes), values, count=5, number=number, walks=(2, 4))


@pytest.fixture
def task():
    return _ladder()


def _law(task, gram, scales):
    """The posterior of the test values, noise included, in NumPy."""
    _, output_scale, noise_scale = scales
    gram = output_scale**2 * gram
    noisy = gram[np.ix_(task.train, task.train)] + noise_scale**2 * np.eye(len(task.train))
    solved = gram[np.ix_(task.test, task.train)] @ np.linalg.inv(noisy)
    covariance = gram[np.ix_(task.test, task.test)] - solved @ gram[np.ix_(task.train, task.test)]
    return solved @ task.y, covariance + noise_scale**2 * np.eye(len(task.test))


def test_scores_match_the_equations(task):
    scales, n = gp.Scales(1.7, 1.3, 0.4), 24
    exact = scipy.linalg.expm(-(1.7**2) / 2 * laplacian(_weights(task.graph)))
    phi = scipy.linalg.sqrtm(exact).real + 0.05 * np.random.default_rng(0).normal(size=(n, n))
    reference = graph_gp.law(task, exact, scales)
    process = graph_gp.Process(task, scales, exact, reference)
    got = graph_gp.scores(process, scipy.sparse.csr_array(phi))
    p, q = _law(task, exact, scales), _law(task, phi @ phi.T, scales)
    inverse, shift = np.linalg.inv(q[1]), q[0] - p[0]
    dets = np.linalg.slogdet(q[1])[1] - np.linalg.slogdet(p[1])[1]
    want = (
        np.linalg.norm(phi @ phi.T - exact) / np.linalg.norm(exact),
        np.sqrt(np.mean((q[0] - task.test_y) ** 2)),
        (np.trace(inverse @ p[1]) + shift @ inverse @ shift - 5 + dets) / 2,
    )
    np.testing.assert_allclose(got, want, rtol=1e-8)
    assert reference.covariance.dtype == jnp.float64


def test_split():
    """Standardised by the training values alone; errors are in the units of all."""
    graph, nodes = Graph.from_networkx(networkx.path_graph(30)), np.arange(5, 25)
    values = 10 + 3.0 * np.arange(20)
    task = graph_gp.split(graph, nodes, values, count=4, standardised=True)
    assert sorted([*task.train, *task.test]) == nodes.tolist()
    assert len(task.test) == 4
    known = values[task.train - 5]
    np.testing.assert_allclose(task.y, (known - known.mean()) / known.std())
    np.testing.assert_allclose(task.test_y, (values[task.test - 5] - known.mean()) / known.std())
    assert graph_gp.rmse(task, task.test_y - 2) == pytest.approx(2 * known.std(), rel=1e-5)


def test_load():
    torus = graph_gp.load("torus", None)
    assert torus.graph.num_nodes == 600
    assert set(np.asarray(torus.graph.degrees)) == {4}
    assert len(torus.test) == 30
    with pytest.raises(ValueError, match="'teapot' needs --data_dir"):
        graph_gp.load("teapot", None)


def test_gp_figure(task, tmp_path, monkeypatch):
    """More walks have lower errors, and the fit moves all scales."""
    monkeypatch.setattr(graph_gp, "STEPS", 20)
    monkeypatch.setattr(graph_gp, "ORDER", 4)
    said = graph_gp.figure({"ladder": [task, _ladder(1)]}, 3, tmp_path / "figure_4")
    rows = read_csv(tmp_path / "figure_4.csv")
    assert [(row["m"], row["coupling"]) for row in rows] == [
        (m, coupling) for m in "24" for coupling in ("independent", "antithetic", "sigma")
    ]
    errors = [float(row["error"].split()[0]) for row in rows]
    assert np.mean(errors[3:]) < 0.9 * np.mean(errors[:3])
    assert all(float(row["KL"].split()[0]) > 0 for row in rows)
    assert "- ladder (splits: 2): lengthscale " in said
    assert said.count("of 2 cases") == 9
    assert (tmp_path / "figure_4.png").exists()
    assert not plt.get_fignums()


def test_likeliest_scales():
    """No scale moved by a tenth has a larger likelihood, by SciPy's normal law."""
    task = _ladder(nodes=30)
    y = task.y + 0.3 * np.random.default_rng(3).normal(size=55)
    found = graph_gp.likeliest(task._replace(y=y))

    def likelihood(lengthscale, output_scale, noise_scale):
        kernel = scipy.linalg.expm(-(lengthscale**2) / 2 * laplacian(_weights(task.graph)))
        gram = output_scale**2 * kernel[np.ix_(task.train, task.train)]
        return stats.multivariate_normal(cov=gram + noise_scale**2 * np.eye(55)).logpdf(y)

    most = likelihood(*found)
    for scale in range(3):
        for factor in (0.9, 1.1):
            moved = [x * (factor if i == scale else 1) for i, x in enumerate(found)]
            assert likelihood(*moved) < most


def test_nearest():
    """By lengths, which are the inverse of the weights: 2 is one long road from 3."""
    graph = Graph.from_edges([(0, 1), (1, 2), (2, 3)], 4, [1.0, 1.0, 0.1])
    values = np.array([1.0, 2.0, 4.0, 8.0])
    task = graph_gp.split(graph, np.arange(4), values, count=1)
    task = task._replace(train=np.array([0, 1, 3]), y=values[[0, 1, 3]], test=np.array([2]))
    np.testing.assert_array_equal(graph_gp.nearest(task, 1), [2])
    np.testing.assert_array_equal(graph_gp.nearest(task, 2), [1.5])


def test_predictors(tmp_path, monkeypatch):
    """The mean of the sensors stands first, and all errors are those of the same splits."""
    monkeypatch.setattr(graph_gp, "STEPS", 20)
    splits = [_ladder(number, nodes=30) for number in (0, 1)]
    graph_gp.predictors({"ladder": splits}, tmp_path / "predictors")
    rows = read_csv(tmp_path / "predictors.csv")
    assert [row["predictor"] for row in rows[:3]] == [
        "mean of all sensors",
        "mean of the nearest 5",
        "ladder, fitted, exact",
    ]
    assert len(rows) == 6
    errors = [float(row["RMSE"].split()[0]) for row in rows]
    want = np.mean([np.sqrt(np.mean(task.test_y**2)) for task in splits])
    assert errors[0] == pytest.approx(want, abs=0.01)
    assert max(errors[1:3]) < 0.7 * errors[0]
    assert errors[4] < 0.4 * errors[0], "the exact kernel of the likeliest scales"
