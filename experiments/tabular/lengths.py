"""Lengths that are assigned to one another by the data's distances: VRC Thm 3.2 beyond small z.

    python -m experiments.tabular.lengths --data_dir=DIR --data_sets=boston_housing,concrete
    python -m experiments.tabular.lengths                 # the sets that come with scikit-learn

For Fourier features pairwise negative coupling (PNC) is the best plan for two lengths while
z = |x - y| is small. Here the plan is the best one for the z of the training points: n equally
likely lengths are assigned to n lengths by one linear assignment, of which the cost is
`theory.transport_cost` averaged over all pairs of training points. Beside it the root mean square
error of the kernel over all pairs of test points, all in closed form: m = d orthogonal frequencies
with independent lengths, PNC, and pairs of the assigned plan, relative to independent frequencies.
Points and lengthscales are those of `experiments.tabular.uci`; --factors multiply the lengthscales,
since smaller ones make z larger. "moved" is the share of lengths whose partner is another than in
PNC by more than a hundredth of all.

Writes lengths.csv and lengths.md to --out.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import interpolate, optimize, stats

from experiments.common import launch, statistics
from experiments.tabular import uci
from performer import theory
from vit import report

LENGTHS = 400
QUANTILES = 64
"""Of z^2 among the training points."""


def lengths_of(d: int) -> np.ndarray:
    """Equally likely values of chi_d, rising."""
    return stats.chi(d).ppf((np.arange(LENGTHS) + 0.5) / LENGTHS)


def squared_distances(x: np.ndarray) -> np.ndarray:
    """|x_i - x_j|^2 of all pairs, (n, d) -> (n, n)."""
    squares = np.sum(x**2, axis=-1)
    return np.maximum(squares[:, None] + squares - 2 * x @ x.T, 0)


def plan(squares: np.ndarray, d: int) -> np.ndarray:
    """The partner of each of `lengths_of(d)` that has the least cost on average over these z^2."""
    sums = np.add.outer(lengths_of(d) ** 2, lengths_of(d) ** 2)
    grid = np.linspace(sums.min(), sums.max(), 1000)  # the cost of a pair is a function of the sum
    equal = np.sqrt(grid / 2)[:, None] * np.ones(2)
    cost = theory.transport_cost(equal, -squares[:, None], d).mean(axis=0)
    return optimize.linear_sum_assignment(interpolate.CubicSpline(grid, cost)(sums))[1]


def pair_means(partner: np.ndarray, squares: np.ndarray, d: int) -> np.ndarray:
    """E cos(w_1.z) cos(w_2.z) of an orthogonal pair under the plan, for each z^2."""
    lengths = lengths_of(d)
    pairs = np.stack([lengths, lengths[partner]], axis=-1)
    return theory.transport_cost(pairs, -squares[:, None], d).mean(axis=-1) / 2


def errors(train: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Root mean square errors on scaled test points, and how much the plan differs from PNC."""
    d = train.shape[-1]
    backwards = np.arange(LENGTHS)[::-1]
    between = squared_distances(train)[np.triu_indices(len(train), 1)]
    partner = plan(np.quantile(between, (np.arange(QUANTILES) + 0.5) / QUANTILES), d)
    squares = squared_distances(test)
    z = np.linspace(0, np.sqrt(squares.max()), 200)
    x = z[:, None] / 2 * np.eye(d)[0]
    curves = {
        name: theory.kernel_mse(name, x, -x, d, features="trigonometric")
        for name in ("iid", "orf", "pnc")
    }
    of_plan, of_pnc = (pair_means(p, z**2, d) for p in (partner, backwards))
    coupled = 2 * (d // 2)  # ordered pairs of a block
    curves["assigned"] = curves["pnc"] + coupled / d**2 * (of_plan - of_pnc)
    means = {k: np.interp(np.sqrt(squares), z, curve).mean() for k, curve in curves.items()}
    moved = float(np.mean(np.abs(partner - backwards) > LENGTHS / 100))
    return {k: float(np.sqrt(mean)) for k, mean in means.items()} | {
        "mean z^2": float(between.mean()),
        "moved": moved,
    }


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    factors: Sequence[float] = (1.0, 0.5, 0.25),
    splits: int = 20,
    points: int = 256,
    out: Path = Path("results/tabular/lengths"),
) -> None:
    """Prints the table.

    Args:
        data_dir: folder of csv files; scikit-learn's sets without.
        data_sets: names; all there are if none is given.
        factors: of the fitted lengthscales.
        splits: random splits.
        points: training and test points at most.
        out: folder for the table.
    """
    launch.at_least(2, splits=splits, points=points)
    launch.at_least(1e-3, factors=min(factors))
    rows = []
    for name, parts in uci.tables(data_sets, data_dir, splits, points):
        scales = np.asarray(uci.hyperparameters(name, uci.SCHEMES[0], parts).lengthscale, float)
        for factor in factors:
            scaled = zip(parts.train_x, parts.test_x, factor * scales, strict=True)
            found = [errors(train / length, test / length) for train, test, length in scaled]
            by_name = {k: np.array([of_split[k] for of_split in found]) for k in found[0]}
            row: dict = {"data set": name, "d": parts.test_x.shape[-1], "factor": factor}
            row |= {key: float(by_name[key].mean()) for key in ("mean z^2", "moved")}
            for coupling in ("orf", "pnc", "assigned"):
                row[coupling] = statistics.plus_minus(
                    *statistics.ratio(by_name[coupling], by_name["iid"])
                )
            value, error = statistics.ratio(by_name["assigned"], by_name["pnc"])
            row["assigned / pnc - 1"] = f"{value - 1:.1e} ± {error:.0e}"
            rows.append(row)
            print(name, factor, row["assigned / pnc - 1"], flush=True)
    print(report.table(rows, out / "lengths"))


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "splits": 2, "points": 32})
