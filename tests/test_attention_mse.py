"""The experiment: its data are as they are said to be, its tables hold what was measured."""

import csv
import subprocess
import sys

import numpy as np
import pytest

from experiments import attention_data, attention_mse


@pytest.mark.parametrize(
    ("kind", "of_queries"), [("isotropic", 1.0), ("anisotropic", 1.0), ("clustered", 0.8)]
)
def test_mean_squared_norms(kind, of_queries):
    """Means over 40 seeds; the clusters' centres make them scatter by 3 percent."""
    pairs = [attention_data.DATA[kind](2.0, seed) for seed in range(40)]
    for rows, expected in zip(zip(*pairs, strict=True), (2 * of_queries, 2.0), strict=True):
        assert rows[0].shape == (197, 1, 64)
        mean = np.mean([np.sum(np.square(x), axis=-1) for x in rows])
        assert mean == pytest.approx(expected, rel=0.1)


def test_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_mse, "SIZES", (16,))
    table = attention_mse.figure7(["pm"], 30, tmp_path / "figure7")
    assert len(table.splitlines()) == 2 + 2
    assert (tmp_path / "figure7_I___d.png").exists()
    attention_mse.vit(["orf"], ["none", "full"], [1.0], 32, 4, tmp_path / "vit")
    with (tmp_path / "vit_absolute.csv").open() as file:
        rows = list(csv.DictReader(file))
    schemes = [(r["coupling"], r["calibration"]) for r in rows]
    assert schemes == [("orf", "none"), ("orf", "full"), ("uniform", "")]
    assert float(rows[0]["anisotropic 1 / orf"]) == pytest.approx(1)
    assert float(rows[1]["anisotropic 1 / orf"]) < 0.5
    assert (tmp_path / "vit.png").exists()
    table = attention_mse.against_features([16, 64], 3, tmp_path / "features")
    assert len(table.splitlines()) == 2 + 4
    with (tmp_path / "features.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert all(float(line["m = 64"]) < float(line["m = 16"]) for line in lines)
    assert float(lines[-1]["m = 64"]) < 0.5 * float(lines[0]["m = 64"])
    assert (tmp_path / "features.png").exists()


def test_a_window_is_that_of_a_run(tmp_path):
    command = [sys.executable, "-m", "experiments.attention_mse", f"--out={tmp_path}"]
    for flags in (["--exact_window=16"], ["--exact_window=0,x", "--workdir=run"]):
        done = subprocess.run([*command, *flags], capture_output=True, text=True)
        assert done.returncode == 1
        assert "give integers as in 0,16, and the --workdir of a run" in done.stderr
