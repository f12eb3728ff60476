"""Kernel errors of the couplings, theory next to measurement: SimRF Figs 4 to 7.

    python -m experiments.kernels.conformity --figures=4,5,6,7 --out=results/kernels/conformity

    4   RF-conformity of one draw of lengths (d = 6, v = 1): iid, ORF, SimRF, SimRF+, and the
        arrangement of the same lengths that scipy.optimize finds best
    5   distribution of |w_i + w_j| (d = 6)
    6   mean squared error relative to iid, against v (d = m = 64)
    7   error of the Gram matrix against m (64 points in 64 dimensions, sigma = 0.1)

Each writes a table (csv, md) with a figure (png).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate, optimize, special, stats

from performer import couplings, directions, features, norms, testing, theory
from vit.study import harness, launch, statistics


def arrangement_conformity(vectors: np.ndarray, v: float) -> float:
    """Return the mean over pairs of 0F1(; d/2; v^2 |w_i + w_j|^2 / 4): Eq. 10."""
    m, d = vectors.shape
    squares = np.sum((vectors[:, None] + vectors[None]) ** 2, axis=-1)
    pairs = special.hyp0f1(d / 2, v**2 * squares / 4)
    return float((pairs.sum() - np.trace(pairs)) / (m * (m - 1)))


def figure_4(out: Path) -> None:
    """Arrange one draw of lengths in five ways."""
    d, v = 6, 1.0
    lengths = norms.independent(jax.random.key(4), d, d)
    column = np.asarray(lengths, np.float64)[:, None]

    def conformity_of(flat):
        vectors = flat.reshape(d, d)
        units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        return arrangement_conformity(column * units, v)

    arrangements = {
        "iid": (directions.independent, 100),
        "orf": (directions.orthogonal, 1),
        "simrf": (directions.simplex, 1),
        "simrf+": (directions.simplex_weighted, 1),
    }
    rows = []
    for name, (draw, count) in arrangements.items():
        units = [draw(key, lengths, d) for key in jax.random.split(jax.random.key(0), count)]
        values = [arrangement_conformity(column * np.asarray(x), v) for x in units]
        row = {"arrangement": name, "conformity": float(np.mean(values))}
        rows.append(row | {"sd": float(np.std(values))})
    start = np.asarray(directions.simplex(jax.random.key(1), lengths, d), np.float64)
    best = optimize.minimize(conformity_of, start.ravel(), method="BFGS", options={"gtol": 1e-9})
    rows.append({"arrangement": "numerically optimised", "conformity": float(best.fun), "sd": 0.0})
    harness.show(rows, out, FIGURES)


def pair_lengths(name: str) -> np.ndarray:
    """Sample |w_i + w_j| in 6 dimensions, (20000,)."""
    W = testing.samples(couplings.get(name), 2, 6, 20_000)
    return np.linalg.norm(W[:, 0] + W[:, 1], axis=-1)


def densities(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the points of the densities of |w_i + w_j| in theory."""
    r = np.linspace(1e-6, 12, 400)
    return [
        {"coupling": row["coupling"], "|w_i + w_j|": length, "density": density}
        for row in rows
        for length, density in zip(r, theory.pair_length_pdf(row["coupling"], r, 6), strict=True)
    ]


def histograms(axis: Any, rows: list[harness.Row]) -> None:
    """Draw the samples next to the densities."""
    for line in list(axis.lines):
        line.set_marker("")
        options: Any = dict(bins=60, density=True, histtype="stepfilled", alpha=0.25)
        axis.hist(pair_lengths(str(line.get_label())), color=line.get_color(), **options)


def figure_5(out: Path) -> None:
    """Compare the densities of |w_i + w_j| with 20,000 sampled pairs."""
    d, r, rows = 6, np.linspace(1e-6, 12, 4001), []
    for name in ("iid", "orf", "simrf"):
        lengths, pdf = pair_lengths(name), theory.pair_length_pdf(name, r, d)
        cdf = integrate.cumulative_simpson(pdf, x=r, initial=0)
        test = stats.kstest(lengths, lambda x, cdf=cdf: np.interp(x, r, cdf))
        mean = float(integrate.simpson(pdf * r, x=r))
        row = {"coupling": name, "mean, theory": mean, "mean, measured": float(lengths.mean())}
        rows.append(row | {"Kolmogorov-Smirnov p": float(test.pvalue)})
    harness.show(rows, out, FIGURES)


def mse(name: str, v: np.ndarray) -> np.ndarray:
    """Return the mean squared error of d = 64 frequencies at |x + y| = v, from theory."""
    x = np.multiply.outer(v, np.eye(64)[0] / 2)
    return np.asarray(theory.kernel_mse(name, x, x, 64))


def curves(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the points of the lines in theory, each with what is measured of its coupling."""
    v = np.linspace(0.05, 6, 120)
    return [
        {"coupling": name, "v": x, "ratio": y, "dots": [(r["v"], r["measured"]) for r in measured]}
        for name, measured in harness.grouped(rows, "{coupling}").items()
        for x, y in zip(v, mse(name, v) / mse("iid", v), strict=True)
    ]


def dots(axis: Any, rows: list[harness.Row]) -> None:
    """Draw what is measured."""
    groups = harness.grouped(rows, "{coupling}")
    for line in list(axis.lines):
        line.set(marker="", linestyle="--" if line.get_label() == "pnc" else "-")  # it hides orf
        v, measured = zip(*groups[line.get_label()][0]["dots"], strict=True)
        axis.plot(v, measured, "o", color=line.get_color())


def figure_6(out: Path) -> None:
    """Compare MSEs of d = m = 64 frequencies relative to iid: lines in theory, dots measured.

    Not measured beyond v = 1.5: there rare draws make up the error, and 20,000 seldom hold one.
    """
    d, m, draws, rows = 64, 64, 20_000, []
    for name in ("orf", "pnc", "simrf", "pm-antithetic", "simrf-antithetic"):
        along = testing.samples(couplings.get(name), m, d, draws)[:, :, 0]
        for length in (0.25, 0.5, 1.0, 1.5):
            squares = (np.exp(along * length - length**2 / 2).mean(axis=-1) - 1) ** 2
            expected, scale = (float(mse(k, np.asarray(length))) for k in (name, "iid"))
            row = {"coupling": name, "v": length, "MSE / MSE(iid), theory": expected / scale}
            apart = float((squares.mean() - expected) / (squares.std() / np.sqrt(draws)))
            row |= {"measured": float(squares.mean() / scale), "standard errors apart": apart}
            rows.append(row)
    harness.show(rows, out, FIGURES)


def figure_7(out: Path) -> None:
    """Measure the Gram matrix of 64 Gaussian points, Gaussian kernel, positive features."""
    d, sizes = 64, (16, 32, 64, 128, 256)
    x = 0.1 * jax.random.normal(jax.random.key(7), (64, d))
    exact = jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, axis=-1) / 2)

    def error(key, coupling, m):
        phi = features.positive(x, coupling(key, m, d), kernel="gaussian")
        return statistics.relative_error(phi @ phi.T, exact)

    def measure(case):
        one = partial(error, coupling=couplings.get(case["coupling"]))
        values = [harness.draws(partial(one, m=m), 200, batch_size=50) for m in sizes]
        return np.stack(values, axis=-1)

    names = ("iid", "orf", "pnc", "simrf", "simrf+", "fast-simrf")
    rows = harness.sweep(harness.cases(coupling=names), measure, m=sizes)
    harness.show(rows, out, FIGURES, shown=harness.pivot(rows, "m = {m}"))


PARTS = {"4": figure_4, "5": figure_5, "6": figure_6, "7": figure_7}
FIGURES: harness.Figures = {
    "figure_4": dict(
        x="{arrangement}",
        y="conformity",
        error="sd",
        line="{arrangement}",
        ylabel="RF-conformity (d = 6, v = 1)",
    ),
    "figure_5": dict(
        change=densities, x="|w_i + w_j|", y="density", ylabel="density", finish=histograms
    ),
    "figure_6": dict(
        change=curves,
        x="v",
        y="ratio",
        finish=dots,
        xlabel="v = |x + y|",
        ylabel="MSE / MSE of iid",
        ylim=(0, 1.3),
    ),
    "figure_7": dict(x="m", log="xy", ylabel="relative Frobenius error"),
}


def main(
    figures: Sequence[Literal["4", "5", "6", "7"]] = ("4", "5", "6", "7"),
    out: Path = Path("results/kernels/conformity"),
) -> None:
    """Draw the figures.

    Args:
        figures: figures of SimRF.
    """
    for name in figures:
        PARTS[name](out / f"figure_{name}")


if __name__ == "__main__":
    launch.run(main)
