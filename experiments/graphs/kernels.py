"""Errors of kernels and of PageRank by random walks: qGRF Figs 2 and 4.

    python -m experiments.graphs.kernels                   # made-up graphs and karate
    python -m experiments.graphs.kernels --data_dir=DIR --graphs=karate,cora --repeats=100

Fig. 2: |K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian (I + sigma^2 L)^{-2}, sigma = 0.1,
p_halt = 0.5, with independent and antithetic walks and with the self-avoiding ones of Sec. 4.1
(`reinforced`, of independent lengths). Fig. 4: |pi - pi_hat|_2^2 of PageRank, p_halt = 0.3, beside
power iteration. Both for 2, 4, 8 and 16 walks from each node and 100 repetitions; means and their
standard errors. Repetitions of two kinds of walks share their keys, so tests are paired. At
p_halt = 0.5 ensembles are antithetic pairs, and are left out.

The paper's eurosis is not among the graphs we have; eu-core stands in its place.

Writes figure_2 and figure_4 (csv, md, png) to --out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import scipy.sparse

from experiments.common import harness, launch
from experiments.graphs import data
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
DEFAULT = (*data.GENERATED, "karate", "dolphins", "football", "eu-core")

Errors = Callable[[Key, Sequence[Graph], str, int], np.ndarray]
"""errors(key, graphs, coupling, repeats) -> (graphs, repeats, sizes)."""


def kernel_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """|K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian, (graphs, repeats, sizes)."""
    exact = [
        np.asarray(kernels.regularised_laplacian(2, SIGMA).dense(graph), np.float64)
        for graph in graphs
    ]
    once, ends = data.side_by_side(graphs), np.cumsum([len(k) for k in exact])
    blocks = [slice(end - len(k), end) for end, k in zip(ends, exact, strict=True)]
    draw = _reinforced if coupling == "reinforced" else _coupled

    def errors(phi):
        pairs = zip(blocks, exact, strict=True)
        return [data.frobenius_errors(phi[at, at], k)[0] ** 2 for at, k in pairs]

    sizes = [[errors(phi) for phi in draw(key, once, coupling, m, repeats)] for m in WALKS]
    return np.array(sizes).T


def pagerank_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """|pi - pi_hat|_2^2 of PageRank, (graphs, repeats, sizes)."""
    return np.array([_pagerank_errors(key, graph, coupling, repeats) for graph in graphs])


def _pagerank_errors(key: Key, graph: Graph, coupling: str, repeats: int) -> np.ndarray:
    exact = np.asarray(pagerank.power_iteration(graph, p_halt=P_PAGERANK), np.float64)
    many = data.copies(graph, repeats)
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
    many, n = data.copies(graph, repeats), graph.num_nodes
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
    inputs = list(graphs.values())
    found = {name: errors(jax.random.key(0), inputs, name, repeats) for name in names}
    cases = [
        {"graph": graph, "N": graphs[graph].num_nodes, "walks": name}
        for graph, name in itertools.product(graphs, names)
    ]
    places = {graph: i for i, graph in enumerate(graphs)}
    rows = harness.sweep(cases, lambda case: found[case["walks"]][places[case["graph"]]], m=WALKS)
    harness.figure(
        rows,
        out,
        x="m",
        line="{walks}",
        panel="{graph}, N = {N}",
        log=True,
        ylabel=QUANTITIES[out.name],
    )
    said = f"{_ratios(rows, names)}\n\n{harness.verdict(rows, '{graph}, m = {m}', 'walks')}"
    return report.table(harness.wide(rows, "m = {m}"), out, said)


def _ratios(rows: Sequence[harness.Row], names: Sequence[str]) -> str:
    """Geometric means over all cases of the ratios to the first."""
    means = np.array([[row["mean"] for row in rows if row["walks"] == name] for name in names]).T
    ratios = np.exp(np.mean(np.log(means / means[:, :1]), axis=0))
    return " ".join(
        f"{name}: {ratio:.3f} of the errors of {names[0]} walks (geometric mean of"
        f" {len(means)} cases)."
        for name, ratio in zip(names[1:], ratios[1:], strict=True)
    )


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 100,
    out: Path = Path("results/graphs/kernels"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder with graphs/; made-up graphs and karate without.
        graphs: names, of generated ones and of files in graphs/; those of the paper.
        repeats: of each estimate.
        out: folder for tables and figures.
    """
    launch.at_least(2, repeats=repeats)
    chosen = data.chosen(graphs, DEFAULT, data_dir)
    both = ("independent", "antithetic")
    print(figure(chosen, kernel_errors, (*both, "reinforced"), repeats, out / "figure_2"))
    print(figure(chosen, pagerank_errors, both, repeats, out / "figure_4"))


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("Small ER", "karate"), "repeats": 4})
