"""Diffusion, clustering and regression on graphs by random walks: qGRF Tables 1, 2 and 3.

    python -m experiments.graphs.tasks                     # Tables 1 and 2: made-up graphs, karate
    python -m experiments.graphs.tasks --data_dir=DIR --graphs=karate,cora --parts=table_2

All with independent and antithetic walks, p_halt = 0.5, of (I + sigma^2 L)^{-2}. Means over trials,
their standard errors (the paper's brackets), and what the paper printed.

Table 1, diffusion: |u - u_hat|^2 for u = exp(-t L) u_0, u_0 = 1 at node 0, t = 1; u_hat applies one
estimate of 10 walks, of sigma^2 = t / N_t, N_t / 2 times, N_t = 1000 (Eq. 21). The paper says mean
squared error; only sums over the nodes are as large as what it prints.

Table 2, kernel k-means: the share of pairs (Eq. 22) that are together in the two clusters of the
exact kernel or in those of an estimate of 10 walks, but not in both. Neither the paper nor the
authors' notebook (isaac-reid/antithetic_termination), which has Fig. 2 alone, states sigma, walks,
starts and trials. Here sigma = 1: with 0.1, as elsewhere, k-means does not leave its start. Both
kernels have the same random start, a new one in each trial.

Table 3, normals of meshes: 1 - cos between the normals of 5% of the vertices and what regression on
the rest finds (Eq. 23), with 6 walks and sigma = 0.1; new vertices and walks in each trial. The
normals are those of the files, means of the faces' weighted by angles; the paper's are "the mean".
A vertex that the estimate connects with no known one, one in a thousand or fewer, counts as 1.

Two parts look for the causes of differences to the paper. "normals" is Table 3 with means weighted
equally, by areas and by angles. "random_graphs" is Table 1 on seven draws of its "Larger ER".

Writes table_1, table_2, table_3 (csv and md) and one figure of them all, tasks.png, to --out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import networkx
import numpy as np

from experiments.graphs import data, methods
from performer.graphs import Graph, graph_random_features, kernels
from performer.graphs.features import EstimatedKernel
from performer.typing import Key
from vit.study import harness, launch, statistics

P_HALT = 0.5
TIME, TIME_STEPS, DIFFUSION_WALKS = 1.0, 1000, 10
CLUSTERS, CLUSTER_SIGMA, CLUSTER_WALKS = 2, 1.0, 10
HIDDEN, MESH_SIGMA, MESH_WALKS = 0.05, 0.1, 6
BATCH = 100
"""Trials in one draw of walks."""

GRAPHS = {
    1: (*data.GENERATED, "karate", "dolphins", "football", "eurosis_lcc"),
    2: (
        *("karate", "dolphins", "polbooks", "football", "eu-core", "cora_Databases", "eurosis"),
        "citeseer",
    ),
}
MESHES = ("cylinder", "teapot", "idler_riser", "busted", "torus")
PRINTED = Path(__file__).parent / "qgrf_tables.csv"
"""The paper's tables; in brackets the error of the last digit."""
WORDS = {"independent": "GRFs", "antithetic": "q-GRFs"}
TITLES = {
    "table_1": "Table 1, diffusion: squared error",
    "table_2": "Table 2, k-means: share of wrong pairs",
    "table_3": "Table 3, normals: 1 - cos",
}


def with_paper(rows: list[harness.Row]) -> list[harness.Row]:
    """Return a row for each coupling, with the number that the paper printed."""
    rows = harness.melt(rows, WORDS)
    theirs = [str(row[f"paper {WORDS[row['line']]}"]).partition("(")[0] for row in rows]
    return [
        row | {"title": TITLES[row["table"]], "paper": float(paper or "nan")}
        for row, paper in zip(rows, theirs, strict=True)
    ]


FIGURES: harness.Figures = {
    "tasks": dict(
        tables=tuple(TITLES),
        change=with_paper,
        x="{graph}",
        line="{line}",
        panel="{title}",
        across=1,
        high=1.9,
        log="y",
    )
}


def diffusion_errors(key: Key, coupling: str, trials: int, graph: Graph) -> np.ndarray:
    """Return |u - u_hat|^2 of each trial, qGRF Eq. 21."""
    exact = np.asarray(kernels.Diffusion((2 * TIME) ** 0.5).dense(graph), np.float64)[:, 0]
    kernel, errors = kernels.RegularisedLaplacian(2, (TIME / TIME_STEPS) ** 0.5), []
    for batch_key, count in _batches(key, trials):
        estimate = _estimate(batch_key, graph, kernel, DIFFUSION_WALKS, coupling, count)
        # SciPy merges the visits to a node, which saves most of the work.
        phi = estimate.left.to_scipy().astype(np.float64)
        transposed, state = phi.T.tocsr(), np.zeros(estimate.shape[0])
        state[:: len(exact)] = 1
        for _ in range(TIME_STEPS // 2):
            state = phi @ (transposed @ state)
        errors.append(np.sum((state.reshape(count, -1) - exact) ** 2, axis=1))
    return np.concatenate(errors)


def clustering_errors(key: Key, coupling: str, trials: int, graph: Graph) -> np.ndarray:
    """Return the share of wrong pairs in each trial, qGRF Eq. 22."""
    kernel = kernels.RegularisedLaplacian(2, CLUSTER_SIGMA)
    exact, errors = kernel.dense(graph), []
    for walks_key, start_key in jax.random.split(key, (trials, 2)):
        estimate = _estimate(walks_key, graph, kernel, CLUSTER_WALKS, coupling)
        labels = [_labels(start_key, k) for k in (exact, estimate)]
        errors.append(methods.clustering_error(*labels))
    return np.array(errors)


@jax.jit
def _labels(key: Key, kernel: jax.Array | EstimatedKernel) -> jax.Array:
    return methods.kernel_kmeans(key, kernel, num_clusters=CLUSTERS, num_starts=1).labels


def normal_errors(
    key: Key, coupling: str, trials: int, graph: Graph, normals: np.ndarray
) -> np.ndarray:
    """Return the mean of 1 - cos over the vertices held out in each trial, qGRF Eq. 23."""
    kernel, errors = kernels.RegularisedLaplacian(2, MESH_SIGMA), []
    for batch_key, count in _batches(key, trials):
        walks_key, nodes_key = jax.random.split(batch_key)
        estimate = _estimate(walks_key, graph, kernel, MESH_WALKS, coupling, count)
        ranks = jax.random.uniform(nodes_key, (count, graph.num_nodes)).argsort().argsort()
        hidden = np.asarray(ranks < int(HIDDEN * graph.num_nodes))
        values = jnp.tile(jnp.asarray(normals, jnp.float32), (count, 1))
        known = jnp.asarray(~hidden.ravel())
        reached = (estimate @ known.astype(values.dtype))[:, None] > 0
        estimated = np.asarray(jnp.where(reached, methods.regress(estimate, values, known), 0))
        errors.append(_mean_angles(estimated.reshape(count, -1, 3), normals, hidden))
    return np.concatenate(errors)


def _mean_angles(estimates: np.ndarray, normals: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Return the mean of 1 - cos over the hidden vertices; 1 where nothing was found."""
    lengths = np.linalg.norm(estimates, axis=-1)
    cosines = np.sum(estimates * normals, axis=-1) / np.where(lengths > 0, lengths, 1)
    return np.mean(1 - np.nan_to_num(cosines), axis=1, where=hidden)


def _estimate(
    key: Key, graph: Graph, kernel: kernels.Modulation, m: int, coupling: str, count: int = 1
) -> EstimatedKernel:
    """Estimate the kernel of `count` copies of the graph by m walks from each node."""
    options: Any = dict(num_walks=m, p_halt=P_HALT, coupling=coupling)
    return graph_random_features(key, data.copies(graph, count), kernel, **options)


def _batches(key: Key, trials: int) -> Iterator[tuple[Key, int]]:
    """Yield keys and numbers of trials."""
    sizes = [min(BATCH, trials - done) for done in range(0, trials, BATCH)]
    yield from zip(jax.random.split(key, len(sizes)), sizes, strict=True)


Part = Literal["table_1", "table_2", "table_3", "normals", "random_graphs"]
TABLES: dict[int, Callable[..., np.ndarray]] = {
    1: diffusion_errors,
    2: clustering_errors,
    3: normal_errors,
}


def table(number: int, problems: dict[str, tuple], trials: int, out: Path) -> None:
    """Print a table with the paper's numbers; both couplings have the same keys."""
    rows = harness.sweep(
        [
            {"graph": name, "N": problem[0].num_nodes, "trials": trials, "coupling": coupling}
            for name, problem in problems.items()
            for coupling in WORDS
        ],
        lambda case: TABLES[number](
            jax.random.key(0), case["coupling"], trials, *problems[case["graph"]]
        ),
    )
    printed, lines = harness.printed(PRINTED, "table", "graph"), []
    values = harness.cases_of(rows, "{graph}")
    for line in harness.pivot(rows, "{coupling}"):
        name = line["graph"]
        apart = statistics.paired(values[name]["antithetic"], values[name]["independent"])
        line |= {"difference": apart.mean, "difference ±": apart.standard_error}
        theirs = printed.get((str(number), name), {})
        lines.append(line | {f"paper {word}": theirs.get(word, "") for word in WORDS.values()})
    harness.show(lines, out / f"table_{number}", text=harness.verdict(rows, "{graph}"))


def normals(paths: dict[str, Path], trials: int, out: Path) -> None:
    """Measure Table 3 with the three weights of the faces around a vertex."""
    problems = {}
    for name, path in paths.items():
        graph, by_angle = data.mesh(path)
        equal, by_area = (data.vertex_normals(path, by_area) for by_area in (False, True))
        for word, values in {"equal": equal, "area": by_area, "angle": by_angle}.items():
            problems[name, word] = graph, values
    rows = harness.sweep(
        [
            {"graph": name, "weights": word, "trials": trials, "coupling": coupling}
            for name, word in problems
            for coupling in WORDS
        ],
        lambda case: normal_errors(
            jax.random.key(0), case["coupling"], trials, *problems[case["graph"], case["weights"]]
        ),
    )
    printed = harness.printed(PRINTED, "table", "graph")
    theirs = {name: printed["3", name] for name in paths}
    harness.show(
        [
            line | {f"paper {word}": theirs[line["graph"]][word] for word in WORDS.values()}
            for line in harness.pivot(rows, "{coupling}")
        ],
        out,
    )


def random_graphs(trials: int, out: Path) -> None:
    """Measure Table 1 on the first seven connected draws of its larger random graph."""
    drawn = (networkx.gnp_random_graph(100, 0.04, seed=seed) for seed in itertools.count())
    connected = itertools.islice(filter(networkx.is_connected, drawn), 7)
    problems = {f"draw {i + 1}": Graph.from_networkx(of) for i, of in enumerate(connected)}
    cases = harness.cases(graph=problems, trials=[trials], coupling=WORDS)
    rows = harness.sweep(
        cases,
        lambda case: diffusion_errors(
            jax.random.key(0), case["coupling"], trials, problems[case["graph"]]
        ),
    )
    ratios = [row for row in harness.relative(rows, "{graph}") if row["coupling"] == "antithetic"]
    lines = zip(harness.pivot(rows, "{coupling}"), ratios, strict=True)
    harness.show([line | {k: row[k] for k in harness.RATIO} for line, row in lines], out)


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    parts: Sequence[Part] = ("table_1", "table_2", "table_3"),
    trials: int = 1000,
    out: Path = Path("results/graphs/tasks"),
) -> None:
    """Print the tables.

    Args:
        parts: tables of the paper; "normals" (with data_dir) and "random_graphs" are not in it.
    """
    problems: dict[int, dict[str, tuple]] = {
        number: {name: (graph,) for name, graph in data.chosen(graphs, names, data_dir).items()}
        for number, names in GRAPHS.items()
    }
    paths = {}
    if data_dir:
        paths = {name: data_dir / "meshes" / f"{name}.npz" for name in MESHES}
        problems[3] = {name: data.mesh(path) for name, path in paths.items()}
    if "random_graphs" in parts:
        random_graphs(trials, out / "random_graphs")
    if data_dir and "normals" in parts:
        normals(paths, trials, out / "normals")
    for number, instances in problems.items():
        if f"table_{number}" in parts:
            table(number, instances, trials, out)
    tables = [name for name in TITLES if (out / f"{name}.csv").exists()]
    if not tables:
        return
    options: Any = FIGURES["tasks"] | {"tables": tables}
    harness.figure(out / "tasks", **options)


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("karate",), "trials": 20})
