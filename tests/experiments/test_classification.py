"""Kernel regression is that of the equation; sigma, tables and figures are those of the paper."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tabular import classification, sets
from tests.support.small import read_csv
from vit.study import statistics


def by_loops(train_x, one_hot, test_x, W):
    """y' of SimRF Sec. 5.3 with K(x, z) = mean_j exp(w_j.x - |x|^2) exp(w_j.z - |z|^2)."""
    predicted = np.zeros((len(test_x), one_hot.shape[1]))
    for t, x in enumerate(test_x):
        total = 0.0
        for z, label in zip(train_x, one_hot, strict=True):
            K = np.mean([np.exp(w @ x - x @ x + w @ z - z @ z) for w in W])
            predicted[t] += K * label
            total += K
        predicted[t] /= total
    return predicted


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_matches_loops(scale):
    """At scale 5 |x|^2 reaches 200: the features themselves are 0 in float32."""
    rng = np.random.default_rng(0)
    train, test = (scale * rng.normal(size=(n, 3)) for n in (12, 7))
    one_hot = np.eye(4)[rng.integers(4, size=12)]
    W = rng.normal(size=(6, 3))
    found = classification.regress(
        *(jnp.asarray(x, jnp.float32) for x in (train, one_hot, test, W)), 3
    )
    assert found.shape == (3, 7, 4)
    for block, m in enumerate((2, 4, 6)):
        expected = by_loops(train, one_hot, test, W[:m])
        np.testing.assert_allclose(found[block], expected, rtol=2e-4, atol=1e-6)


def two_classes(rows=400, d=4, name="banknote"):
    """Unequal classes whose means are 5 apart."""
    rng = np.random.default_rng(1)
    y = (np.arange(rows) % 5 < 2).astype(int)
    x = rng.normal(size=(rows, d))
    x[:, 0] += 5 * y
    return sets.Table(name, 5 + 2 * x, y)


@pytest.mark.thorough
def test_outputs(tmp_path, monkeypatch):
    monkeypatch.setattr(classification, "SIGMAS", (0.1, 1.0))
    monkeypatch.setattr(classification, "MULTIPLES", 2)
    table = two_classes(120)
    tuned = classification.tune([table, table._replace(name="other")], tmp_path)
    assert [t.sigma for t in tuned] == [1.06445901, 1.0]  # the paper's, and the best
    for name, part in classification.PARTS.items():
        assert part(tuned, 10, tmp_path / name) == (tmp_path / f"{name}.md").read_text()
    for name in ("figure_10", "figure_8"):
        assert (tmp_path / f"{name}.png").exists()
    curves = read_csv(tmp_path / "figure_8.csv")
    exact = [float(row["mean"]) for row in curves if row["coupling"] == "exact"]
    assert exact == [classification.exact_accuracies(of, [of.sigma])[0] for of in tuned]

    ours, theirs, other = read_csv(tmp_path / "table_2.csv")
    assert (ours["whose"], theirs["whose"], other["data set"]) == ("ours", "paper", "other")
    sums = tuned[0].sigma * (tuned[0].test_x[:, None] + tuned[0].train_x)
    assert float(ours["v_bar"]) == pytest.approx(np.mean(np.linalg.norm(sums, axis=-1)), rel=1e-5)
    assert theirs["simrf+"] == "0.7132 ± 0.0012"
    fast, printed, _ = read_csv(tmp_path / "table_3.csv")
    # The same keys in the same dimension, a power of two, and the same first d frequencies.
    first = [row for row in curves if (row["data set"], row["m / d"]) == (table.name, "1")]
    for name, row in zip(("iid", "orf", "simrf"), first, strict=False):
        estimate = statistics.plus_minus(float(row["mean"]), float(row["mean ±"]))
        assert (row["coupling"], fast[name]) == (name, estimate)
    assert ours["simrf"] == fast["simrf"]
    assert printed["fast-simrf"] == "0.7296 ± 0.0017"
