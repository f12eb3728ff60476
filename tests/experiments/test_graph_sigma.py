"""The experiments on sigma-coupled walks: what they measure is what they say."""

import networkx
import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.graphs import gp as graph_gp
from experiments.graphs import sigma as graph_sigma
from performer.graphs import Graph
from tests.support.small import read_csv

pytestmark = pytest.mark.thorough


def test_figure_8(tmp_path, monkeypatch):
    """All ways find permutations of the least objective; the reversal, when no quantiles tie."""
    monkeypatch.setattr(graph_sigma, "ORDERS", (2, 3, 11))
    tailed = Graph.from_networkx(networkx.lollipop_graph(3, 4))
    graph_sigma.figure_8({"tailed": tailed}, 40, tmp_path / "figure_8")
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
    task = graph_gp.split(graph, np.arange(2 * nodes), values, 5, number)
    return task._replace(walks=(2, 4))


@pytest.fixture
def task():
    return _ladder()


def test_gp_figure(task, tmp_path, monkeypatch):
    """More walks have lower errors, and the fit moves all scales."""
    monkeypatch.setattr(graph_gp, "STEPS", 20)
    monkeypatch.setattr(graph_gp, "ORDER", 4)
    said = graph_gp.figure({"ladder": [task, _ladder(1)]}, 3, tmp_path / "figure_4")
    rows = read_csv(tmp_path / "figure_4.csv")
    assert [(row["m"], row["coupling"]) for row in rows] == [
        (m, coupling) for m in "24" for coupling in ("independent", "antithetic", "sigma")
    ]
    errors = [float(row["error"]) for row in rows]
    assert np.mean(errors[3:]) < 0.9 * np.mean(errors[:3])
    assert all(float(row["KL"]) > 0 for row in rows)
    assert "- ladder (splits: 2): lengthscale " in said
    assert said.count("of 2 cases") == 9
    assert (tmp_path / "figure_4.png").exists()
    assert not plt.get_fignums()
