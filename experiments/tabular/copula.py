"""Couplings of the lengths learned by gradient: VRC Fig. 6.

    python -m experiments.tabular.copula --data_dir=DIR --data_sets=boston_housing
    python -m experiments.tabular.copula                  # the sets that come with scikit-learn

A Gaussian copula over the d lengths of orthogonal frequencies (`performer.copula`) is trained on
the kernel error (VRC Eq. 35) of the training points of one split, from a random start, for m = d
Fourier and, with their negatives, m = 2 d Laplace frequencies; points and lengthscales are those of
`experiments.tabular.uci`. The figure has the loss of each step and its running mean beside the mean
losses of the fixed couplings; the table the mean errors of fresh draws on training and test points,
and how far the learned coupling is from "+ pnc", in standard errors of the difference.

Writes copula.csv, copula.md, correlations.npz (the learned matrices) and one png for each data set.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import launch, statistics, tabular
from experiments.tabular import uci
from performer import copula, couplings
from performer.typing import Coupling
from vit import report

SMOOTHING = 0.98  # of the running mean in the figure


def coupled(scheme: uci.Scheme) -> Callable[[jax.Array], Coupling]:
    """theta -> coupling: orthogonal, and with their negatives for Laplace features."""
    if scheme.name == "Fourier":
        return copula.orthogonal
    return lambda theta: couplings.Antithetic(copula.orthogonal(theta))


def mean_errors(loss: copula.Loss, coupling: Coupling, m: int, d: int, draws: int) -> np.ndarray:
    """The loss of each of `draws` fresh draws."""
    keys = jax.random.split(jax.random.key(1), draws)
    one = jax.jit(lambda keys: jax.lax.map(lambda k: loss(coupling(k, m, d)), keys, batch_size=10))
    return np.asarray(one(keys), np.float64)


def of_scheme(
    name: str,
    scheme: uci.Scheme,
    splits: tabular.Splits,
    *,
    num_steps: int,
    train_draws: int,
    draws: int,
) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """The rows of one kind of features, the losses in training and the learned correlations."""
    lengthscale = float(np.asarray(uci.hyperparameters(name, scheme, splits).lengthscale)[0])
    train, test = (
        copula.kernel_rmse(
            jnp.asarray(x[0], jnp.float32), scheme.kernel.feature_map, lengthscale=lengthscale
        )
        for x in (splits.train_x, splits.test_x)
    )
    d = splits.train_x.shape[-1]
    m = scheme.per_dimension * d
    start = jax.random.normal(jax.random.key(0), (d * (d - 1) // 2,))
    build = coupled(scheme)
    theta, losses = jax.jit(
        lambda start: copula.learn(
            jax.random.key(2),
            train,
            start,
            num_features=m,
            coupling=build,
            num_draws=train_draws,
            num_steps=num_steps,
            optimizer=optax.adam(optax.cosine_decay_schedule(0.1, num_steps)),
        )
    )(start)
    uci.check_finite(name, scheme, "losses", {"copula": np.asarray(losses)[None]})
    schemes = {word: couplings.get(name) for word, name in scheme.couplings.items()}
    schemes |= {"copula, at the start": build(start), "copula, learned": build(theta)}
    errors = {
        word: [mean_errors(loss, c, m, d, draws) for loss in (train, test)]
        for word, c in schemes.items()
    }
    rows = []
    for word, (on_train, on_test) in errors.items():
        apart, error = statistics.mean_and_error(on_test - errors["+ pnc"][1])  # shared keys
        row = {"data set": name, "d": d, "features": scheme.name, "coupling": word}
        row |= {
            "training RMSE": on_train.mean(),
            "test RMSE": on_test.mean(),
            "standard error": statistics.mean_and_error(on_test)[1],
            "to + pnc": apart / errors["+ pnc"][1].mean(),
            "±": error / errors["+ pnc"][1].mean(),
            "standard errors apart": apart / error if error else 0.0,
        }
        rows.append(row)
        print(f"{name} {scheme.name} {word} {row['test RMSE']:.4f}", flush=True)
    factor = copula.cholesky(theta)
    return rows, np.asarray(losses), np.asarray(factor @ factor.T)


def plot(curves: dict[str, tuple[list[dict], np.ndarray]], out: Path) -> None:
    """VRC Fig. 6: the training curve beside the fixed couplings' losses."""
    drawn, axes = report.figure(out, columns=len(curves))
    for axis, (name, (rows, losses)) in zip(axes, curves.items(), strict=True):
        smooth, value = [], losses[0]
        for loss in losses:
            value = SMOOTHING * value + (1 - SMOOTHING) * loss
            smooth.append(value)
        axis.plot(losses, color="C0", alpha=0.3)
        axis.plot(smooth, color="C0", label="orthogonal + copula (learned)")
        fixed = [row for row in rows if not row["coupling"].startswith("copula")]
        for number, row in enumerate(fixed, 1):
            axis.axhline(row["training RMSE"], color=f"C{number}", ls="--", label=row["coupling"])
        axis.set(xlabel="step", ylabel="training RMSE", title=f"VRC Fig. 6: {out.name}, {name}")
        axis.legend(fontsize=7)
    report.save(drawn, out)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    points: int = 256,
    steps: int = 1000,
    train_draws: int = 8,
    draws: int = 1000,
    out: Path = Path("results/tabular/copula"),
) -> None:
    """Prints the table.

    Args:
        data_dir: folder of csv files; scikit-learn's sets without.
        data_sets: names; all there are if none is given.
        points: training and test points at most.
        steps: of training.
        train_draws: draws in each step.
        draws: for the table.
        out: folder for tables and figures.
    """
    launch.at_least(2, points=points, draws=draws)
    launch.at_least(1, steps=steps, train_draws=train_draws)
    rows, correlations = [], {}
    numbers = dict(num_steps=steps, train_draws=train_draws, draws=draws)
    for name, splits in uci.tables(data_sets, data_dir, 1, points):
        curves = {}
        for scheme in uci.SCHEMES:
            lines, losses, correlation = of_scheme(name, scheme, splits, **numbers)
            curves[scheme.name] = lines, losses
            correlations[f"{name}_{scheme.name}"] = correlation
            rows += lines
        plot(curves, out / name)
    print(report.table(rows, out / "copula"))
    np.savez(out / "correlations.npz", **correlations)


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "points": 32, "steps": 10, "draws": 20})
