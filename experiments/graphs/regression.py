"""Values at the nodes of a graph, to predict from those at others: tasks, scales, predictions.

Of the Gaussian processes of VRC Figs 4 and 11 with the diffusion kernel. Posteriors are dense and
in float64.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import scipy.linalg
import scipy.optimize
import scipy.sparse

from experiments.graphs import data
from performer import gp, graphs
from performer.graphs import Graph, features, kernels

P_HALT, FIT_WALKS, STEPS, LEARNING_RATE = 0.4, 8, 300, 0.05
START = gp.Scales(2.0, 1.0, 0.3)
BOUNDS = [(-4.0, 4.0)] * 3
"""Of the logarithms of scales."""


class Scales(NamedTuple):
    """Those of `gp.Scales`, as numbers."""

    lengthscale: float
    output_scale: float
    noise_scale: float


class Task(NamedTuple):
    """Values at some nodes of a graph, to predict from those at others."""

    graph: Graph
    train: np.ndarray
    """Nodes."""
    y: np.ndarray
    """Values there."""
    test: np.ndarray
    test_y: np.ndarray
    unit: float
    """Of the values."""
    walks: tuple[int, ...]
    """Numbers of walks to compare."""


def load(name: str, data_dir: Path | None, number: int = 0, *, weighted: bool = False) -> Task:
    """The task of that name: "torus", "traffic", or that of a mesh.

    Args:
        name: of the task.
        data_dir: folder with meshes/ and traffic_san_jose/.
        number: of the split.
        weighted: roads weigh the mean length over their own; all weigh 1 otherwise.

    Raises:
        ValueError: when the file is not there, or none can be without data_dir.
    """
    if name == "torus":
        graph, values = torus()
    elif data_dir is None:
        raise ValueError(f"{name!r} needs --data_dir; without it there is 'torus'")
    elif name == "traffic":
        roads = data.traffic(data_dir / "traffic_san_jose" / "pems_san_jose.npz", weighted=weighted)
        return split(*roads, count=75, number=number, walks=(4, 8, 16), standardised=True)
    else:
        graph, normals = data.mesh_faces(data_dir / "meshes" / f"{name}.npz")
        values = normals[:, 2]
    return split(graph, np.arange(len(values)), values, count=len(values) // 20, number=number)


def torus() -> tuple[Graph, np.ndarray]:
    """A torus of 20 by 30 faces, and the z-components of their normals."""
    faces = networkx.grid_2d_graph(20, 30, periodic=True)
    return Graph.from_networkx(faces), np.sin([2 * np.pi * i / 20 for i, _ in faces])


def split(
    graph: Graph,
    nodes: np.ndarray,
    values: np.ndarray,
    *,
    count: int,
    number: int = 0,
    walks: tuple[int, ...] = (16, 32, 64),
    standardised: bool = False,
) -> Task:
    """So many test nodes at random, by the number of the split, and the rest to learn from."""
    test, train = np.split(np.random.default_rng(number).permutation(len(nodes)), [count])
    mean, unit = 0.0, 1.0
    if standardised:
        mean, unit = float(values[train].mean()), float(values[train].std())
    y, test_y = ((values[part] - mean) / unit for part in (train, test))
    return Task(graph, nodes[train], y, nodes[test], test_y, unit, walks)


def fitted(task: Task) -> Scales:
    """The scales that maximise the marginal likelihood under an estimate of the kernel."""
    walks = features.sample(
        jax.random.key(0),
        task.graph,
        num_walks=FIT_WALKS,
        p_halt=P_HALT,
        coupling="independent",
    )
    scales, _ = graphs.gp.fit(
        jax.random.key(1),
        walks,
        jnp.asarray(task.train),
        jnp.asarray(task.y, walks.load.dtype),
        START,
        num_steps=STEPS,
        optimizer=optax.adam(LEARNING_RATE),
    )
    return Scales(*(float(jnp.asarray(scale)) for scale in scales))


def likeliest(task: Task) -> Scales:
    """The scales that maximise the marginal likelihood under the exact kernel, from several starts.

    The search is in the standard deviation of the mean node, not in the output scale.
    """
    adjacency, vectors = scipy.linalg.eigh(task.graph.normalised().to_scipy().toarray())
    rows = vectors[task.train]

    def scales(logarithms: Any) -> tuple[Any, Any, Any, Any]:
        lengthscale, deviation, noise_scale = jnp.exp(logarithms)
        spectrum = jnp.exp(-(lengthscale**2) * (1 - adjacency) / 2)
        return spectrum, lengthscale, deviation / jnp.mean(spectrum) ** 0.5, noise_scale

    @jax.jit
    @jax.value_and_grad
    def loss(logarithms: Any) -> Any:
        spectrum, _, output_scale, noise_scale = scales(logarithms)
        gram = output_scale**2 * (rows * spectrum) @ rows.T
        return -gp.log_marginal_likelihood(gram, task.y, noise_scale)

    search = partial(scipy.optimize.minimize, loss, jac=True, bounds=BOUNDS)
    with jax.enable_x64(True):
        found = [search(np.log([lengthscale, 1.0, 0.5])) for lengthscale in (2.0, 6.0, 18.0)]
        best = min(found, key=lambda end: end.fun)
        return Scales(*map(float, scales(best.x)[1:]))


def exact_kernel(task: Task, scales: Scales) -> np.ndarray:
    """Without the output scale, in float64."""
    with jax.enable_x64(True):
        return np.asarray(kernels.Diffusion(scales.lengthscale).dense(task.graph))


def law(task: Task, gram: Any, scales: Scales) -> gp.Gaussian:
    """The law of the test values; `gram` (N, N), dense or of SciPy, has no output scale yet."""
    rows = scipy.sparse.csr_array(scales.output_scale**2 * gram)
    train, test = rows[task.train], rows[task.test]
    blocks = (train[:, task.train], test[:, task.train], test[:, task.test])
    with jax.enable_x64(True):
        gram, cross, test_gram = (jnp.asarray(block.toarray()) for block in blocks)
        y = jnp.asarray(task.y, jnp.float64)
        f = gp.condition(gram, cross, test_gram, y, scales.noise_scale)
        return gp.observed(f, scales.noise_scale)


def rmse(task: Task, predicted: Any) -> float:
    """Of predictions (k,), or of one for all, in the units of the values."""
    return task.unit * float(np.sqrt(np.mean((np.asarray(predicted) - task.test_y) ** 2)))


def nearest(task: Task, count: int) -> np.ndarray:
    """The mean value of the `count` known nodes that are nearest, for each test node.

    An edge is as long as its weight is small.
    """
    lengths = task.graph.to_scipy()
    lengths.data = 1 / lengths.data
    distances = scipy.sparse.csgraph.dijkstra(lengths, indices=task.test)[:, task.train]
    return task.y[np.argsort(distances, axis=1)[:, :count]].mean(axis=1)
