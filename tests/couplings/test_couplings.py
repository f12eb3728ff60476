"""Every coupling of the table: shapes, marginals, unbiasedness, and its own defining property."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from performer import couplings, directions, norms, testing, theory
from tests.support.draws import drawn, serve
from tests.support.tiers import tiers

NAMES = couplings.names()
# Of [W, -W] the tests of shapes, of rows and of the mean say nothing else than of W. That it is
# [W, -W] is tested exactly below.
GAUSSIAN = tuple(n for n in couplings.COUPLINGS if n not in ("sorf", "fast-simrf", "fixed"))
ANTITHETIC = [n for n in NAMES if n.endswith("-antithetic")]
DRAWS = 4000


@pytest.fixture(params=GAUSSIAN)
def gaussian(request, monkeypatch):
    """A coupling; one program draws all of them, at d = 5 two whole blocks and a part of one."""
    serve(monkeypatch, GAUSSIAN, 12, 5, 10_000)
    return couplings.get(request.param)


def draws_of(name):
    return drawn(GAUSSIAN, 12, 5, 10_000)[name][:DRAWS].astype(np.float64)


@cache
def drawing(m, d):
    """Draws of a key {name: (m antithetic rows, m rows, m / 2 rows)}."""

    @jax.jit
    def draw(key):
        of = {x: couplings.get(x) for x in NAMES}
        return {
            x: (of[f"{x}-antithetic"](key, m, d), of[x](key, m, d), of[x](key, m // 2, d))
            for x in couplings.COUPLINGS
        }

    return draw


def test_parts_of_couplings_have_names():
    """So that "<directions>*<norms>" can combine each of them with others."""
    for coupling in couplings.COUPLINGS.values():
        blocks = getattr(coupling, "coupling", coupling)
        if isinstance(blocks, couplings.Blocks):
            assert blocks.directions in couplings.DIRECTIONS.values()
            assert blocks.norms in couplings.NORMS.values()


BITS = [pytest.mark.thorough, pytest.mark.optimised("one block and two round alike")]


@pytest.mark.parametrize(("m", "d"), [(12, 5), pytest.param(128, 64, marks=BITS)])
def test_draws_are_deterministic_and_prefixes(m, d):
    """With one key, fewer features are the first of more: common random numbers over m."""
    first, again, other = (drawing(m, d)(jax.random.key(seed)) for seed in (0, 0, 1))
    for name, (_, many, few) in first.items():
        assert many.shape == (m, d)
        assert many.dtype == jnp.float32
        np.testing.assert_allclose(few, many[: m // 2], atol=2e-6, err_msg=name)
        np.testing.assert_array_equal(many, again[name][1])
        assert not np.array_equal(many, other[name][1])


def test_rows_are_gaussian(gaussian):
    testing.assert_gaussian_marginals(gaussian, 12, 5)


def test_kernel_estimates_are_unbiased(gaussian):
    """The errors of the estimates are compared with the theory in test_theory.py."""
    testing.assert_unbiased(gaussian, 12, 5)


def test_estimates_of_the_other_kernel_are_unbiased():
    """They differ by a constant factor: one coupling is enough."""
    testing.assert_unbiased(couplings.get("pm-antithetic"), 12, 5, kernel="gaussian")


def test_order_of_kernel_errors():
    """At small v: SimRF < PNC < ORF < iid (SimRF Thm 4.3, VRC Cor. 3.4), by closed forms.

    `test_theory.py` compares these with simulation, for each coupling.
    """
    x = np.full(4, 0.2)
    names = "simrf", "pnc", "orf", "iid"
    errors = [float(theory.kernel_mse(name, x, x, 4)) for name in names]
    assert errors == sorted(errors)
    assert theory.kernel_mse("orf-antithetic", x, x, 4) < errors[2]


@pytest.mark.slow
@pytest.mark.optimised("draws for half a minute else")
def test_weighted_simplices_have_lower_errors():
    """They have no closed form."""
    testing.assert_lower_mse("simrf+", "orf", 4, 4, draws=400_000)


@pytest.mark.thorough
@pytest.mark.parametrize("d", [16, 20])
def test_hadamard_couplings_are_nearly_gaussian(d, monkeypatch):
    """Mean 0 and covariance I exactly (5 standard errors); unbiased within what 10^4 draws see."""
    names = "sorf", "fast-simrf"
    serve(monkeypatch, names, 16, d, 10_000)
    for name in names:
        W = testing.samples(couplings.get(name), 16, d, 10_000)[:, 3]
        products = W[:, :, None] * W[:, None]
        error = products.std(axis=0) / 100
        assert np.all(np.abs(products.mean(axis=0) - np.eye(d)) < 5 * error)
        assert np.all(np.abs(W.mean(axis=0)) < 0.05)
        testing.assert_unbiased(couplings.get(name), 16, d)


def test_fixed_lengths_bias_the_kernel_as_stated():
    """norms.fixed: positive features then estimate 0F1(; d/2; d v^2 / 4) e^{-(x^2 + y^2)/2}."""
    d = 4
    W = testing.samples("fixed", d, d, 20_000)
    np.testing.assert_allclose(np.linalg.norm(W, axis=-1), 2, rtol=1e-5)
    estimates = np.exp(W @ np.full(d, 0.75)).mean(axis=-1)  # v = 1.5
    expected = special.hyp0f1(d / 2, d * 1.5**2 / 4)
    assert abs(estimates.mean() - expected) < 5 * estimates.std() / np.sqrt(20_000)
    assert abs(np.exp(1.5**2 / 2) - expected) > 20 * estimates.std() / np.sqrt(20_000)


VALUES = {name: couplings.get(name) for name in NAMES} | {
    "matern": couplings.with_quantile("pnc-antithetic", norms.matern(1.5)),
    "a pair": couplings.get("hadamard_simplex*fixed"),
    "scores": couplings.Blocks(
        directions.independent, norms.FromScores(norms.pairwise_scores, norms.chi, common=True)
    ),
}


def test_couplings_are_values():
    """Each has a repr that makes an equal one; no two are equal."""
    modules = dict(couplings=couplings, directions=directions, norms=norms)
    for value in VALUES.values():
        again = eval(repr(value), modules)
        assert again == value
        assert hash(again) == hash(value)
        assert couplings.get(value) is value
    assert len(set(VALUES.values())) == len(VALUES)
    assert couplings.get("orthogonal*pairwise") == couplings.get("pnc")
    assert couplings.get("simplex*independent-antithetic") == couplings.get("simrf-antithetic")
    for name in ("halton", "pm"):
        assert couplings.with_quantile(name, norms.chi) == couplings.get(name)


def test_common_lengths():
    """They follow from the parts; of a function nothing is known."""
    for coupling, expected in [
        ("iid", False),
        ("pm-antithetic", True),
        ("simplex*fixed", True),
        ("sorf", False),
        ("halton-antithetic", False),
        (couplings.Blocks(directions.orthogonal, lambda key, m, d: jnp.ones(m)), None),
        (couplings.with_quantile("pm", norms.matern(2.5)), True),
        (lambda key, m, d: jnp.ones((m, d)), None),
    ]:
        assert couplings.common_lengths(coupling) is expected


BLOCKS = slice(0, 5), slice(5, 10), slice(10, 12)


def test_pm_shares_one_length_per_block():
    lengths = np.linalg.norm(draws_of("pm"), axis=-1)
    for block in BLOCKS:
        first = np.broadcast_to(lengths[:, block][:, :1], lengths[:, block].shape)
        np.testing.assert_allclose(lengths[:, block], first, rtol=1e-5)
    assert abs(np.corrcoef(lengths[:, 0], lengths[:, 5])[0, 1]) < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("name", ANTITHETIC)
def test_antithetic_halves_are_the_coupling_and_its_opposite(name):
    W, _, want = drawing(12, 5)(jax.random.key(0))[name.removesuffix("-antithetic")]
    assert W.shape == (12, 5)
    assert W.dtype == jnp.float32
    np.testing.assert_array_equal(W[:6], -W[6:])
    np.testing.assert_allclose(W[:6], want, atol=1e-6)


@pytest.mark.parametrize(("lead", "dtype"), tiers([((2, 3), jnp.float32), ((), jnp.bfloat16)], 1))
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


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((directions.orthogonal, lambda key, m, d: jnp.ones((m, 1))), r"norms .* return \(4, 1\)"),
        ((directions.orthogonal, lambda key, m, d: jnp.ones(3)), r"norms .* return \(3,\)"),
        ((lambda key, lengths, d: jnp.ones(d), norms.independent), r"directions .* return \(4,\)"),
    ],
    ids=["columns of lengths", "too few lengths", "one direction"],
)
def test_parts_of_another_shape_are_refused(parts, message):
    """Broadcast, columns of lengths would repeat the directions of the first blocks."""
    with pytest.raises(ValueError, match=message):
        couplings.Blocks(*parts)(jax.random.key(0), 8, 4)


def test_a_coupling_of_a_module_has_a_name(tmp_path, monkeypatch):
    """Also its antithetic version; what a module lacks is said, with the word for its place."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "import performer\nlattice, WIDTH = performer.couplings.get('orf'), 3\n"
    (tmp_path / "my_module.py").write_text(text)
    (tmp_path / "broken.py").write_text("import nobody_has_this\n")
    key, orf = jax.random.key(0), couplings.get("orf")
    assert couplings.get("my_module:lattice") is orf
    got = couplings.draw(key, "my_module:lattice-antithetic", 8, 4)
    np.testing.assert_array_equal(got, couplings.Antithetic(orf)(key, 8, 4))
    messages = {
        "my_module:WIDTH": "my_module has no function 'WIDTH'",
        "nowhere:lattice": "Python cannot import 'nowhere'; .* a file nowhere.py",
        "favor+": r"Choices: iid, orf \(of FAVOR\+\)",
        None: "got None. Names: iid",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            couplings.get(name)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        couplings.get("broken:lattice")


def test_a_coupling_as_an_attribute_is_explained():
    with pytest.raises(AttributeError, match=r"taken by name: performer.couplings.get\('orf'\)"):
        couplings.orf  # noqa: B018
    with pytest.raises(AttributeError, match="'performer.couplings' has no attribute 'nonsense'"):
        couplings.nonsense  # noqa: B018
