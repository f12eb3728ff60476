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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import qmc

from experiments.common import harness, launch, statistics, tabular
from experiments.tabular import uci
from performer import kernels, theory
from performer.kernels import gp
from performer.typing import Coupling, Frequencies, Key
from vit.reports import report

BITS = 23  # (2^23 - 1/2) / 2^23 is below 1 in float32


def plain_halton(key: Key, m: int, d: int) -> Frequencies:
    """The Halton points 1 to m of SciPy, the same for every key: no row is Gaussian."""
    del key
    points = qmc.Halton(d, scramble=False).random(m + 1)[1:]  # the first point is 0
    return jax.scipy.special.ndtri(jnp.asarray(points.astype(np.float32)))


def sobol(key: Key, m: int, d: int) -> Frequencies:
    """Scrambled Sobol points with a digital shift of each draw, which makes every row N(0, I_d).

    The linear scramble is the same in all draws. The base is 2, of as many points as the next power
    of two, the first m.
    """
    points = qmc.Sobol(d, rng=np.random.default_rng(0)).random_base2((m - 1).bit_length())
    shift = jax.random.bits(key, (1, d), jnp.uint32) >> (32 - BITS)
    digits = jnp.asarray((points[:m] * 2**BITS).astype(np.uint32)) ^ shift
    return jax.scipy.special.ndtri((digits.astype(jnp.float32) + 0.5) / 2**BITS)


BASELINES: dict[str, str | Coupling] = {
    "halton, scrambled": "halton",
    "halton, plain": plain_halton,
    "sobol": sobol,
}
"""Beside the paper's rows. There is no theory of these, or of "halton"."""


def measured(scheme: uci.Scheme, splits: tabular.Splits, scales: gp.Scales, draws: int):
    """The root mean square error of each coupling in each split: {coupling: (s,)}."""
    x, kernel = jnp.asarray(splits.test_x), scheme.kernel
    m, keys = scheme.per_dimension * x.shape[-1], uci.split_keys(len(x), draws)

    def errors(coupling):
        def of_split(split):
            x, lengthscale, keys = split
            exact = kernel(x, x, lengthscale=lengthscale)

            def squared_error(key):
                phi = kernels.random_features(key, kernel, x, m, coupling, lengthscale=lengthscale)
                error = jnp.matmul(phi, phi.T, precision="highest") - exact
                return jnp.mean(error**2)

            return jnp.sqrt(jnp.mean(jax.lax.map(squared_error, keys, batch_size=10)))

        of_splits = jax.jit(partial(jax.lax.map, of_split))
        return np.asarray(of_splits((x, scales.lengthscale, keys)), np.float64)

    return {name: errors(coupling) for name, coupling in scheme.couplings.items()}


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
    rows, in_theory = [], {}
    for coupling, values in errors.items():
        ratio, error = statistics.ratio(values, errors["iid"])
        theory_ratio, apart = "", ""
        if coupling not in ("halton", *BASELINES):
            m = scheme.per_dimension * d
            in_theory[coupling] = np.mean([predicted(scheme, coupling, x, m) for x in scaled])
            theory_ratio = float(in_theory[coupling] / in_theory["iid"])
        word = coupling.split(",")[0]
        theirs = uci.printed("kernel ratio, m = d", scheme.name, word, name)
        if theirs and coupling != "iid":
            apart = (ratio - theirs[0]) / float(np.hypot(error, theirs[1]))
        row = {"data set": name, "d": d, "features": scheme.name, "coupling": coupling}
        row |= {"RMSE": float(values.mean()), "ratio": ratio, "standard error": error}
        row |= {"theory": theory_ratio}
        row |= zip(("paper", "paper's error"), theirs or ("", ""), strict=True)
        rows.append(row | {"apart": apart, "lengthscale": float(np.mean(scales.lengthscale))})
        print(name, scheme.name, coupling, statistics.plus_minus(ratio, error), flush=True)
    return rows


def plot(rows: list[dict], out: Path) -> None:
    """Ratios by data set; diamonds are the paper's."""
    options: Any = dict(panel="VRC Table 1, {features} features", ylabel="kernel RMSE / iid")
    harness.figure(rows, out, x="{data set}", y="ratio", error="standard error", **options)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    splits: int = 20,
    points: int = 256,
    draws: int = 100,
    out: Path = Path("results/tabular/kernel_error"),
) -> None:
    """Print the table."""
    launch.at_least(2, splits=splits, points=points)
    launch.at_least(1, draws=draws)
    rows = []
    for name, parts in uci.tables(data_sets, data_dir, splits, points):
        for scheme in uci.SCHEMES:
            rows += rows_of(name, with_baselines(scheme), parts, draws)
    plot(rows, out / "kernels")
    print(report.table(rows, out / "kernels"))


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "splits": 2, "points": 32, "draws": 4})
