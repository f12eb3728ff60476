"""The experiment on Flax, Equinox and Haiku: one model and its table."""

import pytest

from experiments.attention import frameworks
from tests.small import read_csv

pytestmark = pytest.mark.thorough


def test_tables(tmp_path):
    options = dict(num_features=(8,), epochs=2, steps=2, draws=2, images=32)
    frameworks.main(("haiku",), **options, out=tmp_path)
    exact, *rows = read_csv(tmp_path / "digits.csv")
    assert exact["attention"] == "exact"
    assert [row["attention"] for row in rows] == list(frameworks.METHODS)
    assert all(row["m"] == "8" for row in rows)
    drawn, calibrated, _ = (float(row["attention error"]) for row in rows)
    assert calibrated < drawn
    assert all(float(row["accuracy ±"]) >= 0 for row in rows)
