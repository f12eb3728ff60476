"""A transformer on the nodes of a graph: masked by its kernel, or not.

    python -m experiments.graphs.transformer --data_dir=DIR

An input layer, one block of `performer.nnx.GraphAttention` and an MLP (width 32, 2 heads, 8
features of `pm-antithetic`), an output layer; AdamW on all training nodes at once. The methods
differ in the attention alone:

    performer       without the graph
    masked          times (sum_t f_t A^t)^2, f_0 to f_3 learned by each head, by 8 walks
    exact           softmax attention, without the graph
    exact masked    softmax attention times the same learned kernel, both without an estimate

Cora and Citeseer (Yang et al. 2016): the class of a paper from its words; 20 labels of each class
for training, 500 papers for validation, 1,000 for the test; the split is given by the files.
Meshes: the unit normal of a vertex from its position; random halves of a tenth, a tenth and the
rest for training, validation and test, others in each seed. Without --data_dir a made-up mesh, a
bumpy sphere. A seed decides parameters, frequencies, walks, dropout and the split of a mesh. The
result is the score at the step with the best validation score.

Writes transformer (csv, md, png) to --out.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.spatial
from flax import nnx

from experiments.graphs import data
from performer.graphs import Graph, features
from performer.nnx import GraphAttention
from vit.study import harness, launch

WIDTH, HEADS, FEATURES, TERMS = 32, 2, 8, 4
NUM_WALKS, P_HALT = 8, 0.5
METHODS = ("performer", "masked", "exact", "exact masked")
CITATIONS = ("cora", "citeseer")
MESHES = ("cylinder", "teapot", "idler_riser")
EVERY = 5
"""Steps between evaluations."""
FIGURES: harness.Figures = {
    "transformer": dict(
        change=lambda rows: [row for row in rows if row["attention"] in METHODS],
        x="{attention}",
        line="{data set}",
        panel="{data set}",
        ylabel="score",
    )
}


class Problem(NamedTuple):
    """Inputs (N, d) and targets at the nodes, classes (N,) or unit vectors (N, 3)."""

    graph: Graph
    inputs: np.ndarray
    targets: np.ndarray
    split: np.ndarray | None
    """1 for training, 2 for validation, 3 for the test (N,); None for random ones."""


class Exact(GraphAttention):
    """Softmax attention; the mask, if any, has the powers A^0, A^1, ... (2 TERMS - 1, N, N)."""

    def attend(self, query, key, value, mask, key_mask):
        """Return e^{q.k} M v over its rows."""
        logits = jnp.einsum("inh,jnh->nij", query, key) / query.shape[-1] ** 0.5
        if mask is not None:
            f = jnp.exp(self.modulation[...])
            series = jax.vmap(jnp.convolve)(f, f)
            logits += jnp.log(jnp.maximum(jnp.einsum("nt,tij->nij", series, mask), 1e-30))
        return jnp.einsum("nij,jnh->inh", jax.nn.softmax(logits), value)


class Block(nnx.Module):
    """Attention and MLP, both residual, with normalised inputs."""

    def __init__(self, layer: type[GraphAttention], rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = layer(HEADS, WIDTH, FEATURES, num_terms=TERMS, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        """Return values at the nodes (N, WIDTH)."""
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Inputs at the nodes -> logits or a vector."""

    def __init__(self, method: str, inputs: int, outputs: int, rngs: nnx.Rngs):
        layer = Exact if "exact" in method else GraphAttention
        self.embed = nnx.Linear(inputs, WIDTH, rngs=rngs)
        self.block = Block(layer, rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, outputs, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask, is_class):
        """Return the outputs (N, outputs)."""
        dropout = self.dropout if is_class else lambda x: x
        x = self.block(dropout(self.embed(x)), mask)
        return self.head(dropout(self.norm(x)))


def powers(graph: Graph) -> jax.Array:
    """Return A^0, A^1, ... (2 TERMS - 1, N, N)."""
    a = graph.normalised().to_scipy()
    products: list[Any] = [np.eye(graph.num_nodes)]
    for _ in range(2 * TERMS - 2):
        products.append(a @ products[-1])
    return jnp.asarray(np.stack(products), jnp.float32)


def scores(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return loss and score of each node: accuracy, or the cosine."""
    if targets.ndim == 1:
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return loss, (outputs.argmax(-1) == targets).astype(jnp.float32)
    cosine = optax.cosine_similarity(outputs, targets, epsilon=1e-6)
    return 1 - cosine, cosine


def fit(problem: Problem, method: str, seed: int, steps: int) -> float:
    """Train, and return the score on the test nodes at the best validation score."""
    targets, is_class = jnp.asarray(problem.targets), problem.targets.ndim == 1
    split = random_split(seed, len(targets)) if problem.split is None else problem.split
    chosen = jnp.asarray(split == np.arange(4)[:, None], jnp.float32)
    chosen /= jnp.maximum(chosen.sum(1, keepdims=True), 1)  # weights of the means
    x = jnp.asarray(problem.inputs, jnp.float32)
    outputs = int(targets.max()) + 1 if is_class else targets.shape[1]
    rngs = nnx.Rngs(params=seed, frequencies=100 + seed, dropout=200 + seed)
    model = Model(method, x.shape[1], outputs, rngs)
    mask = None
    if method == "exact masked":
        mask = powers(problem.graph)
    elif "masked" in method:
        key = jax.random.key(300 + seed)
        sampled = features.sample(key, problem.graph, num_walks=NUM_WALKS, p_halt=P_HALT)
        mask = features.merged(sampled, TERMS)
    optimizer = nnx.Optimizer(model, descent(is_class, steps), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    accuracies = np.asarray(_train(graphdef, state, x, mask, targets, chosen, steps))
    return float(accuracies[accuracies[:, 0].argmax(), 1])


@functools.cache  # one value: its functions are part of the compiled program's key
def descent(is_class: bool, steps: int) -> optax.GradientTransformation:
    """Return AdamW with a cosine schedule; decay for classes alone, which have few labels."""
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    return optax.adamw(schedule, weight_decay=0.05 if is_class else 0.0)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _train(graphdef, state, x, mask, targets, chosen, steps) -> jax.Array:
    """Return the scores of validation and test every `EVERY` steps."""
    is_class = targets.ndim == 1

    def step(_, state):
        model, optimizer = nnx.merge(graphdef, state)
        model.train()
        loss = lambda model: scores(model(x, mask, is_class), targets)[0] @ chosen[1]  # noqa: E731
        optimizer.update(model, nnx.grad(loss)(model))
        return nnx.state((model, optimizer))

    def advance(state, _):
        state = jax.lax.fori_loop(0, EVERY, step, state)
        model, _ = nnx.merge(graphdef, state)
        model.eval()
        return state, chosen[2:] @ scores(model(x, mask, is_class), targets)[1]

    return jax.lax.scan(advance, state, length=steps // EVERY)[1]


def random_split(seed: int, count: int) -> np.ndarray:
    """Return 1 for a tenth of the nodes, 2 for another, 3 for the rest."""
    ranks = np.random.default_rng(seed).permutation(count) / count
    return np.where(ranks < 0.1, 1, np.where(ranks < 0.2, 2, 3))


def citations(path: Path) -> Problem:
    """Read papers: words (pairs of a paper and a word), classes, and the split."""
    parts = data.arrays(path, "edges", "n_nodes", "labels", "attributes", "split")
    paper, word = parts["attributes"].T
    words = np.zeros((int(parts["n_nodes"]), int(word.max()) + 1), np.float32)
    words[paper, word] = 1
    words /= np.maximum(words.sum(axis=1, keepdims=True), 1)
    graph = Graph.from_edges(parts["edges"], len(words))
    return Problem(graph, words * len(words[0]) ** 0.5, parts["labels"], parts["split"])


def vertices(graph: Graph, places: np.ndarray, normals: np.ndarray) -> Problem:
    """Return normals from positions, which are centred and scaled to a mean square of 1."""
    centred = places - places.mean(axis=0)
    return Problem(graph, centred / centred.std(), normals, None)


def made_up(count: int = 300) -> Problem:
    """Return a sphere with bumps: the hull of points of a spiral, moved in and out."""
    t = (np.arange(count) + 0.5) / count
    angle, height = np.pi * (1 + 5**0.5) * count * t, 1 - 2 * t
    ring = np.sqrt(1 - height**2)
    points = np.stack([ring * np.cos(angle), ring * np.sin(angle), height], axis=1)
    hull = scipy.spatial.ConvexHull(points)
    pairs = np.concatenate([hull.simplices[:, [i, j]] for i, j in ((0, 1), (1, 2), (2, 0))])
    edges = np.unique(np.sort(pairs, axis=1), axis=0)
    slope = 3 * np.cos(5 * points)
    normals = points + 0.2 * slope
    places = points * (1 + 0.1 * np.sin(5 * points).sum(axis=1, keepdims=True))
    return vertices(
        Graph.from_edges(edges, count), places, normals / np.linalg.norm(normals, axis=1)[:, None]
    )


def load(name: str, data_dir: Path | None) -> Problem:
    """Return the problem of this name; "made up" needs no folder."""
    if data_dir is None:
        return made_up()
    if name in CITATIONS:
        return citations(data_dir / "citations" / f"{name}.npz")
    path = data_dir / "meshes" / f"{name}.npz"
    graph, normals = data.mesh(path)
    return vertices(graph, data.arrays(path, "vertices")["vertices"], normals)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    repeats: int = 5,
    steps: int = 100,
    out: Path = Path("results/graphs/transformer"),
) -> None:
    """Print the table.

    Args:
        methods: names of attention.
        repeats: number of seeds.
        steps: steps of training.
    """
    names = data_sets or ((*CITATIONS, *MESHES) if data_dir else ("made up",))
    problems = {name: load(name, data_dir) for name in names}

    def measure(case: harness.Row) -> list[float]:
        name, method = case["data set"], case["attention"]
        seeds = range(repeats)
        return [fit(problems[name], method, seed, steps) for seed in seeds]

    cases = [
        {"data set": name, "nodes": problem.graph.num_nodes, "attention": method}
        for name, problem in problems.items()
        for method in methods
    ]
    rows = harness.sweep(cases, measure)
    tests: Any = dict(case="{data set}", tested="attention")
    table = harness.pivot(rows, "{attention}")
    harness.show(rows, out / "transformer", FIGURES, shown=table, **tests)


if __name__ == "__main__":
    launch.run(main, quick={"repeats": 2, "steps": 10})
