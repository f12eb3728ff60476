"""The experiment on quadrature features: its numbers are those of its equations."""

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import quadrature
from performer import quadrature as rules
from tests.small import read_csv
from tests.test_sources import idx

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


def _images(folder, images, labels):
    folder.mkdir(exist_ok=True)
    for name, values in [("images-idx3", images), ("labels-idx1", labels)]:
        content = gzip.compress(idx(np.asarray(values).astype(np.uint8)))
        (folder / f"train-{name}-ubyte.gz").write_bytes(content)


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


def test_data_sets(tmp_path):
    digits = quadrature.load("digits", None)
    assert digits.x.shape == (1797, 64)
    assert (digits.x.min(), digits.x.max()) == (0, 1)
    normal = quadrature.load("normal_3072", None)
    assert normal.x.shape == (50, 3072)
    assert np.mean(normal.x**2) == pytest.approx(1, rel=0.05)
    table = np.random.default_rng(0).normal(size=(30, 4)) * [1, 5, 9, 2] + 3
    (tmp_path / "uci_regression").mkdir()
    np.savetxt(
        tmp_path / "uci_regression" / "power_plant.csv",
        table,
        delimiter=",",
        header="a,b,c,y",
        comments="",
    )
    plant = quadrature.load("power_plant", tmp_path)
    scaled = (table - table.mean(axis=0)) / table.std(axis=0)
    order = np.argsort(plant.y), np.argsort(scaled[:, 3])
    np.testing.assert_allclose(plant.x[order[0]], scaled[order[1], :3], rtol=1e-4)
    (tmp_path / "uci_classification").mkdir()
    rows = "\n".join(f"{i % 7},{i % 5},{'ab'[i % 2]}" for i in range(30))
    (tmp_path / "uci_classification" / "letter.csv").write_text(f"a,b,y\n{rows}\n")
    assert set(quadrature.load("letter", tmp_path).y.tolist()) == {0, 1}
    images = np.random.default_rng(1).integers(0, 256, size=(7, 3, 2))
    _images(tmp_path / "fashion_mnist", images, np.arange(7))
    fashion = quadrature.load("fashion_mnist", tmp_path)
    np.testing.assert_allclose(fashion.x, images.reshape(7, 6)[fashion.y] / 255, rtol=1e-6)


@pytest.mark.parametrize(("name", "reflect"), [("G", False), ("G", True), ("H", True)])
def test_first_rules(name, reflect):
    """Of H each part is exact for quadratics; other methods keep their first points."""
    d, whole = 3, (1 + reflect) * 4
    rule = jax.jit(lambda key: rules.METHODS[name](key, 2, d, reflect=reflect))(jax.random.key(0))
    for n in (1, 2):
        part = quadrature.first(rule, name, n, reflect)
        used = np.flatnonzero(part.weights)
        assert len(used) == n * whole
        assert float(part.weights.sum() + part.constant) == pytest.approx(1, abs=1e-6)
        if name == "G":
            np.testing.assert_array_equal(used, np.arange(n * whole))
            assert part.constant == 0
        else:
            second_moment = (part.points.T * part.weights) @ part.points
            np.testing.assert_allclose(second_moment, np.eye(d), atol=1e-5)
    np.testing.assert_allclose(part.weights, rule.weights, rtol=1e-6)
    np.testing.assert_allclose(part.constant, rule.constant, atol=1e-6)


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


def test_score():
    """Neither an orthogonal map to more dimensions than rows, nor a shift or a scale, matters."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    values = x @ [1.0, -2.0, 0.5] + 3 + 0.1 * rng.normal(size=80)
    wide = np.linalg.qr(rng.normal(size=(50, 50)))[0][:3]
    for y in (values, (values > 3).astype(int)):
        got = [
            quadrature.score(z[:40], y[:40], z[40:], y[40:])
            for z in (x, 7 * x @ wide + 5, x @ wide)
        ]
        assert got[0] > 0.9
        np.testing.assert_allclose(got, got[0], rtol=1e-3)


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


def test_times(tmp_path, monkeypatch):
    """Times of the race if they were d log d and d^2."""
    monkeypatch.setattr(quadrature, "BATCH", 2)
    monkeypatch.setattr(quadrature, "LARGE", 16)

    def race(calls, repeats):
        butterfly, dense = (np.asarray(call()) for call in calls.values())
        np.testing.assert_allclose(butterfly, dense, atol=1e-3)
        d = butterfly.shape[-1] - 1
        seconds = 1e-6 * 5 * d * np.log2(d), 1e-6 * d**2
        return {name: quadrature.timing.Best(s, s) for name, s in zip(calls, seconds, strict=True)}

    monkeypatch.setattr(quadrature.timing, "race", race)
    text = quadrature.figure_3((8, 16, 32), 1, tmp_path / "figure_3")
    want = 1 + np.log2(5 / 4)
    assert f"butterfly d^{want:.2f}; dense d^2.00." in text
    row = read_csv(tmp_path / "figure_3.csv")[1]
    assert float(row["dense / butterfly"]) == pytest.approx(16 / 4 / 5)
    assert (tmp_path / "figure_3.png").exists()
