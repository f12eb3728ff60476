"""Sweeps: rows hold what was measured; tables and tests show the rows, figures the csv."""

import jax
import numpy as np
import pytest

from vit.study import harness, statistics

NOISE = np.random.default_rng(0).normal(size=(3, 20))
MEANS = {"a": (9, 6, 3), "b": (9, 6, 12)}
COUPLINGS = ("independent", "antithetic", "sigma")


def swept():
    """The errors of "sigma" are the lowest in a, and the highest in b."""

    def measure(case):
        number = COUPLINGS.index(case["coupling"])
        return NOISE[number] + MEANS[case["graph"]][number]

    return harness.sweep(harness.cases(graph=MEANS, coupling=COUPLINGS), measure)


def test_a_sweep_has_a_row_for_each_case_and_size():
    values = np.arange(6.0).reshape(3, 2)
    rows = harness.sweep([{"n": 1}, {"n": 2}], lambda case: values * case["n"], m=(8, 16))
    assert [(row["n"], row["m"]) for row in rows] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    np.testing.assert_array_equal(rows[3]["values"], 2 * values[:, 1])
    assert (rows[3]["mean"], rows[3]["mean ±"]) == statistics.mean_and_error(2 * values[:, 1])
    lines = harness.pivot(rows, "m = {m}")
    errors = [row["mean ±"] for row in rows]
    names, cells = ["n", "m = 8", "m = 8 ±", "m = 16", "m = 16 ±"], [1, 2, errors[0], 3, errors[1]]
    assert lines[0] == dict(zip(names, cells, strict=True))
    text = statistics.estimate(values[:, 0])
    assert list(harness.with_text(lines[0]).items())[:2] == [("n", 1), ("m = 8", text)]
    back = [(row["line"], row["mean"], row["mean ±"]) for row in harness.melt(lines, ["m = 16"])]
    assert back == [("m = 16", 3, errors[1]), ("m = 16", 6, errors[3])]


def test_the_csv_is_tall_and_the_table_wide(tmp_path):
    """Values are in neither; what is read again are the numbers of the rows."""
    rows = harness.sweep([{"n": 1}], lambda case: np.arange(6.0).reshape(3, 2), m=(8, 16))
    table = harness.show(rows, tmp_path / "errors", shown=harness.pivot(rows, "m = {m}"))
    assert table.splitlines()[0] == "| n | m = 8 | m = 16 |"
    assert table.splitlines()[2] == "| 1 | 2.0 ± 1.2 | 3.0 ± 1.2 |"
    assert table == (tmp_path / "errors.md").read_text()
    want = [{k: v for k, v in row.items() if k != "values"} for row in rows]
    for got, row in zip(harness.read(tmp_path / "errors.csv"), want, strict=True):
        assert got == pytest.approx(row, rel=1e-6)  # seven digits


def test_ratios_are_those_to_the_first_of_a_case():
    rows = harness.relative(swept(), "{graph}")
    assert rows[0]["ratio"] == 1
    want = statistics.ratio(rows[5]["values"], rows[3]["values"])
    assert (rows[5]["ratio"], rows[5]["ratio ±"]) == want
    line = harness.pivot(rows[1:3], "{coupling} / independent", "ratio")[0]
    names = ["antithetic / independent", "sigma / independent"]
    assert list(line) == ["graph", *(f"{name}{end}" for name in names for end in ("", " ±"))]


def test_draws_have_a_key_each():
    drawn = harness.draws(lambda key: jax.random.normal(key, (2,)), 7, seed=3, batch_size=4)
    want = [jax.random.normal(key, (2,)) for key in jax.random.split(jax.random.key(3), 7)]
    np.testing.assert_allclose(drawn, want, rtol=1e-6)
    assert drawn.dtype == np.float64


def test_names_without_values_are_refused():
    """Nothing would be measured, and the table be empty."""
    with pytest.raises(ValueError, match="coupling: give at least one value"):
        harness.cases(graph=MEANS, coupling=())
