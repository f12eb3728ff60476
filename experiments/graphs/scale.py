"""Speed and scale of graph random features: against a Python loop, and up to a million nodes.

    python -m experiments.graphs.scale                       # a random graph of cora's size
    python -m experiments.graphs.scale --data_dir=DIR        # cora
    python -m experiments.graphs.scale --largest=1000000     # 5 million edges

Two plain loops over nodes, walks and steps stand for public code: qGRF Eq. 8 with draws of NumPy's
generator into a dense array, and the same with Python's own lists, dictionary and `random`. Our
coupled walks are timed from the graph to the features, and alone, with the adjacency matrix
normalised and the lengths drawn before.

Time and memory for random graphs of N nodes and 5 N edges, at 4 walks from each node: features of
the 2-regularised Laplacian, the product K v, and PageRank. Memory is the largest that the process
has held so far.

Writes graph_speed (csv, md) and graph_scale (csv, md, png) to --out.
"""

import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import harness, launch, timing
from experiments.graphs import data
from performer.graphs import Graph, couplings, graph_random_features, kernels, pagerank, walks
from vit.reports import report

KERNEL = kernels.RegularisedLaplacian(d=2, sigma=1.0)
NUM_WALKS = 4
P_HALT = 0.5
SIZES = (10**3, 10**4, 10**5, 3 * 10**5, 10**6)
TIMES = ("graph", "features", "product K v", "PageRank")
UNITS = {"s": "time (s)", "GiB": "memory of the process (GiB)"}


def by_unit(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the rows with the quantity of their unit and without the unit in the name."""
    split = [(row, *row["line"].split(", ")) for row in rows]
    return [row | {"line": name, "unit": UNITS[unit]} for row, name, unit in split]


FIGURES: harness.Figures = {
    "graph_scale": dict(
        columns=(*(f"{name}, s" for name in TIMES), "memory, GiB"),
        change=by_unit,
        x="nodes",
        line="{line}",
        panel="{unit}",
        log="xy",
        xlabel="nodes (5 edges and 4 walks for each)",
    )
}


def loop(graph: Graph, num_walks: int, p_halt: float, lists: bool) -> Any:
    """Run qGRF Eq. 8 with independent walks in Python; return the rows of the features."""
    matrix, n = graph.normalised().to_scipy(), graph.num_nodes
    parts: Any = (matrix.indptr, matrix.indices, matrix.data, np.asarray(KERNEL(1000), np.float64))
    draw, phi = np.random.default_rng(0).random, np.zeros((n, n))
    if lists:
        parts, draw = map(np.ndarray.tolist, parts), random.Random(0).random
        phi = [defaultdict(float) for _ in range(n)]
    starts, neighbours, weights, f = parts
    for i, row in enumerate(phi):
        for _ in range(num_walks):
            x, load, t = i, 1.0, 0
            while True:
                row[x] += load * f[t] / num_walks
                if draw() < p_halt:
                    break
                degree = starts[x + 1] - starts[x]
                edge = starts[x] + int(draw() * degree)
                load *= weights[edge] * degree / (1 - p_halt)
                x, t = neighbours[edge], t + 1
    return phi


def speed(graph: Graph, num_walks: int, p_halt: float, repeats: int) -> dict:
    """Time both loops, ours, and the walks alone: the best of the repeats."""
    normalised = graph.normalised()
    lengths = couplings.lengths(jax.random.key(0), "antithetic", graph.num_nodes, num_walks, p_halt)
    calls: dict[str, Callable[[], Any]] = {
        "loop, numpy": lambda: len(loop(graph, num_walks, p_halt, False)),
        "loop, lists": lambda: len(loop(graph, num_walks, p_halt, True)),
    }
    theirs = {name: best.wall for name, best in timing.race(calls, 1).items()}
    calls = {
        "ours": lambda: graph_random_features(
            jax.random.key(0), graph, KERNEL, num_walks=num_walks, p_halt=p_halt
        ),
        "walks alone": lambda: walks.sample(jax.random.key(0), normalised, lengths, p_halt=p_halt),
    }
    ours = {name: best.wall for name, best in timing.race(calls, repeats).items()}
    row: dict = {"m": num_walks, "p_halt": p_halt}
    row |= {f"{name}, ms": 1000 * t for name, t in (theirs | ours).items()}
    for name, t in theirs.items():
        row[f"{name} / ours"] = t / ours["ours"]
        row[f"{name} / walks"] = t / ours["walks alone"]
    return row


def random_graph(num_nodes: int, num_edges: int) -> Graph:
    """Draw ends of edges uniformly; a few are drawn twice and weigh 2, some nodes have none."""
    ends = np.random.default_rng(0).integers(0, num_nodes, (num_edges, 2))
    return Graph.from_edges(ends, num_nodes)


def scale(num_nodes: int) -> dict:
    """Time a random graph; every program is compiled before it is timed."""
    begin = time.perf_counter()
    graph = random_graph(num_nodes, 5 * num_nodes)
    built = time.perf_counter() - begin
    options: Any = dict(num_walks=NUM_WALKS, p_halt=P_HALT)
    key = jax.random.key(0)
    multiply, v = jax.jit(lambda kernel, v: kernel @ v), jnp.ones(num_nodes)
    kernel = graph_random_features(key, graph, KERNEL, **options)
    calls = {
        "features, s": lambda: graph_random_features(key, graph, KERNEL, **options).left.value,
        "product K v, s": lambda: multiply(kernel, v),
        "PageRank, s": lambda: pagerank.pagerank(key, graph, **options),
    }
    seconds = {name: best.wall for name, best in timing.race(calls, 2).items()}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    visits = int(jnp.count_nonzero(kernel.left.value))
    row = {"nodes": num_nodes, "edges": 5 * num_nodes, "visits": visits, "graph, s": built}
    return row | seconds | {"memory, GiB": largest}


def main(
    data_dir: Path | None = None,
    repeats: int = 10,
    largest: int = 10**5,
    out: Path = Path("results/graphs/scale"),
) -> None:
    """Print both tables.

    Args:
        largest: nodes of the largest graph.
    """
    launch.at_least(1, repeats=repeats)
    launch.at_least(SIZES[0], largest=largest)
    text = f"{timing.hardware()}. The best of {repeats} repeats (loops: the second call)."
    graph = data.load("cora", data_dir) if data_dir else random_graph(2708, 5278)
    rows = [speed(graph, m, p_halt, repeats) for p_halt in (0.5, 0.1) for m in (4, 16)]
    print(report.table(rows, out / "graph_speed", text), flush=True)
    rows = []
    for size in (n for n in SIZES if n <= largest):
        rows.append(scale(size))
        print(rows[-1], flush=True)
    print(harness.write(rows, out / "graph_scale", FIGURES["graph_scale"], text))


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 1, "largest": 1000})
