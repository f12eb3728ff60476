"""Couplings of the lengths learned by gradient: VRC Fig. 6.

    python -m experiments.tabular.copula --data_dir=DIR --data_sets=boston_housing
    python -m experiments.tabular.copula                  # the sets that come with scikit-learn

A Gaussian copula over the d lengths of orthogonal frequencies (`experiments.tabular.learned`) is
trained on the kernel error (VRC Eq. 35) of the training points of the first split, from a random
start, for m = d Fourier and, with their negatives, m = 2 d Laplace frequencies. Points and
lengthscales are those of `experiments.tabular.uci`. The figure has the running mean of the loss and
the mean losses of the fixed couplings. The table has the mean errors of fresh draws on training and
test points, and the difference to "+ pnc" in its standard errors.

Writes copula and figure_6 (csv, md, png) to --out.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import signal

from experiments.tabular import learned, sets, uci
from performer import couplings
from performer.typing import Coupling
from vit.study import harness, launch, statistics

SMOOTHING, EVERY = 0.98, 10
"""The running mean of the losses in the figure, and every how many steps it has a point."""
TRAIN_DRAWS = 8
"""Draws in each training step."""
FIGURES: harness.Figures = {
    "figure_6": dict(
        x="step",
        y="training RMSE",
        panel="{data set}, {features}",
        across=2,
        ylabel="training RMSE of the kernel",
        finish=lambda axis, _: axis.lines[0].set_marker(""),
    )
}


def scheme_rows(
    name: str,
    scheme: uci.Scheme,
    splits: sets.Split,
    *,
    num_steps: int,
    draws: int,
) -> tuple[list[dict], np.ndarray]:
    """Learn the copula for one kind of features; return rows and training losses."""
    splits = sets.Split(*(part[:1] for part in splits))
    lengthscale = float(
        np.asarray(uci.hyperparameters(name, splits, uci.fixes_lengthscale(scheme, 1)).lengthscale)[
            0
        ]
    )
    points = (jnp.asarray(x[0], jnp.float32) for x in (splits.train_x, splits.test_x))
    rmse = partial(learned.kernel_rmse, lengthscale=lengthscale)
    train, test = (rmse(x, scheme.kernel.feature_map) for x in points)
    d = splits.train_x.shape[-1]
    m = scheme.per_dimension * d

    def build(theta: jax.Array) -> Coupling:
        """Return orthogonal frequencies, with their negatives for Laplace features."""
        coupling = learned.orthogonal(theta)
        return coupling if scheme.name == "Fourier" else couplings.Antithetic(coupling)

    def errors(loss: learned.Loss, coupling: Coupling) -> np.ndarray:
        """Return the loss of each of `draws` fresh draws, which all couplings share."""
        return harness.draws(lambda key: loss(coupling(key, m, d)), draws, seed=1)

    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
    options: Any = dict(num_features=m, coupling=build, optimizer=optimizer)
    options |= dict(num_draws=TRAIN_DRAWS, num_steps=num_steps)
    start = jax.random.normal(jax.random.key(0), (d * (d - 1) // 2,))
    learn = jax.jit(lambda start: learned.learn(jax.random.key(2), train, start, **options))
    theta, losses = learn(start)
    chosen = {word: couplings.get(name) for word, name in scheme.couplings.items()}
    chosen |= {"copula, at the start": build(start), "copula, learned": build(theta)}
    on_test = {word: errors(test, coupling) for word, coupling in chosen.items()}
    rows, pnc = [], on_test["+ pnc"]
    for word, values in on_test.items():
        apart, error = statistics.mean_and_error(values - pnc)
        mean, error = statistics.mean_and_error(values)
        row = {"data set": name, "d": d, "features": scheme.name, "coupling": word}
        row |= {"training RMSE": errors(train, chosen[word]).mean()}
        row |= {"test RMSE": mean, "standard error": error}
        row |= {"to + pnc": apart / pnc.mean(), "±": error / pnc.mean()}
        rows.append(row | {"standard errors apart": apart / error if error else 0.0})
        print(f"{name} {scheme.name} {word} {mean:.4f}", flush=True)
    return rows, np.asarray(losses)


def curve(rows: list[harness.Row], losses: np.ndarray) -> list[harness.Row]:
    """Return VRC Fig. 6: the running mean of the training losses, and those of fixed couplings."""
    smooth, _ = signal.lfilter([1 - SMOOTHING], [1, -SMOOTHING], losses, zi=[SMOOTHING * losses[0]])
    steps = range(0, len(losses), EVERY)
    lines = [("copula", step, float(smooth[step])) for step in steps]
    lines += [(row["coupling"], "", row["training RMSE"]) for row in rows[:-2]]
    return [
        {k: rows[0][k] for k in ("data set", "features")}
        | dict(zip(("coupling", "step", "training RMSE"), line, strict=True))
        for line in lines
    ]


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    points: int = 256,
    steps: int = 1000,
    draws: int = 1000,
    out: Path = Path("results/tabular/copula"),
) -> None:
    """Print the table.

    Args:
        steps: training steps.
        draws: for the table.
    """
    rows, curves = [], []
    for name, splits in uci.tables(data_sets, data_dir, 20, points):
        for scheme in uci.SCHEMES:
            lines, losses = scheme_rows(name, scheme, splits, num_steps=steps, draws=draws)
            curves += curve(lines, losses)
            rows += lines
    harness.show(rows, out / "copula")
    harness.show(curves, out / "figure_6", FIGURES)


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "points": 32, "steps": 10, "draws": 20})
