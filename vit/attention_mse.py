"""Attention error: what couplings and calibrations buy, on synthetic data.

    performer-vit attention-mse                     # the three parts
    performer-vit attention-mse --parts=figure7     # VRC Fig. 7
    performer-vit attention-mse --parts=features    # the error against m
    performer-vit attention-mse --parts=vit --couplings=orf,pm,pm-antithetic

    figure7    kernel variance, kernel covariance and attention error of 16 tokens in 16 dimensions,
               N(0, I / sqrt(d)) as printed, or N(0, I / d)
    vit        relative error |A^ - A|^2 / |A|^2 with 197 tokens, head_dim 64 and m = 128 on three
               kinds of data at several norms; couplings as drawn, calibrated on other tokens, and
               with an exact window. Drawn tokens have no positions: near keys are any keys
    features   the same error on anisotropic data of squared norm 2, against m
Tables (csv, md) and figures (png) go to --out.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from performer import Exact, calibration
from performer import couplings as known
from performer.analysis import attention_error
from performer.calibration import calibrate
from vit.study import harness, inputs, launch

Part = Literal["figure7", "vit", "features"]
SIZES = (16, 32, 48, 64)
COLUMNS = ("variance", "covariance", "attention error")
FEATURES = (16, 32, 64, 128, 256, 512)
CURVES = (("iid", "none"), ("orf", "none"), ("pm-antithetic", "none"), ("pm-antithetic", "full"))
"""Couplings and calibrations against m."""
SCHEMES = {
    "none": (
        *("iid", "orf", "simrf", "pnc", "pm", "fixed"),
        *("orf-antithetic", "pm-antithetic", "fixed-antithetic"),
    ),
    "shift": ("fixed-antithetic",),
    "shift+scale": ("pm-antithetic", "fixed-antithetic"),
    "full": ("orf", "orf-antithetic", "pm-antithetic", "fixed-antithetic"),
}
"""Couplings under each calibration; names that are given replace them under each."""
NEAR = (("pm-antithetic", "full"),)
"""Couplings with an exact window, where no names are given."""
ORF = ("orf", "none", 0)
"""Baseline of the comparison."""
NORM, ERROR = "mean |q|^2 = |k|^2", "relative attention error"
DRAWN = {
    *(("orf", "none"), ("pm-antithetic", "none"), ("fixed-antithetic", "shift")),
    *(("orf-antithetic", "full"), ("pm-antithetic", "full"), ("uniform", "")),
}
"""Couplings and calibrations in the figure of `vit`; its table has all."""


def drawn(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the rows without a window, of more than eight schemes only those in `DRAWN`."""
    rows = [row for row in rows if row["kind"] in inputs.DATA and not row.get("exact window")]
    schemes = [(row["coupling"], row["calibration"]) for row in rows]
    names = [f"{name}, {how}" if how not in ("", "none") else name for name, how in schemes]
    several = zip(rows, schemes, names, strict=True)
    few = len(set(schemes)) < 9
    return [row | {"scheme": name} for row, scheme, name in several if few or scheme in DRAWN]


FIGURES: harness.Figures = {
    "figure7": dict(
        change=lambda rows: [row for row in rows if row["x ~ N(0, .)"] == "I / d"],
        x="m",
        y={name: f"{name}, relative" for name in COLUMNS},
        across=3,
        log="xy",
    ),
    "vit": dict(
        change=drawn,
        x=NORM,
        xlabel="mean |q|² = |k|²",
        line="{scheme}",
        panel="{kind}",
        across=3,
        log="xy",
        ylabel=ERROR,
    ),
    "features": dict(x="m", log="xy", ylabel=ERROR),
}


def figure7(names: Sequence[str], sizes: Sequence[int], draws: int, out: Path) -> str:
    """Measure VRC Fig. 7 in both readings: variance, covariance and attention error against m."""
    rows = []
    for reading, variance in [("I / sqrt(d)", 1 / 4), ("I / d", 1 / 16)]:
        tokens = np.sqrt(variance) * np.random.default_rng(0).normal(size=(8, 16, 1, 16))
        x = jnp.asarray(tokens, jnp.float32)
        for name, m in itertools.product(names, sizes):
            options: Any = dict(num_features=m, draws=draws, scale=1.0, seed=1)
            error = attention_error(x, x, coupling=name, **options)
            estimates = error.variance, error.covariance, error.attention, error.predicted
            line: harness.Row = {"x ~ N(0, .)": reading, "coupling": name, "m": m}
            # The data sets share the draws, so that their standard errors do not average out.
            for column, estimate in zip((*COLUMNS, "predicted"), estimates, strict=True):
                line[column] = float(estimate.value.mean())
                line[f"{column} ±"] = float(estimate.standard_error.mean())
            rows.append(line | {"uniform": float(error.uniform_attention.mean())})
    return harness.show(rows, out, FIGURES)


def vit(
    names: Sequence[str],
    methods: Sequence[str],
    norms: Sequence[float],
    windows: Sequence[int],
    m: int,
    draws: int,
    out: Path,
) -> str:
    """Measure the errors on three kinds of data at several norms.

    Means and standard errors over the data sets, and "ratio", the geometric mean over the data sets
    of the ratio to ORF's errors. The tokens have no positions: a window makes any
    keys exact, a share of all.
    """
    far = [(name, how) for how in methods for name in names or SCHEMES.get(how, SCHEMES["full"])]
    near = far if names else NEAR
    schemes = [(name, how, 0) for name, how in far]
    schemes += [(name, how, window) for window in windows if window for name, how in near]
    rows, keys = [], ("coupling", "calibration", "exact window")
    for kind, norm in itertools.product(inputs.DATA, norms):
        reference, uniform = errors(kind, norm, ORF, m, draws)
        measured = {
            scheme: errors(kind, norm, scheme, m, draws)[0] if scheme != ORF else reference
            for scheme in schemes
        }
        for scheme, values in (measured | {("uniform", "", 0): uniform}).items():
            case = dict(zip(keys, scheme, strict=True)) | {"kind": kind, NORM: norm}
            case["ratio"] = float(np.exp(np.mean(np.log(values / reference))))
            rows += harness.rows_of(case, values)
        print(kind, f"{norm:g}", flush=True)
    table = harness.pivot(rows, f"{{kind}} {{{NORM}:g}}")
    return harness.show(rows, out, {out.name: FIGURES["vit"]}, shown=table)


def errors(
    kind: str, squared_norm: float, scheme: tuple[str, str, int], m: int, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return errors on each data set of (coupling, calibration, window), and of uniform attention.

    The calibration is fitted to as many other tokens of the same distribution. Each data set has
    its own draws, which all couplings share.
    """
    pairs, (name, method, window) = [], scheme
    for seed in range(inputs.DATA_SETS):
        pair = inputs.DATA[kind](squared_norm, seed, 2 * inputs.TOKENS)
        (query, others), (key, other_keys) = (jnp.split(x, 2) for x in pair)
        how: Any = dict(coupling=name, method=method, scale=1.0, mixed=window > 0)
        fitted = calibrate(others, other_keys, **how)
        options: Any = dict(num_features=m, draws=draws, seed=seed, scale=1.0, calibration=fitted)
        error = attention_error(query, key, coupling=name, exact=Exact(window), **options)
        pairs.append((error.attention.value[0], error.uniform_attention[0]))
    scheme_errors, uniform = np.asarray(pairs, np.float64).T
    return scheme_errors, uniform


def against_features(names: Sequence[str], sizes: Sequence[int], draws: int, out: Path) -> str:
    """Measure the error against m on anisotropic data of squared norm 2."""
    rows, baseline = [], []
    for name, method in [(name, "none") for name in names] or CURVES:
        label = name if method == "none" else f"{name}, calibrated"
        by_size = [errors("anisotropic", 2.0, (name, method, 0), m, draws) for m in sizes]
        values, baseline = np.stack(by_size, axis=-1)  # (2, data sets, sizes)
        rows += harness.rows_of({"coupling": label}, values, m=sizes)
        print(label, flush=True)
    rows += harness.rows_of({"coupling": "uniform"}, baseline, m=sizes)
    return harness.show(rows, out, FIGURES, shown=harness.pivot(rows, "m = {m}"))


def main(
    parts: Sequence[Part] = get_args(Part),
    couplings: Sequence[str] = (),
    calibrations: Sequence[str] = tuple(SCHEMES),
    num_features: Sequence[int] = (),
    squared_norms: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0),
    exact_window: Sequence[int] = (),
    draws: int = 50,
    out: Path = Path("results/attention_mse"),
) -> None:
    """Print the tables.

    Args:
        couplings: names; a selection by default.
        calibrations: calibrations of the part vit.
        num_features: each m; by default 128 for vit.
        squared_norms: |q|^2 = |k|^2 of the part vit.
        exact_window: near keys that are exact; by default 16 for one coupling of the part vit.
    """
    for name in couplings:  # refuse before any work
        known.get(name)
    for method in calibrations:
        calibration.parts(method)
    if "figure7" in parts:
        names, sizes = couplings or ("orf", "pnc", "pm"), num_features or SIZES
        figure7(names, sizes, 40 * draws, out / "figure7")
    if "vit" in parts:
        for m in num_features or (128,):
            target = out / ("vit" + f"_{m}" * (len(num_features) > 1))
            windows = exact_window or (16,)
            vit(couplings, calibrations, squared_norms, windows, m, draws, target)
    if "features" in parts:
        sizes = num_features or FEATURES
        against_features(couplings, sizes, draws, out / "features")


if __name__ == "__main__":
    launch.run(main, quick={"draws": 3, "num_features": (16,), "squared_norms": (1.0,)})
