"""Classification by kernel regression with random features (SimRF Sec. 5.3).

    y'(x) = sum_i K(sigma x, sigma x_i) y_i / sum_i K(sigma x, sigma x_i),    the class its argmax

with K the Gaussian kernel, exact or estimated by m positive features, and y_i one-hot.
`experiments.tabular.classification` makes the paper's figures and tables of it.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.spatial.distance import cdist

from experiments.common import tabular
from performer import couplings

LARGE, TUNING_ROWS = 10_000, (1000, 100)


class Problem(NamedTuple):
    """Points to learn from and points to classify, standardised, float32."""

    name: str
    train_x: np.ndarray
    """(n, d)"""
    one_hot: np.ndarray
    """(n, c)"""
    test_x: np.ndarray
    """(k, d)"""
    test_y: np.ndarray
    """(k,) class numbers."""


def problems(table: tabular.Table, max_rows: int) -> tuple[Problem, Problem]:
    """The problem of a data set, and the one inside its training half that tunes sigma.

    Raises:
        ValueError: for a single column, where no simplex exists, or too few rows.
    """
    if table.x.shape[1] < 2:
        raise ValueError(
            f"data set {table.name!r} has the column {table.columns[0]!r} alone: SimRF needs two"
        )
    split = tabular.splits(table, 1, train=max_rows // 2, test=max_rows // 2)
    x, y, test_x, test_y = (np.asarray(array[0]) for array in split[:4])
    one_hot = np.eye(table.y.max() + 1, dtype=np.float32)

    def problem(train_x, train_y, test_x, test_y):
        points = train_x.astype(np.float32), one_hot[train_y], test_x.astype(np.float32)
        return Problem(table.name, *points, test_y)

    fitted = len(x) - max(1, len(x) // 4)
    first, second = TUNING_ROWS if len(table.x) > LARGE else (len(x), len(x))
    fit, held = slice(min(first, fitted)), slice(fitted, fitted + second)
    return problem(x, y, test_x, test_y), problem(x[fit], y[fit], x[held], y[held])


def regress(
    train_x: Float[Array, "n d"],
    one_hot: Float[Array, "n c"],
    test_x: Float[Array, "k d"],
    W: Float[Array, "m d"],
    blocks: int = 1,
) -> Float[Array, "b k c"]:
    """y' of the test points, from the first m / blocks, 2 m / blocks, ... and from all m features.

    The points come multiplied by sigma. In O((n + k) m c): the sum over the training points first.
    """
    # The features exp(w.x - |x|^2) underflow in float32 for |x|^2 > 100, one outlier being enough.
    # A factor common to all features of a test point cancels, |x|^2 among them; what the training
    # points have in common in one feature (`top`) moves to the test points.
    project = partial(jnp.matmul, precision="highest")
    train = project(train_x, W.T) - jnp.sum(train_x**2, axis=-1, keepdims=True)
    top = jnp.max(train, axis=0)
    class_sums = project(jnp.exp(train - top).T, one_hot)
    test = (project(test_x, W.T) + top).reshape(len(test_x), blocks, -1)
    maximum = jnp.max(test, axis=-1)
    block_sums = jnp.einsum(
        "kbf,bfc->kbc",
        jnp.exp(test - maximum[..., None]),
        class_sums.reshape(blocks, -1, one_hot.shape[-1]),
        precision="highest",
    )
    # Sums of the first blocks, relative to the largest of their maxima.
    running = jax.lax.cummax(maximum, axis=1)
    scales = jnp.tril(jnp.exp(jnp.minimum(maximum[:, None] - running[:, :, None], 0)))
    sums = jnp.einsum("ksb,kbc->skc", scales, block_sums, precision="highest")
    return sums / jnp.sum(sums, axis=-1, keepdims=True)


@partial(jax.jit, static_argnames=("name", "m", "d"))
def _frequencies(keys, *, name, m, d):
    return jax.vmap(lambda key: couplings.get(name)(key, m, d))(keys)


@partial(jax.jit, static_argnames=("blocks", "batch"))
def _right(frequencies, train_x, one_hot, test_x, test_y, *, blocks, batch):
    def draw_counts(W):
        predicted = regress(train_x, one_hot, test_x, W, blocks)
        right = jnp.argmax(predicted, axis=-1) == test_y
        return jnp.sum(right, axis=-1), jnp.all(jnp.isfinite(predicted))

    return jax.lax.map(draw_counts, frequencies, batch_size=batch)


def accuracies(
    problem: Problem, sigma: float, coupling: str, *, blocks: int, draws: int, seed: int
) -> np.ndarray:
    """Accuracies (draws, blocks) with m = d, 2 d, ..., blocks d features.

    Raises:
        ValueError: when an estimate is not finite.
    """
    n, d = problem.train_x.shape
    k, c = len(problem.test_x), problem.one_hot.shape[-1]
    keys = jax.random.split(jax.random.key(seed), draws)
    numbers = blocks * ((n + k) * d + k * (c + blocks))
    # A divisor of the draws: a batch that is left over would be compiled once more.
    batch = max(i for i in range(1, draws + 1) if draws % i == 0 and (i == 1 or i * numbers < 4e6))
    counts, finite = _right(
        _frequencies(keys, name=coupling, m=blocks * d, d=d),
        np.float32(sigma) * problem.train_x,
        problem.one_hot,
        np.float32(sigma) * problem.test_x,
        problem.test_y,
        blocks=blocks,
        batch=batch,
    )
    if not np.all(finite):
        raise ValueError(
            f"data set {problem.name!r} with {coupling} at sigma = {sigma:g}: the estimate is not"
            " finite; take a smaller sigma, or look for extreme values in the columns"
        )
    return np.asarray(counts, np.float64) / k


def exact_accuracies(problem: Problem, sigmas: Sequence[float]) -> list[float]:
    """Accuracies with the exact kernel, in float64."""
    right = np.zeros(len(sigmas))
    for start in range(0, len(problem.test_x), 1000):
        rows = slice(start, start + 1000)
        squares = cdist(problem.test_x[rows], problem.train_x, "sqeuclidean")
        squares -= squares.min(axis=1, keepdims=True)  # so that no row is all zeros
        for i, sigma in enumerate(sigmas):
            predicted = np.exp(-(sigma**2) * squares / 2) @ problem.one_hot
            right[i] += np.sum(np.argmax(predicted, axis=1) == problem.test_y[rows])
    return (right / len(problem.test_x)).tolist()
