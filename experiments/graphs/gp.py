"""Gaussian processes on meshes and on roads, with coupled walks: VRC Figs 4 and 11.

    python -m experiments.graphs.gp                        # a torus
    python -m experiments.graphs.gp --data_dir=DIR --graphs=teapot,traffic --repeats=10

Fig. 4: the nodes are the faces of a mesh, the values the z-components of their normals, and 5% of
them are test nodes. Fig. 11, "traffic": speeds on the roads of San Jose, standardised by 250
sensors; the other 75 are test nodes. The kernel is that of diffusion. Its scales are fitted under
an estimate with 8 independent walks by Adam, 300 steps at 0.05, the paper's by 1000 at 0.01. With
the exact kernel of these scales are then compared its estimates by m walks, independent, antithetic
and sigma-coupled, all at p_halt = 0.4; the permutation of 50 is learned on an Erdos-Renyi graph for
this kernel.

    error   |K - K_hat|_F / |K|_F, over all nodes
    RMSE    of the predictive mean, in the units of the values
    KL      KL(exact || estimate) of the predictive laws of the test values, noise included, in nats

Means ± standard errors over repeats of the walks, four times as many in Fig. 11; the split is the
same. Posteriors are dense and in float64. Repeats of two couplings share their keys, so tests are
paired.

Writes figure_4 and figure_11 (csv, md, png) to --out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import scipy.sparse

from experiments.common import launch, plots, statistics
from experiments.graphs import data
from experiments.graphs.report import frobenius_errors, verdict
from performer import gp, graphs
from performer.graphs import Graph, couplings, features, kernels, matching
from performer.graphs.couplings import Coupling
from vit import report

MESHES = ("teapot", "unit_sphere", "idler_riser", "fandisk")
P_HALT, ORDER = 0.4, 50
FIT_WALKS, STEPS, LEARNING_RATE = 8, 300, 0.05
START = gp.Scales(2.0, 1.0, 0.3)
QUANTITIES = ("error", "RMSE", "KL")


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


def load(name: str, data_dir: Path | None) -> Task:
    """The task of that name: "torus", "traffic", or that of a mesh.

    Raises:
        ValueError: when the file is not there, or none can be without data_dir.
    """
    if name == "torus":
        graph, values = torus()
    elif data_dir is None:
        raise ValueError(f"{name!r} needs --data_dir; without it there is 'torus'")
    elif name == "traffic":
        path = data_dir / "traffic_san_jose" / "pems_san_jose.npz"
        return split(*data.traffic(path), count=75, walks=(4, 8, 16), standardised=True)
    else:
        graph, normals = data.mesh_faces(data_dir / "meshes" / f"{name}.npz")
        values = normals[:, 2]
    return split(graph, np.arange(len(values)), values, count=len(values) // 20)


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
    walks: tuple[int, ...] = (16, 32, 64),
    standardised: bool = False,
) -> Task:
    """So many test nodes at random, and the rest to learn from."""
    test, train = np.split(np.random.default_rng(0).permutation(len(nodes)), [count])
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


def rmse(task: Task, predicted: gp.Gaussian) -> float:
    """In the units of the values."""
    return task.unit * float(np.sqrt(np.mean((np.asarray(predicted.mean) - task.test_y) ** 2)))


def scores(
    task: Task, scales: Scales, exact: np.ndarray, reference: gp.Gaussian, phi: Any
) -> tuple[float, float, float]:
    """Error, RMSE and KL of the features `phi`; `reference` is the law under `exact`."""
    predicted = law(task, phi @ phi.T, scales)
    with jax.enable_x64(True):
        divergence = float(gp.kl(reference, predicted))
    error = float(frobenius_errors(phi, exact)[0])
    return error, rmse(task, predicted), divergence


def compared(task: Task, scales: Scales, repeats: int) -> tuple[dict, float]:
    """{(m, coupling): (repeats, 3)}, and the RMSE of the exact kernel."""
    kernel = kernels.diffusion(scales.lengthscale)
    with jax.enable_x64(True):
        exact = np.asarray(kernel.dense(task.graph))
    reference = law(task, exact, scales)
    permutation = matching.learn(data.erdos_renyi(), kernel, p_halt=P_HALT, order=ORDER)
    chosen: dict[str, str | Coupling] = {name: name for name in ("independent", "antithetic")}
    chosen["sigma"] = couplings.sigma(permutation)
    results = {(m, name): [] for m in task.walks for name in chosen}
    for m, name in results:
        for repeat in range(repeats):
            walks = features.sample(
                jax.random.key(repeat),
                task.graph,
                num_walks=m,
                p_halt=P_HALT,
                coupling=chosen[name],
            )
            phi = features.modulate(walks, kernel).to_scipy().astype(np.float64)
            results[m, name].append(scores(task, scales, exact, reference, phi))
    return {key: np.array(values) for key, values in results.items()}, rmse(task, reference)


def figure(names: list[str], data_dir: Path | None, repeats: int, out: Path) -> str:
    """A row for each graph, m and coupling; a panel for each graph and quantity."""
    tasks = {name: load(name, data_dir) for name in names}
    drawn, axes = plots.panels(out, 3 * len(tasks), columns=len(tasks))
    rows, said, by_quantity = [], [], {quantity: {} for quantity in QUANTITIES}
    for column, (name, task) in zip(axes.reshape(3, -1).T, tasks.items(), strict=True):
        scales = fitted(task)
        results, least = compared(task, scales, repeats)
        for (m, coupling), values in results.items():
            row = {"graph": name, "N": task.graph.num_nodes, "m": m, "coupling": coupling}
            for quantity, column_values in zip(QUANTITIES, values.T, strict=True):
                row[quantity] = statistics.estimate(column_values)
                by_quantity[quantity].setdefault(f"{name}, m = {m}", {})[coupling] = column_values
            rows.append(row)
        for i, (axis, quantity) in enumerate(zip(column, QUANTITIES, strict=True)):
            for coupling in dict.fromkeys(coupling for _, coupling in results):
                column_values = [results[m, coupling][:, i] for m in task.walks]
                values = [statistics.mean_and_error(x) for x in column_values]
                plots.band(axis, task.walks, values, coupling)
            axis.set(xlabel="m", ylabel=quantity, xticks=task.walks)
        column[0].set_title(f"{name}, N = {task.graph.num_nodes}")
        said.append(
            f"- {name}: lengthscale {scales.lengthscale:.3g}, output scale"
            f" {scales.output_scale:.3g}, noise {scales.noise_scale:.3g}; RMSE of the exact kernel"
            f" {least:.4g}, of no prediction {task.unit * np.sqrt(np.mean(task.test_y**2)):.4g}."
        )
        print(out.name, said[-1], flush=True)
    axes[0].legend()
    report.save(drawn, out)
    for quantity, column_values in by_quantity.items():
        said.append(f"\n{quantity}:\n\n{verdict(column_values)}")
    return report.table(rows, out, "\n".join(said))


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 10,
    out: Path = Path("results/graphs/gp"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder with meshes/ and traffic_san_jose/; a torus without.
        graphs: names of meshes, "traffic" or "torus"; those of the paper.
        repeats: of the walks; four times as many of traffic.
        out: folder for tables and figures.
    """
    launch.at_least(2, repeats=repeats)
    names = graphs or ([*MESHES, "traffic"] if data_dir else ["torus"])
    meshes = [name for name in names if name != "traffic"]
    if meshes:
        print(figure(meshes, data_dir, repeats, out / "figure_4"))
    if "traffic" in names:
        print(figure(["traffic"], data_dir, 4 * repeats, out / "figure_11"))


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2})
