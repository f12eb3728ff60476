"""The experiment on quadrature features: its numbers are those of its equations."""

import numpy as np
import pytest

from experiments.kernels import quadrature
from tests.support.small import read_csv

pytestmark = pytest.mark.thorough

KERNELS = ("gaussian", "arc-cosine-0")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The same in all tests: compiled programs remember it."""
    monkeypatch.setattr(quadrature, "RULES", 2)
    monkeypatch.setattr(quadrature, "KERNELS", KERNELS)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def test_figures(x, tmp_path, monkeypatch):
    y = (x[:, 0] > 0).astype(int)
    data = [quadrature.Data("toy", x, y), quadrature.Data("random", x, None)]
    for method, runs in (("G", 3), ("B", 3), ("B", 2)):  # of which the last two are one case
        quadrature.figure_1(data[:1], (method,), runs, tmp_path / "figure_1")
    rows = read_csv(tmp_path / "figure_1.csv")
    assert [row["method"] + row["runs"] for row in rows] == ["G3"] * 4 + ["B2"] * 4
    for one, other in zip(rows[:4], rows[4:], strict=True):
        ratio = float(other["error"]) / float(one["error"])
        assert float(other["ratio"]) == pytest.approx(ratio)
    kept = {name: quadrature.METHODS[name] for name in ("G", "H")}
    monkeypatch.setattr(quadrature, "METHODS", kept)
    quadrature.figure_2(data, 2, tmp_path / "figure_2")
    rows = read_csv(tmp_path / "figure_2.csv")
    assert len(rows) == 2 * 2 * 2
    assert {row["method"] for row in rows} == {"exact", "G"}
    assert all(0 <= float(row["score"]) <= 1 for row in rows)
    assert (tmp_path / "figure_1.png").exists()
    assert (tmp_path / "figure_2.png").exists()
