"""Experiments on graphs: what they load, and that they measure what their equations say."""

import jax
import networkx
import numpy as np
import pytest
from scipy import stats

from experiments.graphs import data as graph_data
from experiments.graphs import kernels as graph_kernels
from experiments.graphs import reinforced, termination
from experiments.graphs import tasks as graph_tasks
from performer.graphs import Graph, couplings, features
from tests.support.graph_examples import (
    ALARM,
    NUM_NODES,
    copies,
    example,
    largest_score,
    mean_loads,
    weights_matrix,
    z_scores,
)
from tests.support.small import read_csv

pytestmark = pytest.mark.thorough

PATH = [(0, 1), (1, 2)]
RING = [(i, (i + 1) % 40) for i in range(40)]


def write(path, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def test_generated_graphs_have_the_sizes_of_the_paper():
    found = {name: graph_data.load(name) for name in graph_data.GENERATED}
    sizes = {name: (graph.num_nodes, len(graph.indices) // 2) for name, graph in found.items()}
    assert {name: size[0] for name, size in sizes.items()} == {
        "Small ER": 20, "Larger ER": 100, "Binary tree": 127, "Ladder": 100,
    }  # fmt: skip
    assert (sizes["Binary tree"][1], sizes["Ladder"][1]) == (126, 148)
    for name, p in (("Small ER", 0.2), ("Larger ER", 0.04)):
        pairs = sizes[name][0] * (sizes[name][0] - 1) / 2
        assert abs(sizes[name][1] - pairs * p) < 4 * np.sqrt(pairs * p * (1 - p))
        assert int(found[name].degrees.min()) > 0


PATH_AND_EDGE = [Graph.from_edges(PATH, 3), Graph.from_edges([(0, 1)], 2)]


def test_kernel_errors_are_those_of_the_librarys_estimate(monkeypatch):
    """A block of one gram matrix for each graph; repeats are drawn independently."""
    monkeypatch.setattr(graph_kernels, "WALKS", (2,))
    key, both = jax.random.key(1), graph_data.side_by_side(PATH_AND_EDGE)
    options = dict(num_walks=2, p_halt=0.5, coupling="antithetic")
    gram = features.graph_random_features(key, both, graph_kernels.KERNEL, **options).gram()
    found = graph_kernels.kernel_errors(key, PATH_AND_EDGE, "antithetic", 1)
    assert found.shape == (2, 1, 1)
    for graph, at, error in zip(PATH_AND_EDGE, (np.s_[:3], np.s_[3:]), found.ravel(), strict=True):
        adjacency = np.asarray(graph.to_dense(), np.float64)
        scale = 1 / np.sqrt(adjacency.sum(axis=1))
        laplacian = np.eye(len(scale)) - adjacency * np.outer(scale, scale)
        inverse = np.linalg.inv(np.eye(len(scale)) + 0.01 * laplacian)
        exact = inverse @ inverse
        want = np.linalg.norm(np.asarray(gram)[at, at] - exact) ** 2 / np.linalg.norm(exact) ** 2
        assert error == pytest.approx(want, rel=1e-3)
    more = graph_kernels.kernel_errors(key, PATH_AND_EDGE, "independent", 20)
    assert all(len(np.unique(of)) > 3 for of in more)


def test_loads_of_reinforced_walks_are_unbiased():
    """E load[step = t, i -> x] = (W^t)_{ix}, as for all walks (VRC Eq. 50 with f = 1)."""
    p_halt, graph = 0.4, copies(example(), 400)
    draws = []
    for seed in range(1, 11):
        key = jax.random.key(seed)
        lengths = couplings.lengths(key, "antithetic", graph.num_nodes, 3, p_halt)
        draws.append(reinforced.sample(key, graph, lengths, p_halt=p_halt))
    power = np.eye(NUM_NODES)
    for t in range(4):
        scores = z_scores(np.concatenate([mean_loads(x, 400, t) for x in draws]), power)
        assert np.abs(scores).max() < largest_score(scores), t
        power = power @ weights_matrix()


def test_reinforced_walks_avoid_edges_of_earlier_ones():
    """On a ring, the second of two steps goes the same way with odds e^-1 : 1."""
    nodes = 3000
    ring = Graph.from_networkx(networkx.cycle_graph(nodes))
    walks = reinforced.sample(jax.random.key(0), ring, np.ones((nodes, 2), np.int32), p_halt=0.4)
    first, second = np.asarray(walks.node)[np.asarray(walks.step) == 1].reshape(nodes, 2).T
    chance = np.exp(-1) / (1 + np.exp(-1))
    z = ((first == second).mean() - chance) / np.sqrt(chance * (1 - chance) / nodes)
    assert abs(z) < stats.norm.isf(ALARM / 2)


def test_kernel_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_kernels, "WALKS", (4,))
    graph_kernels.main(graphs=["Ladder"], repeats=20, out=tmp_path)
    names = ["independent", "antithetic", "reinforced"]
    for figure, walks in (("figure_2", names), ("figure_4", names[:2])):
        rows = read_csv(tmp_path / f"{figure}.csv")
        assert list(rows[0]) == ["graph", "N", "walks", "m", "mean", "mean ±"]
        assert [(row["walks"], row["m"]) for row in rows] == [(name, "4") for name in walks]
        first, *others = [float(row["mean"]) for row in rows]
        assert 0.6 * first < others[0] < first
        assert all(0.8 * first < other < 2 * first for other in others[1:])
        assert "above in 0 of 1" in (tmp_path / f"{figure}.md").read_text()
        assert (tmp_path / f"{figure}.png").exists()


def test_termination(tmp_path, monkeypatch):
    """At p = 1/2 ensembles and circles are pairs; draws agree (false alarms 1e-5 for each)."""
    monkeypatch.setattr(termination, "P_HALT", (0.5,))
    monkeypatch.setattr(termination, "P_DRAWN", (0.5,))
    monkeypatch.setattr(termination, "SIGMAS", (1.0,))
    monkeypatch.setattr(termination, "WALKS", 8)
    termination.main(graphs=("karate",), draws=400, out=tmp_path)
    (row,) = read_csv(tmp_path / "ratios.csv")
    pairs = float(row["pairs"])
    assert pairs < 0.95
    np.testing.assert_allclose([float(row["ensembles"]), float(row["circles"])], pairs, rtol=1e-12)
    drawn = read_csv(tmp_path / "draws.csv")
    assert [row["coupling"] for row in drawn] == ["pairs", "ensembles", "close pairs", "circles"]
    assert all(abs(float(row["apart by"])) < 4.5 for row in drawn)
    assert all(float(row["±"]) < 0.03 for row in drawn)
    (row,) = read_csv(tmp_path / "recommended.csv")
    assert float(row["error"]) <= 0.1 < float(row["independent"])
    assert (tmp_path / "ratios.png").exists()


def test_task_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(graph_tasks, "GRAPHS", {1: ("Ladder",), 2: ("two",)})
    monkeypatch.setattr(graph_tasks, "MESHES", ("ring",))
    pairs = [(i, j) for i in range(10) for j in range(i) if (i < 5) == (j < 5)]
    write(tmp_path / "graphs" / "two.npz", edges=[*pairs, (0, 9)], n_nodes=10)
    angles = np.arange(40) * 2 * np.pi / 40
    normals = np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    write(tmp_path / "meshes" / "ring.npz", edges=RING, vertex_normals=normals)
    graph_tasks.main(data_dir=tmp_path, trials=100, out=tmp_path / "out")
    rows = [read_csv(tmp_path / "out" / f"table_{number}.csv")[0] for number in (1, 2, 3)]
    assert [(row["graph"], row["N"]) for row in rows] == [
        ("Ladder", "100"), ("two", "10"), ("ring", "40")
    ]  # fmt: skip
    assert (rows[0]["paper GRFs"], rows[0]["paper q-GRFs"]) == ("0.0190(8)", "0.0105(3)")
    for coupling, want, theirs in (("independent", 0.0190, 8e-4), ("antithetic", 0.0105, 3e-4)):
        error = np.hypot(float(rows[0][f"{coupling} ±"]), theirs)
        assert abs(float(rows[0][coupling]) - want) < 4 * error + 0.1 * want
    for row in rows:
        apart = float(row["antithetic"]) - float(row["independent"])
        assert float(row["difference"]) == pytest.approx(apart, abs=2e-7)  # seven digits
    assert 0 < float(rows[1]["independent"]) < 1
    assert 0 < float(rows[2]["antithetic"]) < 0.3
    assert "antithetic below independent in" in (tmp_path / "out" / "table_3.md").read_text()
    assert (tmp_path / "out" / "tasks.png").exists()


@pytest.mark.thorough
def test_causes_of_differences(tmp_path):
    """Other weights of the normals, and other draws of a random graph."""
    solid = np.array([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2]])
    faces = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])
    edges = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    path = tmp_path / "meshes" / "cylinder.npz"
    faces, edges = (np.concatenate([x + 4 * i for i in range(5)]) for x in (faces, edges))
    vertices = np.tile(solid, (5, 1))
    write(path, vertices=vertices, faces=faces, edges=edges, vertex_normals=vertices - 0.5)
    graph_tasks.normals({"cylinder": path}, 10, tmp_path / "normals")
    rows = read_csv(tmp_path / "normals.csv")
    assert [row["weights"] for row in rows] == ["equal", "area", "angle"]
    assert len({row["independent"] for row in rows}) == 3
    graph_tasks.random_graphs(10, tmp_path / "random_graphs")
    rows = read_csv(tmp_path / "random_graphs.csv")
    assert len(rows) == 7
    for row in rows:
        means = (float(row[name]) for name in ("antithetic", "independent", "ratio"))
        antithetic, independent, ratio = means
        assert ratio == pytest.approx(antithetic / independent, rel=0.02)
