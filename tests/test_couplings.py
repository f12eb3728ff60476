"""Every coupling of the table: shapes, marginals, unbiasedness, and its own defining property."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import performer
from performer import couplings

NAMES = couplings.names()
DRAWS = 4000


def draw_many(name, m, d, draws=DRAWS, seed=0):
    keys = jax.random.split(jax.random.key(seed), draws)
    coupling = couplings.get(name)
    return np.asarray(jax.jit(jax.vmap(lambda key: coupling(key, m, d)))(keys), np.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "d"), [(2, 3), (6, 6), (10, 4), (128, 64)])
def test_shape_dtype_and_determinism(name, m, d):
    coupling = jax.jit(couplings.get(name), static_argnums=(1, 2))
    W = coupling(jax.random.key(0), m, d)
    chex.assert_shape(W, (m, d))
    assert W.dtype == jnp.float32
    assert np.array_equal(W, coupling(jax.random.key(0), m, d))
    assert not np.array_equal(W, coupling(jax.random.key(1), m, d))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_gaussian(name):
    """Each row is N(0, I): Kolmogorov-Smirnov tests of lengths, coordinates and a projection.

    d = 5 and m = 12: two whole blocks and a part of one. 12 rows x 3 tests x 10 couplings at 1e-6
    each: a false-alarm rate of 4e-4 for the whole table.
    """
    m, d = 12, 5
    W = draw_many(name, m, d)
    direction = np.ones(d) / np.sqrt(d)
    for row in range(m):
        x = W[:, row]
        for sample, law in [
            (np.linalg.norm(x, axis=-1), stats.chi(d).cdf),
            (x[:, 0], stats.norm.cdf),
            (x @ direction, stats.norm.cdf),
        ]:
            assert stats.kstest(sample, law).pvalue > 1e-6, (name, row)


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_estimates_are_unbiased(name, kernel):
    """The mean over draws is within 5 standard errors (20 comparisons: false-alarm rate 1e-5)."""
    d, m = 8, 16
    x = np.full(d, 0.5 / np.sqrt(d))
    y = 0.6 * np.eye(d)[0]
    exact = np.exp(x @ y) if kernel == "softmax" else np.exp(-np.sum((x - y) ** 2) / 2)
    keys = jax.random.split(jax.random.key(5), DRAWS)
    coupling = couplings.get(name)

    def estimate(key):
        W = coupling(key, m, d)
        a, b = (
            performer.features.positive(jnp.asarray(p, jnp.float32), W, kernel=kernel)
            for p in (x, y)
        )
        return a @ b

    estimates = np.asarray(jax.jit(jax.vmap(estimate))(keys), np.float64)
    assert abs(estimates.mean() - exact) < 5 * estimates.std() / np.sqrt(DRAWS)


@pytest.mark.parametrize("name", ["orf", "pnc", "pm"])
def test_blocks_are_orthogonal(name):
    W = draw_many(name, 10, 4, draws=3)
    for gram in W @ W.swapaxes(1, 2):
        for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
            off_diagonal = gram[block, block] - np.diag(np.diag(gram[block, block]))
            np.testing.assert_allclose(off_diagonal, 0, atol=1e-4)


def test_simrf_pairs_meet_at_the_simplex_angle():
    W = draw_many("simrf", 6, 6, draws=3)
    unit = W / np.linalg.norm(W, axis=-1, keepdims=True)
    off_diagonal = (unit @ unit.swapaxes(1, 2))[:, ~np.eye(6, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, -1 / 5, atol=1e-5)


def test_pnc_lengths_are_coupled_inside_blocks_of_odd_size():
    """d = 5: pairs (0, 1), (2, 3), a free row, then the next block."""
    lengths = np.linalg.norm(draw_many("pnc", 10, 5), axis=-1)
    u = stats.chi.cdf(lengths, 5)
    for a, b in [(0, 1), (2, 3), (5, 6), (7, 8)]:
        np.testing.assert_allclose(u[:, a] + u[:, b], 1, atol=1e-5)
    for a, b in [(4, 5), (1, 2), (4, 9)]:
        assert abs(np.corrcoef(u[:, a], u[:, b])[0, 1]) < 5 / np.sqrt(DRAWS)


def test_pm_shares_one_length_per_block():
    lengths = np.linalg.norm(draw_many("pm", 10, 4), axis=-1)
    for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
        np.testing.assert_allclose(
            lengths[:, block],
            np.broadcast_to(lengths[:, block][:, :1], lengths[:, block].shape),
            rtol=1e-5,
        )
    assert abs(np.corrcoef(lengths[:, 0], lengths[:, 4])[0, 1]) < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("antithetic")])
def test_antithetic_halves_are_opposite(name):
    W = draw_many(name, 12, 5, draws=2)
    np.testing.assert_array_equal(W[:, :6], -W[:, 6:])


def test_orf_has_lower_kernel_variance_than_iid():
    """SimRF Thm 4.3: ORF < iid. The ratio of the two variances here is about 0.79."""
    d = m = 8
    x = np.full(d, 1 / np.sqrt(d))
    variances = {}
    for name in ("iid", "orf"):
        estimates = np.exp(draw_many(name, m, d, seed=2) @ (2 * x) - 1).mean(axis=1)
        variances[name] = estimates.var()
    assert variances["orf"] < 0.9 * variances["iid"]


def test_only_the_key_changes_without_recompilation():
    for name in NAMES:
        coupling = couplings.get(name)
        counted = chex.assert_max_traces(coupling, n=1)
        draw = jax.jit(counted, static_argnums=(1, 2))
        for seed in range(3):
            draw(jax.random.key(seed), 16, 8)
        chex.clear_trace_counter()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("orff", "orf"), ("PM", "pm"), ("pm-antitetic", "pm-antithetic"), ("", "pm")],
)
def test_unknown_names_are_refused_with_the_choices(name, nearest):
    with pytest.raises(ValueError, match="Choices: iid, orf, simrf, pnc, pm") as error:
        couplings.get(name)
    if name:
        assert repr(nearest) in str(error.value)


@pytest.mark.parametrize(("m", "d"), [(0, 4), (-1, 4), (4, 0), (2.5, 4), ("4", 4)])
def test_sizes_must_be_positive_integers(m, d):
    bad = m if m != 4 else d
    with pytest.raises(ValueError, match=f"got {bad!r}"):
        couplings.get("orf").__wrapped__(jax.random.key(0), m, d)  # past the type checks


def test_antithetic_needs_an_even_number():
    with pytest.raises(ValueError, match="even number of features, got m = 7"):
        couplings.get("pm-antithetic")(jax.random.key(0), 7, 4)
