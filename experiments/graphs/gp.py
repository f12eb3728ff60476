"""Gaussian processes on meshes and on roads, with coupled walks: VRC Figs 4 and 11.

    python -m experiments.graphs.gp                        # a torus
    python -m experiments.graphs.gp --data_dir=DIR --graphs=teapot,traffic --repeats=10

Fig. 4: the nodes are the faces of a mesh, the values the z-components of their normals, and 5% of
them are test nodes. Fig. 11, "traffic": speeds on the roads of San Jose, standardised by 250
sensors; the other 75 are test nodes. The kernel is the diffusion kernel. Its scales are fitted
under an estimate with 8 independent walks by 1,000 steps of Adam at a rate of 0.01, as in the
paper. The exact kernel of these scales is then compared with its estimates by m walks,
independent, antithetic and sigma-coupled, all at p_halt = 0.4; the permutation of 50 is learned on
an Erdos-Renyi graph for this kernel.

    error   |K - K_hat|_F / |K|_F, over all nodes
    RMSE    of the predictive mean, in the units of the values
    KL      KL(exact || estimate) of the predictive distributions of the test values with their
            noise, in nats

Means ± standard errors over repeats of the walks, four times as many in Fig. 11. The split is the
same for all repeats; of traffic each repeat is the mean over several splits. Posteriors are dense
and in float64. Repeats of two couplings share their keys, so tests are paired.

All roads weigh 1 in Fig. 11: with the weights of the file (mean length over a road's own) the
exact kernel with the fitted scales predicts hardly better than the mean of all sensors.

Writes figure_4 and figure_11 (csv, md, png) to --out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import scipy.sparse

from experiments.graphs import data
from performer import gp, graphs
from performer.graphs import Graph, couplings, features, kernels, matching
from performer.graphs.couplings import Coupling
from vit.study import harness, launch

MESHES = ("teapot", "fuze", "unit_sphere", "idler_riser", "busted", "torus")
P_HALT, FIT_WALKS, STEPS, LEARNING_RATE, ORDER = 0.4, 8, 1000, 0.01, 50
START = gp.Scales(2.0, 1.0, 0.3)
QUANTITIES = ("error", "RMSE", "KL")
FIGURES: harness.Figures = {
    name: dict(
        x="m",
        y={"error": "relative kernel error", "RMSE": f"RMSE{unit}", "KL": "KL (nats)"},
        panel="{graph}, N = {N}",
        across=3,
        log="x",
        xlabel="m (walks)",
    )
    for name, unit in {"figure_4": "", "figure_11": " (mph)"}.items()
}


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
    """Standard deviation of the values in their own unit."""
    walks: tuple[int, ...]
    """Numbers of walks to compare."""


class Process(NamedTuple):
    """A task, its scales, the exact kernel and its prediction, and the couplings to compare."""

    task: Task
    scales: gp.Scales
    exact: np.ndarray
    """(N, N), without the output scale, in float64."""
    predicted: gp.Gaussian
    couplings: Mapping[str, str | Coupling]


def load(name: str, data_dir: Path | None, number: int = 0) -> Task:
    """Read the task of a name: "torus", "traffic" with the split of a number, or a mesh.

    Raises:
        ValueError: for a missing file, or a name that needs data_dir.
    """
    if name == "torus" and data_dir is None:  # of 20 by 30 faces
        faces = networkx.grid_2d_graph(20, 30, periodic=True)
        graph, values = Graph.from_networkx(faces), np.sin([2 * np.pi * i / 20 for i, _ in faces])
    elif data_dir is None:
        raise ValueError(f"{name!r} needs --data_dir; without it there is 'torus'")
    elif name == "traffic":
        graph, nodes, speeds = data.traffic(data_dir / "traffic_san_jose" / "pems_san_jose.npz")
        problem = split(graph, nodes, speeds, 75, number)
        mean, unit = float(problem.y.mean()), float(problem.y.std())
        y, test_y = (problem.y - mean) / unit, (problem.test_y - mean) / unit
        return problem._replace(y=y, test_y=test_y, unit=unit, walks=(4, 8, 16))
    else:
        graph, normals = data.mesh_faces(data_dir / "meshes" / f"{name}.npz")
        values = normals[:, 2]
    return split(graph, np.arange(len(values)), values, len(values) // 20)


def split(graph: Graph, nodes: np.ndarray, values: np.ndarray, count: int, number: int = 0) -> Task:
    """Return the task of a split: `count` random test nodes, and the rest known."""
    test, train = np.split(np.random.default_rng(number).permutation(len(nodes)), [count])
    return Task(graph, nodes[train], values[train], nodes[test], values[test], 1.0, (16, 32, 64))


def fitted(task: Task) -> gp.Scales:
    """Fit the scales by the marginal likelihood under an estimate of the kernel."""
    options: Any = dict(num_walks=FIT_WALKS, p_halt=P_HALT, coupling="independent")
    walks = features.sample(jax.random.key(0), task.graph, **options)
    known = jnp.asarray(task.train), jnp.asarray(task.y, walks.load.dtype)
    options = dict(num_steps=STEPS, optimizer=optax.adam(LEARNING_RATE))
    scales, _ = graphs.gp.fit(jax.random.key(1), walks, *known, START, **options)
    return gp.Scales(*(float(jnp.asarray(scale)) for scale in scales))


def process(task: Task) -> Process:
    """Fit the scales; learn the sigma-coupling for their kernel, on an Erdos-Renyi graph."""
    scales = fitted(task)
    kernel = kernels.Diffusion(scales.lengthscale)
    with jax.enable_x64(True):
        exact = np.asarray(kernel.dense(task.graph))
    permutation = matching.learn(data.erdos_renyi(), kernel, p_halt=P_HALT, order=ORDER)
    chosen = {name: name for name in ("independent", "antithetic")}
    chosen |= {"sigma": couplings.sigma(permutation)}
    return Process(task, scales, exact, predict(task, exact, scales), chosen)


def predict(task: Task, gram: Any, scales: gp.Scales) -> gp.Gaussian:
    """Return the distribution of the test values; `gram` (N, N) has no output scale yet."""
    rows = scipy.sparse.csr_array(scales.output_scale**2 * gram)
    train, test = rows[task.train], rows[task.test]
    blocks = (train[:, task.train], test[:, task.train], test[:, task.test])
    with jax.enable_x64(True):
        gram, cross, test_gram = (jnp.asarray(block.toarray()) for block in blocks)
        y = jnp.asarray(task.y, jnp.float64)
        f = gp.condition(gram, cross, test_gram, y, scales.noise_scale)
        return gp.observed(f, scales.noise_scale)


def rmse(task: Task, predicted: gp.Gaussian) -> float:
    """Return the RMSE of the predictive mean, in the units of the values."""
    return task.unit * float(np.sqrt(np.mean((np.asarray(predicted.mean) - task.test_y) ** 2)))


def scores(of: Process, coupling: str, num_walks: int, repeat: int) -> tuple[float, ...]:
    """Return the `QUANTITIES` of an estimate of the kernel between all nodes."""
    options: Any = dict(num_walks=num_walks, p_halt=P_HALT, coupling=of.couplings[coupling])
    walks = features.sample(jax.random.key(repeat), of.task.graph, **options)
    phi = features.modulate(walks, kernels.Diffusion(of.scales.lengthscale)).to_scipy()
    phi = scipy.sparse.csr_array(phi, dtype=np.float64)
    predicted = predict(of.task, phi @ phi.T, of.scales)
    with jax.enable_x64(True):
        divergence = float(gp.kl(of.predicted, predicted))
    error = float(data.frobenius_errors(phi, of.exact)[0])
    return error, rmse(of.task, predicted), divergence


def figure(tasks: Mapping[str, Sequence[Task]], repeats: int, out: Path) -> str:
    """Write a line for each graph, m and coupling, means over splits; return the markdown."""
    rows, said = [], []
    for name, splits in tasks.items():
        processes = [process(task) for task in splits]

        def measure(case: harness.Row, processes: list[Process] = processes) -> np.ndarray:
            word, m = case["coupling"], case["m"]
            drawn = [[scores(of, word, m, i) for i in range(repeats)] for of in processes]
            return np.mean(drawn, axis=0)

        sizes = dict(graph=[name], N=[splits[0].graph.num_nodes], m=splits[0].walks)
        cases = harness.cases(**sizes, coupling=processes[0].couplings)
        rows += harness.sweep(cases, measure, quantity=QUANTITIES)
        told = "; ".join(
            f"{field} {', '.join(f'{getattr(of.scales, field):.3g}' for of in processes)}"
            for field in gp.Scales._fields
        )
        least = np.mean([rmse(of.task, of.predicted) for of in processes])
        said.append(
            f"- {name} (splits: {len(splits)}): {told}; RMSE of the exact kernel {least:.4g}."
        )
    for quantity, group in harness.grouped(rows, "{quantity}").items():
        said.append(f"\n{quantity}:\n\n{harness.verdict(group, '{graph}, m = {m}')}")
    return harness.show(harness.pivot(rows, "{quantity}"), out, FIGURES, "\n".join(said))


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 10,
    splits: int = 10,
    out: Path = Path("results/graphs/gp"),
) -> None:
    """Print the tables.

    Args:
        graphs: names of meshes, "traffic" or "torus"; by default the names of the paper.
        repeats: repeats of the walks; traffic has four times as many.
        splits: splits of the sensors of traffic into known and test nodes.
    """
    names = graphs or ([*MESHES, "traffic"] if data_dir else ["torus"])
    meshes = {name: [load(name, data_dir)] for name in names if name != "traffic"}
    if meshes:
        figure(meshes, repeats, out / "figure_4")
    if "traffic" in names:
        roads = [load("traffic", data_dir, i) for i in range(splits)]
        figure({"traffic": roads}, 4 * repeats, out / "figure_11")


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2, "splits": 2})
