"""Experiments on tabular data: what they compute is what they say, and their tables are whole."""

import jax
import numpy as np
import pytest

from experiments.common import statistics, tabular
from experiments.kernels import matern
from experiments.tabular import gp as uci_gp
from experiments.tabular import uci
from tests.small import read_csv

FOURIER, _ = uci.SCHEMES
SMALL = FOURIER._replace(couplings={"iid": "iid", "orthogonal": "orf", "+ pnc": "pnc"})


@pytest.fixture(scope="module")
def splits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)) * [1, 5, 0.1, 2]
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=80)
    table = tabular.Table("toy", x, y)
    return tabular.folds(table, 4, 30)


def test_performer_lengthscale_is_the_mean_distance(splits):
    """VRC Eq. 36 with a minus, as in the authors' code."""
    x = splits.train_x[0]
    want = 2 * np.mean([np.linalg.norm(a - b) for a in x for b in x])
    assert uci.performer_lengthscale(x) == pytest.approx(want)


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
