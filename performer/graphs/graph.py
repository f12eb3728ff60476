"""Undirected weighted graphs in compressed sparse rows: JAX arrays, a pytree.

The neighbours of node i are `indices[indptr[i]:indptr[i + 1]]`; every edge is in the rows of both
ends. qGRF Sec. 2.1, VRC App. C.1: our `weights` are their W, `normalised()` is
A = D^{-1/2} W D^{-1/2}, and the normalised Laplacian is I - A.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from performer import choices

if TYPE_CHECKING:
    import networkx


class Graph(NamedTuple):
    """An undirected graph, made by `from_edges`, `from_scipy` or `from_networkx`."""

    indptr: Array
    """Start of each row (num_nodes + 1,), int32."""
    indices: Array
    """Neighbours, row after row, int32."""
    weights: Array
    """Weights of the edges to the neighbours, floating-point."""

    @classmethod
    def from_edges(
        cls,
        edges: Any,
        num_nodes: int,
        weights: Any = None,
        *,
        both_directions: bool | None = None,
    ) -> "Graph":
        """Return the graph of a list of edges.

        Args:
            edges: pairs of node ids (E, 2), 0 to num_nodes - 1. Parallel edges add up.
            num_nodes: number of nodes, at least 1; nodes without edges are allowed.
            weights: weights (E,), similarities: 0 is no edge, a larger weight a closer pair; 1 each
                if None.
            both_directions: True if the list has every edge in both directions, as the transposed
                `edge_index` of PyTorch Geometric, each pair being one edge; False if it has every
                edge once, (0, 1) and (1, 0) being parallel edges. Required if there are such pairs.

        Raises:
            ValueError: for ids out of range, wrong shapes, more nodes or arcs than int32 can
                number, weights that are not real and finite, edges in both directions without
                `both_directions`, or an edge in one direction with it.

        Example:
            >>> Graph.from_edges([(0, 1), (1, 2)], num_nodes=4)
        """
        choices.positive_integer("num_nodes", num_nodes)
        pairs = np.asarray(edges) if np.size(edges) else np.zeros((0, 2), int)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            turned = "; transpose it, as edge_index.T" if pairs.shape[:1] == (2,) else ""
            raise ValueError(f"edges must be pairs (E, 2), got shape {pairs.shape}{turned}")
        if not np.issubdtype(pairs.dtype, np.integer):
            raise ValueError(
                f"edges must be integer node ids, got {pairs.dtype}: number the nodes from 0, or"
                " use from_networkx"
            )
        for i in np.flatnonzero(((pairs < 0) | (pairs >= num_nodes)).any(axis=1)):
            raise ValueError(
                f"edge {i}, {tuple(pairs[i].tolist())}, names a node outside 0..{num_nodes - 1}:"
                f" num_nodes={num_nodes} is too small or the ids do not start at 0"
            )
        values = np.ones(len(pairs)) if weights is None else _real(weights)
        if values.shape != (len(pairs),):
            raise ValueError(f"{len(pairs)} edges need as many weights, got shape {values.shape}")
        rows, columns = pairs.T.astype(np.int64)
        shape = num_nodes, num_nodes
        arcs = scipy.sparse.coo_array((values, (rows, columns)), shape=shape).tocsr()
        if both_directions:
            _require_symmetric(arcs)
            return cls.from_scipy(arcs)
        there = arcs.astype(bool)  # not finite weights included
        both = scipy.sparse.triu(there, 1).multiply(there.T).tocoo()
        if both_directions is None and both.nnz:
            i, j = (int(part[0]) for part in both.coords)
            raise ValueError(
                f"the list has the edges ({i}, {j}) and ({j}, {i}): give both_directions=True if"
                " it has every edge in both directions (edge_index.T of PyTorch Geometric), False"
                " if these are two parallel edges, which add up"
            )
        loops = scipy.sparse.diags_array(arcs.diagonal())  # a loop counts once
        return cls.from_scipy(arcs + arcs.T - loops)

    @classmethod
    def from_scipy(cls, matrix: Any) -> "Graph":
        """Return the graph of a weighted adjacency matrix, SciPy sparse or dense.

        Raises:
            ValueError: if it is not square, not symmetric (to six digits of each entry), has more
                nodes or arcs than int32 can number, entries that are not real and finite, or a node
                all of whose weights round to 0 in JAX's default dtype.
        """
        matrix = _real(matrix)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
            raise ValueError(f"an adjacency matrix is square, this one is {matrix.shape}")
        choices.require_numbered("nodes", matrix.shape[0])
        matrix = scipy.sparse.csr_array(matrix, dtype=np.float64, copy=True)  # edited below
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        dtype = jnp.result_type(float)
        with np.errstate(over="ignore"):
            rounded = matrix.data.astype(dtype)
        if not np.isfinite(rounded).all():
            raise ValueError(f"an edge has a weight that is not finite in {dtype}")
        degrees = np.diff(matrix.indptr)
        matrix.data[rounded == 0] = 0
        matrix.eliminate_zeros()
        for i in np.flatnonzero((degrees > 0) & (np.diff(matrix.indptr) == 0)):
            raise ValueError(
                f"all weights of node {i} round to 0 in {dtype}: scale the weights up, or leave"
                " its edges out"
            )
        turned = matrix.T.tocsr()
        skew = (abs(matrix - turned) - 1e-6 * abs(matrix).maximum(abs(turned))).tocoo()
        if skew.nnz and skew.max() > 0:
            i, j = (int(part[np.argmax(skew.data)]) for part in skew.coords)
            raise ValueError(
                f"the adjacency matrix is not symmetric: [{i}, {j}] is {matrix[i, j]:.6g} and"
                f" [{j}, {i}] is {matrix[j, i]:.6g}; graphs are undirected here, use W + W.T"
            )
        return cls._from_rows(matrix)

    @classmethod
    def _from_rows(cls, matrix: scipy.sparse.csr_array) -> "Graph":
        choices.require_numbered("arcs (two for each edge)", matrix.nnz)
        return cls(
            jnp.asarray(matrix.indptr, jnp.int32),
            jnp.asarray(matrix.indices, jnp.int32),
            jnp.asarray(matrix.data, float),
        )

    @classmethod
    def from_networkx(cls, graph: "networkx.Graph", weight: str | None = "weight") -> "Graph":
        """Return the graph of networkx: node i here is the i-th of `graph.nodes`.

        Args:
            graph: undirected; parallel edges of a MultiGraph add up.
            weight: edge attribute with the weights, 1 if absent; None for weights of 1.

        Raises:
            ValueError: if the graph is directed.
        """
        with choices.optional():
            import networkx

        if graph.is_directed():
            raise ValueError("the graph is directed; use graph.to_undirected()")
        options: Any = dict(weight=weight, dtype=float)
        matrix = networkx.to_scipy_sparse_array(graph, **options)  # pyright: ignore (its stubs)
        return cls.from_scipy(matrix)

    def __repr__(self) -> str:
        """The sizes in place of the arrays, as "Graph(4 nodes, 3 edges, weighted)"."""
        if any(isinstance(part, Tracer) for part in self):
            return f"Graph({self.num_nodes} nodes, traced)"
        loops = int((self.to_scipy().diagonal() != 0).sum())
        kind = "unweighted" if (np.asarray(self.weights) == 1).all() else "weighted"
        return f"Graph({self.num_nodes} nodes, {(len(self.indices) + loops) // 2} edges, {kind})"

    @property
    def num_nodes(self) -> int:
        """The number of nodes N."""
        return len(self.indptr) - 1

    @property
    def degrees(self) -> Array:
        """The number of neighbours of each node (N,), int32."""
        return jnp.diff(self.indptr)

    def __matmul__(self, vectors: ArrayLike) -> Array:
        """Return W v, for v (N,) or (N, k)."""
        vectors = choices.real_array("vectors", vectors)
        require_rows(vectors, self.num_nodes)
        rows = jnp.repeat(
            jnp.arange(self.num_nodes), self.degrees, total_repeat_length=len(self.indices)
        )
        weights = self.weights.reshape(-1, *[1] * (vectors.ndim - 1))
        return jax.ops.segment_sum(
            weights * vectors[self.indices], rows, self.num_nodes, indices_are_sorted=True
        )

    def normalised(self) -> "Graph":
        """Return the graph of A = D^{-1/2} W D^{-1/2}; the normalised Laplacian is I - A.

        The Laplacian of a node without edges is 0, so A_ii = 1: a loop.

        Raises:
            ValueError: for a negative weight, with which D need not have a root.
        """
        require_nonnegative(self, "the normalised Laplacian")
        matrix = self.to_scipy()
        alone = np.diff(matrix.indptr) == 0
        roots = np.sqrt(np.where(alone, 1, matrix.sum(axis=1)))
        matrix.data = matrix.data / np.repeat(roots, np.diff(matrix.indptr)) / roots[matrix.indices]
        loops = scipy.sparse.diags_array(alone.astype(float), format="csr")
        return Graph._from_rows(matrix + loops if alone.any() else matrix)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """Return a copy of the weighted adjacency matrix W, in float64."""
        arrays = (np.array(self.weights, np.float64), np.array(self.indices), np.array(self.indptr))
        return scipy.sparse.csr_array(arrays, shape=(self.num_nodes, self.num_nodes))

    def to_dense(self) -> Float[Array, "n n"]:
        """Return the weighted adjacency matrix W, dense."""
        return jnp.asarray(self.to_scipy().toarray(), self.weights.dtype)


def _require_symmetric(arcs: scipy.sparse.csr_array) -> None:
    """Raise ValueError for an edge in one direction, or with another weight in the other."""
    alone = (arcs != arcs.T).tocoo()
    if alone.nnz:
        i, j = (int(part[0]) for part in alone.coords)
        raise ValueError(
            f"both_directions=True: the edge ({i}, {j}) has the weight {arcs[i, j]:.6g}, and"
            f" ({j}, {i}) {arcs[j, i]:.6g}"
        )


def require_nonnegative(graph: Graph, purpose: str) -> None:
    """Raise ValueError for a negative weight; `purpose` is for the message."""
    least = np.asarray(graph.weights).min(initial=0)
    if least < 0:
        raise ValueError(f"{purpose} needs weights >= 0, the least is {least:.6g}")


def require_rows(vectors: Array, num_nodes: int) -> None:
    """Raise ValueError unless vectors have a row for each node; indexing would not check it."""
    if vectors.shape[:1] != (num_nodes,):
        raise ValueError(f"vectors must be (N,) or (N, k) for N = {num_nodes}, got {vectors.shape}")


def _real(values: Any) -> Any:
    """Return weights as a float64 array or SciPy matrix; ValueError unless they are real."""
    values = values if scipy.sparse.issparse(values) else np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"weights must be real numbers, got {values.dtype}")
    return values.astype(np.float64, copy=False)  # sums of small integers would wrap
