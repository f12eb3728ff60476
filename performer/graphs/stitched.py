"""Stitched walks: long walks from short ones (GRFs++, 2510.07716).

With g the l-th root of the modulation f, g * ... * g = f, the product Phi_1 ... Phi_l of features
of g, drawn independently, has the mean sum_t f_t A^t, as one matrix of features of f. Its entries
are sums over all ways to continue a walk by others, many more than were drawn. For kernels that
reach far this lowers the error at equal work; for near ones it changes nothing.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import choices
from performer.graphs import features, kernels
from performer.graphs.features import Features
from performer.graphs.graph import Graph
from performer.typing import Key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stitched:
    """A kernel estimate (Psi_1 Psi_2^T + Psi_2 Psi_1^T) / 2, each Psi a product of features."""

    left: tuple[Features, ...]
    right: tuple[Features, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, N)."""
        return self.left[0].num_nodes, self.left[0].num_nodes

    def __matmul__(self, vectors: ArrayLike) -> Array:
        """Return K v, for v (N,) or (N, k), without K."""
        return (
            _product(self.left, self.right, vectors) + _product(self.right, self.left, vectors)
        ) / 2

    def gram(self) -> Float[Array, "n n"]:
        """Return K, dense."""
        return self @ jnp.eye(self.shape[0], dtype=self.left[0].value.dtype)


def _product(left: tuple[Features, ...], right: tuple[Features, ...], vectors: ArrayLike) -> Array:
    across = reduce(lambda v, phi: phi.transposed(v), right, choices.real_array("vectors", vectors))
    return reduce(lambda v, phi: phi @ v, reversed(left), across)


def stitched(
    key: Key, graph: Graph, kernel: kernels.Modulation, num_stretches: int, **options: Any
) -> Stitched:
    """Estimate a kernel between all nodes by walks of `num_stretches` stitched stretches.

    Unbiased, also on the diagonal; two ensembles are drawn for that.

    Args:
        key: random key.
        graph: the graph.
        kernel: as of `features.graph_random_features`, with f_0 > 0; not traced.
        num_stretches: l; 2 to 4 for a diffusion kernel of sigma 2 to 4.
        options: of `features.sample`, for each stretch: `num_walks` and `p_halt`, with which l
            stretches are l times the work.

    Raises:
        ValueError: as `features.sample`, or for f_0 that is not positive.
    """
    choices.positive_integer("num_stretches", num_stretches)
    if not kernel(1)[0] > 0:
        raise ValueError(f"stitched walks need a modulation with f_0 > 0, got {kernel(1)[0]}")
    keys = jax.random.split(key, (2, num_stretches))
    f = partial(kernels.coefficients, kernel)
    g = lambda length: kernels.root(f(length), num_stretches)  # noqa: E731
    draw = lambda key: features.modulate(features.sample(key, graph, **options), g)  # noqa: E731
    return Stitched(*(tuple(draw(key) for key in row) for row in keys))
