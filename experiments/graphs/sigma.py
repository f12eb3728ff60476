"""Sigma-coupled walks, for kernels and for PageRank: VRC Figs 3, 8, 9 and 10.

    python -m experiments.graphs.sigma                     # karate and made-up graphs
    python -m experiments.graphs.sigma --data_dir=DIR --graphs=karate,cora_lcc --repeats=100

Two walks from each node, independent, antithetic or sigma-coupled; the permutations are learned on
one Erdos-Renyi graph of 100 nodes and used on all graphs. Its edge probability, which the paper
does not say, is 0.1 here.

Figs 3, 10: |K - K_hat|_F / |K|_F of the 2-regularised Laplacian (I + L)^{-2}; permutations of 30.
Fig. 8: the same at p_halt = 0.3, with permutations of 2 to 30, learned on the graph itself: by the
    linear objective (Eq. 56), by random projections (Lemma C.2), and up to 10 by the quadratic one
    (Eq. 55) among all permutations, and among all with vectors reduced to 32 dimensions (Eq. 62).
    Each has its Cayley distance from the quadratic one (from 11 on, from the projected one), and by
    how much its quadratic objective exceeds that one's: quantiles that hold the same lengths may
    change places, which makes a distance and nothing else.
Fig. 9: |rho - rho_hat|_2 of PageRank; permutations of 10, of the exact objective (Eq. 82). For
    p_halt >= 1/2 the coupling learned has the law of antithetic walks, of which one has length 0.

Means ± standard errors over repeats. The repeats of two couplings share their keys, so ratios and
tests are paired. The paper's eurosis is not among the graphs we have.

Writes figure_8, figure_9, figure_10 (csv, md, png) and figure_3.png to --out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from experiments.common import harness, launch, statistics
from experiments.graphs import data
from performer.graphs import Graph, couplings, features, kernels, matching, pagerank
from performer.graphs.couplings import Coupling
from performer.typing import Key
from vit import report

COUPLINGS = ("independent", "antithetic", "sigma")
Errors = dict[str, np.ndarray]
"""(repeats,) of each graph."""
KERNEL = kernels.regularised_laplacian(2, 1.0)
DEFAULT = (
    *("karate", "dolphins", "polbooks", "football", "news_2cl1_0.1", "eu-core_lcc", "cora_lcc"),
    *("Larger ER", "Binary tree", "Ladder"),
)
P_KERNEL = (0.1, 0.2, 0.3, 0.4, 0.5)
P_PAGERANK = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDER, ORDER_PAGERANK = 30, 10
FIGURE_8, P_FIGURE_8, REDUCED = ("karate", "eu-core_lcc"), 0.3, 32
ORDERS = (*range(2, 11), 12, 15, 20, 25, 30)
NODES = 100_000
"""About so many at once, of all graphs."""


def draws(graphs: dict[str, Graph], repeats: int) -> Iterator[tuple[Key, Graph, dict[str, slice]]]:
    """Keys, all graphs as one, each in several copies, and the nodes of each.

    One program draws the walks of all graphs, and of several repeats at once.
    """
    count = -(-repeats // max(NODES // sum(graph.num_nodes for graph in graphs.values()), 1))
    copies = -(-repeats // count)
    whole = data.side_by_side([graph for graph in graphs.values() for _ in range(copies)])
    ends = np.cumsum([copies * graph.num_nodes for graph in graphs.values()])
    parts = {
        name: slice(int(end) - copies * graph.num_nodes, int(end))
        for end, (name, graph) in zip(ends, graphs.items(), strict=True)
    }
    for draw in range(count):
        yield jax.random.key(draw), whole, parts


def kernel_errors(
    coupling: str | Coupling,
    p_halt: float,
    graphs: dict[str, Graph],
    exact: dict[str, np.ndarray],
    repeats: int,
) -> Errors:
    """|K - K_hat|_F / |K|_F of estimates with two walks; `exact` are the kernels."""
    errors = {name: [] for name in graphs}
    for key, whole, parts in draws(graphs, repeats):
        walks = features.sample(key, whole, num_walks=2, p_halt=p_halt, coupling=coupling)
        phi = features.modulate(walks, KERNEL).to_scipy()
        for name, part in parts.items():
            errors[name].append(data.frobenius_errors(phi[part, part], exact[name]))
    return {name: np.concatenate(values)[:repeats] for name, values in errors.items()}


def pagerank_errors(
    coupling: str | Coupling, p_halt: float, graphs: dict[str, Graph], repeats: int
) -> Errors:
    """|rho - rho_hat|_2 with two walks from each node.

    Raises:
        ValueError: for a node without edges, whose walks would go on to the other graphs.
    """
    require_edges(graphs)
    exact = {
        name: np.asarray(pagerank.power_iteration(graph, p_halt=p_halt, tolerance=1e-6))
        for name, graph in graphs.items()
    }
    errors = {name: [] for name in graphs}
    for key, whole, parts in draws(graphs, repeats):
        rho = pagerank.pagerank(key, whole, num_walks=2, p_halt=p_halt, coupling=coupling)
        for name, part in parts.items():
            n = len(exact[name])
            by_copy = np.asarray(rho[part], np.float64).reshape(-1, n) * (whole.num_nodes / n)
            errors[name].append(np.linalg.norm(by_copy - exact[name], axis=1))
    return {name: np.concatenate(values)[:repeats] for name, values in errors.items()}


def require_edges(graphs: dict[str, Graph]) -> None:
    """Raises ValueError when a node has no edge."""
    for name, graph in graphs.items():
        if int(graph.degrees.min()) == 0:
            raise ValueError(f"graph {name!r} has nodes without edges: take its largest component")


def exact_kernels(graphs: dict[str, Graph]) -> dict[str, np.ndarray]:
    """What `kernel_errors` compares with."""
    return {name: np.asarray(KERNEL.dense(graph), np.float64) for name, graph in graphs.items()}


def figure(
    graphs: dict[str, Graph],
    errors: Callable[..., Errors],
    permutations: dict[float, np.ndarray],
    out: Path,
) -> tuple[str, list[harness.Row]]:
    """A line for each graph and p_halt, a panel for each graph; also the rows."""
    found: dict[tuple[float, str], Errors] = {}
    for p, permutation in permutations.items():
        for coupling in COUPLINGS:
            chosen = couplings.sigma(permutation) if coupling == "sigma" else coupling
            found[p, coupling] = errors(chosen, p_halt=p)
        print(out.name, p, flush=True)
    rows = [
        {"graph": name, "N": graph.num_nodes, "p_halt": p, "coupling": coupling}
        | harness.estimated(values[name])
        for name, graph in graphs.items()
        for (p, coupling), values in found.items()
    ]
    rows, case = harness.relative(rows, "{graph} at {p_halt}"), "{graph} at {p_halt}"
    label = "error / error of independent walks"
    harness.figure(rows, out, x="p_halt", y="ratio", panel="{graph}, N = {N}", ylabel=label)
    others = [row for row in rows if row["coupling"] != "independent"]
    ratios = harness.wide(others, "{coupling} / independent", "ratio")
    lines = [a | b for a, b in zip(harness.wide(rows, "{coupling}"), ratios, strict=True)]
    return report.table(lines, out, harness.verdict(rows, case)), rows


def figure_3(rows: list[harness.Row], permutations: dict[float, np.ndarray], out: Path) -> None:
    """The errors of one graph, and the permutations."""
    drawn, axes = harness.panels(out, 1 + len(permutations), columns=3)
    harness.curves(axes[0], rows, "p_halt")
    axes[0].set(title=rows[0]["graph"], xlabel="p_halt", ylabel="relative Frobenius error")
    axes[0].legend()
    for axis, (p, permutation) in zip(axes[1:], permutations.items(), strict=True):
        axis.imshow(np.eye(len(permutation))[permutation], cmap="Greys", origin="lower")
        axis.set(title=f"sigma, p_halt = {p}", xlabel="sigma(q)", ylabel="q")
    report.save(drawn, out)


def learned(graph: Graph, order: int) -> dict[str, tuple[np.ndarray, float]]:
    """Permutations for Fig. 8, and their quadratic objectives."""
    responses = matching.spectral_responses(graph, KERNEL, P_FIGURE_8, order)
    edges, rng = matching.spectral_edges(responses), np.random.default_rng(order)
    permutations = {
        "linear": matching.assign(matching.linear_costs(responses)),
        "projected": matching.project(rng, edges),
    }
    if order <= matching.ENUMERABLE:
        (small,) = matching.reduced(rng, edges, size=REDUCED)
        permutations["quadratic"] = matching.enumerate_all(edges, edges)
        permutations["reduced"] = matching.enumerate_all(small, small)
    return {
        name: (permutation, matching.objective(permutation, edges, edges))
        for name, permutation in permutations.items()
    }


def cayley_distance(a: np.ndarray, b: np.ndarray) -> int:
    """The fewest transpositions from one permutation to another: n minus the cycles of a^-1 b."""
    n, between = len(a), np.argsort(a)[b]
    steps = scipy.sparse.csr_array((np.ones(n), (np.arange(n), between)), shape=(n, n))
    return n - int(scipy.sparse.csgraph.connected_components(steps)[0])


def figure_8(graphs: dict[str, Graph], repeats: int, out: Path) -> str:
    """A row for each graph, order and way to learn; equal permutations have equal errors."""
    rows = [
        {"graph": name} | row
        for name, graph in graphs.items()
        for row in order_rows({name: graph}, repeats)
    ]
    y = ("error / independent", "Cayley distance")
    options: Any = dict(x="n", y=y, line="{learned}", panel="{graph}", columns=2)
    harness.figure(rows, out, error="±", **options)
    return report.table(rows, out)


def order_rows(graph: dict[str, Graph], repeats: int) -> list[dict[str, Any]]:
    """The rows of one graph."""
    (name,), exact, rows = graph, exact_kernels(graph), []
    errors = partial(kernel_errors, p_halt=P_FIGURE_8, graphs=graph, exact=exact, repeats=repeats)
    independent = errors("independent")[name]
    for order in ORDERS:
        permutations, known = learned(graph[name], order), {}
        best, least = permutations.get("quadratic", permutations["projected"])
        for how, (permutation, objective) in permutations.items():
            if tuple(permutation) not in known:
                values = errors(couplings.sigma(permutation))[name]
                known[tuple(permutation)] = statistics.ratio(values, independent)
            row = {"n": order, "learned": how}
            row |= zip(("error / independent", "±"), known[tuple(permutation)], strict=True)
            row |= {"Cayley distance": cayley_distance(best, permutation)}
            row |= {"excess of the objective": objective / least - 1}
            rows.append(row | {"permutation": " ".join(map(str, permutation))})
    return rows


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 100,
    pagerank_repeats: int = 1000,
    out: Path = Path("results/graphs/sigma"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder with graphs/; karate and made-up graphs without.
        graphs: names, of generated ones and of files in graphs/; those of the paper.
        repeats: of kernel estimates.
        pagerank_repeats: of PageRank.
        out: folder for tables and figures.
    """
    launch.at_least(2, repeats=repeats, pagerank_repeats=pagerank_repeats)
    chosen = data.chosen(graphs, DEFAULT, data_dir)
    require_edges(chosen)
    learn_on = data.erdos_renyi()
    sigmas = {p: matching.learn(learn_on, KERNEL, p_halt=p, order=ORDER) for p in P_KERNEL}
    errors = partial(kernel_errors, graphs=chosen, exact=exact_kernels(chosen), repeats=repeats)
    table, rows = figure(chosen, errors, sigmas, out / "figure_10")
    print(table)
    largest = max(chosen, key=lambda name: chosen[name].num_nodes)
    figure_3([row for row in rows if row["graph"] == largest], sigmas, out / "figure_3")
    some = [name for name in FIGURE_8 if name in chosen] or [min(chosen)]
    print(figure_8({name: chosen[name] for name in some}, repeats, out / "figure_8"))
    sigmas = {p: pagerank.learn(learn_on, p_halt=p, order=ORDER_PAGERANK) for p in P_PAGERANK}
    errors = partial(pagerank_errors, graphs=chosen, repeats=pagerank_repeats)
    print(figure(chosen, errors, sigmas, out / "figure_9")[0])


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("Small ER", "Ladder"), "repeats": 4, "pagerank_repeats": 10})
