"""Errors of kernels and of PageRank by random walks: qGRF Figs 2 and 4.

    python -m experiments.graphs.kernels                   # made-up graphs and karate
    python -m experiments.graphs.kernels --data_dir=DIR --graphs=karate,cora --repeats=100

Fig. 2: |K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian (I + sigma^2 L)^{-2}, sigma = 0.1,
p_halt = 0.5. Walks are independent, antithetic, or the self-avoiding ones of Sec. 4.1
(`reinforced`, of independent lengths). Fig. 4: |pi - pi_hat|_2^2 of PageRank, p_halt = 0.3, from
power iteration. Both for 2, 4, 8 and 16 walks from each node and 100 repetitions; means and their
standard errors. Repetitions of two kinds of walks share their keys, so tests are paired. At
p_halt = 0.5 ensembles are antithetic pairs and are left out.

Writes figure_2 and figure_4 (csv, md, png) to --out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from experiments.graphs import data, reinforced
from performer.graphs import Graph, couplings, features, kernels, pagerank
from performer.typing import Key
from vit.study import harness, launch

WALKS = (2, 4, 8, 16)
P_KERNEL, P_PAGERANK = 0.5, 0.3
KERNEL = kernels.RegularisedLaplacian(2, 0.1)
FIGURES: harness.Figures = {
    name: dict(
        x="m",
        line="{walks}",
        panel="{graph}, N = {N}",
        log="xy",
        xlabel="m (walks)",
        ylabel=label,
    )
    for name, label in [
        ("figure_2", "relative squared error of K"),
        ("figure_4", "squared error of PageRank"),
    ]
}
DEFAULT = (*data.GENERATED, "karate", "dolphins", "football", "eurosis_lcc")

Errors = Callable[[Key, Sequence[Graph], str, int], np.ndarray]
"""errors(key, graphs, coupling, repeats) -> (graphs, repeats, sizes)."""


def kernel_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """Return |K - K_hat|_F^2 / |K|_F^2 of the 2-regularised Laplacian, (graphs, repeats, sizes)."""
    exact = [np.asarray(KERNEL.dense(graph), np.float64) for graph in graphs]
    once, ends = data.side_by_side(graphs), np.cumsum([len(k) for k in exact])
    blocks = [slice(end - len(k), end) for end, k in zip(ends, exact, strict=True)]

    def errors(phi):
        pairs = zip(blocks, exact, strict=True)
        return [data.frobenius_errors(phi[at, at], k)[0] ** 2 for at, k in pairs]

    return np.array([[*map(errors, _phis(key, once, coupling, m, repeats))] for m in WALKS]).T


def _phis(
    key: Key, graph: Graph, coupling: str, num_walks: int, repeats: int
) -> Iterator[scipy.sparse.csr_array]:
    """Yield Phi (N, N) of each repetition."""
    if coupling == "reinforced":  # one by one, for each takes memory in N times the edges
        normalised = graph.normalised()
        for pair in jax.random.split(key, (repeats, 2)):
            steps = couplings.lengths(pair[0], "independent", graph.num_nodes, num_walks, P_KERNEL)
            walks = reinforced.sample(pair[1], normalised, steps, p_halt=P_KERNEL)
            phi = features.modulate(walks, KERNEL).to_scipy()
            yield scipy.sparse.csr_array(phi, dtype=np.float64)
        return
    many, n = data.copies(graph, repeats), graph.num_nodes
    options: Any = dict(num_walks=num_walks, p_halt=P_KERNEL, coupling=coupling)
    left = features.graph_random_features(key, many, KERNEL, **options).left
    phi = scipy.sparse.csr_array(left.to_scipy(), dtype=np.float64)
    yield from (phi[at : at + n, at : at + n] for at in range(0, repeats * n, n))


def pagerank_errors(key: Key, graphs: Sequence[Graph], coupling: str, repeats: int) -> np.ndarray:
    """Return |pi - pi_hat|_2^2 of PageRank, (graphs, repeats, sizes)."""

    def errors(graph: Graph, m: int) -> np.ndarray:
        exact = np.asarray(pagerank.power_iteration(graph, p_halt=P_PAGERANK), np.float64)
        options: Any = dict(num_walks=m, p_halt=P_PAGERANK, coupling=coupling)
        ranks = pagerank.pagerank(key, data.copies(graph, repeats), **options)
        by_copy = repeats * np.asarray(ranks, np.float64).reshape(repeats, -1)
        return np.sum((by_copy - exact) ** 2, axis=1)

    return np.array([np.array([errors(graph, m) for m in WALKS]).T for graph in graphs])


def figure(
    graphs: dict[str, Graph], errors: Errors, names: Sequence[str], repeats: int, out: Path
) -> None:
    """Write the errors of all graphs and couplings, and their figure."""
    values = {name: errors(jax.random.key(0), [*graphs.values()], name, repeats) for name in names}
    rows = [
        row
        for number, (name, graph) in enumerate(graphs.items())
        for walks in names
        for row in harness.rows_of(
            {"graph": name, "N": graph.num_nodes, "walks": walks}, values[walks][number], m=WALKS
        )
    ]
    means = np.array([[row["mean"] for row in rows if row["walks"] == name] for name in names])
    ratios = np.exp(np.mean(np.log(means / means[0]), axis=1))
    listed = "; ".join(f"{name} {ratio:.3f}" for name, ratio in zip(names, ratios, strict=True))
    text = f"Geometric means of the ratio to the errors of {names[0]} walks: {listed}."
    tests: Any = dict(case="{graph}, m = {m}", tested="walks")
    harness.show(rows, out, FIGURES, text, shown=harness.pivot(rows, "m = {m}"), **tests)


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 100,
    out: Path = Path("results/graphs/kernels"),
) -> None:
    """Print the tables."""
    chosen, both = data.chosen(graphs, DEFAULT, data_dir), ("independent", "antithetic")
    figure(chosen, kernel_errors, (*both, "reinforced"), repeats, out / "figure_2")
    figure(chosen, pagerank_errors, both, repeats, out / "figure_4")


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("Small ER", "karate"), "repeats": 4})
