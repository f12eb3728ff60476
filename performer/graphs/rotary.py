"""Rotary positions of nodes: queries and keys turned by angles from the spectrum of the graph.

The position of node i is r_i, its entries in the lowest eigenvectors of the Laplacian D - W. Pair b
of the entries of a query or key is turned by omega_b . r_i ("Rotary position encodings for graphs",
WIRE, Reid et al. 2025), so that q_i . k_j depends on r_i - r_j. On a path with one eigenvector this
is RoPE up to a monotone change of the position. Queries and keys are turned before the features,
which makes it a relative position that linear attention can have.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse.csgraph
import scipy.sparse.linalg
from jaxtyping import Array, Float

from performer import choices
from performer.graphs.graph import Graph, require_nonnegative

DENSE = 300
"""Number of nodes up to which all eigenvectors are computed."""


def coordinates(graph: Graph, num_coordinates: int) -> Float[Array, "nodes r"]:
    """Return the lowest eigenvectors of D - W, of length sqrt(nodes), in JAX's default dtype.

    Constants on components, of eigenvalue 0, are left out. The sign of an eigenvector, and the
    basis of those of one eigenvalue, are arbitrary: with frequencies drawn from N(0, s^2 I) the law
    of the angles does not depend on them.

    Args:
        graph: the graph. The system D - W + c I is factored, which suits meshes and sparse graphs.
        num_coordinates: number of eigenvectors.

    Raises:
        ValueError: for more coordinates than nodes less components, or a negative weight.
    """
    choices.positive_integer("num_coordinates", num_coordinates)
    require_nonnegative(graph, "the Laplacian")
    weights, n = graph.to_scipy(), graph.num_nodes
    parts, part = scipy.sparse.csgraph.connected_components(weights, directed=False)
    if num_coordinates > n - parts:
        raise ValueError(
            f"num_coordinates must be at most {n - parts}, the number of nodes less that of"
            f" components, got {num_coordinates}"
        )
    laplacian: Any = scipy.sparse.csgraph.laplacian(weights)
    if n <= DENSE:
        vectors = np.linalg.eigh(laplacian.toarray())[1][:, parts:][:, :num_coordinates]
    else:
        vectors = _lanczos(laplacian, part, num_coordinates)
    return jnp.asarray(vectors * n**0.5, float)


def _lanczos(laplacian: Any, part: np.ndarray, count: int) -> np.ndarray:
    """Return the lowest eigenvectors that are orthogonal to the constants on the components."""
    n, sizes = len(part), np.bincount(part)
    shift = 1e-2 * float(np.mean(laplacian.diagonal())) * scipy.sparse.eye_array(n)
    inverse = scipy.sparse.linalg.splu(
        (laplacian + shift).tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )  # fmt: skip

    def centred(v):
        return v - (np.bincount(part, v) / sizes)[part]

    product: Any = lambda v: centred(inverse.solve(centred(v.ravel())))  # noqa: E731
    linear_operator: Any = scipy.sparse.linalg.LinearOperator
    operator = linear_operator((n, n), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(n)  # else another draw in each call
    return scipy.sparse.linalg.eigsh(operator, count, which="LA", v0=start)[1][:, ::-1]


def rotate(
    x: Float[Array, "*b nodes n h"],
    positions: Float[Array, "nodes r"],
    frequencies: Float[Array, "*n half r"],
) -> Float[Array, "*b nodes n h"]:
    """Return queries or keys with entries b and b + h / 2 turned by omega_b . r_i.

    Args:
        x: queries or keys; h is even.
        positions: those of `coordinates`, or any other.
        frequencies: omega, (h / 2, r) for all heads or (n, h / 2, r). Trainable.

    Raises:
        ValueError: for frequencies that are not half as many as h.

    Example:
        >>> r = coordinates(graph, 4)
        >>> query, key = rotate(query, r, omega), rotate(key, r, omega)
    """
    if 2 * frequencies.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"{x.shape[-1]} entries need half as many frequencies: {frequencies.shape}"
        )
    shared = jnp.broadcast_to(frequencies, (x.shape[-2], *frequencies.shape[-2:]))
    angles = jnp.einsum("nbr,ir->inb", shared, positions.astype(shared.dtype), precision="highest")
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
