"""The graph container: three ways in, what it multiplies, what it refuses."""

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import scipy.sparse

from performer.graphs import Graph
from tests.graph_examples import EDGES, NUM_NODES, WEIGHTS, example, laplacian, weights_matrix


def test_edges_scipy_and_networkx_give_the_same_graph():
    of_networkx = networkx.Graph()
    of_networkx.add_nodes_from(range(NUM_NODES))
    of_networkx.add_weighted_edges_from((*e, w) for e, w in zip(EDGES, WEIGHTS, strict=True))
    graphs = [
        example(),
        Graph.from_scipy(scipy.sparse.coo_array(weights_matrix())),
        Graph.from_scipy(weights_matrix()),
        Graph.from_networkx(of_networkx),
    ]
    for graph in graphs:
        np.testing.assert_allclose(graph.to_dense(), weights_matrix(), rtol=1e-7)
        assert graph.num_nodes == NUM_NODES
        assert graph.degrees.tolist() == (weights_matrix() != 0).sum(axis=1).tolist()


def test_it_is_a_pytree_that_multiplies_under_jit():
    v = np.random.default_rng(0).standard_normal((NUM_NODES, 3))
    multiply = jax.jit(lambda graph, v: graph @ v)
    np.testing.assert_allclose(multiply(example(), jnp.asarray(v)), weights_matrix() @ v, rtol=1e-5)
    np.testing.assert_allclose(example() @ jnp.asarray(v[:, 0]), weights_matrix() @ v[:, 0], 1e-5)


def test_parallel_edges_add_up_and_a_loop_counts_once():
    graph = Graph.from_edges([(0, 1), (1, 0), (1, 1)], 2, [1.0, 2.0, 5.0])
    assert graph.to_dense().tolist() == [[0, 3], [3, 5]]


def test_normalised_is_one_minus_the_laplacian():
    found = example().normalised().to_dense()
    np.testing.assert_allclose(found, np.eye(NUM_NODES) - laplacian(weights_matrix()), atol=1e-7)
    assert found[5, 5] == 1, "a node alone has Laplacian 0"


def test_a_graph_without_edges():
    graph = Graph.from_edges(np.zeros((0, 2), int), 3)
    assert graph.to_dense().tolist() == np.zeros((3, 3)).tolist()
    assert graph.normalised().to_dense().tolist() == np.eye(3).tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Graph.from_edges([(0, 3)], 3), r"edge 0, \(0, 3\), names a node outside 0..2"),
        (lambda: Graph.from_edges([(0, 1), (-1, 2)], 3), r"edge 1, \(-1, 2\)"),
        (lambda: Graph.from_edges([(0.0, 1.0)], 3), "integer node ids, got float64"),
        (lambda: Graph.from_edges([(0, 1, 2)], 3), r"pairs \(E, 2\), got shape \(1, 3\)"),
        (lambda: Graph.from_edges([(0, 1)], 3, [1.0, 2.0]), "1 edges need as many weights"),
        (lambda: Graph.from_edges([(0, 1)], 3, [np.nan]), "not finite"),
        (lambda: Graph.from_scipy(np.ones((2, 3))), r"square, this one is \(2, 3\)"),
        (lambda: Graph.from_scipy(np.triu(np.ones((3, 3)), 1)), r"not symmetric: \[0, 1\] is 1"),
        (lambda: Graph.from_networkx(networkx.DiGraph([(0, 1)])), "directed; take"),
        (
            lambda: Graph.from_edges([(0, 1)], 2, [-1.0]).normalised(),
            "weights >= 0, the least is -1",
        ),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()
