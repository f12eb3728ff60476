"""Kernel errors of VRC Tables 1 and 4 by the noise of the draws alone.

    python -m experiments.tabular.draws --data_dir=DIR --data_sets=abalone,boston_housing

`experiments.tabular.gp` has errors over the folds, which are the same for the paper and for every
coupling: most of such an error is common, and hardly any two couplings are told apart by it. Here a
value varies only with the draws of the frequencies, fold by fold. It agrees with the printed one
if it is within two joint standard errors of the draws (the paper has 5,000 in a fold for Fourier
features, 500 for Laplace features) and half a unit of the last printed digit.

With Laplace features "orthogonal" can be read in several ways, and draws.csv has further rows:

    orthogonal, + pnc   d orthogonal frequencies and their negatives (App. B.1; in the tables)
    own lengths         d orthogonal directions and their opposites, each with its own length
    own lengths, pnc    the same with lengths coupled in pairs, among the d and among the opposites
    two blocks          two independent orthogonal blocks of d

Writes draws.csv to --out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tabular import gp, sets, uci
from performer import directions, norms
from performer.typing import Frequencies, Key
from vit.study import harness, launch

THEIRS = {"Fourier": 5000, "Laplace": 500}
"""Draws of the paper in each fold."""


@partial(jax.jit, static_argnames="kernel")
def kernel_errors(stacked: gp.Split, frequencies: jax.Array, kernel: Any) -> jax.Array:
    """Return the root mean squared error of the Gram matrix of each draw, (s, draws)."""

    def split_errors(arguments):
        split, draws_of_split = arguments
        exact = gp.gram(split, split.test_x, split.test_x)
        lengthscale, output_scale, _ = split.scales

        def error(w):
            phi = kernel.feature_map(
                split.test_x, w, lengthscale=lengthscale, output_scale=output_scale
            )
            return jnp.sqrt(jnp.mean((phi @ phi.T - exact) ** 2))

        return jax.lax.map(error, draws_of_split)

    return jax.lax.map(split_errors, (stacked, frequencies))


def mean_of_draws(errors: np.ndarray) -> tuple[float, float]:
    """Return the mean of (s, draws) and its standard error over the draws, the folds given."""
    folds, draws = errors.shape
    within = errors - errors.mean(axis=1, keepdims=True)
    return float(errors.mean()), float(np.sqrt((within**2).sum() / (draws - 1) / draws) / folds)


def ratio_of_draws(errors: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Return the ratio of two means, and its standard error over the paired draws."""
    value = errors.mean() / reference.mean()
    return float(value), mean_of_draws(errors - value * reference)[1] / float(reference.mean())


def rows_of(name: str, splits: sets.Split, draws: int) -> list[harness.Row]:
    """Return a row for each kind of features, number of them and coupling."""
    rows = []
    for scheme, multiple in ((s, k) for s in uci.SCHEMES for k in gp.MULTIPLES):
        stacked = gp.split_of(name, splits, uci.fixes_lengthscale(scheme, multiple))
        d, errors = stacked.x.shape[-1], {}
        chosen = {k: v for k, v in scheme.couplings.items() if k != "sobol"}
        if scheme.name == "Laplace":
            chosen |= {"own lengths": partial(opposite, length=norms.independent)}
            chosen |= {"own lengths, pnc": partial(opposite, length=norms.pairwise)}
            chosen |= {"two blocks": "orf"}
        for word, coupling in chosen.items():
            options: Any = dict(kernel=scheme.kernel, coupling=coupling, multiple=multiple)
            keys = uci.split_keys(len(splits.scale), draws)
            w = gp.ensembles(keys, **options, m=scheme.per_dimension * d, d=d)
            errors[word] = np.asarray(kernel_errors(stacked, w, scheme.kernel))
        m, quantity = ("d", "kernel ratio") if multiple == 1 else ("8d", "kernel RMSE")
        for word, values in errors.items():
            ours = ratio_of_draws(values, errors["iid"]) if multiple == 1 else mean_of_draws(values)
            row = {"data set": name, "features": scheme.name, "m": m, "coupling": word}
            printed = uci.printed(f"{quantity}, m = {m}", scheme.name, word, name)
            row |= {"quantity": quantity, "value": ours[0], "value ±": ours[1]}
            row |= {"paper": printed[0] if printed else ""}
            row |= {"paper ±": ours[1] * (draws / THEIRS[scheme.name]) ** 0.5 if printed else ""}
            rows.append(row)
        print(name, scheme.name, m, flush=True)
    return rows


def opposite(key: Key, m: int, d: int, *, length: Callable) -> Frequencies:
    """Return m / 2 orthogonal directions with lengths, and their opposites with other lengths."""
    of_directions, first, second = jax.random.split(key, 3)
    units = directions.orthogonal(of_directions, jnp.ones(m // 2), d)
    lengths = [length(of_length, m // 2, d)[:, None] for of_length in (first, second)]
    return jnp.concatenate([lengths[0] * units, -lengths[1] * units])


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    splits: int = 20,
    points: int = 256,
    draws: int = 100,
    out: Path = Path("results/tabular/draws"),
) -> None:
    """Print the table.

    Args:
        draws: in each split.
    """
    rows = []
    with jax.enable_x64(True):
        for name, table in uci.tables(data_sets, data_dir, splits, points):
            rows += rows_of(name, table, draws)
            jax.clear_caches()
    harness.show(rows, out / "draws")


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "splits": 2, "points": 32, "draws": 2})
