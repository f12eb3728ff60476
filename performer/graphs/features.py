"""Graph random features: sparse estimates of kernels between the nodes of a graph.

    phi(i)_x = 1/m sum over walks k from i, over their visits to x:  f(step) load

(qGRF Eq. 8, VRC Eqs 49 and 50). Dot products are unbiased for the kernel (sum_t f_t A^t)^2 of two
different nodes. On the diagonal a node shares its walks with itself, and the estimate is too large.
A second, independent ensemble (`unbiased_diagonal`) corrects this for twice the work (qGRF App.
8.7): (Phi_1 Phi_2^T + Phi_2 Phi_1^T) / 2, which need not be positive definite as with one ensemble.

No N x N matrix is formed unless requested: `kernel @ v` takes time proportional to the visits.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.choices import real_array
from performer.graphs import couplings, kernels, walks
from performer.graphs.couplings import Coupling
from performer.graphs.graph import Graph, require_rows
from performer.typing import Key

FOREVER = -1
"""Step of the visit to a node without edges: it stands for all steps, with the factor sum_t f_t."""
ENDLESS = 1024
"""Number of terms of that sum."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """The sparse matrix Phi (N, N), row i the features of node i; duplicate entries add up."""

    start: Any
    """Rows (T,), int32."""
    node: Any
    """Columns (T,), int32."""
    value: Any
    """Entries (T,); (n, T) with one modulation for each of n heads, for `masked_attention`."""
    num_nodes: int = field(metadata={"static": True})

    def __matmul__(self, vectors: ArrayLike) -> Array:
        """Return Phi v, for v (N,) or (N, k)."""
        return self._sum(self.node, self.start, vectors)

    def transposed(self, vectors: ArrayLike) -> Array:
        """Return Phi^T v."""
        return self._sum(self.start, self.node, vectors)

    def to_dense(self) -> Float[Array, "*k n n"]:
        """Return Phi as an array; (n, N, N) for n heads."""
        shape = (*self.value.shape[:-1], self.num_nodes, self.num_nodes)
        return jnp.zeros(shape, self.value.dtype).at[..., self.start, self.node].add(self.value)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """Return Phi as a SciPy matrix; duplicate entries are summed."""
        value, start, node = (np.asarray(x) for x in (self.value, self.start, self.node))
        matrix = scipy.sparse.csr_array((value, (start, node)), shape=(self.num_nodes,) * 2)
        matrix.eliminate_zeros()
        return matrix

    def _sum(self, source: Array, target: Array, vectors: ArrayLike) -> Array:
        vectors = real_array("vectors", vectors)
        require_rows(vectors, self.num_nodes)
        value = self.value.reshape(-1, *[1] * (vectors.ndim - 1))
        return jax.ops.segment_sum(value * vectors[source], target, self.num_nodes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EstimatedKernel:
    """An estimated kernel: Phi Phi^T, or of two ensembles (Phi_1 Phi_2^T + Phi_2 Phi_1^T) / 2."""

    left: Features
    right: Features | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, N)."""
        return self.left.num_nodes, self.left.num_nodes

    def __matmul__(self, vectors: ArrayLike) -> Array:
        """Return K v, for v (N,) or (N, k), without K."""
        if self.right is None:
            return self.left @ self.left.transposed(vectors)
        product = self.left @ self.right.transposed(vectors)
        return (product + self.right @ self.left.transposed(vectors)) / 2

    def gram(self) -> Float[Array, "*k n n"]:
        """Return K, dense; (n, N, N) for n heads."""
        phi, psi = self.left.to_dense(), (self.right or self.left).to_dense()
        product = jnp.matmul(phi, psi.mT, precision="highest")
        return product if self.right is None else (product + product.mT) / 2


def graph_random_features(
    key: Key,
    graph: Graph,
    kernel: kernels.Modulation,
    *,
    num_walks: int,
    p_halt: float,
    coupling: str | Coupling = "antithetic",
    steps: walks.Steps = "uniform",
    adjacency: Literal["normalised", "weights"] = "normalised",
    unbiased_diagonal: bool = False,
) -> EstimatedKernel:
    """Estimate a kernel between all nodes by random walks.

    Call it outside `jit`: the lengths of the walks decide the shapes. The result is a pytree, and
    its products compile.

    Args:
        key: random key; it decides the walks, whatever the kernel is.
        graph: the graph.
        kernel: of `kernels`, such as `kernels.Diffusion(sigma=1.0)`, or a function
            length -> (f_0, ...).
        num_walks: m, from each node.
        p_halt: probability to halt at each step; small for long walks and small errors.
        coupling: coupling of the lengths: "independent", "antithetic", "ensemble", or a function.
        steps: "uniform" or "weighted".
        adjacency: "normalised" for the normalised adjacency matrix as A, "weights" for the weights.
        unbiased_diagonal: draw two ensembles.

    Raises:
        ValueError: as `sample`, or for a series that diverges on A (`kernels.require_convergence`).

    Example:
        >>> K = graph_random_features(key, graph, kernels.Diffusion(), num_walks=8, p_halt=0.2)
        >>> K @ v, K.gram()
    """
    sampled = partial(
        sample, graph=graph, num_walks=num_walks, p_halt=p_halt, coupling=coupling,
        steps=steps, adjacency=adjacency,
    )  # fmt: skip
    if isinstance(kernel, type) or not callable(kernel):
        raise ValueError(f"kernel must be a value, as kernels.Diffusion(sigma=1.0), got {kernel!r}")
    if adjacency == "weights":
        kernels.require_convergence(graph, kernel)
    else:
        kernels.require_radius(kernel, 1.0)
    if not unbiased_diagonal:
        return EstimatedKernel(modulate(sampled(key), kernel))
    left, right = (modulate(sampled(half), kernel) for half in jax.random.split(key))
    return EstimatedKernel(left, right)


def sample(
    key: Key,
    graph: Graph,
    *,
    num_walks: int,
    p_halt: float,
    coupling: str | Coupling = "antithetic",
    steps: walks.Steps = "uniform",
    adjacency: Literal["normalised", "weights"] = "normalised",
    max_steps: int | None = None,
) -> walks.Walks:
    """Draw the walks of `graph_random_features`, to be modulated by any kernel.

    With `max_steps` longer walks are cut: enough for a modulation of max_steps + 1 coefficients.
    Shapes then depend on the sizes alone, and `jit` may contain the call, with a concrete graph.

    At a node without edges the sum over all steps of the normalised adjacency matrix is known: one
    visit has the step `FOREVER`, which `modulate` multiplies by the sum of f.

    Raises:
        ValueError: for an unknown `adjacency`, and as `couplings.lengths` and `walks.sample`.
    """
    if adjacency not in ("normalised", "weights"):
        raise ValueError(f"adjacency must be 'normalised' or 'weights', got {adjacency!r}")
    lengths_key, walks_key = jax.random.split(key)
    chosen = graph.normalised() if adjacency == "normalised" else graph
    lengths = couplings.lengths(lengths_key, coupling, graph.num_nodes, num_walks, p_halt)
    options: Any = dict(p_halt=p_halt, steps=steps, max_steps=max_steps)
    sampled = walks.sample(walks_key, chosen, lengths, **options)
    alone = np.diff(np.asarray(graph.indptr)) == 0
    if adjacency == "weights" or not alone.any():
        return sampled
    alone, step = jnp.asarray(alone)[sampled.start], sampled.step
    load = jnp.where(alone & (step > 0), 0, sampled.load)
    return replace(sampled, step=jnp.where(alone, FOREVER, step), load=load)


def merged(sampled: walks.Walks, num_terms: int | None = None) -> walks.Walks:
    """Return walks whose visits of equal start, node and step are one: the same features.

    With 8 walks of p_halt = 0.5 on cora a third of the visits is left. Ends of walks are forgotten.

    Args:
        sampled: the walks; not traced.
        num_terms: steps from this one on are left out, for modulations f_0, ..., f_{num_terms - 1}.
    """
    arrays = (np.asarray(x) for x in (sampled.start, sampled.node, sampled.step, sampled.load))
    start, node, step, load = arrays
    kept = (load != 0) & (step < (sampled.max_steps + 1 if num_terms is None else num_terms))
    visits = np.stack([start, node, step], axis=1)[kept]
    unique, place = np.unique(visits, axis=0, return_inverse=True)
    total = np.bincount(place.reshape(-1), load[kept], len(unique)).astype(load.dtype)
    start, node, step = (jnp.asarray(x, jnp.int32) for x in unique.T)
    last = jnp.zeros(len(unique), bool)
    return replace(sampled, start=start, node=node, step=step, load=jnp.asarray(total), last=last)


def modulate(sampled: walks.Walks, kernel: kernels.Modulation) -> Features:
    """Return the features of walks for a kernel (VRC Eqs 49 and 50); differentiable in f.

    A modulation length -> (n, length) has a kernel for each of n heads.

    Raises:
        ValueError: for a modulation that returns fewer than `length` coefficients.
    """
    length = max(sampled.max_steps + 1, ENDLESS)
    value = _weighed(sampled, jnp.asarray(kernels.coefficients(kernel, length)))
    return Features(sampled.start, sampled.node, value, sampled.num_nodes)


@jax.jit
def _weighed(sampled: walks.Walks, f: Array) -> Array:
    # The last one is for `FOREVER`.
    f = jnp.append(f, f.sum(-1, keepdims=True), axis=-1).astype(sampled.load.dtype)
    load = sampled.load.reshape(*[1] * (f.ndim - 1), -1)
    return f[..., sampled.step] * load / sampled.num_walks
