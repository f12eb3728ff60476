"""Clustering of nodes and regression of their attributes, by a kernel between nodes.

A `kernel` has a shape and multiplies vectors with `@`: an estimate of `graph_random_features` or a
dense matrix. No N x N matrix is formed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int, Num

from performer import choices
from performer.typing import Key


def regress(
    kernel: Any, values: Num[ArrayLike, "n ..."], known: ArrayLike | Sequence[bool]
) -> Float[Array, "n ..."]:
    """Return the mean of the known values, weighted by the kernel, at all nodes (qGRF Eq. 23).

    A node that the kernel connects with no known node gets the mean of all known values.

    Args:
        kernel: kernel of the nodes.
        values: values at the nodes, one or several for each; unknown ones are ignored.
        known: True for known values (N,), at least one.

    Raises:
        ValueError: if `known` is not one value for each node, or no value is known (inside `jit`
            the result is NaN instead).
    """
    known, values = jnp.asarray(known, bool), choices.real_array("values", values)
    if known.shape != values.shape[:1]:
        raise ValueError(
            f"known must have the shape {values.shape[:1]}, one for each node, got {known.shape}"
        )
    if not isinstance(known, Tracer) and not bool(jnp.any(known)):
        raise ValueError("regress needs a node whose value is known; `known` is false everywhere")
    known = known.reshape(-1, *[1] * (values.ndim - 1))
    weights = _apply(kernel, known.astype(jnp.result_type(values, float)))
    mean = jnp.mean(values, axis=0, where=known)
    sums = _apply(kernel, jnp.where(known, values, 0))
    return jnp.where(weights == 0, mean, sums / jnp.where(weights == 0, 1, weights))


def _apply(kernel: Any, vectors: Array) -> Array:
    with jax.default_matmul_precision("highest"):  # else three digits on a GPU
        return kernel @ vectors


Labels = Int[Array | np.ndarray, " n"]


class Clusters(NamedTuple):
    """The result of `kernel_kmeans`."""

    labels: Int[Array, " n"]
    objective: Float[Array, ""]
    """sum_i |phi_i - mean of its cluster|^2 - sum_i K_ii; lower is better, never above 0."""


def kernel_kmeans(
    key: Key, kernel: Any, *, num_clusters: int, num_starts: int = 10, num_steps: int = 50
) -> Clusters:
    """Cluster nodes by k-means in the space of the kernel (Dhillon et al. 2004).

    The squared distance of node i to the mean of cluster c, K_ii - 2 sum_{j in c} K_ij / |c| +
    sum_{jl in c} K_jl / |c|^2, follows from the product of K and the one-hot labels.

    Args:
        key: random key of the initial labels.
        kernel: kernel of the nodes.
        num_clusters: number of clusters.
        num_starts: number of starts; the best result is returned.
        num_steps: steps of each start, more than it needs to converge.
    """
    choices.positive_integer("num_clusters", num_clusters)

    def distances(labels):
        members = jax.nn.one_hot(labels, num_clusters)  # (N, c)
        count = jnp.bincount(labels, length=num_clusters)  # int32: sums of ones stop at 2^24
        sizes = jnp.maximum(count, 1).astype(members.dtype)
        sums = _apply(kernel, members) / sizes[None]
        within = jnp.sum(members * sums, axis=0) / sizes
        away = jnp.where((count > 0)[None], within[None] - 2 * sums, jnp.inf)
        return away, -jnp.sum(within * sizes)

    def nearest(labels):
        return jnp.argmin(distances(labels)[0], axis=1).astype(jnp.int32)

    def one(key):
        start = jax.random.randint(key, kernel.shape[:1], 0, num_clusters, jnp.int32)
        labels = jax.lax.fori_loop(0, num_steps, lambda _, labels: nearest(labels), start)
        return Clusters(labels, distances(labels)[1])

    clusters = jax.lax.map(one, jax.random.split(key, num_starts))
    best = jnp.argmin(clusters.objective)
    return Clusters(clusters.labels[best], clusters.objective[best])


def clustering_error(labels: Labels, other: Labels) -> float:
    """Return the share of pairs of nodes that are together in only one clustering (qGRF Eq. 22).

    Args:
        labels: cluster of each node (N,), any integers.
        other: the same for the other clustering.
    """
    a, b = (np.unique(x, return_inverse=True)[1] for x in np.stack([labels, other]))
    n = len(a)
    together = [_pairs(x) for x in (a, b, a * n + b)]
    return (together[0] + together[1] - 2 * together[2]) / max(n * (n - 1) // 2, 1)


def _pairs(labels: np.ndarray) -> int:
    """Return the number of pairs with the same label."""
    sizes = np.unique(labels, return_counts=True)[1]
    return int(np.sum(sizes * (sizes - 1) // 2))
