"""Speed and scale of graph random features: against a Python loop, and up to a million nodes.

    python -m experiments.graphs.scale                       # a random graph of cora's size
    python -m experiments.graphs.scale --data_dir=DIR        # cora
    python -m experiments.graphs.scale --largest=1000000     # 5 million edges
    python -m experiments.graphs.scale --attention=1000000   # also attention masked by the graph

Two plain loops over nodes, walks and steps stand for public code: qGRF Eq. 8 with draws of NumPy's
generator into a dense array, and the same with Python's own lists, dictionary and `random`. Our
coupled walks are timed from the graph to the features, and alone, with the adjacency matrix
normalised and the lengths drawn before.

Time and memory for random graphs of N nodes and 5 N edges, at 4 walks from each node: features of
the 2-regularised Laplacian, the product K v, and PageRank. Memory is the largest that the process
has held so far.

With --attention: one head of masked attention (h = m = 32) on a grid, a road-like graph (a grid
without a third of its edges) and a random graph of mean degree 6: forward, and forward and backward
to queries, keys, values and the modulation of the walks, by wall clock and by CPU time of all
threads. "links" is the search for pairs of walks that meet, once for a graph.

Writes graph_speed (csv, md), graph_scale (csv, md, png) and graph_attention (csv, md) to --out.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.graphs import data
from performer import couplings as frequency_couplings
from performer.graphs import (
    Graph,
    couplings,
    features,
    graph_random_features,
    kernels,
    masked_attention,
    pagerank,
    walks,
)
from performer.graphs.attention import link
from vit.run import devices
from vit.study import harness, launch, timing

KERNEL = kernels.RegularisedLaplacian(d=2, sigma=1.0)
NUM_WALKS = 4
P_HALT = 0.5
SIZES = (10**3, 10**4, 10**5, 3 * 10**5, 10**6)
TIMES = ("graph", "features", "product K v", "PageRank")
UNITS = {"s": "time (s)", "GiB": "memory of the process (GiB)"}


def by_unit(rows: list[harness.Row]) -> list[harness.Row]:
    """Return a row for each time and for the memory, with its unit apart from its name."""
    rows = harness.melt(rows, (*(f"{name}, s" for name in TIMES), "memory, GiB"))
    split = [(row, *row["line"].split(", ")) for row in rows]
    return [row | {"line": name, "unit": UNITS[unit]} for row, name, unit in split]


FIGURES: harness.Figures = {
    "graph_scale": dict(
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
    numbers: Any = (
        matrix.indptr,
        matrix.indices,
        matrix.data,
        np.asarray(KERNEL(1000), np.float64),
    )
    draw, phi = np.random.default_rng(0).random, np.zeros((n, n))
    if lists:
        numbers, draw = map(np.ndarray.tolist, numbers), random.Random(0).random
        phi = [defaultdict(float) for _ in range(n)]
    starts, neighbours, weights, f = numbers
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
    """Time both loops once, ours, and the walks alone: the best of the repeats."""
    key, normalised, n = jax.random.key(0), graph.normalised(), graph.num_nodes
    lengths = couplings.lengths(key, "antithetic", n, num_walks, p_halt)
    options: Any = dict(num_walks=num_walks, p_halt=p_halt)
    loops: dict[str, Callable[[], Any]] = {
        "loop, numpy": lambda: len(loop(graph, num_walks, p_halt, False)),
        "loop, lists": lambda: len(loop(graph, num_walks, p_halt, True)),
    }
    programs: dict[str, Callable[[], Any]] = {
        "ours": lambda: graph_random_features(key, graph, KERNEL, **options),
        "walks alone": lambda: walks.sample(key, normalised, lengths, p_halt=p_halt),
    }
    best = timing.race(loops, 1) | timing.race(programs, repeats)
    row: dict = {"m": num_walks, "p_halt": p_halt}
    row |= {f"{name}, ms": 1000 * times.wall for name, times in best.items()}
    for name in loops:
        row[f"{name} / ours"] = best[name].wall / best["ours"].wall
        row[f"{name} / walks"] = best[name].wall / best["walks alone"].wall
    return row


def random_graph(num_nodes: int, num_edges: int) -> Graph:
    """Draw ends of edges uniformly; a few are drawn twice and weigh 2, some nodes have none."""
    ends = np.random.default_rng(0).integers(0, num_nodes, (num_edges, 2))
    return Graph.from_edges(ends, num_nodes, both_directions=False)


def scale(num_nodes: int) -> dict:
    """Time a random graph; every program is compiled before it is timed."""
    begin = time.perf_counter()
    graph = random_graph(num_nodes, 5 * num_nodes)
    row: dict = {"nodes": num_nodes, "edges": 5 * num_nodes, "visits": 0}
    row["graph, s"] = time.perf_counter() - begin
    key, options = jax.random.key(0), dict[str, Any](num_walks=NUM_WALKS, p_halt=P_HALT)
    multiply, v = jax.jit(lambda kernel, v: kernel @ v), jnp.ones(num_nodes)
    kernel = graph_random_features(key, graph, KERNEL, **options)
    row["visits"] = int(jnp.count_nonzero(kernel.left.value))
    calls = {
        "features, s": lambda: graph_random_features(key, graph, KERNEL, **options).left.value,
        "product K v, s": lambda: multiply(kernel, v),
        "PageRank, s": lambda: pagerank.pagerank(key, graph, **options),
    }
    row |= {name: best.wall for name, best in timing.race(calls, 2).items()}
    return row | {"memory, GiB": devices.memory()["memory_gib"]}


def attention_graphs(num_nodes: int) -> dict[str, Graph]:
    """Return a grid, a road-like graph and a random one, of about as many nodes."""
    side = round(num_nodes**0.5)
    index = np.arange(side**2).reshape(side, side)
    pairs = [(index[:, :-1], index[:, 1:]), (index[:-1], index[1:])]
    edges = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs])
    kept = np.random.default_rng(0).random(len(edges)) < 2 / 3
    return {
        "grid": Graph.from_edges(edges, side**2),
        "road-like": Graph.from_edges(edges[kept], side**2),
        "random": random_graph(num_nodes, 3 * num_nodes),
    }


def masked(name: str, graph: Graph, width: int = 32) -> dict:
    """Time masked attention; every program is compiled before it is timed."""
    n, edges = graph.num_nodes, len(graph.indices) // 2
    drawn = features.sample(jax.random.key(0), graph, num_walks=NUM_WALKS, p_halt=P_HALT)
    query, key, value = jax.random.normal(jax.random.key(1), (3, n, 1, width))
    frequencies = frequency_couplings.get("pm")(jax.random.key(2), width, width)
    f, begin = kernels.Diffusion(1.0)(16), time.perf_counter()
    links = link(features.EstimatedKernel(features.modulate(drawn, kernels.Diffusion(1.0))))
    row: dict = {"graph": name, "nodes": n, "edges": edges, "links, s": time.perf_counter() - begin}

    def forward(query, key, value, f, drawn, links):
        phi = features.modulate(drawn, lambda length: jnp.pad(f, (0, length - len(f))))
        options: Any = dict(implementation="sparse", links=links)
        return masked_attention(
            query, key, value, frequencies, features.EstimatedKernel(phi), **options
        )

    def backward(*args):
        return jax.grad(lambda *x: jnp.sum(forward(*x) ** 2), argnums=(0, 1, 2, 3))(*args)

    args = query, key, value, f, drawn, links
    passes = {"forward": jax.jit(forward), "forward + backward": jax.jit(backward)}
    for name, program in passes.items():
        (best,) = timing.race({name: partial(program, *args)}, 1).values()
        row |= {f"{name}, s": best.wall, f"{name}, CPU s": best.cpu}
    row["CPU us per edge"] = row["forward + backward, CPU s"] / edges * 1e6
    return row | {"memory, GiB": devices.memory()["memory_gib"]}


def main(
    data_dir: Path | None = None,
    repeats: int = 10,
    largest: int = 10**5,
    attention: int = 0,
    out: Path = Path("results/graphs/scale"),
) -> None:
    """Print both tables.

    Args:
        largest: nodes of the largest graph.
        attention: nodes of the graphs of masked attention; 0 for none.
    """
    text = f"{timing.hardware()}. The best of {repeats} repeats (loops: the second call)."
    graph = data.load("cora", data_dir) if data_dir else random_graph(2708, 5278)
    rows = [speed(graph, m, p_halt, repeats) for p_halt in (0.5, 0.1) for m in (4, 16)]
    harness.show(rows, out / "graph_speed", text=text)
    rows = [scale(size) for size in SIZES if size <= largest]
    harness.show(rows, out / "graph_scale", FIGURES, text)
    if attention:
        rows = [masked(*item) for item in attention_graphs(attention).items()]
        harness.show(rows, out / "graph_attention", text=timing.hardware())


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2, "largest": 1000})
