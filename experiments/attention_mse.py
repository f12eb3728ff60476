"""Attention error: what couplings and calibrations buy, on synthetic data and in a trained model.

    python -m experiments.attention_mse                     # all of the following but the last
    python -m experiments.attention_mse --parts=figure7     # VRC Fig. 7
    python -m experiments.attention_mse --parts=features    # the error against m
    python -m experiments.attention_mse --parts=vit --couplings=orf,pm,pm-antithetic
    python -m experiments.attention_mse --workdir=runs/pm --couplings=pm --num_features=32
    python -m experiments.attention_mse --workdir=runs/softmax --couplings=orf-antithetic \\
        --num_features=32 --exact_window=0,16

figure7: kernel variance, kernel covariance and attention error of 16 tokens in 16 dimensions that
are N(0, I / sqrt(d)) as printed, or N(0, I / d). vit: relative error |A^ - A|^2 / |A|^2 with 197
tokens, head_dim 64 and m = 128 on three kinds of data at several lengths of queries and keys,
couplings as they are and calibrated, beside uniform attention. features: the same error on
anisotropic data of squared norm 2, against the number of features. With --workdir: the queries and
keys of a trained model on its evaluation images, layer by layer and head by head, each coupling in
turn, with each window of near keys that are exact (data that are drawn have none).

Tables (csv, md) and figures (png) go to --out, by default results/attention_mse.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from experiments import attention_data
from performer import couplings
from performer.analysis import attention_error
from performer.calibration import calibrate, parts
from vit import report
from vit.arguments import parse_flags
from vit.attention_report import report_attention

PARTS = ["figure7", "vit", "features"]
SIZES = (16, 32, 48, 64)
NORMS = (0.5, 1.0, 2.0, 4.0, 8.0)
CURVES = (("iid", "none"), ("orf", "none"), ("pm-antithetic", "none"), ("pm-antithetic", "full"))
"""Couplings and calibrations against m."""
FEATURES = (16, 32, 64, 128, 256, 512)
SCHEMES = {
    "none": (
        *("iid", "orf", "simrf", "pnc", "pm", "fixed"),
        *("orf-antithetic", "pm-antithetic", "fixed-antithetic"),
    ),
    "shift": ("fixed-antithetic",),
    "shift+scale": ("pm-antithetic", "fixed-antithetic"),
    "full": ("orf", "orf-antithetic", "pm-antithetic", "fixed-antithetic"),
}
"""Couplings under each calibration; with --couplings all of those under each."""


def figure7(names: Sequence[str], draws: int, out: Path) -> str:
    """VRC Fig. 7 in both readings: variance, covariance, attention error against m."""
    rows = []
    for reading, variance in [("I / sqrt(d)", 1 / 4), ("I / d", 1 / 16)]:
        tokens = np.sqrt(variance) * np.random.default_rng(0).normal(size=(8, 16, 1, 16))
        x = jnp.asarray(tokens, jnp.float32)
        for name, m in itertools.product(names, SIZES):
            error = attention_error(
                x, x, coupling=name, num_features=m, draws=draws, scale=1.0, seed=1
            )
            columns = {
                "variance": error.variance,
                "covariance": error.covariance,
                "attention error": error.attention,
                "predicted": error.predicted,
            }
            row = {"x ~ N(0, .)": reading, "coupling": name, "m": m}
            for column, estimate in columns.items():
                row[column] = float(estimate.value.mean())
            # The data sets share the draws, so that their standard errors do not average out.
            row["standard error"] = float(error.attention.standard_error.mean())
            rows.append(row | {"uniform": float(error.uniform_attention.mean())})
    for reading in dict.fromkeys(row["x ~ N(0, .)"] for row in rows):
        drawn, axes = report.figure(_suffixed(out, reading), columns=3)
        for name in names:
            of_name = [r for r in rows if r["coupling"] == name and r["x ~ N(0, .)"] == reading]
            for axis, column in zip(
                axes, ("variance", "covariance", "attention error"), strict=True
            ):
                sizes = [row["m"] for row in of_name]
                axis.plot(sizes, [row[column] for row in of_name], marker="o", label=name)
                axis.set(ylabel=f"{column}, relative")
        for axis in axes:
            report.log_log(axis, SIZES)
        drawn.suptitle(f"VRC Fig. 7, x ~ N(0, {reading})")
        report.save(drawn, _suffixed(out, reading))
    return report.table(rows, out)


def vit(
    names: Sequence[str],
    methods: Sequence[str],
    norms: Sequence[float],
    m: int,
    draws: int,
    out: Path,
) -> str:
    """Errors, absolute and relative to ORF's, for three kinds of data and several norms."""
    schemes = [
        (name, method)
        for method in methods
        for name in names or SCHEMES.get(method, SCHEMES["full"])
    ]
    rows: list[dict] = [{"coupling": name, "calibration": method} for name, method in schemes]
    uniform: dict = {"coupling": "uniform", "calibration": ""}
    for kind, squared_norm in itertools.product(attention_data.DATA, norms):
        draw, seeds = attention_data.DATA[kind], range(attention_data.DATA_SETS)
        pairs = [draw(squared_norm, seed) for seed in seeds]
        column = f"{kind} {squared_norm:g}"
        reference, uniform[column] = errors(pairs, "orf", "none", m, draws)
        for row, scheme in zip(rows, schemes, strict=True):
            plain = scheme == ("orf", "none")
            values = reference if plain else errors(pairs, *scheme, m, draws)[0]
            row[column] = float(values.mean())
            row[f"{column} / orf"] = float(np.exp(np.mean(np.log(values / reference))))
        uniform[f"{column} / orf"] = float(np.exp(np.mean(np.log(uniform[column] / reference))))
        print(column, flush=True)
    rows.append(uniform)
    _plot_vit(rows, norms, out)
    short = [{name: value for name, value in row.items() if not name[-1].isdigit()} for row in rows]
    table = report.table(short, out)
    report.table(rows, _suffixed(out, "absolute"))
    return table


def errors(
    pairs: Sequence[tuple[jax.Array, jax.Array]], name: str, method: str, m: int, draws: int
) -> tuple[np.ndarray, float]:
    """Attention errors on each pair of queries and keys, and the mean one of uniform attention."""
    measured = []
    for query, key in pairs:
        fitted = calibrate(query, key, coupling=name, method=method, scale=1.0)
        options: Any = dict(
            coupling=name, num_features=m, draws=draws, scale=1.0, calibration=fitted
        )
        measured.append(attention_error(query, key, **options))
    uniform = np.mean([error.uniform_attention[0] for error in measured])
    return np.array([error.attention.value[0] for error in measured]), float(uniform)


def against_features(sizes: Sequence[int], draws: int, out: Path) -> str:
    """The error against m on anisotropic data of squared norm 2, beside uniform attention."""
    pairs = [
        attention_data.DATA["anisotropic"](2.0, seed) for seed in range(attention_data.DATA_SETS)
    ]
    rows: list[dict] = []
    drawn, axis = report.figure(out)
    for name, method in CURVES:
        measured = [errors(pairs, name, method, m, draws) for m in sizes]
        values = [float(error.mean()) for error, _ in measured]
        label = name if method == "none" else f"{name}, calibrated"
        rows.append(
            {"coupling": label} | {f"m = {m}": x for m, x in zip(sizes, values, strict=True)}
        )
        axis.plot(sizes, values, marker="o", markersize=3, label=label)
    axis.axhline(measured[0][1], color="black", linestyle=":", label="uniform attention")
    report.log_log(axis, sizes)
    axis.set(xlabel="features m", ylabel="relative attention error")
    report.save(drawn, out)
    return report.table(rows, out)


def _plot_vit(rows: list[dict], norms: Sequence[float], out: Path) -> None:
    drawn, axes = report.figure(out, columns=len(attention_data.DATA))
    for axis, kind in zip(axes, attention_data.DATA, strict=True):
        for number, row in enumerate(rows):
            label = f"{row['coupling']}, {row['calibration']}".removesuffix(", ").removesuffix(
                ", none"
            )
            style = {"none": "--", "": ":"}.get(row["calibration"], "-")
            values = [row[f"{kind} {norm:g}"] for norm in norms]
            color = "black" if row["coupling"] == "uniform" else f"C{number % 10}"
            axis.plot(norms, values, style, label=label, color=color, marker="o", markersize=3)
        report.log_log(axis, norms)
        axis.set(title=kind, xlabel="mean |q|^2 = |k|^2", ylabel="relative attention error")
        axis.get_legend().remove()
    axes[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    report.save(drawn, out)


def _suffixed(out: Path, suffix: str) -> Path:
    safe = "".join(c if c.isalnum() else "_" for c in suffix).strip("_")
    return out.with_name(f"{out.name}_{safe}")


def main(_: list[str]) -> None:
    """Prints the tables."""
    logging.set_verbosity(logging.WARNING)
    out, names, m, draws = Path(_OUT.value), _COUPLINGS.value, _NUM_FEATURES.value, _DRAWS.value
    windows = [int(w) if w.isdecimal() else -1 for w in _EXACT_WINDOW.value]
    try:
        if min(windows, default=0) < 0 or (windows and not _WORKDIR.value):
            raise ValueError(
                f"--exact_window={','.join(_EXACT_WINDOW.value)}: give integers as in 0,16, and the"
                " --workdir of a run, whose tokens have places"
            )
        for name in names:  # all is right before any work starts
            couplings.get(name)
        for method in _CALIBRATIONS.value:
            parts(method)
        if _WORKDIR.value:
            workdir = Path(_WORKDIR.value)
            for name, window in itertools.product(names or [""], windows or [None]):
                target = f"{workdir.name}_{name or 'own'}".replace("*", "_")
                target += "" if window is None else f"_window{window}"
                options: Any = dict(coupling=name, num_features=m, draws=draws, exact_window=window)
                print("" if window is None else f"exact_window={window}\n")
                print(report_attention(workdir, out / target, **options))
            return
        if "figure7" in _PARTS.value:
            print(figure7(names or ("orf", "pnc", "pm"), 40 * draws, out / "figure7"))
        if "vit" in _PARTS.value:
            norms = [float(norm) for norm in _SQUARED_NORMS.value]
            print(vit(names, _CALIBRATIONS.value, norms, m or 128, draws, out / "vit"))
        if "features" in _PARTS.value:
            print(against_features(FEATURES, draws, out / "features"))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")


if __name__ == "__main__":
    _PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "which")
    _WORKDIR = flags.DEFINE_string("workdir", "", "a trained run, instead of the parts")
    _COUPLINGS = flags.DEFINE_list("couplings", [], "names; a selection if none is given")
    _CALIBRATIONS = flags.DEFINE_list("calibrations", list(SCHEMES), "of the part vit")
    _NUM_FEATURES = flags.DEFINE_integer("num_features", 0, "m; 128, or the run's", lower_bound=0)
    _EXACT_WINDOW = flags.DEFINE_list("exact_window", [], "of a run; its own if none is given")
    _SQUARED_NORMS = flags.DEFINE_list("squared_norms", [str(n) for n in NORMS], "|q|^2 = |k|^2")
    _DRAWS = flags.DEFINE_integer("draws", 50, "draws of the frequencies", lower_bound=3)
    _OUT = flags.DEFINE_string("out", "results/attention_mse", "folder of tables and figures")
    app.run(main, flags_parser=parse_flags)
