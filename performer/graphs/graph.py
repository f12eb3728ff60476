"""Undirected weighted graphs in compressed sparse rows: arrays of jax, a pytree.

The neighbours of node i are `indices[indptr[i]:indptr[i + 1]]`, every edge standing in the rows of
both of its ends. qGRF Sec. 2.1, VRC App. C.1: our `weights` are their W, `normalised()` is
A = D^{-1/2} W D^{-1/2}, and the normalised Laplacian is I - A.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.core import Tracer
from jaxtyping import Array, Float

from performer import choices

if TYPE_CHECKING:
    import networkx


class Graph(NamedTuple):
    """An undirected graph; make it by `from_edges`, `from_scipy` or `from_networkx`."""

    indptr: Array
    """Where each row begins (num_nodes + 1,), int32."""
    indices: Array
    """The neighbours, row after row, int32."""
    weights: Array
    """Weights of the edges to them, floating."""

    @classmethod
    def from_edges(cls, edges: Any, num_nodes: int, weights: Any = None) -> "Graph":
        """A graph from a list of its edges, each undirected edge once.

        Args:
            edges: pairs of node ids (E, 2), 0 to num_nodes - 1. Parallel edges add up.
            num_nodes: how many nodes there are, at least 1; some may have no edge.
            weights: (E,), 1 if None.

        Raises:
            ValueError: for ids out of range, shapes that do not fit, more nodes or arcs than int32
                numbers, weights that are not real and finite.

        Example:
            >>> Graph.from_edges([(0, 1), (1, 2)], num_nodes=4)
        """
        choices.positive_integer("num_nodes", num_nodes)
        pairs = np.asarray(edges) if np.size(edges) else np.zeros((0, 2), int)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"edges must be pairs (E, 2), got shape {pairs.shape}")
        if not np.issubdtype(pairs.dtype, np.integer):
            raise ValueError(f"edges must be integer node ids, got {pairs.dtype}")
        for i in np.flatnonzero(((pairs < 0) | (pairs >= num_nodes)).any(axis=1)):
            raise ValueError(
                f"edge {i}, {tuple(pairs[i].tolist())}, names a node outside 0..{num_nodes - 1}:"
                f" num_nodes={num_nodes} is too small or the ids do not start at 0"
            )
        values = np.ones(len(pairs)) if weights is None else _real(weights)
        if values.shape != (len(pairs),):
            raise ValueError(f"{len(pairs)} edges need as many weights, got shape {values.shape}")
        back = pairs[:, 0] != pairs[:, 1]  # a loop counts once
        rows, columns = np.concatenate([pairs, pairs[back, ::-1]]).T.astype(np.int64)
        entries = np.concatenate([values, values[back]])
        return cls.from_scipy(
            scipy.sparse.coo_array((entries, (rows, columns)), shape=(num_nodes, num_nodes))
        )

    @classmethod
    def from_scipy(cls, matrix: Any) -> "Graph":
        """A graph from its weighted adjacency matrix, a SciPy sparse (or a dense) one.

        Raises:
            ValueError: when it is not square, not symmetric (to six digits of each entry), has more
                nodes or arcs than int32 numbers, or entries that are not real and finite.
        """
        matrix = _real(matrix)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
            raise ValueError(f"an adjacency matrix is square, this one is {matrix.shape}")
        choices.require_numbered("nodes", matrix.shape[0])
        matrix = scipy.sparse.csr_array(matrix, dtype=np.float64, copy=True)  # to be edited
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        dtype = jnp.result_type(float)
        with np.errstate(over="ignore"):
            finite = np.isfinite(matrix.data.astype(dtype)).all()
        if not finite:
            raise ValueError(f"an edge has a weight that is not finite in {dtype}")
        turned = matrix.T.tocsr()
        skew = (abs(matrix - turned) - 1e-6 * abs(matrix).maximum(abs(turned))).tocoo()
        if skew.nnz and skew.max() > 0:
            i, j = (int(part[np.argmax(skew.data)]) for part in skew.coords)
            raise ValueError(
                f"the adjacency matrix is not symmetric: [{i}, {j}] is {matrix[i, j]:.6g} and"
                f" [{j}, {i}] is {matrix[j, i]:.6g}; these graphs are undirected, take W + W.T"
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
        """A graph of networkx: node i here is the i-th of `graph.nodes`.

        Args:
            graph: undirected; parallel edges of a MultiGraph add up.
            weight: the edge attribute with the weights, 1 where it is absent; None for all 1.

        Raises:
            ValueError: when the graph is directed.
        """
        with choices.extra("graphs"):
            import networkx

        if graph.is_directed():
            raise ValueError("the graph is directed; take graph.to_undirected()")
        matrix = networkx.to_scipy_sparse_array(graph, weight=weight)  # pyright: ignore (its stubs)
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
        """N."""
        return len(self.indptr) - 1

    @property
    def degrees(self) -> Array:
        """The number of neighbours of each node (N,), int32."""
        return jnp.diff(self.indptr)

    def __matmul__(self, vectors: Array) -> Array:
        """W v, for v (N,) or (N, k)."""
        rows = jnp.repeat(
            jnp.arange(self.num_nodes), self.degrees, total_repeat_length=len(self.indices)
        )
        weights = self.weights.reshape(-1, *[1] * (vectors.ndim - 1))
        return jax.ops.segment_sum(
            weights * vectors[self.indices], rows, self.num_nodes, indices_are_sorted=True
        )

    def normalised(self) -> "Graph":
        """A = D^{-1/2} W D^{-1/2}, so that the normalised Laplacian is I - A.

        The Laplacian of a node without edges is 0, which makes its A_ii = 1: a loop.

        Raises:
            ValueError: when a weight is negative, for then D need not have a root.
        """
        require_nonnegative(self, "the normalised Laplacian")
        matrix = self.to_scipy()
        alone = np.diff(matrix.indptr) == 0
        roots = np.sqrt(np.where(alone, 1, matrix.sum(axis=1)))
        matrix.data = matrix.data / np.repeat(roots, np.diff(matrix.indptr)) / roots[matrix.indices]
        loops = scipy.sparse.diags_array(alone.astype(float), format="csr")
        return Graph._from_rows(matrix + loops if alone.any() else matrix)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The weighted adjacency matrix W, in float64; a copy, to be edited at will."""
        parts = (np.array(self.weights, np.float64), np.array(self.indices), np.array(self.indptr))
        return scipy.sparse.csr_array(parts, shape=(self.num_nodes, self.num_nodes))

    def to_dense(self) -> Float[Array, "n n"]:
        """The weighted adjacency matrix W."""
        return jnp.asarray(self.to_scipy().toarray(), self.weights.dtype)


def require_nonnegative(graph: Graph, purpose: str) -> None:
    """Raises ValueError when a weight is negative, naming the `purpose` that cannot have it."""
    least = np.asarray(graph.weights).min(initial=0)
    if least < 0:
        raise ValueError(f"{purpose} needs weights >= 0, the least is {least:.6g}")


def _real(values: Any) -> Any:
    """Weights as they are, an array or a SciPy matrix, if they are real numbers."""
    values = values if scipy.sparse.issparse(values) else np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"weights must be real numbers, got {values.dtype}")
    return values
