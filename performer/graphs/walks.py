"""Random walks from all nodes at once.

Walk k of node i makes `lengths[i, k]` steps; the joint law of these lengths is the coupling. A step
goes to a neighbour, uniform or in proportion to the weights (qGRF Eq. 87). At each node it visits,
a walk leaves a *load*, the factor of f in VRC Eq. 50,

    load = (product of the weights along the walk) / (probability of the walk up to the node),

one for each prefix. A prefix of t steps has the probability of its directions times (1 - p_halt)^t.
The walks are distributed over *lanes* of about equal total length; a lane makes its walks in turn,
and all lanes step at once, so that none waits for the longest walk. A draw is a function of key,
walker and step alone, not of the lanes.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Int

from performer import choices
from performer.graphs import couplings
from performer.graphs.graph import Graph, require_nonnegative
from performer.typing import Key

Steps = Literal["uniform", "weighted"]
STRETCH = 4
"""Length of a lane relative to the longest walk expected; at 4 a sixth of the steps is idle."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Walks:
    """Visits of all walks: flat lists (T,), in no particular order."""

    start: Any
    """First node of the walk, int32."""
    node: Any
    """Visited node, int32."""
    step: Any
    """Number of steps so far, int32."""
    load: Any
    """Weights over probability; 0 for padding entries."""
    last: Any
    """True if the walk halts there, bool."""
    num_nodes: int = field(metadata={"static": True})
    num_walks: int = field(metadata={"static": True})
    """Number of walks from each node."""
    max_steps: int = field(metadata={"static": True})
    """Upper bound of the steps."""


def sample(
    key: Key,
    graph: Graph,
    lengths: Int[Array | np.ndarray, "n m"],
    *,
    p_halt: float,
    steps: Steps = "uniform",
    max_steps: int | None = None,
) -> Walks:
    """Draw walks of given lengths from every node, and their loads.

    A walk at a node without neighbours stays there, with load 0.

    Args:
        key: random key of the directions.
        graph: the graph, whose weights the loads multiply.
        lengths: (num_nodes, num_walks), drawn by `couplings.lengths`; concrete without
            `max_steps`.
        p_halt: parameter of the geometric distribution of each length.
        steps: "uniform" over the neighbours, or "weighted", in proportion to the weights.
        max_steps: step at which longer walks are cut. The number of visits is then
            num_nodes * num_walks * (max_steps + 1), whatever the lengths are.

    Raises:
        ValueError: for p_halt outside (0, 1), lengths of another shape, more walks than int32 can
            number, unknown `steps`, or "weighted" with a negative weight.
    """
    couplings.require_probability(p_halt)
    require_lengths(lengths, graph)
    require_steps(steps, graph)
    num_walks = lengths.shape[1]
    choices.require_numbered("walks", graph.num_nodes * num_walks)
    if max_steps is None:
        walkers, dealt, rounds = _lanes(np.asarray(lengths), p_halt)
        longest = -(-int(dealt.max()) // 64) * 64
    else:  # one lane for each walk
        walkers = jnp.arange(lengths.size, dtype=jnp.int32)[None]
        dealt, rounds = jnp.minimum(jnp.reshape(lengths, (1, -1)), max_steps), max_steps + 1
        longest = max_steps
    seed = jax.random.bits(key, (2,), jnp.uint32)
    thresholds = _thresholds(graph) if steps == "weighted" else None
    options = dict(num_walks=num_walks, rounds=rounds, p_halt=float(p_halt))
    start, node, step, load, last = _walk(seed, graph, thresholds, walkers, dealt, **options)
    return Walks(start, node, step, load, last, graph.num_nodes, num_walks, longest)


def require_lengths(lengths: Int[Array | np.ndarray, "..."], graph: Graph) -> None:
    """Raise ValueError unless lengths are (num_nodes, num_walks)."""
    if lengths.ndim != 2 or len(lengths) != graph.num_nodes:
        shape, n = lengths.shape, graph.num_nodes
        raise ValueError(f"lengths must be (num_nodes, num_walks), of {n} nodes; got {shape}")


def require_steps(steps: str, graph: Graph) -> None:
    """Raise ValueError for unknown `steps`, or "weighted" with a negative weight."""
    if steps not in ("uniform", "weighted"):
        raise ValueError(f"steps must be 'uniform' or 'weighted', got {steps!r}")
    if steps == "weighted":
        require_nonnegative(graph, "a step in proportion to the weights")


def transition(graph: Graph, steps: str) -> scipy.sparse.csr_array:
    """Return T, the probabilities of a step (N, N), float64; zero rows for nodes without edges.

    Raises:
        ValueError: as `require_steps`.
    """
    require_steps(steps, graph)
    matrix = graph.to_scipy()
    if steps == "uniform":
        matrix.data = np.ones_like(matrix.data)
    row, strengths = _strengths(matrix)
    matrix.data /= np.where(strengths > 0, strengths, 1)[row]
    return matrix


def _strengths(matrix: scipy.sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of every entry, and the sums of the rows."""
    degrees = np.diff(matrix.indptr)
    row = np.repeat(np.arange(len(degrees)), degrees)
    return row, np.bincount(row, matrix.data, len(degrees))


def _lanes(lengths: np.ndarray, p_halt: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Return walkers and their lengths, both (walks of a lane, lanes), and the steps of a lane.

    Walker k of node i is i * num_walks + k; a length of -1 means no walk.
    """
    longest = np.log(lengths.size + 1) / -np.log1p(-p_halt) + 1
    lanes = max(round(lengths.size / p_halt / (STRETCH * longest)), 1)
    depth = -(-lengths.size // lanes)
    padding = (0, depth * lanes - lengths.size)
    padded = np.pad(lengths.reshape(-1), padding, constant_values=-1)
    narrow = np.min_scalar_type(-1 - int(padded.max(initial=0)))  # 16 bits: a radix sort
    walkers = np.argsort(-padded.astype(narrow), kind="stable").reshape(depth, lanes)
    walkers[1::2] = walkers[1::2, ::-1]  # to and fro, for lanes of equal length
    dealt = padded[walkers]
    grain = -(-int(longest) // 16) * 16  # draws rarely need another program
    rounds = -(-int((dealt + 1).sum(axis=0).max(initial=1)) // grain) * grain
    return walkers.astype(np.int32), dealt.astype(np.int32), rounds


@partial(jax.jit, static_argnames=("num_walks", "rounds", "p_halt"))
def _walk(seed, graph, thresholds, walkers, lengths, *, num_walks, rounds, p_halt):
    """Walk all lanes step by step; return flat lists of start, node, step, load and last."""
    depth, lanes = walkers.shape
    lane = jnp.arange(lanes)

    def move(carry, _):
        turn, step, node, load = carry
        place = jnp.minimum(turn, depth - 1)
        walker = walkers[place, lane]
        length = jnp.where(turn < depth, lengths[place, lane], -1)
        start = jnp.minimum(walker // num_walks, graph.num_nodes - 1)
        moved, factor = _step(graph, thresholds, node, _bits(seed, walker, step))
        node = jnp.where(step == 0, start, moved)
        load = jnp.where(step == 0, 1, load * factor / (1 - p_halt)).astype(load.dtype)
        left = jnp.where(length >= 0, load, 0)
        last = step == length
        done = step >= length
        carry = (turn + done.astype(turn.dtype), jnp.where(done, 0, step + 1), node, load)
        return carry, (start, jnp.where(length >= 0, node, start), step, left, last)

    zeros = jnp.zeros_like(walkers[0])
    begin = (zeros, zeros, zeros, zeros.astype(graph.weights.dtype))
    _, visits = jax.lax.scan(move, begin, length=rounds)
    return tuple(x.reshape(-1) for x in visits)


def _step(graph, thresholds, node, bits):
    """Return the next node, and the weight of the edge over its probability (exact to 2^-32)."""
    if not len(graph.indices):
        return node, jnp.zeros(node.shape, graph.weights.dtype)
    begin, end = graph.indptr[node], graph.indptr[node + 1]
    degree, last = end - begin, jnp.maximum(end - 1, begin)
    if thresholds is None:
        place = begin + _high_word(bits, degree.astype(jnp.uint32)).astype(jnp.int32)
        factor = graph.weights[place] * degree.astype(graph.weights.dtype)
    else:
        above, strengths = thresholds
        place = _first_above(above, begin, last, bits)
        factor = strengths[node]
    return jnp.where(degree > 0, graph.indices[place], node), jnp.where(degree > 0, factor, 0)


def _high_word(a, b):
    """Return floor(a b / 2^32) of uint32, by products of 16 bits: uint64 requires x64."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)


def _first_above(thresholds, low, high, target):
    """Return the first place from low to high with a threshold above the target, or else high."""

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low >> 1)  # low + high may overflow int32
        above = thresholds[middle] > target
        return jnp.where(above, low, jnp.minimum(middle + 1, high)), jnp.where(above, middle, high)

    return jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))[0]


def _bits(seed, walker, step):
    """Draw 32 random bits for each walker and step: Threefry of the two as a counter."""
    counter = jnp.concatenate([walker, step]).astype(jnp.uint32)
    return threefry_2x32((seed[0], seed[1]), counter)[: len(walker)]


def _thresholds(graph: Graph) -> tuple[Array, Array]:
    """Return 2^32 times the cumulative probabilities of each row, uint32, and the sums of weights.

    The cumulative sum runs over all rows in fixed point of 62 bits: it wraps, and differences
    within a row are exact. The last entry of a row, 2^32, is never read.
    """
    chances = transition(graph, "weighted")
    row, _ = _strengths(chances)
    sums = np.cumsum((chances.data * 2.0**62).astype(np.uint64))
    before = np.concatenate([np.zeros(1, np.uint64), sums])[chances.indptr[:-1]]
    within = np.minimum((sums - before[row]) >> np.uint64(30), 2**32 - 1)
    strengths = _strengths(graph.to_scipy())[1]
    return jnp.asarray(within.astype(np.uint32)), jnp.asarray(strengths, graph.weights.dtype)
