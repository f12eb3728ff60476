"""The experiment: its data are as they are said to be, its tables hold what was measured."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from performer import analysis
from tests.support.small import read_csv
from vit import attention_mse as errors
from vit.study import inputs as attention_data

FIGURE = errors.FIGURES["figure7"]


def test_the_data_have_the_norms_that_they_are_said_to_have():
    """Means over 40 data sets, up to five standard errors; the clusters of keys have a mean."""
    shares = {"isotropic": (1, 1), "anisotropic": (1, 1), "clustered": (0.8, 1)}
    for kind, draw in attention_data.DATA.items():
        pairs = [draw(3.0, seed, 100) for seed in range(40)]
        squares = np.sum(np.square(pairs, dtype=np.float64), axis=(3, 4)).mean(axis=2)  # (40, 2)
        error = np.std(squares, axis=0, ddof=1) / np.sqrt(40)
        assert np.all(error < 0.05)
        assert np.all(abs(squares.mean(axis=0) - 3 * np.array(shares[kind])) < 5 * error)


@pytest.fixture
def rows(monkeypatch):
    """Rows that an experiment hands to its table, which is not written."""
    shown = []
    monkeypatch.setattr(errors.harness, "show", lambda rows, *_, **__: shown.extend(rows) or "")
    return shown


def test_figure_7_has_both_readings_and_plots_the_second(rows, monkeypatch):
    """Each measured number in its own column; the variance of the tokens by their entries."""
    squares = []

    def measured(x, y, *, scale, **_):
        assert scale == 1.0
        np.testing.assert_array_equal(x, y)
        squares.append(float(np.mean(np.square(x))))
        return SimpleNamespace(
            **{
                name: analysis.Mean(np.full((8, 1), i), np.full((8, 1), i / 10))
                for i, name in enumerate(("variance", "covariance", "attention", "predicted"))
            },
            uniform_attention=np.full((8, 1), 9.0),
        )

    monkeypatch.setattr(errors, "attention_error", measured)
    errors.figure7(["pm"], [16], 30, Path("none"))
    assert squares == pytest.approx([16**-0.5, 1 / 16], rel=0.1)
    names = "variance", "covariance", "attention error", "predicted"
    want = {name: i for i, name in enumerate(names)} | {"uniform": 9}
    want |= {f"{name} ±": i / 10 for i, name in enumerate(names)}
    for row in rows:
        assert {name: row[name] for name in want} == pytest.approx(want)
    assert [row["x ~ N(0, .)"] for row in rows] == ["I / sqrt(d)", "I / d"]
    assert [row["x ~ N(0, .)"] for row in FIGURE["change"](rows)] == ["I / d"]


def test_ratios_are_geometric_means_over_the_data_sets(rows, monkeypatch):
    """Errors of 1/2 and 2 times ORF's are as large as ORF's: an arithmetic mean has 1.25."""
    values = {"pm": np.array([0.5, 4.0]), "orf": np.array([1.0, 2.0])}
    scored = lambda kind, norm, scheme, m, draws: (values[scheme[0]], np.ones(2))  # noqa: E731
    monkeypatch.setattr(errors, "errors", scored)
    errors.vit(["orf", "pm"], ["none"], [1.0], [0], 16, 3, Path("none"))
    ratios = [row["ratio"] for row in rows if row["coupling"] in values]
    assert ratios == pytest.approx([1.0] * len(ratios))
    assert len(ratios) == 2 * len(attention_data.DATA)


def test_the_features_part_has_anisotropic_data_of_squared_norm_2(rows, monkeypatch):
    asked = []

    def measured(*given):
        asked.append(given)
        return np.full((2, 3), 0.5)

    monkeypatch.setattr(errors, "errors", measured)
    errors.against_features(["pm"], [16, 32], 7, Path("none"))
    assert asked == [("anisotropic", 2.0, ("pm", "none", 0), m, 7) for m in (16, 32)]
    assert [row["coupling"] for row in rows] == ["pm", "pm", "uniform", "uniform"]


def test_flags_reach_their_parts_and_names_are_refused_first(monkeypatch):
    calls = {name: [] for name in ("figure7", "vit", "against_features")}
    for name, made in calls.items():
        monkeypatch.setattr(errors, name, lambda *given, made=made: made.append(given))
    out = Path("out")
    errors.main(num_features=[8, 16], exact_window=[4, 32], draws=5, out=out)
    windows, folders = ([call[i] for call in calls["vit"]] for i in (3, 6))
    assert windows == [[4, 32]] * 2
    assert folders == [out / "vit_8", out / "vit_16"]
    assert [call[4] for call in calls["vit"]] == [8, 16]
    assert [call[-1] for call in calls["figure7"]] == [out / "figure7"]
    assert [call[2] for call in calls["figure7"]] == [200]
    errors.main(parts=["vit"], num_features=[8], out=out)
    assert calls["vit"][-1][3:] == ((16,), 8, 50, out / "vit")
    for made in calls.values():
        made.clear()
    for wrong in ({"couplings": ["pm", "orff"]}, {"calibrations": ["none", "ful"]}):
        with pytest.raises(ValueError, match="unknown"):
            errors.main(**wrong, out=out)
    assert not any(calls.values())


@pytest.mark.thorough
def test_tables(tmp_path, monkeypatch):
    kinds = {name: attention_data.DATA[name] for name in ("anisotropic", "clustered")}
    monkeypatch.setattr(attention_data, "DATA", kinds)
    table = errors.figure7(["pm"], [16], 30, tmp_path / "figure7")
    assert len(table.splitlines()) == 2 + 2
    assert (tmp_path / "figure7.png").exists()
    table = errors.vit(["orf"], ["none", "full"], [1.0], [0, 64], 32, 4, tmp_path / "vit")
    rows = read_csv(tmp_path / "vit.csv")
    names = ("kind", "coupling", "calibration", "exact window")
    schemes = [tuple(row[name] for name in names) for row in rows]
    features, near = ([("orf", x, n) for x in ("none", "full")] for n in ("0", "64"))
    each = [*features, *near, ("uniform", "", "0")]
    assert schemes == [(kind, *scheme) for kind in kinds for scheme in each]
    assert len(table.splitlines()) == 2 + len(each)
    assert all(0 < float(row["mean ±"]) < float(row["mean"]) for row in rows)
    ratios = [float(row["ratio"]) for row in rows[: len(each)]]
    assert ratios[0] == pytest.approx(1)
    assert ratios[1] < 0.7
    assert max(ratios[2] / ratios[0], ratios[3] / ratios[1]) < 0.5  # 4 of 5 pairs are exact
    assert (tmp_path / "vit.png").exists()
    table = errors.against_features(["iid", "orf"], [16, 64], 3, tmp_path / "features")
    assert len(table.splitlines()) == 2 + 3
    rows = read_csv(tmp_path / "features.csv")
    assert [row["m"] for row in rows] == ["16", "64"] * 3
    *lines, uniform = (tuple(row["mean"] for row in rows[i : i + 2]) for i in (0, 2, 4))
    assert all(float(many) < float(few) for few, many in lines)
    assert uniform[0] == uniform[1]


@pytest.mark.thorough
def test_calibrations_are_scored_on_other_tokens(monkeypatch):
    """Compare tokens that are fitted and scored: none in common. A window is told to the fit."""
    seen, with_exact = [], []
    fit, score = errors.calibrate, errors.attention_error

    def calibrate(query, key, **options):
        seen.append((np.asarray(query), np.asarray(key)))
        with_exact.append(options["mixed"])
        return fit(query, key, **options)

    def attention_error(query, key, **options):
        for fitted, scored in zip(seen[-1], (query, key), strict=True):
            assert fitted.shape == scored.shape == (197, 1, 64)
            same = np.asarray(scored)[:, None] == fitted[None]
            assert not same.all(axis=(2, 3)).any()
        return score(query, key, **options)

    monkeypatch.setattr(errors, "calibrate", calibrate)
    monkeypatch.setattr(errors, "attention_error", attention_error)
    monkeypatch.setattr(attention_data, "DATA_SETS", 2)
    values, uniform = errors.errors("anisotropic", 1.0, ("orf", "full", 0), 16, 3)
    assert len(seen) == len(values) == len(uniform) == 2
    errors.errors("anisotropic", 1.0, ("orf", "full", 16), 16, 3)
    assert with_exact == [False, False, True, True]
