"""The experiment on quadrature features: its numbers are those of its equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import quadrature
from performer import quadrature as rules
from tests.small import read_csv

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


def _kernel(name, x, y):
    if name == "gaussian":
        return np.exp(-np.sum((x[:, None] - y) ** 2, axis=-1) / len(x[0]))
    cosine = x @ y.T / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)
    return 1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi


def _estimate(name, x, rule, y):
    """The constant's f(0) is 1 and 1/2 (Quad Sec. 4)."""
    points, weights, constant = (np.asarray(part, np.float64) for part in rule)
    if name == "gaussian":
        angles = (x[:, None] - y) @ points.T / np.sqrt(x.shape[1] / 2)
        return constant + np.cos(angles) @ weights
    return constant / 2 + 2 * ((x @ points.T > 0) * weights) @ (y @ points.T > 0).T


@pytest.mark.parametrize("kernel", KERNELS)
def test_frobenius_errors(kernel, x):
    keys = jax.random.split(jax.random.key(1), 2)
    reflect = kernel != "gaussian"
    got = quadrature.frobenius_errors(jnp.asarray(x), keys, "H", kernel)
    want = np.zeros((2, 2))
    draw = jax.jit(lambda key: rules.METHODS["H"](key, 2, 3, reflect=reflect))
    for run, key in enumerate(keys):
        rule = draw(key)
        for n in (1, 2):
            part = quadrature.first(rule, "H", n, reflect)
            error = _estimate(kernel, x, part, x) - _kernel(kernel, x, x)
            want[run, n - 1] = np.linalg.norm(error) / np.linalg.norm(_kernel(kernel, x, x))
    np.testing.assert_allclose(got, want, rtol=1e-3)


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
