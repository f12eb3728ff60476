"""Experiments on tabular data: what they compute is what they say, and their tables are whole."""

import jax
import numpy as np
import pytest

from experiments.kernels import matern
from experiments.tabular import draws, sets, uci
from experiments.tabular import gp as uci_gp
from tests.support.small import read_csv
from vit.study import statistics

FOURIER, _ = uci.SCHEMES
SMALL = FOURIER._replace(couplings={"iid": "iid", "orthogonal": "orf", "+ pnc": "pnc"})


@pytest.fixture(scope="module")
def splits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)) * [1, 5, 0.1, 2]
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=80)
    table = sets.Table("toy", x, y)
    return sets.folds(table, 4, 30, np.random.default_rng(0).permutation(60))


def test_performer_lengthscale_is_the_mean_distance(splits):
    """VRC Eq. 36 with a minus, as in the authors' code."""
    x = splits.train_x[0]
    want = 2 * np.mean([np.linalg.norm(a - b) for a in x for b in x])
    assert uci.performer_lengthscale(x) == pytest.approx(want)


@pytest.mark.parametrize(
    ("count", "first"),
    [
        (512, [279, 75, 177, 503, 29, 227, 376, 446, 94, 334]),
        (1024, [813, 820, 279, 1022, 75, 596, 177, 503, 29, 227]),
    ],
)
def test_row_order_is_that_of_tensorflow(count, first):
    """Printed by TensorFlow 2.21 and TensorFlow Probability 0.25 for the seed of the VRC code."""
    order = uci.row_order(count)
    assert order[:10].tolist() == first
    assert sorted(order) == list(range(count))
    assert uci.row_order(count, 1).tolist() != order.tolist()


@pytest.mark.parametrize("points", [uci.halton, uci.sobol])
def test_shifted_points_are_normal(points):
    """Each row is N(0, I): means over 2,000 draws are within 4.5 standard errors (1 in 3,000)."""
    keys = jax.random.split(jax.random.key(0), 2000)
    w = np.asarray(jax.jit(jax.vmap(lambda key: points(key, 5, 3)))(keys))
    assert w.shape == (2000, 5, 3)
    assert np.abs(w.mean(axis=0)).max() < 4.5 / 2000**0.5
    assert np.abs((w**2).mean(axis=0) - 1).max() < 4.5 * (2 / 2000) ** 0.5


def test_scales_are_fixed_for_laplace_features_at_m_d_alone(splits):
    fixed = [uci.fixes_lengthscale(scheme, k) for scheme in uci.SCHEMES for k in (1, 8)]
    assert fixed == [False, False, True, False]
    length = uci.hyperparameters("toy", splits, True).lengthscale
    np.testing.assert_allclose(length, [uci.performer_lengthscale(x) for x in splits.train_x])
    free = uci.hyperparameters("toy", splits, False)
    assert np.abs(np.log(free.lengthscale / length)).min() > 0.1


def test_printed_errors_of_table_4_are_halved():
    assert uci.printed("KL, m = d", "Fourier", "iid", "airfoil") == (0.357, 0.025)
    assert uci.printed("KL, m = 8d", "Fourier", "iid", "airfoil") == (0.017, 0.002)
    assert uci.printed("KL, m = d", "Fourier", "sobol", "airfoil") is None


def test_ratio():
    """The error of a ratio of means over 4,000 simulated splits is its spread over repetitions."""
    rng = np.random.default_rng(1)
    reference = rng.gamma(5, size=(2000, 40))
    values = 0.5 * reference + 0.1 * rng.normal(size=reference.shape)
    found = np.array([statistics.ratio(a, b) for a, b in zip(values, reference, strict=True)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.1)


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
    assert by_name["linear"]["KL"] == by_name["linear"]["kernel ratio"] == ""
    other = [row | {"mean": row["mean"] + 2} for row in rows]
    lines = [x for x in uci_gp.spread(rows, [rows, other]) if x["quantity"] == "NLL"]
    assert [x["coupling"] for x in lines] == [*SMALL.couplings, "exact"]
    for line in lines:
        mean = by_name[line["coupling"]]["NLL"]
        assert line["authors' order"] == line["lowest"] == pytest.approx(mean)
        assert line["other orders"] == pytest.approx(mean + 1)
        assert line["standard deviation"] == pytest.approx(2**0.5)
    assert by_name["iid"]["kernel ratio"] == 1 > by_name["orthogonal"]["kernel ratio"]
    assert [row["quantity"] for row in differences] == list(uci_gp.QUANTITIES)
    difference = by_name["+ pnc"]["NLL"] - by_name["orthogonal"]["NLL"]
    assert differences[3]["mean"] == pytest.approx(difference)
    assert said.count("of 1 cases") == 4
    monkeypatch.setattr(uci, "SCHEMES", (FOURIER._replace(couplings={"iid": "iid"}),))
    uci_gp.figure_1("toy", splits, 4, tmp_path / "figure_1")
    sizes = [(row["coupling"], row["m"]) for row in read_csv(tmp_path / "figure_1.csv")]
    assert sizes == [("iid", "4"), ("exact", ""), ("linear", "")]


@pytest.mark.thorough
def test_matern(monkeypatch):
    """PNC has lower errors, and 16 times the features a fourth of them: there is no bias."""
    monkeypatch.setattr(matern, "MULTIPLES", (1, 16))
    monkeypatch.setattr(matern, "COUPLINGS", ("iid", "pnc"))
    x = jax.random.normal(jax.random.key(0), (16, 4)) / 2
    rows = matern.errors("toy", x, (0.5, 1.5), 300)
    few, many = ([row["mean"] for row in rows if row["m / d"] == size] for size in (1, 16))
    assert few[0] > 1.1 * few[1]
    assert few[2] > 1.1 * few[3]
    np.testing.assert_allclose(np.array(few) / many, 4, rtol=0.12)


def test_errors_of_the_draws_leave_the_folds_out():
    """Folds that differ a thousandfold do not change the error of the draws."""
    noise = np.random.default_rng(0).normal(size=(4, 50))
    mean, error = draws.mean_of_draws(noise)
    moved = draws.mean_of_draws(noise + np.array([[0.0], [10.0], [100.0], [1000.0]]))
    assert moved == pytest.approx((mean + 277.5, error))
    assert error == pytest.approx(np.sqrt(np.sum(noise.var(axis=1, ddof=1) / 50)) / 4)


def test_a_ratio_of_paired_draws_has_no_error_if_they_are_proportional():
    noise = np.random.default_rng(1).normal(3, 1, size=(4, 50))
    assert draws.ratio_of_draws(0.5 * noise, noise) == pytest.approx((0.5, 0.0), abs=1e-12)
