"""Errors of Matern kernels under coupled frequencies: VRC Fig. 12.

    python -m experiments.matern                          # and the sets that come with scikit-learn
    python -m experiments.matern --data_dir=DIR --data_sets=concrete,abalone

The relative Frobenius error of the Gram matrix against m, for nu = 1/2, 3/2 and 5/2 and lengthscale
1: of the paper's 64 points N(0, I / 8) in 8 dimensions, and of 64 points of each data set,
standardised and divided by sqrt(d) to lie as far apart. The frequencies are multivariate t: the
lengths of `norms.matern` in the place of chi_d, coupled as ever.

Writes matern.csv, matern.md and one png for each set of points to --out.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import launch, statistics, uci
from performer import kernels
from vit import report

ORDERS = (0.5, 1.5, 2.5)
MULTIPLES = (1, 2, 4, 8, 16)
POINTS = 64
COUPLINGS = ("iid", "orf", "pnc")


def gram_errors(kernel: kernels.Kernel, coupling: str, x: jax.Array, draws: int) -> np.ndarray:
    """|K_hat - K|_F over |K|_F, (draws, sizes): the first blocks of a draw are the smaller ones."""
    d, exact = x.shape[-1], kernel(x, x)

    def one(key):
        w = kernels.frequencies(key, kernel, MULTIPLES[-1] * d, d, coupling)
        phis = [kernel.feature_map(x, w[: multiple * d]) for multiple in MULTIPLES]
        return jnp.stack([jnp.linalg.norm(phi @ phi.T - exact) for phi in phis])

    keys = jax.random.split(jax.random.key(0), draws)
    norms = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=10))(keys)
    return np.asarray(norms / jnp.linalg.norm(exact), np.float64)


def errors(name: str, x: jax.Array, draws: int, out: Path) -> list[dict]:
    """The rows of one set of points, and its figure."""
    d, rows = x.shape[-1], []
    sizes = [d * multiple for multiple in MULTIPLES]
    drawn, axes = report.figure(out, columns=len(ORDERS))
    for axis, nu in zip(axes, ORDERS, strict=True):
        for coupling in COUPLINGS:
            row: dict = {"points": name, "d": d, "nu": nu, "coupling": coupling}
            values = gram_errors(kernels.matern(nu), coupling, x, draws)
            for multiple, column in zip(MULTIPLES, values.T, strict=True):
                mean, error = statistics.mean_and_error(column.tolist())
                row[f"m = {multiple}d"] = f"{mean:.4f} ± {error:.4f}"
            axis.plot(sizes, values.mean(axis=0), marker="o", markersize=3, label=coupling)
            rows.append(row)
        axis.set(ylabel="relative Frobenius error", title=f"{name}, nu = {nu}")
        report.log_log(axis, sizes)
    drawn.suptitle("VRC Fig. 12")
    report.save(drawn, out)
    return rows


def main() -> None:
    """Prints the table."""
    out = Path(_OUT.value)
    points = {"synthetic": jax.random.normal(jax.random.key(12), (POINTS, 8)) / 8**0.5}
    for name, splits in uci.tables(1, POINTS):
        x = splits.train_x[0]
        points[name] = jnp.asarray(x / np.sqrt(x.shape[-1]), jnp.float32)
    rows = []
    for name, x in points.items():
        rows += errors(name, x, _DRAWS.value, out / name)
        print(name, flush=True)
    print(report.table(rows, out / "matern"))


if __name__ == "__main__":
    _DRAWS = flags.DEFINE_integer("draws", 500, "draws of the frequencies", lower_bound=2)
    _OUT = flags.DEFINE_string("out", "results/matern", "folder for tables and figures")
    flags.adopt_module_key_flags(uci)
    launch.run(main)
