"""Closed forms against SciPy, against each other and against simulation."""

import warnings

import numpy as np
import pytest
from scipy import integrate, special, stats

from performer import testing, theory
from tests.support.draws import drawn
from tests.support.tiers import tiers

V = np.array([0.0, 0.1, 1.0, 3.0])
BASES = ("iid", "orf", "simrf", "pnc", "pm", "simplex*monotone")
NAMES = [base + suffix for base in BASES for suffix in ("", "-antithetic")]


@pytest.mark.parametrize("d", [2, 5, 64, 1024])
def test_orf_is_simrf_eq_23(d):
    want = special.hyp1f1(d, d / 2, V**2 / 2)
    np.testing.assert_allclose(theory.conformity("orf", V, d, 2), want, rtol=1e-12)


@pytest.mark.parametrize("d", [2, 3, 6, 20])
def test_simrf_is_simrf_eq_24(d):
    """The double sum as printed."""
    v = np.array([0.3, 1.0, 2.0])
    total = np.zeros(3)
    for k in range(80):
        inner = sum(
            (-1 / (d - 1)) ** p
            * np.exp(special.gammaln((d + p) / 2) - special.gammaln((d + p + 1) / 2))
            * np.exp(-special.gammaln(k - p + 1) - special.gammaln(p + 1))
            for p in range(k + 1)
        )
        total += (
            np.exp(special.gammaln(k + d) - special.gammaln(k + d / 2)) * (v**2 / 2) ** k * inner
        )
    total *= np.sqrt(np.pi) / special.gamma(d / 2) / 2 ** (d - 1)
    np.testing.assert_allclose(theory.conformity("simrf", v, d, d), total, rtol=1e-9)


def test_monotone_lengths_have_closed_forms():
    for d in (3, 64):
        for name, exponent in (("pm", 1), ("simplex*monotone", (d - 2) / (d - 1))):
            want = np.exp(V**2 * exponent)
            np.testing.assert_allclose(theory.conformity(name, V, d, d), want, rtol=1e-14)


@pytest.mark.parametrize("d", [2, 7, 64])
def test_a_negatively_coupled_pair_by_adaptive_quadrature(d):
    """Over u in (0, 1) instead of over the normal score, with 0F1 by its series."""
    law = stats.chi(d)
    k = np.arange(60)
    logs = special.gammaln(d / 2) - special.gammaln(d / 2 + k) - special.gammaln(k + 1)
    for v in (0.5, 2.0):

        def integrand(u, v=v):
            s = v**2 * (law.ppf(u) ** 2 + law.isf(u) ** 2) / 4
            return np.exp(logs + k * np.log(s)).sum()

        want, _ = integrate.quad(integrand, 0, 0.5, epsabs=1e-12, epsrel=1e-12, limit=200)
        np.testing.assert_allclose(theory.conformity("pnc", v, d, 2), 2 * want, rtol=1e-9)


def test_pairs_of_truncated_blocks_are_counted():
    """d = 3, m = 7: blocks of 3, 3 and 1 rows; 12 ordered pairs within, 4 of them coupled."""
    pair, orf = (theory.conformity(n, 1.0, 3, 2) for n in ("pnc", "orf"))
    want = (4 * pair + 8 * orf + 30 * np.e) / 42
    assert theory.conformity("pnc", 1.0, 3, 7) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", tiers(NAMES, ["orf", "pm-antithetic"]))
def test_errors_agree_with_simulation(name):
    """Both kernels and both feature maps, in float64 NumPy; 24 x 4 tests at 5 standard errors.

    d = 5 and m = 12: two whole blocks and a part of one. The first 6 of 12 are a draw of 6, and
    the half of an antithetic one.
    """
    d, draws = 5, 33_000
    x, y = testing.general_points(d)
    base = name.removesuffix("-antithetic")
    twelve = drawn((base,), 12, d, draws, 11)[base].astype(np.float64)
    six = list(range(6))
    if name != base:
        twelve, six = np.concatenate([twelve[:, :6], -twelve[:, :6]], axis=1), [0, 1, 2, 6, 7, 8]
    squares = x @ x + y @ y
    exact = {"gaussian": np.exp(-np.sum((x - y) ** 2) / 2), "softmax": np.exp(x @ y)}
    for W in (twelve, twelve[:, six]):
        cosines = np.cos(W @ (x - y)).mean(axis=-1)
        estimates = {
            ("gaussian", "positive"): np.exp(W @ (x + y) - squares).mean(axis=-1),
            ("softmax", "positive"): np.exp(W @ (x + y) - squares / 2).mean(axis=-1),
            ("gaussian", "trigonometric"): cosines,
            ("softmax", "trigonometric"): cosines * np.exp(squares / 2),
        }
        for (kernel, features), estimate in estimates.items():
            measured = (estimate - exact[kernel]) ** 2
            m = W.shape[1]
            want = theory.kernel_mse(name, x, y, m, kernel=kernel, features=features)
            error = measured.std() / np.sqrt(draws)
            assert abs(measured.mean() - want) < 5 * error, (m, kernel, features)


@pytest.mark.parametrize("features", ["positive", "trigonometric"])
def test_orthogonality_gap(features):
    """SimRF Eq. 25 with 2^k k! and Eq. 26, as series, for m <= d."""
    d, m = 6, 4
    x, y = testing.general_points(d)
    t = np.sum((x + y) ** 2) if features == "positive" else -np.sum((x - y) ** 2)
    k = np.arange(60)
    terms = np.exp(special.gammaln(k + d) - special.gammaln(k + d / 2) - special.gammaln(k + 1))
    series = np.sum(terms * (t / 2) ** k) * special.gamma(d / 2) / special.gamma(d)
    prefactor = np.exp(-2 * (x @ x + y @ y)) if features == "positive" else 1.0
    want = prefactor * (m - 1) / m * (np.exp(t) - series)
    iid, orf = (theory.kernel_mse(name, x, y, m, features=features) for name in ("iid", "orf"))
    assert iid - orf == pytest.approx(want, rel=1e-9)
    assert want > 0


@pytest.mark.parametrize("d", [2, 6, 64])
@pytest.mark.parametrize("name", ["iid", "orf", "simrf"])
def test_pair_lengths(name, d):
    """The density integrates to 1, and the mean of 0F1 under it is the conformity."""
    r = np.linspace(1e-6, 6 * np.sqrt(2 * d) + 12, 40_001)
    pdf = theory.pair_length_pdf(name, r, d)
    assert integrate.simpson(pdf, x=r) == pytest.approx(1, abs=1e-5)
    if d > 2:  # at d = 2 the simplex pair's density is infinite at 0
        rho = integrate.simpson(pdf * special.hyp0f1(d / 2, r**2 / 4), x=r)
        assert rho == pytest.approx(float(theory.conformity(name, 1.0, d, 2)), rel=1e-6)


def test_transport_cost_averages_to_the_conformity():
    """The cost is VRC Eq. 6 times Gamma(d / 2), of two orthogonal frequencies of these lengths."""
    d = 4
    lengths = stats.chi(d).rvs(size=(100_000, 2), random_state=0)
    costs = 2 * special.hyp0f1(d / 2, np.sum(lengths**2, axis=-1) / 4)
    want = 2 * theory.conformity("orf", 1.0, d, 2)
    assert abs(costs.mean() - want) < 5 * costs.std() / np.sqrt(100_000)


@pytest.mark.parametrize("name", BASES)
def test_errors_of_far_points(name):
    """|x| = 10 and x = y: e^{2 v^2} is past float64, the error e^{4 x.y} / m is not; 40: inf."""
    x = np.array([[10.0], [40.0], [np.nan]]) * np.ones(4) / 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = theory.kernel_mse(name, x, x, 6)
        opposite = theory.kernel_mse(name, x, -x, 6, kernel="softmax")
        waves = theory.kernel_mse(name, x, x, 6, kernel="softmax", features="trigonometric")
    np.testing.assert_allclose(errors, [np.exp(400.0) / 6, np.inf, np.nan], rtol=1e-12)
    np.testing.assert_allclose(opposite, [0, 0, np.nan], atol=1e-30)
    np.testing.assert_allclose(waves, [0, 0, np.nan], atol=1e-12)
