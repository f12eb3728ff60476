"""Kernel errors on tabular data: VRC Table 1.

    python -m experiments.tabular.kernel_error --data_dir=DIR --data_sets=boston_housing,concrete
    python -m experiments.tabular.kernel_error            # the sets that come with scikit-learn

The root mean square error of the Gaussian kernel over all pairs of test points and over the draws,
with m = d Fourier or m = 2 d Laplace frequencies, divided by that of independent ones; means over
the splits. `experiments.tabular.uci` says which points, at which lengthscale. "theory" is the
closed form of `performer.theory` on the same points, "paper" Table 1, "apart" the difference to it
in units of the joint standard error. With Laplace features rare draws make up much of the error
where points lie far out: the measured error is then below the theory's until there are very many
draws.

The paper does not say which Halton points it has. "halton" are plain ones, shifted modulo 1 in each
draw, which have its Fourier ratios; beside them are scrambled and shifted ones (`couplings.halton`)
and plain ones as they are, the same in each draw; and scrambled Sobol points, which the paper's
earlier version has.

Writes kernels.csv, kernels.md and kernels.png to --out.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import launch, statistics, tabular
from experiments.tabular import low_discrepancy, published, uci
from performer import gp, kernels, theory
from performer.typing import Coupling
from vit import report

BASELINES: dict[str, str | Coupling] = {
    "halton, scrambled": "halton",
    "halton, plain": low_discrepancy.plain_halton,
    "sobol": low_discrepancy.sobol,
}
"""Beside the paper's rows. There is no theory of these, or of "halton"."""


def measured(scheme: uci.Scheme, splits: tabular.Splits, scales: gp.Scales, draws: int):
    """The root mean square error of each coupling in each split: {coupling: (s,)}."""
    x = jnp.asarray(splits.test_x)
    d = x.shape[-1]
    keys = uci.split_keys(len(x), draws)

    @jax.jit(static_argnames="name")
    def errors(x, lengthscale, keys, name):
        coupling, kernel = scheme.couplings[name], scheme.kernel
        m = scheme.per_dimension * d

        def one(split):
            x, lengthscale, keys = split
            exact = kernel(x, x, lengthscale=lengthscale)

            def squared_error(key):
                phi = kernels.random_features(key, kernel, x, m, coupling, lengthscale=lengthscale)
                error = jnp.matmul(phi, phi.T, precision="highest") - exact
                return jnp.mean(error**2)

            return jnp.sqrt(jnp.mean(jax.lax.map(squared_error, keys, batch_size=10)))

        return jax.lax.map(one, (x, lengthscale, keys))

    return {
        name: np.asarray(errors(x, scales.lengthscale, keys, name), np.float64)
        for name in scheme.couplings
    }


def with_baselines(scheme: uci.Scheme) -> uci.Scheme:
    """The same with `BASELINES` after the paper's Halton points."""
    first = {word: scheme.couplings[word] for word in ("iid", "halton")}
    return scheme._replace(couplings=first | BASELINES | scheme.couplings)


def predicted(scheme: uci.Scheme, coupling: str, x: np.ndarray, m: int) -> float:
    """The root mean square error in closed form, for the scaled points (n, d) of one split."""
    d, squares = x.shape[-1], np.sum(x**2, axis=-1)
    products, norms = 2 * x @ x.T, squares[:, None] + squares
    fourier = scheme.name == "Fourier"
    apart = np.sqrt(np.maximum(norms - products if fourier else norms + products, 0))
    grid = np.linspace(0, apart.max(), 200)  # the error is a smooth function of |x - y| or |x + y|
    point = grid[:, None] / 2 * np.eye(d)[0]
    kind = "trigonometric" if fourier else "positive"
    error = theory.kernel_mse(
        scheme.couplings[coupling], point, -point if fourier else point, m, features=kind
    )
    if fourier:
        return float(np.sqrt(np.interp(apart, grid, error).mean()))
    # e^{-2|x|^2 - 2|y|^2} is in front, e^{-v^2} where both are v / 2.
    error = np.interp(apart, grid, error * np.exp(grid**2)) * np.exp(-2 * norms)
    return float(np.sqrt(error.mean()))


def rows_of(name: str, scheme: uci.Scheme, splits: tabular.Splits, draws: int) -> list[dict]:
    """The rows of one data set and one kind of features."""
    scales = uci.hyperparameters(name, scheme, splits)
    errors = measured(scheme, splits, scales, draws)
    uci.check_finite(name, scheme, "kernel estimates", errors)
    d = splits.test_x.shape[-1]
    scaled = splits.test_x / np.asarray(scales.lengthscale, np.float64)[:, None, None]
    in_theory = {
        coupling: float(
            np.mean([predicted(scheme, coupling, x, scheme.per_dimension * d) for x in scaled])
        )
        for coupling in errors
        if coupling not in ("halton", *BASELINES)
    }
    rows = []
    for coupling, values in errors.items():
        ours, error = statistics.ratio(values, errors["iid"])
        word = coupling.split(",")[0]
        theirs = published.value("kernel ratio, m = d", scheme.name, word, name)
        row = {
            "data set": name,
            "d": d,
            "features": scheme.name,
            "coupling": coupling,
            "RMSE": float(values.mean()),
            "ratio": ours,
            "standard error": error,
            "theory": in_theory[coupling] / in_theory["iid"] if coupling in in_theory else "",
            "paper": "",
            "paper's error": "",
            "apart": "",
            "lengthscale": float(np.mean(scales.lengthscale)),
        }
        if theirs:
            row |= {"paper": theirs[0], "paper's error": theirs[1]}
        if theirs and coupling != "iid":
            row["apart"] = (ours - theirs[0]) / float(np.hypot(error, theirs[1]))
        rows.append(row)
        print(name, scheme.name, coupling, statistics.plus_minus(ours, error), flush=True)
    return rows


def plot(rows: list[dict], out: Path) -> None:
    """Ratios by data set: ours as bars, the paper's as diamonds."""
    drawn, axes = report.figure(out, columns=2)
    for axis, scheme in zip(axes, uci.SCHEMES, strict=True):
        shown = [row for row in rows if row["features"] == scheme.name]
        sets, couplings = (
            list(dict.fromkeys(r[by] for r in shown)) for by in ("data set", "coupling")
        )
        width = 0.8 / len(couplings)
        for number, coupling in enumerate(couplings):
            mine = [row for row in shown if row["coupling"] == coupling]
            at = np.arange(len(sets)) + (number - (len(couplings) - 1) / 2) * width
            values, errors = ([row[name] for row in mine] for name in ("ratio", "standard error"))
            axis.bar(at, values, width, yerr=errors, label=coupling)
            theirs = [(a, row["paper"]) for a, row in zip(at, mine, strict=True) if row["paper"]]
            axis.plot(*np.array(theirs).T if theirs else ([], []), "kD", markersize=4)
        axis.plot([], [], "kD", markersize=4, label="the paper's")
        axis.set_xticks(range(len(sets)), sets, rotation=25, ha="right")
        axis.set(ylabel="kernel RMSE / iid", title=f"VRC Table 1, {scheme.name} features")
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    report.save(drawn, out)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    splits: int = 20,
    points: int = 256,
    draws: int = 100,
    out: Path = Path("results/tabular/kernel_error"),
) -> None:
    """Prints the table.

    Args:
        data_dir: folder of csv files; scikit-learn's sets without.
        data_sets: names; all there are if none is given.
        splits: random splits.
        points: training and test points at most.
        draws: of the frequencies per split.
        out: folder for tables and figures.
    """
    launch.at_least(2, splits=splits, points=points)
    launch.at_least(1, draws=draws)
    rows = [
        row
        for name, parts in uci.tables(data_sets, data_dir, splits, points)
        for scheme in uci.SCHEMES
        for row in rows_of(name, with_baselines(scheme), parts, draws)
    ]
    plot(rows, out / "kernels")
    print(report.table(rows, out / "kernels"))


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "splits": 2, "points": 32, "draws": 4})
