"""Every coupling of the table: shapes, marginals, unbiasedness, and its own defining property."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from performer import copula, couplings, directions, norms, testing

NAMES = couplings.names()
# Of [W, -W] the tests of shapes, of rows and of the mean say nothing else than of W. That it is
# [W, -W] is tested exactly below.
GAUSSIAN = [name for name in couplings.COUPLINGS if couplings.properties(name).gaussian]
ANTITHETIC = [n for n in NAMES if n.endswith("-antithetic")]
DRAWS = 4000


def draw_many(name, m, d, draws=DRAWS, seed=0):
    return testing.samples(couplings.get(name), m, d, draws, seed)


@pytest.mark.parametrize("name", couplings.COUPLINGS)
@pytest.mark.parametrize(("m", "d"), [(2, 3), (10, 4), (128, 64)])
def test_shape_dtype_determinism_and_one_compilation(name, m, d):
    """Another key needs no other program."""
    counted = chex.assert_max_traces(lambda key, m, d: couplings.get(name)(key, m, d), n=1)
    chex.clear_trace_counter()
    coupling = jax.jit(counted, static_argnums=(1, 2))
    W = coupling(jax.random.key(0), m, d)
    chex.assert_shape(W, (m, d))
    assert W.dtype == jnp.float32
    assert np.array_equal(W, coupling(jax.random.key(0), m, d))
    assert not np.array_equal(W, coupling(jax.random.key(1), m, d))


@pytest.fixture(scope="module", params=GAUSSIAN)
def gaussian(request):
    """Of module scope, so that what one coupling draws serves all its tests."""
    return couplings.get(request.param)


def test_rows_are_gaussian(gaussian):
    """d = 5 and m = 12: two whole blocks and a part of one."""
    testing.assert_gaussian_marginals(gaussian, 12, 5)


def test_kernel_estimates_are_unbiased(gaussian):
    """The errors of the estimates are compared with the theory in test_theory.py."""
    testing.assert_unbiased(gaussian, 12, 5)


def test_estimates_of_the_other_kernel_are_unbiased():
    """They differ by a constant factor: one coupling is enough."""
    testing.assert_unbiased(couplings.get("pm-antithetic"), 12, 5, kernel="gaussian")


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("orf", "iid"),
        ("pnc", "orf"),
        ("simrf", "pnc"),
        pytest.param("simrf+", "orf", marks=pytest.mark.optimised("draws for half a minute else")),
        ("orf-antithetic", "orf"),
    ],
)
def test_order_of_kernel_errors(lower, higher):
    """At small v: SimRF < PNC < ORF < iid (SimRF Thm 4.3, VRC Cor. 3.4); PNC wins by 2% only."""
    testing.assert_lower_mse(couplings.get(lower), couplings.get(higher), 4, 4, draws=400_000)


@pytest.mark.parametrize("name", ["sorf", "fast-simrf"])
@pytest.mark.parametrize("d", [16, 20])
def test_hadamard_couplings_are_nearly_gaussian(name, d):
    """Mean 0 and covariance I exactly (5 standard errors); unbiased within what 10^4 draws see."""
    W = draw_many(name, 4, d, draws=10_000)[:, 3]
    products = W[:, :, None] * W[:, None]
    error = products.std(axis=0) / 100
    assert np.all(np.abs(products.mean(axis=0) - np.eye(d)) < 5 * error)
    assert np.all(np.abs(W.mean(axis=0)) < 0.05)
    testing.assert_unbiased(couplings.get(name), 16, d)


def test_fixed_lengths_bias_the_kernel_as_stated():
    """norms.fixed: positive features then estimate 0F1(; d/2; d v^2 / 4) e^{-(x^2 + y^2)/2}."""
    d = 4
    W = draw_many("fixed", d, d, draws=20_000)
    np.testing.assert_allclose(np.linalg.norm(W, axis=-1), 2, rtol=1e-5)
    estimates = np.exp(W @ np.full(d, 0.75)).mean(axis=-1)  # v = 1.5
    expected = special.hyp0f1(d / 2, d * 1.5**2 / 4)
    assert abs(estimates.mean() - expected) < 5 * estimates.std() / np.sqrt(20_000)
    assert abs(np.exp(1.5**2 / 2) - expected) > 20 * estimates.std() / np.sqrt(20_000)


def test_matern_kernel_from_another_radial_law():
    """PNC under the Matern law: unbiased for e^-r and (1 + sqrt 3 r) e^(-sqrt 3 r)."""
    d, draws = 3, 20_000
    x = np.array([0.3, -0.5, 0.2])
    r = np.linalg.norm(x)
    for nu, exact in [(0.5, np.exp(-r)), (1.5, (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r))]:
        coupling = couplings.with_quantile("pnc", norms.matern(nu))
        estimates = np.cos(testing.samples(coupling, 6, d, draws) @ x).mean(axis=-1)
        assert abs(estimates.mean() - exact) < 5 * estimates.std() / np.sqrt(draws)


def test_pairs_by_name():
    for name, row in [
        ("orthogonal*pairwise", "pnc"),
        ("simplex*independent-antithetic", "simrf-antithetic"),
    ]:
        args = jax.random.key(0), 10, 4
        np.testing.assert_array_equal(couplings.get(name)(*args), couplings.get(row)(*args))
    for name, message in [
        ("iid*pairwise", "unknown directions in coupling 'iid\\*pairwise': 'iid'.*independent"),
        ("simplex*pm", "unknown norms in coupling .* 'pm'; .*Choices: independent, pairwise"),
        ("a*b*c", "unknown coupling"),
    ]:
        with pytest.raises(ValueError, match=message):
            couplings.get(name)


def test_equal_couplings_are_one_program(caplog):
    """A name looked up again, and its parts put together again, have what the first compiled."""
    size = 12, 7
    for name in ("pnc-antithetic", "simplex*pairwise", "hadamard*fixed"):
        couplings.get(name)(jax.random.key(0), *size)
    again = couplings.Blocks(directions.simplex, norms.FromScores(norms.pairwise_scores))
    with jax.log_compiles():
        for name in ("pnc-antithetic", "simplex*pairwise", "hadamard*fixed"):
            couplings.get(name)(jax.random.key(1), *size)
        again(jax.random.key(2), *size)
    assert [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()] == []


VALUES = {name: couplings.get(name) for name in NAMES} | {
    "matern": couplings.with_quantile("pnc-antithetic", norms.matern(1.5)),
    "a pair": couplings.get("hadamard_simplex*fixed"),
    "scores": couplings.Blocks(
        directions.independent, norms.FromScores(norms.pairwise_scores, norms.chi, common=True)
    ),
    "learned": copula.orthogonal(jnp.asarray([0.3, -0.4, 0.2])),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_repr_makes_an_equal_value(name):
    value = VALUES[name]
    modules = dict(couplings=couplings, directions=directions, norms=norms, copula=copula)
    again = eval(repr(value), modules)
    assert again == value
    assert hash(again) == hash(value)


def test_no_two_are_equal():
    assert len(set(VALUES.values())) == len(VALUES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("iid", (True, False)),
        ("pm-antithetic", (True, True)),
        ("simplex*fixed", (False, True)),
        ("sorf", (False, False)),
        ("halton-antithetic", (True, False)),
    ],
)
def test_properties(name, expected):
    assert couplings.properties(name) == expected


def test_properties_of_what_is_no_row_of_the_table():
    """They follow from the parts; what says nothing is unknown."""
    mine = couplings.Blocks(directions.orthogonal, lambda key, m, d: jnp.ones(m))
    assert couplings.properties(mine) == (None, None)
    matern = couplings.with_quantile("pm", norms.matern(2.5))
    assert couplings.properties(matern) == (False, True)
    assert couplings.properties(lambda key, m, d: jnp.ones((m, d))) == (None, None)


def test_couplings_are_taken_as_they_are():
    for coupling in (VALUES["learned"], lambda key, m, d: jnp.ones((m, d))):
        assert couplings.get(coupling) is coupling
    with pytest.raises(ValueError, match="must be a name or a function .* got 3"):
        couplings.get.__wrapped__(3)  # past the type checks


def test_the_law_of_the_lengths_can_be_another():
    with pytest.raises(ValueError, match="couplings.halton draws no lengths"):
        couplings.with_quantile("halton", norms.matern(1.5))
    with pytest.raises(ValueError, match="without a law"):
        couplings.with_quantile("fixed-antithetic", norms.matern(1.5))
    assert couplings.with_quantile("halton", norms.chi) == couplings.get("halton")
    assert couplings.with_quantile("pm", norms.chi) == couplings.get("pm")


def test_draws_are_prefixes():
    """With one key, fewer features are the first of more: common random numbers over m."""
    for name in couplings.COUPLINGS:
        few, many = (couplings.get(name)(jax.random.key(3), m, 4) for m in (6, 13))
        np.testing.assert_allclose(few, many[:6], atol=1e-6, err_msg=name)


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


@pytest.mark.parametrize("name", ANTITHETIC)
def test_antithetic_halves_are_the_coupling_and_its_opposite(name):
    both, half = (couplings.get(n) for n in (name, name.removesuffix("-antithetic")))
    W, want = jax.jit(lambda key: (both(key, 12, 5), half(key, 6, 5)))(jax.random.key(0))
    chex.assert_shape(W, (12, 5))
    assert W.dtype == jnp.float32
    np.testing.assert_array_equal(W[:6], -W[6:])
    np.testing.assert_allclose(W[:6], want, atol=1e-6)


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
        couplings.Blocks.__call__.__wrapped__(  # past the type checks
            couplings.get("orf"), jax.random.key(0), m, d
        )


def test_antithetic_needs_an_even_number():
    with pytest.raises(ValueError, match="even number of features, got m = 7"):
        couplings.get("pm-antithetic")(jax.random.key(0), 7, 4)


@pytest.mark.parametrize(("lead", "dtype"), [((2, 3), jnp.float32), ((), jnp.bfloat16)])
def test_redraw_of_stacked_layers_and_of_other_dtypes(lead, dtype):
    """All leading axes are of independent draws; the dtype stays."""
    old, key = jnp.zeros((*lead, 4, 3), dtype), jax.random.key(0)
    new = jax.jit(lambda step: couplings.redraw(key, "iid", old, step, every=2))
    assert not np.any(new(1))
    heads = 6 if lead else None
    want = couplings.draw(jax.random.fold_in(key, 2), "iid", 4, 3, heads).reshape(old.shape)
    assert new(2).dtype == dtype
    assert len(np.unique(np.asarray(new(2), np.float32))) > 0.9 * want.size
    np.testing.assert_allclose(
        np.asarray(new(2), np.float32), np.asarray(want.astype(dtype), np.float32), atol=1e-6
    )
