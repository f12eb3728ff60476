"""Attention error: what couplings and calibrations buy, on synthetic data and in a trained model.

    python -m experiments.attention_mse                     # the three parts
    python -m experiments.attention_mse --parts=figure7     # VRC Fig. 7
    python -m experiments.attention_mse --parts=features    # the error against m
    python -m experiments.attention_mse --parts=vit --couplings=orf,pm,pm-antithetic
    python -m experiments.attention_mse --workdir=runs/pm --couplings=pm --num_features=32

    figure7    kernel variance, kernel covariance and attention error of 16 tokens in 16 dimensions,
               N(0, I / sqrt(d)) as printed, or N(0, I / d)
    vit        relative error |A^ - A|^2 / |A|^2 with 197 tokens, head_dim 64 and m = 128 on three
               kinds of data at several norms; couplings as drawn, calibrated on other tokens, and
               with an exact window. Drawn tokens have no places: near keys are a share of all keys
    features   the same error on anisotropic data of squared norm 2, against m
    --workdir  the queries and keys of a trained model on its evaluation images, for each layer and
               head, each coupling and each window
Tables (csv, md) and figures (png) go to --out.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.attention import errors
from experiments.common import launch
from performer import couplings as known
from performer.attention.calibration import parts as parts_of
from vit.reports.attention_report import report_attention

FIGURES = errors.FIGURES
Part = Literal["figure7", "vit", "features"]


def main(
    parts: Sequence[Part] = get_args(Part),
    workdir: Path | None = None,
    couplings: Sequence[str] = (),
    calibrations: Sequence[str] = tuple(errors.SCHEMES),
    num_features: Sequence[int] = (),
    squared_norms: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0),
    exact_window: Sequence[int] = (),
    draws: int = 50,
    out: Path = Path("results/attention_mse"),
) -> None:
    """Print the tables.

    Args:
        workdir: a trained run, instead of the parts.
        couplings: names; a selection by default. The parts vit and features also accept copula and
            copula-antithetic, which are learned.
        calibrations: calibrations of the part vit.
        num_features: each m; by default 128 for vit, and that of the run.
        squared_norms: |q|^2 = |k|^2 of the part vit.
        exact_window: near keys that are exact; by default that of the run, or 16 for one coupling
            of the part vit.
    """
    for name in couplings:  # refuse before any work
        if workdir or "figure7" in parts or name not in errors.LEARNED:
            known.get(name)
    for method in calibrations:
        parts_of(method)
    if workdir:
        windows = exact_window or [None]
        for name, m, w in itertools.product(couplings or [""], num_features or [0], windows):
            target = f"{workdir.name}_{name or 'own'}" + f"_{m}" * (len(num_features) > 1)
            target += f"_window{w}" * (w is not None)
            options: Any = dict(coupling=name, num_features=m, draws=draws, exact_window=w)
            print(report_attention(workdir, out / target.replace("*", "_"), **options))
        return
    if "figure7" in parts:
        names, sizes = couplings or ("orf", "pnc", "pm"), num_features or errors.SIZES
        errors.figure7(names, sizes, 40 * draws, out / "figure7")
    if "vit" in parts:
        for m in num_features or (128,):
            target = out / ("vit" + f"_{m}" * (len(num_features) > 1))
            windows = exact_window or (16,)
            errors.vit(couplings, calibrations, squared_norms, windows, m, draws, target)
    if "features" in parts:
        sizes = num_features or errors.FEATURES
        errors.against_features(couplings, sizes, draws, out / "features")


if __name__ == "__main__":
    launch.run(main, quick={"draws": 3, "num_features": (16,), "squared_norms": (1.0,)})
