"""Sweeps: rows hold what was measured; tables and tests show the rows, figures the csv."""

import jax
import numpy as np

from experiments.common import harness, statistics

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
    assert (rows[3]["mean"], rows[3]["±"]) == statistics.mean_and_error(2 * values[:, 1])
    lines = harness.wide(rows, "m = {m}")
    assert [list(line) for line in lines] == [["n", "m = 8", "m = 16"]] * 2
    assert lines[0]["m = 8"] == statistics.estimate(values[:, 0])
    (first, _) = harness.wide(rows, "{m}", text=False)
    assert first == {"n": 1, "8": 2.0, "± (8)": rows[0]["±"], "16": 3.0, "± (16)": rows[1]["±"]}


def test_ratios_are_those_to_the_first_of_a_case():
    rows = harness.relative(swept(), "{graph}")
    assert rows[0]["ratio"] == 1
    want = statistics.ratio(rows[5]["values"], rows[3]["values"])
    assert (rows[5]["ratio"], rows[5]["ratio ±"]) == want
    line = harness.wide(rows[1:3], "{coupling} / independent", "ratio")[0]
    assert list(line) == ["graph", "antithetic / independent", "sigma / independent"]


def test_draws_have_a_key_each():
    found = harness.draws(lambda key: jax.random.normal(key, (2,)), 7, seed=3, batch_size=4)
    want = [jax.random.normal(key, (2,)) for key in jax.random.split(jax.random.key(3), 7)]
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert found.dtype == np.float64
