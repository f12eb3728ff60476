"""Walks and their loads against powers of the weights; features against dense kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from performer.graphs import (
    Graph,
    couplings,
    features,
    graph_random_features,
    kernels,
    walks,
)
from tests.support.graph_examples import (
    ALARM,
    NUM_NODES,
    blocks,
    copies,
    example,
    karate,
    largest_score,
    mean_loads,
    weights_matrix,
    z_scores,
)

P_HALT = 0.4
COPIES = 4000


def lengths_of(graph, num_walks=3, coupling="antithetic", seed=0, p_halt=P_HALT):
    return couplings.lengths(jax.random.key(seed), coupling, graph.num_nodes, num_walks, p_halt)


@pytest.mark.parametrize("steps", ["uniform", "weighted"])
def test_loads_are_unbiased_for_the_powers_of_the_weights(steps):
    """E load[step = t, i -> x] = (W^t)_{ix}: for each t, i and x (VRC Eq. 50 with f = 1)."""
    graph = copies(example(), COPIES)
    sampled = walks.sample(
        jax.random.key(1), graph, lengths_of(graph, seed=1), p_halt=P_HALT, steps=steps
    )
    power = np.eye(NUM_NODES)
    for t in range(4):
        scores = z_scores(mean_loads(sampled, COPIES, t), power)
        assert np.abs(scores).max() < largest_score(scores), t
        power = power @ weights_matrix()


def test_compiled_walks_are_those_of_shorter_lengths():
    """`max_steps` cuts a walk, whose last visit is then there; other visits have the load 0."""
    graph, lengths = example(), lengths_of(example(), num_walks=20)
    assert lengths.max() > 2
    options = dict(p_halt=P_HALT, steps="weighted")
    want = walks.sample(jax.random.key(1), graph, np.minimum(lengths, 2), **options)
    got = jax.jit(lambda x: walks.sample(jax.random.key(1), graph, x, max_steps=2, **options))(
        jnp.asarray(lengths)
    )
    assert got.start.size == 3 * lengths.size

    def visits(sampled):
        names = ("start", "node", "step", "load", "last")
        rows = zip(*(np.asarray(getattr(sampled, name)) for name in names), strict=True)
        return sorted(row for row in rows if row[3])

    np.testing.assert_allclose(visits(got), visits(want), rtol=1e-6)


def test_edges_of_tiny_weight_are_not_taken():
    """The cumulative probability is 2^32 before them, one more than 32 bits hold."""
    graph = Graph.from_edges(np.array([(0, 1), (0, 2), (1, 2)]), 3, np.array([1.0, 1e-30, 1.0]))
    lengths = np.ones((3, 50), np.int32)
    sampled = walks.sample(jax.random.key(0), graph, lengths, p_halt=0.5, steps="weighted")
    moved = (np.asarray(sampled.start) == 0) & (np.asarray(sampled.step) == 1)
    np.testing.assert_array_equal(np.asarray(sampled.node)[moved], 1)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", ["uniform", "weighted"])
def test_all_neighbours_of_a_hub_are_equally_likely(steps):
    """Of 3 2^20 of them: by 24 random bits one in three has 6 of 16 chances in place of 1 of 3."""
    degree, count = 3 * 2**20, 2**16
    hub = Graph(jnp.array([0, degree]), jnp.arange(degree), jnp.ones(degree))
    found = walks.sample(
        jax.random.key(0), hub, np.ones((1, count), np.int32), p_halt=0.5, steps=steps
    )
    kept = np.asarray(found.step) == 1
    kept &= np.asarray(found.load) > 0
    assert kept.sum() == count
    np.testing.assert_array_equal(np.asarray(found.load)[kept], 2 * degree)
    drawn, there = (  # by residue, in each of 12 parts: float32 rounds products in other ways
        np.bincount(x % 3 + 3 * (x // 2**18), minlength=36)
        for x in (np.asarray(found.node)[kept], np.arange(degree))
    )
    assert stats.chisquare(drawn, there * (count / degree)).pvalue > ALARM


def test_a_draw_depends_on_walker_and_step_alone():
    """Longer walks of a few do not change the others' paths."""
    graph = karate()
    short = np.full((34, 2), 3)
    longer = short.copy()
    longer[5] = 40
    a, b = (walks.sample(jax.random.key(3), graph, x, p_halt=P_HALT) for x in (short, longer))

    def paths(found):
        keep = (np.asarray(found.load) > 0) & (np.asarray(found.start) != 5)
        columns = (np.asarray(x)[keep] for x in (found.start, found.step, found.node))
        return sorted(zip(*(x.tolist() for x in columns), strict=True))

    assert paths(a) == paths(b)
    other = walks.sample(jax.random.key(4), graph, short, p_halt=P_HALT)
    assert paths(a) != paths(other)


def test_one_ensemble_is_too_large_on_the_diagonal_alone():
    """qGRF App. 8.7."""
    graph = copies(example(), COPIES)
    kernel = kernels.RegularisedLaplacian(d=2, sigma=0.7)
    phi = graph_random_features(
        jax.random.key(7), graph, kernel, num_walks=2, p_halt=P_HALT
    ).left.to_scipy()
    scores = z_scores(blocks(phi @ phi.T, COPIES), np.asarray(kernel.dense(example())))
    connected = np.delete(np.arange(NUM_NODES), 5)
    assert (np.diag(scores)[connected] > 3).all()
    off = scores[~np.eye(NUM_NODES, dtype=bool)]
    assert np.abs(off).max() < largest_score(off)


def test_products_are_those_of_the_gram_matrix():
    v = np.random.default_rng(0).standard_normal((NUM_NODES, 2))
    for two in (False, True):
        estimate = graph_random_features(
            jax.random.key(9), example(), kernels.Diffusion(), num_walks=3, p_halt=P_HALT,
            unbiased_diagonal=two,
        )  # fmt: skip
        phi = estimate.left.to_scipy().toarray()
        other = phi if estimate.right is None else estimate.right.to_scipy().toarray()
        gram = (phi @ other.T + other @ phi.T) / 2
        found = jax.jit(
            lambda k, v: (k.gram(), k @ v, k @ v[:, 0], k.left @ v, k.left.transposed(v))
        )(estimate, jnp.asarray(v))
        wanted = gram, gram @ v, gram @ v[:, 0], phi @ v, phi.T @ v
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_features_are_those_of_the_equation():
    """VRC Eqs 49 and 50, walk by walk, in float64 from the visits."""
    sampled = features.sample(jax.random.key(10), karate(), num_walks=3, p_halt=P_HALT)
    f = [1.0, 0.5, -0.3] + [0.1] * 400
    phi = np.zeros((34, 34))
    columns = (np.asarray(x).tolist() for x in (sampled.start, sampled.node, sampled.step))
    for i, x, t, load in zip(*columns, np.asarray(sampled.load).tolist(), strict=True):
        phi[i, x] += f[t] * load / 3
    found = features.modulate(sampled, lambda length: jnp.asarray((f + [0.0] * length)[:length]))
    np.testing.assert_allclose(found.to_dense(), phi, atol=1e-5)


def test_merged_walks_have_the_same_features():
    """Also with a node alone, whose one visit stands for all steps; of steps below 3 with 3."""
    sampled = features.sample(jax.random.key(0), example(), num_walks=6, p_halt=0.3)
    for length, found in ((None, features.merged(sampled)), (3, features.merged(sampled, 3))):

        def modulation(size, length=length):
            return kernels.Diffusion(1.0)(size) * (jnp.arange(size) < (length or size))

        parts = (features.modulate(x, modulation) for x in (found, sampled))
        np.testing.assert_allclose(*(x.to_dense() for x in parts), atol=1e-6)
        visits = np.stack([found.start, found.node, found.step], axis=1)
        assert len(np.unique(visits, axis=0)) == len(visits) < len(sampled.start)
