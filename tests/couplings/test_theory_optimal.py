"""What the papers prove to be optimal, and how errors begin: each by another route than the proof.

Everything is deterministic; oracles are float64 NumPy and SciPy.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

from performer import directions, theory
from tests.support import oracles

BASES = ("iid", "orf", "simrf", "pnc", "pm", "simplex*monotone")


def mean_conformity(lengths, units, v):
    """Eq. 42 of SimRF: the mean over all orders of the lengths, and over ordered pairs i != j."""
    d = len(lengths)
    orders = np.array(list(itertools.permutations(lengths)))
    products = orders[:, :, None] * orders[:, None] * (units @ units.T)
    squares = orders[:, :, None] ** 2 + orders[:, None] ** 2 + 2 * products
    pairs = special.hyp0f1(d / 2, v**2 * squares / 4)
    return pairs[:, ~np.eye(d, dtype=bool)].mean()


def arrangements(simplex):
    """Unit vectors: orthogonal ones, 100 random draws, and 100 close to the simplex."""
    rng, shape = np.random.default_rng(0), (100, *simplex.shape)
    for vectors in [np.eye(len(simplex)), *rng.normal(size=shape)]:
        yield vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    for vectors in simplex + 0.1 * rng.normal(size=shape):
        yield vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("v", [0.3, 1.5, 4.0])
def test_simrf_theorem_3_4(v):
    """No arrangement that ignores the lengths is below the simplex, d = 4.

    Two opposite pairs have as low a sum of cosines as the simplex has.
    """
    d = 4
    lengths = stats.chi(d).rvs(size=d, random_state=1)
    simplex = directions.simplex(jax.random.key(0), jnp.asarray(lengths, jnp.float32), d)
    simplex = np.asarray(simplex, np.float64)
    pairs = np.array([[1, 0, 0, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, -1, 0, 0]])
    least = mean_conformity(lengths, simplex, v)
    for units in [pairs, *arrangements(simplex)]:
        assert mean_conformity(lengths, units, v) > least * (1 + 1e-6)


def test_simrf_prefactor_at_small_v():
    """SimRF Sec. 5.1, of m MSE / v^2 at m = d: 1, 1, and the variance of chi_d over d for SimRF."""
    d, v = 64, 1e-3
    x = v / 2 * np.eye(d)[0]
    found = {name: d * theory.kernel_mse(name, x, x, d) / v**2 for name in ("iid", "orf", "simrf")}
    log_gammas = special.gammaln([d + 1, d / 2 + 1 / 2, d / 2, d / 2 + 1])
    printed = 1 - np.sqrt(np.pi) * np.exp(log_gammas @ [1, 1, -1, -2] - d * np.log(2))
    assert found["iid"] == pytest.approx(1, rel=1e-4)
    assert found["orf"] == pytest.approx(1, rel=1e-4)
    assert found["simrf"] == pytest.approx(printed, rel=1e-3)
    assert found["simrf"] == pytest.approx(stats.chi(d).var() / d, rel=1e-3)
    assert round(printed, 4) == 0.0078


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("z", [0.5, 1.0, 2.0])
def test_simrf_corollary_4_6(z, m):
    """What the first order in 1/d leaves is of second order: a quarter of it at twice the d."""
    left = []
    for d in (512, 1024):
        x = z / 2 * np.eye(d)[0]
        orf, iid = (
            theory.kernel_mse(name, x, -x, m, features="trigonometric") for name in ("orf", "iid")
        )
        first = np.exp(-(z**2)) * z**4 / d / np.expm1(-(z**2)) ** 2
        left.append((orf / iid - 1) / (m - 1) + first)
    assert abs(left[0]) < 20 / 512**2
    assert left[1] / left[0] == pytest.approx(1 / 4, rel=0.05)


def optimal_plan(t, d, n=60):
    """Where the optimal plan between n equally likely lengths and themselves sends each."""
    squares = stats.chi(d).ppf((np.arange(n) + 0.5) / n) ** 2
    cost = special.hyp0f1(d / 2, t / 4 * (squares[:, None] + squares))  # VRC Eq. 6
    return optimize.linear_sum_assignment(cost)[1]


@pytest.mark.parametrize("d", [2, 5, 64])
def test_vrc_theorem_3_2(d):
    """Negative monotone for Laplace features at any v, for Fourier features while z is small."""
    backwards = np.arange(60)[::-1]
    for v in (0.2, 1.0, 5.0):
        np.testing.assert_array_equal(optimal_plan(v**2, d), backwards)
    np.testing.assert_array_equal(optimal_plan(-(0.3**2), d), backwards)
    assert (optimal_plan(-(6.0**2), d) != backwards).any()


def pair_gap(z, d):
    """E cos cos of an orthogonal pair with independent lengths, minus that of a PNC pair."""
    x = np.asarray(z)[..., None] / 2 * np.eye(d)[0]
    orf, pnc = (
        theory.kernel_mse(name, x, -x, 2, features="trigonometric") for name in ("orf", "pnc")
    )
    return 2 * (orf - pnc)


@pytest.mark.parametrize("d", [2, 6, 20])
def test_vrc_lemma_a_6(d):
    """Below the delta of Eq. 32, with Gamma(d/2) in g, PNC is below independent lengths.

    c of Eq. 30 is 2 (d^2 - E w_1^2 w_2^2), integrated here over u; z^4 c / 32 Gamma(2 + d/2) is the
    first term of the gap; and Eq. 29, of moments, by quadrature.
    """
    law = stats.chi(d)
    u = (np.arange(100_000) + 0.5) / 100_000
    c = 2 * (d**2 - np.mean((law.ppf(u) * law.isf(u)) ** 2))
    leading = c / 32 / special.gamma(2 + d / 2)
    k = np.arange(3, 60)
    for order in (3, 4):
        moment = np.mean((2 * law.ppf(u) ** 2) ** order)
        want = 4**order * special.gamma(order + d / 2) / special.gamma(d / 2)
        assert moment == pytest.approx(want, rel=0.02)

    def slack(z):
        terms = np.exp(2 * k * np.log(z) - special.gammaln(k + 1))
        return leading * z**4 - 2 * terms.sum() / special.gamma(d / 2)

    delta = optimize.root_scalar(slack, bracket=(1e-3, 3.0)).root
    z = np.linspace(0.1, 1, 10) * delta
    assert (pair_gap(z, d) > 0).all()
    first = special.gamma(d / 2) * leading * z[0] ** 4
    assert pair_gap(z[0], d) == pytest.approx(first, rel=0.05)


def test_pnc_loses_for_fourier_features_at_large_z():
    """So the condition of VRC Thm 3.2 is needed."""
    gaps = pair_gap(np.linspace(0.5, 8, 40), 6)
    assert gaps[0] > 0 > gaps.min()


@pytest.mark.parametrize("d", [2, 5, 64])
def test_vrc_theorem_3_5(d):
    """Of two Laplace features opposite ones are best: rho >= exp(E v.(w_1 + w_2)) = 1, and is 1.

    simplex*monotone is that coupling at d = 2.
    """
    for v in (0.1, 1.0, 3.0):
        assert theory.conformity("iid-antithetic", v, d, 2) == 1
        x = v / 2 * np.eye(d)[0]
        least = theory.kernel_mse("iid-antithetic", x, x, 2)
        for name in BASES[: -1 if d == 2 else None]:
            assert theory.conformity(name, v, d, 2) > 1
            assert theory.kernel_mse(name, x, x, 2) > least


@pytest.mark.parametrize("v", [0.3, 1.5, 4.0])
def test_simrf_lemma_a_1(v):
    """At equal lengths the simplex reaches Jensen's bound (Eq. 40); 201 other arrangements do not.

    Only there are all |u_i + u_j|^2 equal and the u_i add up to 0: then they are 2 (d - 2)/(d - 1).
    """
    d = 4
    lengths, simplex = np.full(d, 1.7), oracles.simplex_rows(d)
    bound = special.hyp0f1(d / 2, v**2 * 1.7**2 * 2 * (d - 2) / (d - 1) / 4)
    assert mean_conformity(lengths, simplex, v) == pytest.approx(bound, rel=1e-12)
    for units in arrangements(simplex):
        assert mean_conformity(lengths, units, v) > bound * (1 + 1e-6)


@pytest.mark.parametrize("d", [2, 5, 16])
def test_vrc_corollary_3_4(d):
    """Pairs lower the error of orthogonal Laplace features at any v, of Fourier ones at small z."""
    for m in (2, d, 2 * d + 1):
        for v in (0.2, 1.0, 4.0):
            x = v / 2 * np.eye(d)[0]
            orf, pnc = (theory.kernel_mse(name, x, x, m) for name in ("orf", "pnc"))
            assert pnc < orf
        x = 0.15 * np.eye(d)[0]
        orf, pnc = (
            theory.kernel_mse(name, x, -x, m, features="trigonometric") for name in ("orf", "pnc")
        )
        assert pnc < orf
