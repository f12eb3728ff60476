"""The experiment: its data are as they are said to be, its tables hold what was measured."""

import numpy as np
import pytest

from experiments import attention_mse as errors
from experiments.attention import data as attention_data
from tests.support.small import read_csv

pytestmark = pytest.mark.thorough


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


def test_calibrations_are_scored_on_other_tokens(monkeypatch):
    """Compare tokens that are fitted and scored: none in common. A window is told to the fit."""
    seen, with_exact = [], []
    fit, score = errors.calibrate, errors.attention_error

    def calibrate(query, key, **options):
        seen.append((np.asarray(query), np.asarray(key)))
        with_exact.append(options.get("beside_exact", False))
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
