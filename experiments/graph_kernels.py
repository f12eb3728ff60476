"""Errors of kernels and of PageRank by random walks: qGRF Figs 2 and 4.

    python -m experiments.graph_kernels                   # made-up graphs and karate
    python -m experiments.graph_kernels --data_dir=DIR [--graphs=karate,cora] [--repeats=100]

Fig. 2: |K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian (I + sigma^2 L)^{-2}, sigma = 0.1,
p_halt = 0.5, with independent and antithetic walks and with the self-avoiding ones of Sec. 4.1
(`reinforced`, of independent lengths). Fig. 4: |pi - pi_hat|_2^2 of PageRank, p_halt = 0.3, beside
power iteration. Both for 2, 4, 8 and 16 walks from each node and 100 repetitions; means and their
standard errors. At p_halt = 0.5 ensembles are antithetic pairs, and are left out.

The paper's eurosis is not among the graphs we have; eu-core stands in its place.

Writes figure_2 and figure_4 (csv, md, png) to --out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import scipy.sparse
from absl import flags

from experiments import graph_data, graph_report, launch
from performer.graphs import (
    Graph,
    couplings,
    features,
    graph_random_features,
    kernels,
    pagerank,
    reinforced,
)
from performer.typing import Key
from vit import report

WALKS = (2, 4, 8, 16)
SIGMA, P_KERNEL, P_PAGERANK = 0.1, 0.5, 0.3
QUANTITIES = {"figure_2": "relative squared error of K", "figure_4": "squared error of PageRank"}
DEFAULT = (*graph_data.GENERATED, "karate", "dolphins", "football", "eu-core")

Errors = Callable[[Key, Sequence[Graph], str, int], np.ndarray]
"""errors(key, graphs, coupling, repeats) -> (graphs, repeats, sizes)."""


def kernel_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """|K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian, (graphs, repeats, sizes)."""
    exact = [
        np.asarray(kernels.regularised_laplacian(2, SIGMA).dense(graph), np.float64)
        for graph in graphs
    ]
    once, ends = graph_data.side_by_side(graphs), np.cumsum([len(k) for k in exact])
    blocks = [slice(end - len(k), end) for end, k in zip(ends, exact, strict=True)]
    draw = _reinforced if coupling == "reinforced" else _coupled

    def errors(phi):
        return [relative_error(phi[at, at], k) for at, k in zip(blocks, exact, strict=True)]

    sizes = [[errors(phi) for phi in draw(key, once, coupling, m, repeats)] for m in WALKS]
    return np.array(sizes).T


def relative_error(phi: scipy.sparse.csr_array, exact: np.ndarray) -> float:
    """|K - Phi Phi^T|_F^2 / |K|_F^2."""
    return float(np.sum((exact - (phi @ phi.T).toarray()) ** 2) / np.sum(exact**2))


def pagerank_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """|pi - pi_hat|_2^2 of PageRank, (graphs, repeats, sizes)."""
    return np.array([_pagerank_errors(key, graph, coupling, repeats) for graph in graphs])


def _pagerank_errors(key: Key, graph: Graph, coupling: str, repeats: int) -> np.ndarray:
    exact = np.asarray(pagerank.power_iteration(graph, p_halt=P_PAGERANK), np.float64)
    many = graph_data.copies(graph, repeats)
    columns = []
    for m in WALKS:
        ranks = pagerank.pagerank(key, many, num_walks=m, p_halt=P_PAGERANK, coupling=coupling)
        by_copy = repeats * np.asarray(ranks, np.float64).reshape(repeats, -1)
        columns.append(np.sum((by_copy - exact) ** 2, axis=1))
    return np.array(columns).T


def _coupled(
    key: Key, graph: Graph, coupling: str, num_walks: int, repeats: int
) -> Iterator[scipy.sparse.csr_array]:
    """Phi (N, N) of each repetition."""
    many, n = graph_data.copies(graph, repeats), graph.num_nodes
    kernel = kernels.regularised_laplacian(2, SIGMA)
    estimate = graph_random_features(
        key, many, kernel, num_walks=num_walks, p_halt=P_KERNEL, coupling=coupling
    )
    phi = scipy.sparse.csr_array(estimate.left.to_scipy(), dtype=np.float64)
    yield from (phi[at : at + n, at : at + n] for at in range(0, repeats * n, n))


def _reinforced(
    key: Key, graph: Graph, _: str, num_walks: int, repeats: int
) -> Iterator[scipy.sparse.csr_array]:
    """The same of self-avoiding walks: one by one, for each takes memory in N times the edges."""
    kernel, normalised = kernels.regularised_laplacian(2, SIGMA), graph.normalised()
    for pair in jax.random.split(key, (repeats, 2)):
        lengths = couplings.lengths(pair[0], "independent", graph.num_nodes, num_walks, P_KERNEL)
        walks = reinforced.sample(pair[1], normalised, lengths, p_halt=P_KERNEL)
        yield scipy.sparse.csr_array(features.modulate(walks, kernel).to_scipy(), dtype=np.float64)


def figure(
    graphs: dict[str, Graph], errors: Errors, names: Sequence[str], repeats: int, out: Path
) -> str:
    """Writes the errors of all graphs and couplings, a panel for each graph; the table."""
    keys, inputs = jax.random.split(jax.random.key(0), len(names)), list(graphs.values())
    summaries = [
        _summary(errors(k, inputs, name, repeats)) for k, name in zip(keys, names, strict=True)
    ]
    means = np.stack(summaries, axis=1)
    drawn, axes = graph_report.panels(out, len(graphs), columns=4)
    rows = []
    for axis, graph, by_name in zip(axes, graphs, means, strict=True):
        n = graphs[graph].num_nodes
        for name, values in zip(names, by_name, strict=True):
            axis.errorbar(WALKS, *values.T, marker="o", markersize=3, label=name)
            texts = [f"{mean:.3g} ± {error:.1g}" for mean, error in values]
            row = {"graph": graph, "N": n, "walks": name}
            rows.append(row | {f"m = {m}": text for m, text in zip(WALKS, texts, strict=True)})
        axis.set(title=f"{graph}, N = {n}", ylabel=QUANTITIES[out.name])
        report.log_log(axis, WALKS)
    report.save(drawn, out)
    return report.table(rows, out, _verdict(means, names))


def _summary(errors: np.ndarray) -> np.ndarray:
    """Means over the repetitions and standard errors, (graphs, sizes, 2)."""
    deviations = errors.std(axis=1, ddof=1) / errors.shape[1] ** 0.5
    return np.stack([errors.mean(axis=1), deviations], axis=-1)


def _verdict(means: np.ndarray, names: Sequence[str]) -> str:
    """Where the errors (graphs, names, sizes, 2) are surely below and above the first ones."""
    lines, (first, *others) = [], np.moveaxis(means, (1, 3), (0, 1))
    for name, other in zip(names[1:], others, strict=True):
        apart, margin = other[0] - first[0], 2 * np.hypot(other[1], first[1])
        lines.append(
            f"{name}: {np.exp(np.mean(np.log(other[0] / first[0]))):.3f} of the errors of"
            f" {names[0]} walks (geometric mean); by two standard errors below in"
            f" {np.sum(apart < -margin)} and above in {np.sum(apart > margin)} of {apart.size}."
        )
    return "\n".join(lines)


def main() -> None:
    out, repeats = Path(_OUT.value), _REPEATS.value
    graphs = graph_data.chosen(DEFAULT)
    both = ("independent", "antithetic")
    print(figure(graphs, kernel_errors, (*both, "reinforced"), repeats, out / "figure_2"))
    print(figure(graphs, pagerank_errors, both, repeats, out / "figure_4"))


if __name__ == "__main__":
    _REPEATS = flags.DEFINE_integer("repeats", 100, "of each estimate", lower_bound=2)
    _OUT = flags.DEFINE_string("out", "results/graph_kernels", "folder for tables and figures")
    flags.adopt_module_key_flags(graph_data)
    launch.run(main)
