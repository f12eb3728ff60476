"""The graph container: three ways in, what it multiplies, what it refuses."""

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest
import scipy.sparse

from performer.graphs import Graph, graph_random_features, kernels
from tests.support.graph_examples import (
    EDGES,
    NUM_NODES,
    WEIGHTS,
    example,
    laplacian,
    weights_matrix,
)


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
    v, multiply = (
        np.random.default_rng(0).standard_normal((NUM_NODES, 3)),
        jax.jit(Graph.__matmul__),
    )
    for x in (v, v[:, 0]):
        found = multiply(example(), jnp.asarray(x))
        np.testing.assert_allclose(found, weights_matrix() @ x, rtol=1e-5)


def test_products_with_large_integers():
    """Counts above 2^31, which JAX would keep modulo 2^32."""
    graph, counts = example(), np.arange(NUM_NODES) * 1_000_000_000
    estimate = graph_random_features(
        jax.random.key(0), graph, kernels.Diffusion(), num_walks=2, p_halt=0.5
    )
    for kernel, matrix in ((graph, weights_matrix()), (estimate, np.asarray(estimate.gram()))):
        np.testing.assert_allclose(kernel @ counts, matrix @ counts, rtol=1e-5)


def test_parallel_edges_add_up_and_a_loop_counts_once():
    graph = Graph.from_edges([(0, 1), (0, 1), (1, 1)], 2, [1.0, 2.0, 5.0])
    assert graph.to_dense().tolist() == [[0, 3], [3, 5]]
    without = Graph.from_edges(np.zeros((0, 2), int), 3)
    assert without.to_dense().tolist() == np.zeros((3, 3)).tolist()
    assert without.normalised().to_dense().tolist() == np.eye(3).tolist()


def test_weights_of_small_dtypes_add_up_as_numbers():
    """300 and 200, not 44 and -56 as modulo 256; two booleans are two."""
    edges = [(0, 1), (0, 1), (0, 0)]
    for weights, wanted in (
        (np.array([200, 100, 200], np.uint8), [[200, 300], [300, 0]]),
        (np.array([True, True, True]), [[1, 2], [2, 0]]),
        (np.array([2048, 1, 1], np.float16), [[1, 2049], [2049, 0]]),
    ):
        assert Graph.from_edges(edges, 2, weights).to_dense().tolist() == wanted
    parts = np.array([200, 100, 200, 100], np.uint8), ([0, 0, 1, 1], [1, 1, 0, 0])
    assert Graph.from_scipy(scipy.sparse.coo_array(parts)).to_dense()[0, 1] == 300
    text = networkx.Graph()
    text.add_edge("a", "b", weight="2.5")  # as read from a file
    assert Graph.from_networkx(text).to_dense().tolist() == [[0, 2.5], [2.5, 0]]


def test_a_weight_that_rounds_to_zero_is_no_edge():
    """As of a Gaussian kernel of far points, dense: 1e-60 is 0 in float32."""
    far = np.array([[0, 1, 1e-60], [1, 0, 1], [1e-60, 1, 0]])
    graph = Graph.from_scipy(far)
    assert graph.degrees.tolist() == [1, 2, 1]
    assert np.isfinite(graph.normalised().to_dense()).all()
    with jax.enable_x64(True):
        assert Graph.from_scipy(far).degrees.tolist() == [2, 2, 2]


def test_edges_in_both_directions_count_once_if_the_caller_says_so():
    """As in PyTorch Geometric's edge_index. Without a word such a list is refused."""
    both = [*EDGES, *((j, i) for i, j in EDGES if i != j)]
    weights = [*WEIGHTS, *(w for (i, j), w in zip(EDGES, WEIGHTS, strict=True) if i != j)]
    order = np.random.default_rng(0).permutation(len(both))
    given = np.array(both)[order], NUM_NODES, np.array(weights)[order]
    found = Graph.from_edges(*given, both_directions=True)
    np.testing.assert_allclose(found.to_dense(), weights_matrix(), rtol=1e-7)
    loops = np.diag(np.diag(weights_matrix()))
    twice = Graph.from_edges(*given, both_directions=False)
    np.testing.assert_allclose(twice.to_dense(), 2 * weights_matrix() - loops, rtol=1e-7)
    for edges in (given[0], [(0, 1), (1, 0), (1, 2)]):
        message = r"the edges \((\d), (\d)\) and \(\2, \1\): give both_directions=True"
        with pytest.raises(ValueError, match=message):
            Graph.from_edges(edges, NUM_NODES)
    message = r"both_directions=True: the edge \(1, 2\) has the weight 1, and \(2, 1\) 0"
    with pytest.raises(ValueError, match=message):
        Graph.from_edges([(0, 1), (1, 0), (1, 2)], 3, both_directions=True)


def test_normalised_is_one_minus_the_laplacian():
    found = example().normalised().to_dense()
    np.testing.assert_allclose(found, np.eye(NUM_NODES) - laplacian(weights_matrix()), atol=1e-7)
    assert found[5, 5] == 1, "a node alone has Laplacian 0"


def test_nothing_of_the_caller_is_edited():
    """Not even a matrix in the very format that is wanted, with entries to add up and to drop."""
    parts = {
        "data": np.array([1.0, 2.0, 0.0, 3.0]),
        "indices": np.array([1, 1, 0, 0], np.int32),
        "indptr": np.array([0, 3, 4], np.int32),
    }
    kept = {name: part.copy() for name, part in parts.items()}
    matrix = scipy.sparse.csr_array(tuple(parts.values()), shape=(2, 2))
    graph = Graph.from_scipy(matrix)
    assert graph.to_dense().tolist() == [[0, 3], [3, 0]]
    for name, part in parts.items():
        np.testing.assert_array_equal(part, kept[name])
        np.testing.assert_array_equal(getattr(matrix, name), kept[name])
    edges, weights = np.array([(0, 1), (1, 1)]), np.array([0.0, 2.0])
    Graph.from_edges(edges, 2, weights)
    assert (edges.tolist(), weights.tolist()) == ([[0, 1], [1, 1]], [0, 2])


def test_rounding_is_no_asymmetry():
    """As float32 rounds D^{-1/2} W D^{-1/2}, entry by entry, next to entries of any size."""
    matrix = np.array([[0, 1e-9, 0], [1e-9 * (1 + 1e-7), 0, 1e9], [0, 1e9, 0]])
    np.testing.assert_allclose(Graph.from_scipy(matrix).to_dense(), matrix, rtol=1e-6)
