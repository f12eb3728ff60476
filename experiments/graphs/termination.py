"""Couplings of walks that halt together, compared in closed form: qGRF Cor. 3.3 and Thm 3.4.

    python -m experiments.graphs.termination                     # made-up graphs and karate
    python -m experiments.graphs.termination --data_dir=DIR --graphs=karate,cora_lcc

E |Phi_1 Phi_2^T - K|_F^2 of two ensembles of 60 walks from each node, relative to that of
independent walks, by `performer.graphs.theory`. K is the 2-regularised Laplacian (I + sigma^2
L)^{-2}. The termination variables of neighbours in a group are offset by

    pairs         1/2, two walkers (Def. 3.1)
    ensembles     p_halt, floor(1 / p_halt) walkers (Cor. 3.3)
    close pairs   midway from p_halt (1 - p_halt) to p_halt, two walkers (Thm 3.4)
    circles       1 / size, for the most walkers whose neighbours Thm 3.4 still allows:
                  floor(1 / (p_halt (1 - p_halt)))

"draws" compares these ratios with pairs of ensembles drawn at sigma = 1, on two small graphs.
"recommended" has the recommendations of `theory.recommend` for an expected error of 10% at sigma =
1.

Writes ratios (csv, md, png), draws and recommended (csv, md) to --out.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from experiments.graphs import data
from performer.graphs import Graph, couplings, features, kernels, theory
from performer.graphs.theory import Group
from vit.study import harness, launch, statistics

WALKS, TOLERANCE = 60, 0.1
P_HALT, SIGMAS = (0.1, 0.2, 0.3, 0.4, 0.5), (0.1, 1.0)
P_DRAWN, SIGMA_DRAWN = (0.1, 0.3, 0.5), 1.0
DEFAULT = (*data.GENERATED, "karate", "dolphins", "football", "eu-core")
DRAWN = ("karate", "Binary tree")
FIGURES: harness.Figures = {
    "ratios": dict(
        change=lambda rows: harness.melt(
            [row for row in rows if row["sigma"] == SIGMA_DRAWN],
            ("pairs", "ensembles", "close pairs", "circles"),
        ),
        x="p_halt",
        line="{line}",
        panel="{graph}, N = {N}",
        ylabel="squared error, relative to independent walks",
    )
}


def groups(p_halt: float) -> dict[str, Group]:
    """Return each way to couple, by its name."""
    least = p_halt * (1 - p_halt)
    most = int(1 / least + 1e-9)
    return {
        "independent": Group(0.5, 1),
        "pairs": Group(0.5, 2),
        "ensembles": Group(p_halt, int(1 / p_halt + 1e-9)),
        "close pairs": Group((least + p_halt) / 2, 2),
        "circles": Group(1 / most, most),
    }


def ratios(graph: Graph, sigma: float, p_halt: float) -> dict[str, float]:
    """Return the error of independent walks, and the squared error of the others over theirs."""
    kernel = kernels.RegularisedLaplacian(2, sigma)
    error = partial(theory.expected_error, graph, kernel, num_walks=WALKS, p_halt=p_halt)
    errors = {name: error(coupling=group) for name, group in groups(p_halt).items()}
    alone = errors.pop("independent")
    return {"independent": alone} | {name: (x / alone) ** 2 for name, x in errors.items()}


def squares(graph: Graph, group: Group, p_halt: float, draws: int) -> np.ndarray:
    """Return |Phi_1 Phi_2^T - K|_F^2 of each draw."""
    kernel, n = kernels.RegularisedLaplacian(2, SIGMA_DRAWN), graph.num_nodes
    exact, many = np.asarray(kernel.dense(graph), np.float64), data.copies(graph, draws)
    coupling = partial(couplings.antithetic, offset=group.offset, size=group.size)
    options: Any = dict(num_walks=WALKS, p_halt=p_halt, coupling=coupling)
    walks = [features.sample(jax.random.key(seed), many, **options) for seed in (0, 1)]
    phis = [scipy.sparse.csr_array(features.modulate(w, kernel).to_scipy()) for w in walks]
    blocks = [[phi[at : at + n, at : at + n] for phi in phis] for at in range(0, draws * n, n)]
    pairs = ([phi.toarray().astype(np.float64) for phi in block] for block in blocks)
    return np.array([np.sum((a @ b.T - exact) ** 2) for a, b in pairs])


def drawn_rows(graphs: Mapping[str, Graph], draws: int) -> Iterator[dict]:
    """Yield ratios in closed form and drawn, and how many standard errors they are apart."""
    for (name, graph), p_halt in itertools.product(graphs.items(), P_DRAWN):
        expected, chosen = ratios(graph, SIGMA_DRAWN, p_halt), groups(p_halt)
        alone = squares(graph, chosen.pop("independent"), p_halt, draws)
        for coupling, group in chosen.items():
            drawn, error = statistics.ratio(squares(graph, group, p_halt, draws), alone)
            row = {"graph": name, "p_halt": p_halt, "coupling": coupling}
            row |= {"expected": expected[coupling], "drawn": drawn, "±": error}
            yield row | {"apart by": (drawn - expected[coupling]) / error}


def recommended(name: str, graph: Graph) -> dict:
    """Return a row with the recommended coupling."""
    kernel = kernels.RegularisedLaplacian(2, SIGMA_DRAWN)
    best = theory.recommend(graph, kernel, TOLERANCE)
    row = {"graph": name, "N": graph.num_nodes} | best._asdict()
    return row | {"squared error less": 1 - (best.error / best.independent) ** 2}


def main(
    data_dir: Path | None = None,
    graphs: Sequence[str] = (),
    draws: int = 200,
    out: Path = Path("results/graphs/termination"),
) -> None:
    """Print the tables.

    Args:
        draws: draws of each pair of ensembles.
    """
    chosen = data.chosen(graphs, DEFAULT, data_dir)
    rows = [
        {"graph": name, "N": graph.num_nodes, "sigma": sigma, "p_halt": p} | ratios(graph, sigma, p)
        for (name, graph), sigma, p in itertools.product(chosen.items(), SIGMAS, P_HALT)
    ]
    harness.show(rows, out / "ratios", FIGURES)
    harness.show([recommended(*pair) for pair in chosen.items()], out / "recommended")
    some = {name: graph for name, graph in chosen.items() if name in DRAWN}
    if some:
        harness.show([*drawn_rows(some, draws)], out / "draws")


if __name__ == "__main__":
    launch.run(main, quick={"graphs": ("karate",), "draws": 10})
