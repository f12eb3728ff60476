"""Calibration: the fit against eigenvectors, exact invariances, unbiased sampling, lower errors."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from performer import Exact, Features, calibration, couplings, directions
from performer.calibration import calibrate, fit, pair_moments
from performer.nnx import PerformerAttention
from performer.refinement import LEARNED
from performer.testing import reference
from tests.support import oracles
from tests.support.attention_inputs import ours

METHODS = ["none", "shift", "scale", "tilt", "proposal", "shift+scale", "shift+traceless", "full"]
H = 4


def data(seed=0, shape=(2, 9, 2, H), keys=7):
    """Queries and keys off centre and anisotropic, differently in each head."""
    rng = np.random.default_rng(seed)
    batch, queries, heads, h = shape
    query, key = (
        np.einsum(
            "btnh,nhg->btng",
            rng.normal(size=(batch, length, heads, h)),
            0.8 * rng.normal(size=(heads, h, h)),
        )
        + rng.normal(size=(heads, h))
        for length in (queries, keys)
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in (query, key))


QUERY, KEY = data()
VALUE = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 2, 3)), jnp.float32)
ROOT = H**-0.25


def frequencies_of(*heads):
    """Six for each head, whatever their law: the oracles take them as they are."""
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.normal(size=(*heads, 6, H)), jnp.float32)


def parts_of(fitted, head):
    """c, M, M^-1, mu, S of one head in float64, identities for None."""
    *leaves, root = reference._leaves(jax.tree.map(lambda x: x[head], fitted), H)
    return *leaves, root @ root.T


@pytest.mark.parametrize("method", METHODS)
def test_fit_is_that_of_the_equations(method):
    fitted = calibrate(QUERY, KEY, coupling="orf", method=method)
    for head, moments in enumerate(oracles.pair_moments(QUERY, KEY)):
        want = oracles.calibration(moments, calibration.parts(method, "orf"))
        c, m, inverse, mu, s = parts_of(fitted, head)
        for got, expected in zip((c, m, mu, s), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(inverse @ m, np.eye(H), atol=2e-6)


def test_a_tilt_beside_exact_pairs_is_never_traceless():
    fitted = calibrate(QUERY, KEY, coupling="pm", mixed=True)
    assert calibration.parts("full", "pm", True) == ("shift", "scale", "proposal")
    for head, moments in enumerate(oracles.pair_moments(QUERY, KEY)):
        want = oracles.calibration(moments, ("shift", "scale", "tilt"))
        got = parts_of(fitted, head)
        np.testing.assert_allclose(got[0], want[0], rtol=2e-4, atol=2e-5)  # c
        np.testing.assert_allclose(got[4], want[3], rtol=2e-4, atol=2e-5)  # S
    for options, method in (
        (dict(exact=Exact(keys=2)), "shift+scale+proposal"),
        (dict(exact=Exact(window=2)), "shift+scale+proposal"),
        (dict(exact=Exact(rows=1)), "shift+scale+traceless"),
    ):
        options |= dict(coupling="pm", calibration="full", rngs=nnx.Rngs(0))
        assert PerformerAttention(8, H, **options).method == method
    drawn = Features.draw(jax.random.key(0), "pm", 8, H, exact=Exact(keys=2))
    jax.tree.map(np.testing.assert_array_equal, drawn.calibrated(QUERY, KEY).calibration, fitted)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "coupling"),
    [
        ("full", "orf-antithetic"),
        ("shift+scale+traceless", "pm-antithetic"),
        ("tilt", "orf"),
        ("proposal", "orf-antithetic"),
    ],
)
def test_kernel_estimates_stay_unbiased(method, coupling):
    """z test of 4 pairs at once; false alarms 1e-4, by the sum of squares of 4 whitened means."""
    query, key = 0.7 * QUERY[:, :, :1], 0.7 * KEY[:, :, :1]
    fitted = calibrate(query, key, coupling=coupling, method=method)
    draw = couplings.get(coupling)
    q, k = ROOT * query[0, :2, 0], ROOT * key[0, :2]
    log_det = np.linalg.slogdet(np.asarray(fitted.root[0], np.float64))[1]

    def estimates(random_key):
        of_query, of_key, log_weights = calibration.fold(fitted, draw(random_key, 8, H)[None])
        moved = calibration.transform_keys(fitted, k)[:, 0]
        exponent = (
            (q @ of_query[0].T)[:, None]
            + (moved @ of_key[0].T)[None]
            - jnp.sum(moved**2, -1)[:, None] / 2
        )
        # The kernel of (M q, M^-1 (k - c)) is e^{q.k - q.c}; the queries' |M q|^2 / 2 is restored.
        m = jnp.eye(H) if fitted.scale is None else fitted.scale[0]
        shift = jnp.zeros(H) if fitted.shift is None else fitted.shift[0]
        log_kernel = q @ (k[:, 0] - shift).T + jnp.sum((q @ m) ** 2, -1, keepdims=True) / 2
        exponents = exponent - log_kernel[..., None]
        weighted = exponents + log_weights[0] + log_det
        return [jnp.mean(jnp.exp(x), axis=-1).reshape(-1) for x in (weighted, exponents)]

    def z_squared(samples):
        samples = np.asarray(samples, float)
        mean, covariance = samples.mean(0) - 1, np.cov(samples.T) / len(samples)
        return mean @ np.linalg.solve(covariance, mean)

    keys = jax.random.split(jax.random.key(11), 40_000)
    weighted, unweighted = map(z_squared, jax.jit(jax.vmap(estimates))(keys))
    assert weighted < stats.chi2(4).isf(1e-4)
    assert unweighted > stats.chi2(4).isf(1e-4)  # the fault this is for: no weights


def test_without_any_pair_nothing_changes():
    fitted = fit(jnp.zeros((2, 2 * H + 1, 2 * H + 1)), "full")
    for leaf, want in zip(fitted, (0, np.eye(H), np.eye(H), None, np.eye(H)), strict=True):
        if want is not None:
            np.testing.assert_allclose(leaf, np.broadcast_to(want, leaf.shape), atol=1e-5)
    nothing = pair_moments(QUERY, KEY, mask=jnp.zeros(7, bool))
    assert not np.any(np.isnan(nothing))
    np.testing.assert_array_equal(nothing[:, 0, 0], 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(query=QUERY.at[0, 1].set(np.nan)), "not finite: is there a NaN, an infinity"),
        (dict(query=QUERY.at[1, 0, 0, 0].set(np.inf)), "not finite"),
        (dict(key=KEY.at[1, 2].set(1e20)), "not finite"),
        (dict(mask=np.zeros(7, bool)), "no query has a key"),
    ],
)
def test_what_cannot_be_fitted_is_refused(bad, message):
    """The calibration would be the identity."""
    with pytest.raises(ValueError, match=message):
        calibrate(**dict(query=QUERY, key=KEY) | bad)


def a_function(key, m, d):
    return jax.random.normal(key, (m, d), jnp.float32)


@pytest.mark.parametrize(
    ("coupling", "tilt"),
    [
        ("orf-antithetic", "tilt"),
        ("fast-simrf", "tilt"),
        ("pm-antithetic", "traceless"),
        (couplings.Blocks(directions.simplex, lambda key, m, d: jnp.ones(m)), "traceless"),
        (a_function, "traceless"),
        (None, "traceless"),
    ],
)
def test_the_coupling_chooses_the_tilt(coupling, tilt):
    """By its lengths, not by its name; where it does not say, the one that suits them all."""
    want = fit(pair_moments(QUERY, KEY), f"shift+scale+{tilt}", "iid")
    chex.assert_trees_all_equal(calibrate(QUERY, KEY, coupling=coupling), want)
    assert calibration.parts("tilt+shift", coupling) == (tilt, "shift")
    assert calibration.parts("proposal", coupling) == ("proposal",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("feature_map", "window"),  # the normaliser of trigonometric features alone may nearly cancel
    [("hyperbolic", 3), ("hyperbolic", 0), ("trigonometric", 3), (LEARNED, 3), (LEARNED, 0)],
)
def test_shift_and_scale_serve_every_map_of_softmax(feature_map, window):
    """They are those of queries and keys alone: moved before the call, nothing else changes."""
    fitted = calibrate(QUERY, KEY, method="shift+scale")
    attend = partial(ours, feature_map=feature_map, exact_window=window)
    query, frequencies, root = QUERY[:, :7], frequencies_of(2), H**-0.25
    got = attend(query, KEY, VALUE, frequencies, calibration=fitted)
    query = calibration.transform_queries(fitted, query * root)
    key = calibration.transform_keys(fitted, KEY * root)
    want = attend(query, key, VALUE, frequencies, scale=1.0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


EXACT_WAYS = [  # options with which all nine keys are exact
    dict(exact_keys=9),
    dict(exact_window=9),
    dict(exact_rows=9),
    dict(exact_window=3, exact_first=6, is_causal=True),
    dict(exact_window=9, is_causal=True, implementation="robust"),
]


@pytest.mark.parametrize("options", EXACT_WAYS)
def test_exact_pairs_ignore_an_ill_conditioned_calibration(options):
    """Products of M q and M^-1 k are off by 6e-4 to 2e-3."""
    rng = np.random.default_rng(5)
    vectors = np.linalg.qr(rng.normal(size=(H, H)))[0]
    sizes = np.array([0.03, 1, 1, 30])
    m, inverse = (vectors * x @ vectors.T for x in (sizes, 1 / sizes))
    leaves = (20 * rng.normal(size=H), m, inverse, None, np.eye(H) + 0.1)
    fitted = calibration.Calibration(*(x if x is None else jnp.float32(x) for x in leaves))
    query, key = data(6, keys=9)
    output = ours(query, key, key, frequencies_of(), calibration=fitted, **options)
    want = jax.nn.dot_product_attention(query, key, key, is_causal=options.get("is_causal", False))
    np.testing.assert_allclose(output, want, atol=3e-6)


def test_ill_conditioned_covariances():
    """Eigenvalues over six orders of magnitude, as the covariances of trained queries have."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 64)))
    covariance = basis * np.logspace(-4, 2, 64) @ basis.T
    moments = np.zeros((129, 129))
    moments[0, 0], moments[1:65, 1:65], moments[65:, 65:] = 1, covariance, covariance[::-1, ::-1]
    fitted = fit(jnp.asarray(moments[None], jnp.float32), "scale+tilt", "orf")
    _, m, _, spread = oracles.calibration(moments, ("scale", "tilt"))
    np.testing.assert_allclose(fitted.scale[0], m, atol=1e-3 * np.abs(m).max())
    got = np.asarray(fitted.root[0], np.float64)
    np.testing.assert_allclose(got @ got.T, spread, atol=1e-3 * np.abs(spread).max())


@pytest.mark.parametrize("spread", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1e-4, 1e-4)])
def test_equal_queries_or_keys(spread):
    """A head may add its bias alone: a sum about zero rounds to an indefinite covariance."""
    noise = np.random.default_rng(6).normal(size=(2, 1, 64, 1, 8))
    query, key = (
        jnp.asarray(mean + size * x, jnp.float32)
        for mean, size, x in zip((10, 3), spread, noise, strict=True)
    )
    fitted = calibrate(query, key, coupling="orf")
    for leaf in fitted:
        assert leaf is None or np.isfinite(leaf).all()
    np.testing.assert_allclose(fitted.scale[0] @ fitted.inverse_scale[0], np.eye(8), atol=1e-5)


def test_moments_of_a_long_sequence():
    """2 t^2 is past 2^31."""
    query = jnp.linspace(0.0, 1.0, 40_000).reshape(1, -1, 1, 1)
    moments = pair_moments(query, jnp.zeros((1, 1, 1, 1)), scale=1.0)
    np.testing.assert_allclose(moments[0, 0, 1], 0.5, rtol=1e-3)


def test_a_scale_is_shared_by_queries_and_keys():
    """Scores are scale q.k, so that moments are those of both times the root of the scale."""
    want = pair_moments(QUERY * 0.3**0.5, KEY * 0.3**0.5, scale=1.0)
    np.testing.assert_allclose(pair_moments(QUERY, KEY, scale=0.3), want, rtol=1e-5, atol=1e-6)


def test_segments_are_calibrated_as_their_pairs():
    """Each pair of one segment, in any order, also of queries and keys with their own numbers."""
    ids = jnp.array([[2, 0, 2, 1, 0, 2, 1]] * len(KEY))
    pairs = (ids[:, :, None] == ids[:, None])[:, None]
    want = calibrate(KEY, KEY, mask=pairs)
    for given in ids, (ids, ids + 0):
        got = calibrate(KEY, KEY, segment_ids=given)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)
    with pytest.raises(ValueError, match="mask has the value -1.0"):
        pair_moments(KEY, KEY, mask=pairs - 1.0)
