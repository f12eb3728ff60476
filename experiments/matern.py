"""Errors of Matern kernels under coupled frequencies: VRC Fig. 12.

    python -m experiments.matern                          # and the sets that come with scikit-learn
    python -m experiments.matern --data_dir=DIR --data_sets=concrete,abalone

The relative Frobenius error of the Gram matrix against m, for nu = 1/2, 3/2 and 5/2 and lengthscale
1: of the paper's 64 points N(0, I / 8) in 8 dimensions, and of 64 points of each data set,
standardised and divided by sqrt(d) to lie as far apart. The frequencies are multivariate t: the
lengths of `norms.matern` in the place of chi_d, coupled as ever.

Writes matern.csv, matern.md and one png for each set of points to --out.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import launch, statistics, uci
from performer import couplings, directions, features, kernels, norms
from performer.typing import Coupling
from vit import report

ORDERS = (0.5, 1.5, 2.5)
MULTIPLES = (1, 2, 4, 8, 16)
POINTS = 64
PARTS = {
    "iid": (directions.independent, norms.independent),
    "orf": (directions.orthogonal, norms.independent),
    "pnc": (directions.orthogonal, norms.pairwise),
}


def gram_errors(coupling: Coupling, x: jax.Array, exact: jax.Array, draws: int) -> np.ndarray:
    """|K_hat - K|_F over |K|_F, (draws, sizes): the first blocks of a draw are the smaller ones."""
    d = x.shape[-1]

    def one(key):
        w = coupling(key, MULTIPLES[-1] * d, d)
        phis = [features.trigonometric(x, w[: multiple * d]) for multiple in MULTIPLES]
        return jnp.stack([jnp.linalg.norm(phi @ phi.T - exact) for phi in phis])

    keys = jax.random.split(jax.random.key(0), draws)
    found = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=10))(keys)
    return np.asarray(found / jnp.linalg.norm(exact), np.float64)


def errors(name: str, x: jax.Array, draws: int, out: Path) -> list[dict]:
    """The rows of one set of points, and its figure."""
    d, rows = x.shape[-1], []
    sizes = [d * multiple for multiple in MULTIPLES]
    drawn, axes = report.figure(out, columns=len(ORDERS))
    for axis, nu in zip(axes, ORDERS, strict=True):
        exact = kernels.matern(nu)(x, x)
        for coupling, (draw_directions, draw_norms) in PARTS.items():
            draw_norms = partial(draw_norms, quantile=norms.matern(nu))
            coupled = couplings.Blocks(draw_directions, draw_norms)
            row: dict = {"points": name, "d": d, "nu": nu, "coupling": coupling}
            found = gram_errors(coupled, x, exact, draws)
            for multiple, of_size in zip(MULTIPLES, found.T, strict=True):
                mean, error = statistics.mean_and_error(of_size.tolist())
                row[f"m = {multiple}d"] = f"{mean:.4f} ± {error:.4f}"
            axis.plot(sizes, found.mean(axis=0), marker="o", markersize=3, label=coupling)
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
