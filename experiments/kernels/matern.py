"""Errors of Matern kernels under coupled frequencies: VRC Fig. 12.

    python -m experiments.kernels.matern            # and the sets that come with scikit-learn
    python -m experiments.kernels.matern --data_dir=DIR --data_sets=concrete,abalone

The relative Frobenius error of the Gram matrix against m, for nu = 1/2, 3/2 and 5/2 and lengthscale
1. Points are the paper's 64, N(0, I / 8) in 8 dimensions, and 64 of each data set, standardised and
divided by sqrt(d). The frequencies are multivariate t: the
lengths of `norms.matern` instead of chi_d, in the same couplings.

Writes matern (csv, md, png) to --out.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.tabular import sets
from performer import kernels
from vit.study import harness, launch, statistics

MULTIPLES = (1, 2, 4, 8, 16)
POINTS = 64
COUPLINGS = ("iid", "orf", "pnc")
FIGURES: harness.Figures = {
    "matern": dict(
        x="m / d",
        panel="{points}, nu = {nu}",
        across=3,
        log="xy",
        ylabel="relative Frobenius error",
    )
}


def gram_errors(kernel: kernels.Kernel, coupling: str, x: jax.Array, draws: int) -> np.ndarray:
    """Return |K_hat - K|_F / |K|_F, (draws, sizes); smaller m are the first blocks of a draw."""
    d, exact = x.shape[-1], kernel(x, x)

    def one(key):
        w = kernels.frequencies(key, kernel, MULTIPLES[-1] * d, d, coupling)
        phis = jax.vmap(lambda block: kernel.feature_map(x, block))(w.reshape(-1, d, d))
        sums = jnp.cumsum(jnp.einsum("bnf,bkf->bnk", phis, phis), axis=0)
        means = [sums[multiple - 1] / multiple for multiple in MULTIPLES]
        return jnp.stack([statistics.relative_error(mean, exact) for mean in means])

    return harness.draws(one, draws)


def errors(name: str, x: jax.Array, orders: Sequence[float], draws: int) -> list[harness.Row]:
    """Return the rows of one set of points."""
    return harness.sweep(
        harness.cases(points=[name], d=[x.shape[-1]], nu=orders, coupling=COUPLINGS),
        lambda case: gram_errors(kernels.matern(case["nu"]), case["coupling"], x, draws),
        **{"m / d": MULTIPLES},
    )


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    orders: Sequence[float] = (0.5, 1.5, 2.5),
    draws: int = 500,
    out: Path = Path("results/kernels/matern"),
) -> None:
    """Print the table.

    Args:
        orders: nu of each kernel.
    """
    points = {"synthetic": jax.random.normal(jax.random.key(12), (POINTS, 8)) / 8**0.5}
    for name in sets.names(data_sets, "regression", data_dir):
        x = sets.load(name, "regression", data_dir).x
        x = np.random.default_rng(0).choice(x, POINTS, replace=False)
        points[name] = jnp.asarray(stats.zscore(x) / np.sqrt(x.shape[-1]), jnp.float32)
    rows = [row for name, x in points.items() for row in errors(name, x, orders, draws)]
    harness.show(rows, out / "matern", FIGURES, shown=harness.pivot(rows, "m = {m / d}d"))


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "orders": (1.5,), "draws": 4})
