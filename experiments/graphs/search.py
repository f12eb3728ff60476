"""Search for the best node of a large graph by Thompson sampling.

    python -m experiments.graphs.search --nodes=1000000

The nodes are members and groups, a thousand members to a group; each member is in three groups at
random. The value of a node is the mean of its groups' values, N(0, 1), and noise of 0.1 is seen.
Each round draws one posterior function for each of `batch` nodes (`performer.graphs.gp.sample`,
diffusion with sigma = 3, 4 walks) and observes where each is largest. The first round draws the
prior. Beside it as many nodes at random. Regret is the best value of all nodes less the best value
among the observed ones.

Writes search (csv, md, png) to --out; time is that of all rounds so far, memory the largest that
the process has held.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import harness, launch, timing
from experiments.graphs.scale import memory
from performer.graphs import Graph, gp, graph_random_features, kernels

MEMBERS, JOINED, NOISE = 1000, 3, 0.1
FIGURES: harness.Figures = {
    "search": dict(
        columns=("Thompson sampling", "random"), line="{line}", x="observed", ylabel="regret"
    )
}


def members(nodes: int) -> tuple[Graph, jax.Array]:
    """Return the graph, its groups first, and the values of the nodes."""
    rng, groups = np.random.default_rng(0), max(nodes // MEMBERS, JOINED)
    joined = rng.integers(0, groups, (nodes - groups, JOINED))
    pairs = np.stack([np.repeat(np.arange(groups, nodes), JOINED), joined.ravel()], axis=1)
    worth = rng.standard_normal(groups)
    values = np.concatenate([worth, worth[joined].mean(axis=1)])
    return Graph.from_edges(pairs, nodes), jnp.asarray(values, jnp.float32)


def main(
    nodes: int = 10**5,
    rounds: int = 16,
    batch: int = 16,
    out: Path = Path("results/graphs/search"),
) -> None:
    """Print the table.

    Args:
        nodes: number of nodes.
        rounds: number of rounds.
        batch: nodes observed in each round.
    """
    graph, values = members(nodes)
    begin = time.perf_counter()
    kernel = graph_random_features(
        jax.random.key(0), graph, kernels.Diffusion(3.0), num_walks=4, p_halt=0.25
    )
    print(f"features: {time.perf_counter() - begin:.1f} s", flush=True)
    random = jax.random.choice(jax.random.key(1), nodes, (rounds * batch,), replace=False)
    observed, y = jnp.zeros(0, jnp.int32), jnp.zeros(0)
    scale, rows, best = 1.0, [], float(values.max())
    for i, key in enumerate(jax.random.split(jax.random.key(2), rounds)):
        sample_key, noise_key = jax.random.split(key)
        paths = gp.sample(
            sample_key, kernel, observed, y, NOISE, batch, output_scale=scale, tolerance=1e-3
        )
        if i == 0:
            scale = float(values.std() / paths.std())  # the prior has the spread of the values
        new = jnp.argmax(paths, axis=1).astype(jnp.int32)
        noise = NOISE * jax.random.normal(noise_key, new.shape)
        observed, y = jnp.append(observed, new), jnp.append(y, values[new] + noise)
        seen = {"Thompson sampling": observed, "random": random[: len(observed)]}
        rows.append(
            {"nodes": nodes, "observed": len(observed)}
            | {name: best - float(values[at].max()) for name, at in seen.items()}
            | {"time, s": time.perf_counter() - begin, "memory, GiB": memory()}
        )
        print(*rows[-1].values(), flush=True)
    text = f"{timing.hardware()}. The best node is worth {best:.2f}."
    harness.show(rows, out / "search", FIGURES, text)


if __name__ == "__main__":
    launch.run(main, quick={"nodes": 2000, "rounds": 4, "batch": 4})
