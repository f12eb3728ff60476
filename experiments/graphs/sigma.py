"""Sigma-coupled walks, for kernels and for PageRank: VRC Figs 3, 8, 9 and 10.

    python -m experiments.graphs.sigma                     # karate and made-up graphs
    python -m experiments.graphs.sigma --data_dir=DIR --graphs=karate,cora_lcc --repeats=100

Two walks from each node, independent, antithetic or sigma-coupled; the permutations are learned on
one Erdos-Renyi graph of 100 nodes and used on all graphs. The paper does not give its edge
probability; here it is 0.1.

Figs 3, 10: |K - K_hat|_F / |K|_F of the 2-regularised Laplacian (I + L)^{-2}; permutations of 30.
Fig. 8: the same at p_halt = 0.3, with permutations of 2 to 30, learned on the graph itself: by the
    linear objective (Eq. 56), by random projections (Lemma C.2), and up to 10 by the quadratic one
    (Eq. 55) among all permutations, and among all with vectors reduced to 32 dimensions (Eq. 62).
    Each has its Cayley distance from the quadratic one (from 11 on, from the projected one), and
    the excess of its quadratic objective. Quantiles with equal lengths can swap, which changes the
    distance alone.
Fig. 9: |rho - rho_hat|_2 of PageRank; permutations of 10, of the exact objective (Eq. 82). For
    p_halt >= 1/2 the learned coupling has the distribution of antithetic walks, one of them of
    length 0.

Means ± standard errors over repeats. The repeats of two couplings share their keys, so ratios and
tests are paired.

Writes figure_3, figure_8, figure_9 and figure_10 (csv, md, png) to --out.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from experiments.graphs import data
from performer.graphs import Graph, couplings, features, kernels, matching, pagerank
from performer.graphs.couplings import Coupling
from performer.typing import Key
from vit.study import harness, launch, statistics

COUPLINGS = ("independent", "antithetic", "sigma")
Errors = dict[str, np.ndarray]
"""(repeats,) of each graph."""
KERNEL = kernels.RegularisedLaplacian(2, 1.0)
DEFAULT = (
    *("karate", "dolphins", "polbooks", "football", "news_2cl1_0.1", "eu-core_lcc", "arenas-email"),
    *("eurosis_lcc", "citeseer_lcc", "cora", "Larger ER", "Binary tree", "Ladder"),
)
"""The ten graphs of Figs 9 and 10 (numbers of nodes: App. E.3), and three made-up ones."""
P_KERNEL = (0.1, 0.2, 0.3, 0.4, 0.5)
P_PAGERANK = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ORDER, ORDER_PAGERANK = 30, 10
FIGURE_8, P_FIGURE_8, REDUCED = ("karate", "eurosis_lcc"), 0.3, 32
ORDERS = (*range(2, 11), 12, 15, 20, 25, 30)
WALKS: harness.Row = dict(
    change=lambda rows: [row for row in rows if row["coupling"] != "independent"],
    x="p_halt",
    y="ratio",
    panel="{graph}, N = {N}",
    ylabel="error / error of independent walks",
)
FIGURES: harness.Figures = {
    "figure_3": dict(
        x="q",
        y="sigma(q)",
        line="sigma",
        panel="p_halt = {p_halt}",
        across=5,
        ylabel="sigma(q)",
        finish=lambda axis, _: axis.lines[0].set(linestyle="", markersize=2),
        box_aspect=1,
    ),
    "figure_8": dict(
        change=lambda rows: [row | {"error / independent ±": row["±"]} for row in rows],
        x="{n}",
        y={x: x for x in ("error / independent", "Cayley distance")},
        line="{learned}",
        panel="{graph}",
        across=1,
        high=1.6,
        xlabel="n (order of the permutation)",
    ),
    "figure_9": WALKS,
    "figure_10": WALKS,
}
NODES = 100_000
"""Nodes of all graphs together in one program, about."""


def repeated(
    graphs: dict[str, Graph],
    repeats: int,
    estimate: Callable[[Key, Graph], Any],
    error: Callable[[Any, slice, str], np.ndarray],
) -> Errors:
    """Return error(estimate(key, all), nodes, name) (copies,) of each graph.

    All graphs are one, each in several copies: one program draws the walks of several repeats.
    """
    count = -(-repeats // max(NODES // sum(graph.num_nodes for graph in graphs.values()), 1))
    copies = -(-repeats // count)
    whole = data.side_by_side([graph for graph in graphs.values() for _ in range(copies)])
    ends = np.cumsum([0] + [copies * graph.num_nodes for graph in graphs.values()]).tolist()
    slices = dict(zip(graphs, map(slice, ends, ends[1:]), strict=False))
    estimates = [estimate(jax.random.key(draw), whole) for draw in range(count)]
    return {
        name: np.concatenate([error(of, nodes, name) for of in estimates])[:repeats]
        for name, nodes in slices.items()
    }


def exact_kernels(graphs: dict[str, Graph]) -> dict[str, np.ndarray]:
    """Return K of each graph; on cora it takes longer than its estimates."""
    return {name: np.asarray(KERNEL.dense(graph), np.float64) for name, graph in graphs.items()}


def kernel_errors(
    graphs: dict[str, Graph],
    exact: dict[str, np.ndarray],
    repeats: int,
    coupling: str | Coupling,
    p_halt: float,
) -> Errors:
    """Return |K - K_hat|_F / |K|_F with two walks from each node."""

    def phi(key: Key, whole: Graph) -> scipy.sparse.csr_array:
        walks = features.sample(key, whole, num_walks=2, p_halt=p_halt, coupling=coupling)
        return features.modulate(walks, KERNEL).to_scipy()

    def error(phi: scipy.sparse.csr_array, at: slice, name: str) -> np.ndarray:
        return data.frobenius_errors(phi[at, at], exact[name])

    return repeated(graphs, repeats, phi, error)


def pagerank_errors(
    graphs: dict[str, Graph], repeats: int, coupling: str | Coupling, p_halt: float
) -> Errors:
    """Return |rho - rho_hat|_2 with two walks from each node."""
    iterate = partial(pagerank.power_iteration, p_halt=p_halt, tolerance=1e-6)
    exact = {name: np.asarray(iterate(graph)) for name, graph in graphs.items()}

    def error(rho: jax.Array, at: slice, name: str) -> np.ndarray:
        n = len(exact[name])
        by_copy = np.asarray(rho[at], np.float64).reshape(-1, n) * (len(rho) / n)
        return np.linalg.norm(by_copy - exact[name], axis=1)

    draw = partial(pagerank.pagerank, num_walks=2, p_halt=p_halt, coupling=coupling)
    return repeated(graphs, repeats, draw, error)


def require_edges(graphs: dict[str, Graph]) -> None:
    """Raise ValueError for a graph with a node without edges."""
    for name, graph in graphs.items():
        if int(graph.degrees.min()) == 0:
            raise ValueError(f"graph {name!r} has nodes without edges: take its largest component")


def figure(
    graphs: dict[str, Graph],
    errors: Callable[..., Errors],
    permutations: dict[float, np.ndarray],
    out: Path,
) -> str:
    """Write a line for each graph and p_halt, and the figure; return the markdown."""
    by_case = {}
    for p, permutation in permutations.items():
        for coupling in COUPLINGS:
            chosen = couplings.sigma(permutation) if coupling == "sigma" else coupling
            by_case[p, coupling] = errors(coupling=chosen, p_halt=p)
        print(out.name, p, flush=True)
    rows = [
        row
        for name, graph in graphs.items()
        for (p, coupling), values in by_case.items()
        for row in harness.rows_of(
            {"graph": name, "N": graph.num_nodes, "p_halt": p, "coupling": coupling}, values[name]
        )
    ]
    case = "{graph} at {p_halt}"
    rows = harness.relative(rows, case)
    others = [row for row in rows if row["coupling"] != "independent"]
    ratios = harness.pivot(others, "{coupling} / independent", "ratio")
    lines = [a | b for a, b in zip(harness.pivot(rows, "{coupling}"), ratios, strict=True)]
    return harness.show(rows, out, FIGURES, harness.verdict(rows, case), shown=lines)


def figure_3(permutations: dict[float, np.ndarray], out: Path) -> None:
    """Write a row for each permutation, number and image, and the figure."""
    rows = [
        {"p_halt": p, "q": q, "sigma(q)": image}
        for p, permutation in permutations.items()
        for q, image in enumerate(permutation)
    ]
    harness.show(rows, out, FIGURES)


def learned(graph: Graph, order: int) -> dict[str, tuple[np.ndarray, float]]:
    """Learn the permutations of Fig. 8; return them with their quadratic objectives."""
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
    """Return the fewest transpositions between permutations: n minus the cycles of a^-1 b."""
    n, between = len(a), np.argsort(a)[b]
    steps = scipy.sparse.csr_array((np.ones(n), (np.arange(n), between)), shape=(n, n))
    return n - int(scipy.sparse.csgraph.connected_components(steps)[0])


def figure_8(graphs: dict[str, Graph], repeats: int, out: Path) -> None:
    """Write a row for each graph, order and method; equal permutations have equal errors."""
    rows = []
    for name, graph in graphs.items():
        single = {name: graph}
        errors = partial(kernel_errors, single, exact_kernels(single), repeats, p_halt=P_FIGURE_8)
        independent = errors("independent")[name]

        @cache
        def ratio(*permutation: int, name=name, errors=errors, independent=independent):
            values = errors(couplings.sigma(np.array(permutation)))[name]
            return statistics.ratio(values, independent)

        for order in ORDERS:
            permutations = learned(graph, order)
            best, least = permutations.get("quadratic", permutations["projected"])
            for how, (permutation, objective) in permutations.items():
                row = {"graph": name, "n": order, "learned": how}
                row |= zip(("error / independent", "±"), ratio(*permutation), strict=True)
                row |= {"Cayley distance": cayley_distance(best, permutation)}
                row |= {"excess of the objective": objective / least - 1}
                rows.append(row | {"permutation": " ".join(map(str, permutation))})
    harness.show(rows, out, FIGURES)


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    repeats: int = 100,
    out: Path = Path("results/graphs/sigma"),
) -> None:
    """Print the tables.

    Args:
        repeats: repeats of kernel estimates; PageRank has ten times as many.
    """
    chosen, learn_on = data.chosen(graphs, DEFAULT, data_dir), data.erdos_renyi()
    require_edges(chosen)
    sigmas = {p: matching.learn(learn_on, KERNEL, p_halt=p, order=ORDER) for p in P_KERNEL}
    errors = partial(kernel_errors, chosen, exact_kernels(chosen), repeats)
    figure(chosen, errors, sigmas, out / "figure_10")
    figure_3(sigmas, out / "figure_3")
    some = [name for name in FIGURE_8 if name in chosen] or [min(chosen)]
    figure_8({name: chosen[name] for name in some}, repeats, out / "figure_8")
    sigmas = {p: pagerank.learn(learn_on, p_halt=p, order=ORDER_PAGERANK) for p in P_PAGERANK}
    errors = partial(pagerank_errors, chosen, 10 * repeats)
    figure(chosen, errors, sigmas, out / "figure_9")


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("Small ER", "Ladder"), "repeats": 4})
