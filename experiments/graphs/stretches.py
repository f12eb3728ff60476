"""Stitched walks against longer walks at equal work.

    python -m experiments.graphs.stretches --data_dir=DIR

The relative Frobenius error of the unbiased estimate of a diffusion kernel (two ensembles), from
walks of 1, 2 or 4 stretches. All have 64 visits for each node and ensemble, on average, and so the
same cost of a product K v. p_halt is the best of four for each entry. Without --data_dir a grid.

Writes stretches (csv, md, png) to --out.
"""

import operator
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import networkx
import numpy as np

from experiments.common import harness, launch
from experiments.graphs import data
from performer.graphs import Graph, kernels
from performer.graphs.stitched import stitched

SIGMAS, STRETCHES, VISITS, P_HALT = (1.0, 2.0, 4.0), (1, 2, 4), 64, (0.0625, 0.125, 0.25, 0.5)
FIGURES: harness.Figures = {
    "stretches": dict(
        columns=tuple(f"{n} stretches" for n in STRETCHES), line="{line}", x="sigma",
        panel="{graph}", log="xy", ylabel="relative error",
    )
}  # fmt: skip


def errors(graph: Graph, sigma: float, stretches: int, p_halt: float, trials: int) -> np.ndarray:
    """Return |K^ - K|_F / |K|_F of each trial: copies of the graph, side by side."""
    kernel, n = kernels.Diffusion(sigma), graph.num_nodes
    exact = np.asarray(kernel.dense(graph), np.float64)
    options: Any = dict(num_walks=round(VISITS * p_halt / stretches), p_halt=p_halt)
    many = data.copies(graph, trials)
    estimate = stitched(jax.random.key(0), many, kernel, stretches, **options)
    sides = [[phi.to_scipy() for phi in side] for side in (estimate.left, estimate.right)]
    left, right = (reduce(operator.matmul, side) for side in sides)
    gram = left @ right.T
    blocks = [gram[i : i + n, i : i + n].toarray() for i in range(0, trials * n, n)]
    apart = [np.linalg.norm((block + block.T) / 2 - exact) for block in blocks]
    return np.array(apart) / np.linalg.norm(exact)


def main(
    data_dir: Path | None = None,
    trials: int = 20,
    out: Path = Path("results/graphs/stretches"),
) -> None:
    """Print the table."""
    grid = networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(12, 12))
    graphs = {"grid": Graph.from_networkx(grid)}
    if data_dir:
        graphs["football"] = data.load("football", data_dir)

    def best(case: harness.Row) -> np.ndarray:
        stretches = case["stretches"]
        usable = [p for p in P_HALT if VISITS * p >= stretches]
        problem = graphs[case["graph"]], case["sigma"], stretches
        return min((errors(*problem, p, trials) for p in usable), key=np.mean)

    cases = harness.cases(graph=graphs, sigma=SIGMAS, stretches=STRETCHES)
    rows = harness.sweep(cases, best)
    tests: Any = dict(case="{graph}, {sigma}", tested="stretches")
    harness.show(rows, out / "stretches", FIGURES, column="{stretches} stretches", **tests)


if __name__ == "__main__":
    launch.run(main, quick={"trials": 2})
