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

Means ± standard errors over repeats of the walks, four times as many in Fig. 11. The split is the
same for all repeats; of traffic each repeat is the mean over several splits. Posteriors are dense
and in float64. Repeats of two couplings share their keys, so tests are paired.

All roads weigh 1 in Fig. 11. With the weights of the file (mean length over a road's own) the exact
kernel with the fitted scales predicts hardly better than the mean of all sensors. The table
"predictors" shows why. It has, over the same splits, the errors of that mean, of the mean of the
nearest 5 sensors, and of Gaussian processes with both kinds of weights. Their scales are fitted
under the estimate, or by the exact likelihood, the latter also with an estimate by 16 walks.

Writes figure_4, figure_11 (csv, md, png) and predictors (csv, md) to --out.
"""

import itertools
from collections.abc import Mapping, Sequence
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

from experiments.common import harness, launch, statistics
from experiments.graphs import data
from performer import graphs
from performer.graphs import Graph, couplings, features, kernels, matching
from performer.graphs.couplings import Coupling
from performer.kernels import gp

MESHES = ("teapot", "fuze", "unit_sphere", "idler_riser", "busted", "torus")
P_HALT, FIT_WALKS, STEPS, LEARNING_RATE = 0.4, 8, 300, 0.05
START = gp.Scales(2.0, 1.0, 0.3)
BOUNDS = [(-4.0, 4.0)] * 3
"""Bounds of the logarithms of scales."""
ORDER, NEIGHBOURS, MOST_WALKS = 50, 5, 16
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
    """A task, its scales, the exact kernel and its law."""

    task: Task
    scales: gp.Scales
    exact: np.ndarray
    """(N, N), without the output scale, in float64."""
    law: gp.Gaussian


def load(name: str, data_dir: Path | None, number: int = 0, *, weighted: bool = False) -> Task:
    """Read the task of a name: "torus", "traffic", or a mesh.

    Args:
        name: name of the task.
        data_dir: folder with meshes/ and traffic_san_jose/.
        number: number of the split.
        weighted: roads weigh the mean length over their own; all weigh 1 otherwise.

    Raises:
        ValueError: for a missing file, or a name that needs data_dir.
    """
    if name == "torus" and data_dir is None:  # of 20 by 30 faces
        faces = networkx.grid_2d_graph(20, 30, periodic=True)
        graph, values = Graph.from_networkx(faces), np.sin([2 * np.pi * i / 20 for i, _ in faces])
    elif data_dir is None:
        raise ValueError(f"{name!r} needs --data_dir; without it there is 'torus'")
    elif name == "traffic":
        roads = data.traffic(data_dir / "traffic_san_jose" / "pems_san_jose.npz", weighted=weighted)
        return split(*roads, count=75, number=number, walks=(4, 8, 16), standardised=True)
    else:
        graph, normals = data.mesh_faces(data_dir / "meshes" / f"{name}.npz")
        values = normals[:, 2]
    return split(graph, np.arange(len(values)), values, count=len(values) // 20)


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
    """Return the task of a split: `count` random test nodes, and the rest known."""
    test, train = np.split(np.random.default_rng(number).permutation(len(nodes)), [count])
    known = values[train]
    mean, unit = (float(known.mean()), float(known.std())) if standardised else (0.0, 1.0)
    y, test_y = (known - mean) / unit, (values[test] - mean) / unit
    return Task(graph, nodes[train], y, nodes[test], test_y, unit, walks)


def fitted(task: Task) -> gp.Scales:
    """Fit the scales by the marginal likelihood under an estimate of the kernel."""
    options: Any = dict(num_walks=FIT_WALKS, p_halt=P_HALT, coupling="independent")
    walks = features.sample(jax.random.key(0), task.graph, **options)
    known = jnp.asarray(task.train), jnp.asarray(task.y, walks.load.dtype)
    options = dict(num_steps=STEPS, optimizer=optax.adam(LEARNING_RATE))
    scales, _ = graphs.gp.fit(jax.random.key(1), walks, *known, START, **options)
    return gp.Scales(*(float(jnp.asarray(scale)) for scale in scales))


def likeliest(task: Task) -> gp.Scales:
    """Fit the scales by the marginal likelihood under the exact kernel, from several starts.

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
        return gp.Scales(*map(float, scales(best.x)[1:]))


def process(task: Task, scales: gp.Scales) -> Process:
    """Condition the task under the exact kernel of these scales."""
    with jax.enable_x64(True):
        exact = np.asarray(kernels.Diffusion(scales.lengthscale).dense(task.graph))
    return Process(task, scales, exact, law(task, exact, scales))


def law(task: Task, gram: Any, scales: gp.Scales) -> gp.Gaussian:
    """Return the law of the test values; `gram` (N, N) has no output scale yet."""
    rows = scipy.sparse.csr_array(scales.output_scale**2 * gram)
    train, test = rows[task.train], rows[task.test]
    blocks = (train[:, task.train], test[:, task.train], test[:, task.test])
    with jax.enable_x64(True):
        gram, cross, test_gram = (jnp.asarray(block.toarray()) for block in blocks)
        y = jnp.asarray(task.y, jnp.float64)
        f = gp.condition(gram, cross, test_gram, y, scales.noise_scale)
        return gp.observed(f, scales.noise_scale)


def rmse(task: Task, predicted: Any) -> float:
    """Return the RMSE of predictions (k,), or of one for all, in the units of the values."""
    return task.unit * float(np.sqrt(np.mean((np.asarray(predicted) - task.test_y) ** 2)))


def nearest(task: Task, count: int) -> np.ndarray:
    """Return the mean value of the `count` nearest known nodes of each test node.

    An edge is as long as its weight is small.
    """
    lengths = task.graph.to_scipy()
    lengths.data = 1 / lengths.data
    distances = scipy.sparse.csgraph.dijkstra(lengths, indices=task.test)[:, task.train]
    return task.y[np.argsort(distances, axis=1)[:, :count]].mean(axis=1)


def estimated(
    of: Process, repeat: int, num_walks: int, coupling: str | Coupling
) -> scipy.sparse.csr_array:
    """Draw the features of all nodes."""
    options: Any = dict(num_walks=num_walks, p_halt=P_HALT, coupling=coupling)
    walks = features.sample(jax.random.key(repeat), of.task.graph, **options)
    phi = features.modulate(walks, kernels.Diffusion(of.scales.lengthscale))
    return scipy.sparse.csr_array(phi.to_scipy(), dtype=np.float64)


def scores(of: Process, phi: Any) -> tuple[float, float, float]:
    """Return error, RMSE and KL of the features `phi`."""
    predicted = law(of.task, phi @ phi.T, of.scales)
    with jax.enable_x64(True):
        divergence = float(gp.kl(of.law, predicted))
    error = float(data.frobenius_errors(phi, of.exact)[0])
    return error, rmse(of.task, predicted.mean), divergence


def sigma(of: Process) -> Coupling:
    """Learn the coupling for the kernel, on an Erdos-Renyi graph."""
    kernel = kernels.Diffusion(of.scales.lengthscale)
    return couplings.sigma(matching.learn(data.erdos_renyi(), kernel, p_halt=P_HALT, order=ORDER))


def measured(name: str, splits: Sequence[Task], repeats: int) -> tuple[list[harness.Row], str]:
    """Return rows of each m, coupling and quantity, means over splits; a line about the scales."""
    processes = [process(task, fitted(task)) for task in splits]
    permuted = [sigma(of) for of in processes]

    def measure(case: harness.Row) -> np.ndarray:
        word, m = case["coupling"], case["m"]
        pairs = zip(processes, permuted if word == "sigma" else [word] * len(splits), strict=True)
        return np.mean(
            [[scores(of, estimated(of, i, m, c)) for i in range(repeats)] for of, c in pairs],
            axis=0,
        )

    sizes = dict(graph=[name], N=[splits[0].graph.num_nodes], m=splits[0].walks)
    cases = harness.cases(**sizes, coupling=("independent", "antithetic", "sigma"))
    told = "; ".join(
        f"{field} {', '.join(f'{getattr(of.scales, field):.3g}' for of in processes)}"
        for field in gp.Scales._fields
    )
    least = np.mean([rmse(of.task, of.law.mean) for of in processes])
    said = f"- {name} (splits: {len(splits)}): {told}; RMSE of the exact kernel {least:.4g}."
    return harness.sweep(cases, measure, quantity=QUANTITIES), said


def figure(tasks: Mapping[str, Sequence[Task]], repeats: int, out: Path) -> str:
    """Write a line for each graph, m and coupling, and its figure; return the markdown."""
    rows, said = [], []
    for name, splits in tasks.items():
        found, line = measured(name, splits, repeats)
        rows += found
        said.append(line)
    for quantity, group in harness.grouped(rows, "{quantity}").items():
        said.append(f"\n{quantity}:\n\n{harness.verdict(group, '{graph}, m = {m}')}")
    return harness.show(rows, out, FIGURES, "\n".join(said), column="{quantity}")


def predictors(roads: Mapping[str, Sequence[Task]], out: Path) -> None:
    """Write a row for each predictor, means over splits; `roads`: the tasks of each weighting."""
    weighted = next(iter(roads.values()))
    found: dict[str, tuple[list[float], str]] = {
        "mean of all sensors": ([rmse(task, 0.0) for task in weighted], ""),
        f"mean of the nearest {NEIGHBOURS}": (
            [rmse(task, nearest(task, NEIGHBOURS)) for task in weighted],
            "",
        ),
    }
    for (kind, splits), fit in itertools.product(roads.items(), (fitted, likeliest)):
        processes = [process(task, fit(task)) for task in splits]
        scales = " ".join(f"{of.scales.lengthscale:.3g}" for of in processes)
        exact = [rmse(of.task, of.law.mean) for of in processes]
        walked = [scores(of, estimated(of, 0, MOST_WALKS, "independent"))[1] for of in processes]
        found[f"{kind}, {fit.__name__}, exact"] = exact, scales
        found[f"{kind}, {fit.__name__}, {MOST_WALKS} walks"] = walked, scales
    mean = np.array(found["mean of all sensors"][0])
    rows = [
        {
            "predictor": predictor,
            "RMSE": statistics.estimate(errors),
            "RMSE less that of the mean": statistics.estimate(np.array(errors) - mean),
            "lengthscales": scales,
        }
        for predictor, (errors, scales) in found.items()
    ]
    harness.show(rows, out)


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 10,
    splits: int = 10,
    out: Path = Path("results/graphs/gp"),
) -> None:
    """Print the tables.

    Args:
        graphs: names of meshes, "traffic" or "torus"; those of the paper.
        repeats: repeats of the walks; traffic has four times as many.
        splits: splits of the sensors of traffic into known and test nodes.
    """
    names = graphs or ([*MESHES, "traffic"] if data_dir else ["torus"])
    meshes = {name: [load(name, data_dir)] for name in names if name != "traffic"}
    if meshes:
        figure(meshes, repeats, out / "figure_4")
    if "traffic" in names:
        roads = {
            kind: [load("traffic", data_dir, i, weighted=weighted) for i in range(splits)]
            for kind, weighted in {"weights 1 / length": True, "weights 1": False}.items()
        }
        predictors(roads, out / "predictors")
        figure({"traffic": roads["weights 1"]}, 4 * repeats, out / "figure_11")


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2, "splits": 2})
