"""Self-avoiding walks: the baseline q-RRW of qGRF Sec. 4.1, an idea of Choromanski 2023.

The walks of a node are drawn in turn and avoid the edges of earlier walks: the probability of an
edge is proportional to exp(-c), c the number of times it was passed in either direction. The loads
divide by the actual probabilities, so that estimates are unbiased.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from performer.graphs import Graph, walks
from performer.typing import Key


def sample(
    key: Key, graph: Graph, lengths: Int[jax.Array | np.ndarray, "n m"], *, p_halt: float
) -> walks.Walks:
    """Draw reinforced walks of given lengths from every node, in place of `walks.sample`.

    For small graphs with edges: O(num_nodes * edges) memory. Probabilities are float32 sums, with
    errors of up to 2^-24 times the degree.
    """
    longest = -(-int(np.asarray(lengths).max()) // 16) * 16  # few lengths of the scan to compile
    ends = np.sort(np.stack(graph.to_scipy().tocoo().coords), axis=0)  # (2, entries)
    edges = np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)
    widest = int(np.asarray(graph.degrees).max())
    start, node, step, load, last = _sample(
        key, graph, lengths, jnp.asarray(edges, jnp.int32), longest, widest, p_halt
    )
    return walks.Walks(start, node, step, load, last, graph.num_nodes, lengths.shape[1], longest)


@partial(jax.jit, static_argnums=(4, 5, 6))
def _sample(key, graph, lengths, edges, longest, widest, p_halt):
    """Return the flat lists of `Walks`; `edges` numbers the undirected edge of every entry."""

    def choose(node, passed, u):
        """Return the entry of the next edge, 1 / its probability, and whether there is one."""
        entries = graph.indptr[node] + jnp.arange(widest)
        exists = entries < graph.indptr[node + 1]
        entries = jnp.where(exists, entries, 0)
        times = jnp.where(exists, passed[edges[entries]], jnp.inf)
        # Relative to the least passed edge, whose chance is 1: the sum cannot underflow.
        chances = jnp.where(exists, jnp.exp(times.min() - times), 0)
        sums = jnp.cumsum(chances)
        chosen = jnp.searchsorted(sums, u * sums[-1], side="right")
        chosen = jnp.minimum(chosen, jnp.maximum(exists.sum() - 1, 0))
        return entries[chosen], sums[-1] / chances[chosen], exists.any()

    def from_node(start, lengths, key):
        def step(carry, inputs):
            node, load, passed, length = carry
            time, u = inputs
            entry, inverse_chance, moves = choose(node, passed, u)
            alive = time <= length
            factor = jnp.where(moves, graph.weights[entry] * inverse_chance / (1 - p_halt), 0)
            load = jnp.where(alive, load * factor, 0)
            node = jnp.where(alive & moves, graph.indices[entry], node)
            passed = passed.at[edges[entry]].add(jnp.where(alive & moves, 1, 0))
            return (node, load, passed, length), (node, time, load, time == length)

        def walk(passed, inputs):
            length, key = inputs
            times = jnp.arange(1, longest + 1, dtype=jnp.int32)
            one = jnp.ones((), graph.weights.dtype)
            draws = jax.random.uniform(key, (longest,), jnp.float32)
            first = (start, jnp.zeros((), jnp.int32), one, length == 0)
            carry, later = jax.lax.scan(step, (start, one, passed, length), (times, draws))
            return carry[2], jax.tree.map(lambda a, b: jnp.append(a, b), first, later)

        keys = jax.random.split(key, len(lengths))
        never = jnp.zeros(len(edges), graph.weights.dtype)
        return jax.lax.scan(walk, never, (lengths, keys))[1]

    starts = jnp.arange(graph.num_nodes, dtype=jnp.int32)
    visits = jax.vmap(from_node)(starts, lengths, jax.random.split(key, graph.num_nodes))
    start = jnp.broadcast_to(starts[:, None, None], visits[0].shape)  # (nodes, walks, steps + 1)
    return tuple(x.reshape(-1) for x in (start, *visits))
