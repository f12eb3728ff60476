"""Experiments on tabular data: what they compute is what they say, and their tables are whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.stats import qmc

from experiments.common import statistics, tabular
from experiments.kernels import matern
from experiments.tabular import copula, kernel_error, uci
from experiments.tabular import gp as uci_gp
from performer import couplings, gp, kernels, testing, theory
from tests.small import read_csv

FOURIER, LAPLACE = uci.SCHEMES
SMALL = FOURIER._replace(couplings={"iid": "iid", "orthogonal": "orf", "+ pnc": "pnc"})


@pytest.fixture(scope="module")
def splits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)) * [1, 5, 0.1, 2]
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=80)
    table = tabular.Table("toy", x, y, ("a", "b", "c", "d"))
    return tabular.splits(table, 6, train=30, test=20)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    monkeypatch.setattr(uci, "STEPS", 60)


def test_summed_norms_match_the_equation(splits):
    """VRC Eq. 36."""
    x = splits.train_x[:2]
    want = [2 * np.mean([np.linalg.norm(a + b) for a in of for b in of]) for of in x]
    np.testing.assert_allclose(uci.summed_norms(jnp.asarray(x)), want, rtol=1e-5)


def test_hyperparameters(splits):
    fitted = uci.hyperparameters("toy", FOURIER, splits)
    held = uci.hyperparameters("toy", LAPLACE, splits)
    np.testing.assert_allclose(held.lengthscale, uci.summed_norms(splits.train_x), rtol=1e-5)
    x, y = (jnp.asarray(part[0]) for part in splits[:2])
    want, _ = gp.fit(
        x, y, gp.Scales(2.0, 1.0, 0.5), num_steps=60, optimizer=uci.optax.adam(uci.LEARNING_RATE)
    )
    for got, value in zip(fitted, want, strict=True):
        assert float(got[0]) == pytest.approx(float(value), rel=1e-3)
    broken = splits._replace(train_y=np.where(splits.train_y > 1, np.inf, splits.train_y))
    with pytest.raises(ValueError, match="'toy' .Fourier features, lengthscale. .* split 0"):
        uci.hyperparameters("toy", FOURIER, broken)


@pytest.mark.thorough
def test_our_descent_ends_where_the_papers_does(splits, monkeypatch):
    """300 steps at 0.05 beside 5000 at 0.01 (VRC App. B.1): within a thousandth."""
    ends = []
    for steps, rate in ((300, 0.05), (5000, 0.01)):
        monkeypatch.setattr(uci, "STEPS", steps)
        monkeypatch.setattr(uci, "LEARNING_RATE", rate)
        ends.append(uci.hyperparameters("toy", FOURIER, tabular.Splits(*(p[:2] for p in splits))))
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3)


@pytest.mark.parametrize("scheme", uci.SCHEMES, ids=["Fourier", "Laplace"])
def test_predicted_is_the_theory_of_every_pair(scheme, splits):
    x = splits.test_x[0] / 4
    kind = "trigonometric" if scheme is FOURIER else "positive"
    exact = theory.kernel_mse(
        scheme.couplings["+ pnc"], x[:, None], x, 4 * scheme.per_dimension, features=kind
    )
    got = kernel_error.predicted(scheme, "+ pnc", x, 4 * scheme.per_dimension)
    assert got == pytest.approx(np.sqrt(exact.mean()), rel=1e-3)


def test_ratio():
    """The error of a ratio of means over 4,000 simulated splits is its spread over repetitions."""
    rng = np.random.default_rng(1)
    reference = rng.gamma(5, size=(2000, 40))
    values = 0.5 * reference + 0.1 * rng.normal(size=reference.shape)
    found = np.array([statistics.ratio(a, b) for a, b in zip(values, reference, strict=True)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.1)


def test_kernel_table(splits, tmp_path, monkeypatch):
    """Measured and theory agree; the false-alarm rate of 5 standard errors is below 1e-3."""
    monkeypatch.setattr(uci, "SCHEMES", (SMALL, SMALL._replace(name="Laplace")))
    rows = kernel_error.rows_of("toy", SMALL, splits, 300)
    assert rows[0]["ratio"] == 1
    for row in rows[1:]:
        assert abs(row["ratio"] - row["theory"]) < 5 * row["standard error"] + 0.03
        assert row["ratio"] < 0.9
    rows[2] |= {"paper": 0.5}
    kernel_error.plot(rows + [row | {"features": "Laplace"} for row in rows], tmp_path / "kernels")
    assert (tmp_path / "kernels.png").exists()


def test_halton_and_sobol_points():
    """Whatever the draw is, the points are SciPy's, but for the shift."""
    plain = qmc.Halton(5, scramble=False)
    got = stats.norm.cdf(kernel_error.plain_halton(jax.random.key(0), 7, 5))
    np.testing.assert_allclose(got, plain.random(8)[1:], atol=1e-5)
    shifted = stats.norm.cdf(couplings.Halton(scramble=False)(jax.random.key(0), 7, 5))
    shift = (shifted - plain.reset().random(7)) % 1
    np.testing.assert_allclose(shift - shift[0], 0, atol=1e-5)
    draws = [kernel_error.sobol(jax.random.key(k), 8, 5) for k in range(2)]
    for u in map(stats.norm.cdf, draws):  # a point in each eighth
        np.testing.assert_array_equal(
            np.sort((8 * u).astype(int), axis=0), np.tile(np.arange(8)[:, None], 5)
        )
    assert (draws[0] != draws[1]).all()


def test_sobol_rows_are_gaussian():
    testing.assert_gaussian_marginals(kernel_error.sobol, 6, 5, draws=10_000)


def test_scores_match_the_equations(splits):
    """VRC Eqs 42 and 43 in NumPy."""
    with jax.enable_x64(True):
        split = uci_gp.Split(
            *(jnp.asarray(part[0]) for part in splits[:4]), gp.Scales(2.0, 1.5, 0.4)
        )
        w = jax.random.normal(jax.random.key(0), (4, 4))
        got = jax.jit(
            lambda split, w: uci_gp.scores(split, w, uci_gp.exact(split), kernels.gaussian)
        )(split, w)
    x, y, new, new_y = (part[0] for part in splits[:4])

    def kernel(a, b):
        squares = np.sum((a[:, None] - b) ** 2, axis=-1)
        return 1.5**2 * np.exp(-squares / 2 / 2.0**2)

    def estimate(a, b):
        angles = (a[:, None] - b) @ np.asarray(w).T / 2.0
        return 1.5**2 * np.cos(angles).mean(axis=-1)

    def law(k):
        solved = k(new, x) @ np.linalg.inv(k(x, x) + 0.16 * np.eye(30))
        return solved @ y, k(new, new) - solved @ k(new, x).T + 0.16 * np.eye(20)

    def kl(p, q):
        inverse, shift = np.linalg.inv(q[1]), q[0] - p[0]
        dets = np.linalg.slogdet(q[1])[1] - np.linalg.slogdet(p[1])[1]
        return (np.trace(inverse @ p[1]) + shift @ inverse @ shift - 20 + dets) / 2

    exact, approximate = law(kernel), law(estimate)
    zero = np.zeros(20)
    priors = [(zero, k(new, new) + 0.16 * np.eye(20)) for k in (kernel, estimate)]
    deviations = np.sqrt(np.diag(approximate[1]))
    want = [
        np.mean((kernel(new, new) - estimate(new, new)) ** 2),
        kl(exact, approximate) / 20,
        np.sqrt(np.mean((approximate[0] - new_y) ** 2)),
        -stats.norm(approximate[0], deviations).logpdf(new_y).mean(),
        kl(*priors) / 20,
    ]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_units():
    """Values x = 3 y: errors triple, densities fall by log 3."""
    found = uci_gp.in_units(np.ones((1, 2, 5)), np.array([3.0]))
    np.testing.assert_allclose(found[0], [[1, 1, 3, 1 + np.log(3), 1]] * 2)
    (means,) = uci_gp.over_draws(np.array([[[1.0] * 5, [9.0] * 5]]))
    np.testing.assert_allclose(means, [np.sqrt(5), 5, 5, 5, 5])


@pytest.mark.thorough
def test_gp_tables(splits, tmp_path, monkeypatch):
    monkeypatch.setattr(uci_gp, "MULTIPLES", (1,))
    monkeypatch.setattr(uci_gp, "SIZES", (1,))
    monkeypatch.setattr(uci, "SCHEMES", (SMALL,))
    rows = uci_gp.rows_of("toy", splits, 4)
    differences, said = uci_gp.differences(rows)
    by_name = {row["coupling"]: row for row in uci_gp.table(rows)}
    assert list(by_name) == [*SMALL.couplings, "exact", "linear"]
    assert by_name["exact"]["RMSE"] < by_name["orthogonal"]["RMSE"] < by_name["iid"]["RMSE"]
    assert by_name["orthogonal"]["KL"] > by_name["exact"]["KL"] == 0
    assert by_name["linear"]["KL"] == ""
    assert [row["quantity"] for row in differences] == list(uci_gp.QUANTITIES)
    difference = by_name["+ pnc"]["NLL"] - by_name["orthogonal"]["NLL"]
    assert differences[3]["mean"] == pytest.approx(difference)
    assert said.count("of 1 cases") == 4
    monkeypatch.setattr(uci, "SCHEMES", (FOURIER._replace(couplings={"iid": "iid"}),))
    uci_gp.figure_1("toy", splits, 4, tmp_path / "figure_1")
    sizes = [(row["coupling"], row["m"]) for row in read_csv(tmp_path / "figure_1.csv")]
    assert sizes == [("iid", "4")]


@pytest.mark.thorough
def test_copulas(splits, tmp_path):
    scheme = LAPLACE._replace(couplings={"+ pnc": "pnc-antithetic"})
    rows, losses, correlation = copula.of_scheme(
        "toy", scheme, splits, num_steps=100, train_draws=8, draws=400
    )
    pnc, start, learned = (row["training RMSE"] for row in rows)
    assert learned < 0.95 * start
    assert learned < 1.15 * pnc
    np.testing.assert_allclose(np.diag(correlation), 1, rtol=1e-5)
    copula.plot({"a": (rows, losses), "b": (rows, losses)}, tmp_path / "toy")
    assert (tmp_path / "toy.png").exists()


def test_matern(tmp_path, monkeypatch):
    """PNC has lower errors, and 16 times the features a fourth of them: there is no bias."""
    monkeypatch.setattr(matern, "MULTIPLES", (1, 16))
    monkeypatch.setattr(matern, "COUPLINGS", ("iid", "pnc"))
    x = jax.random.normal(jax.random.key(0), (16, 4)) / 2
    rows = matern.errors("toy", x, (0.5, 1.5), 300, tmp_path / "toy")
    few, many = ([float(row[f"m = {m}d"].split()[0]) for row in rows] for m in (1, 16))
    assert few[0] > 1.1 * few[1]
    assert few[2] > 1.1 * few[3]
    np.testing.assert_allclose(np.array(few) / many, 4, rtol=0.12)
    assert (tmp_path / "toy.png").exists()
