"""Kernels and Gaussian processes on tabular data: VRC Tables 1, 3 and 4, Fig. 1.

    python -m experiments.tabular.gp --data_dir=DIR --data_sets=boston_housing,power_plant
    python -m experiments.tabular.gp                      # the sets that come with scikit-learn

With the environment variable OPENBLAS_NUM_THREADS=1 it is up to ten times faster.

With k d Fourier (2 k d Laplace) frequencies, k = 1 and 8, on the splits and with the scales of
`experiments.tabular.uci`, in the units of the targets:

    kernel RMSE   of the Gram matrix of the test points in one draw; targets standardised. The
                  kernel ratio is its mean over the mean of iid frequencies (Table 1)
    KL            KL(exact || approximate) of the predictive distributions of the test values,
                  divided by their number: the order and the scale of the paper's figures
    RMSE          of the predictive mean; the RMSE ratio is relative to the mean of iid frequencies
    NLL           negative log density of all test values, divided by their number

gp.csv has means over splits of means over draws, ± one standard error over the splits, with the
paper's values. These errors are too small: in nearly all splits the training points are the same.
permutations.csv therefore has the same means for other orders of the rows, and their standard
deviation, which is the error of one order.

What the couplings themselves change is far smaller than what the splits do. It is tested by the
paired differences between "+ pnc" and "orthogonal", split by split: t-tests under Holm's correction
over the cases of a quantity, and intervals where they are not significant (differences.csv). The
same caution holds: they are for these training points.
"exact" is the exact Gaussian process, "linear" ridge regression on the inputs.

Fig. 1 (--figure=NAME, power_plant by default if it is there): one split, m from d to 32 d, and the
KL of the priors also. Writes gp, permutations, differences and figure_1 (csv, md, png) to --out.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import multivariate_normal
from sklearn.linear_model import RidgeCV

from experiments.tabular import sets, uci
from performer import gp, kernels
from vit.study import harness, launch, statistics

MULTIPLES = (1, 8)
SIZES = (1, 2, 4, 8, 16, 32)
SCORES = ("kernel RMSE", "KL", "RMSE", "NLL", "prior KL")
"""The last axis of scores."""
QUANTITIES = SCORES[:4]
COLUMNS = ("kernel ratio", "kernel RMSE", "KL", "RMSE", "RMSE ratio", "NLL")
"""Quantities of gp.csv, the same as in the paper."""
CASE = "{data set}, {features}, m = {m}"
FIGURES: harness.Figures = {
    "figure_1": dict(x="m", y={score: score for score in SCORES}, across=3, log="xy")
}


class Split(NamedTuple):
    """One split, and its scales."""

    x: jax.Array
    y: jax.Array
    test_x: jax.Array
    test_y: jax.Array
    scales: gp.Scales


def split_of(name: str, splits: sets.Split, fixed_lengthscale: bool = False) -> Split:
    """Return all splits, stacked, with their scales."""
    scales = uci.hyperparameters(name, splits, fixed_lengthscale)
    return Split(*(jnp.asarray(part) for part in splits[:4]), scales)  # pyright: ignore


def gram(split: Split, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the exact kernel with the scales of the split."""
    lengthscale, output_scale, _ = split.scales
    return kernels.gaussian(x, y, lengthscale=lengthscale, output_scale=output_scale)


def exact(split: Split) -> gp.Gaussian:
    """Return the exact distribution of the test values."""
    x, test_x, noise = split.x, split.test_x, split.scales.noise_scale
    f = gp.condition(
        gram(split, x, x), gram(split, test_x, x), gram(split, test_x, test_x), split.y, noise
    )
    return gp.observed(f, noise)


def predictive_scores(predicted: gp.Gaussian, split: Split) -> list[jax.Array]:
    """Return RMSE and NLL of a predictive distribution."""
    rmse = jnp.sqrt(jnp.mean((predicted.mean - split.test_y) ** 2))
    density = multivariate_normal.logpdf(split.test_y, *predicted)
    return [rmse, jnp.negative(density) / len(split.test_y)]


def scores(
    split: Split, frequencies: jax.Array, reference: gp.Gaussian, kernel: kernels.Kernel
) -> jax.Array:
    """Return the `SCORES` of the random-feature Gaussian process; `reference` is `exact(split)`."""
    lengthscale, output_scale, noise = split.scales
    options: Any = dict(lengthscale=lengthscale, output_scale=output_scale)
    points = (split.x, split.test_x)
    phi, test_phi = (kernel.feature_map(x, frequencies, **options) for x in points)
    predicted = gp.observed(gp.condition_features(phi, test_phi, split.y, noise), noise)
    test_gram, estimate = gram(split, split.test_x, split.test_x), test_phi @ test_phi.T
    count, zero = len(split.test_y), jnp.zeros_like(split.test_y)
    prior, approximate = (gp.observed(gp.Gaussian(zero, k), noise) for k in (test_gram, estimate))
    rmse = jnp.sqrt(jnp.mean((estimate - test_gram) ** 2))
    divergence = gp.kl(reference, predicted) / count
    prior_kl = gp.kl(prior, approximate) / count
    return jnp.stack([rmse, divergence, *predictive_scores(predicted, split), prior_kl])


@partial(jax.jit, static_argnames="kernel")
def scored(stacked: Split, frequencies: jax.Array, kernel: kernels.Kernel) -> jax.Array:
    """The scores of frequencies (s, draws, m, d): (s, draws, scores); compiled once for each m."""

    def split_scores(arguments):
        split, draws_of_split = arguments
        reference = exact(split)
        return jax.lax.map(lambda w: scores(split, w, reference, kernel), draws_of_split)

    return jax.lax.map(split_scores, (stacked, frequencies))


@partial(jax.jit, static_argnames=("kernel", "coupling", "multiple", "m", "d"))
def ensembles(keys: jax.Array, *, kernel: Any, coupling: Any, multiple: int, m: int, d: int):
    """Return `multiple` independent ensembles of m frequencies for each key of (s, draws)."""

    def draw(key):
        drawn = partial(
            kernels.frequencies, kernel=kernel, num_features=m, dim=d, coupling=coupling
        )
        return jax.vmap(drawn)(jax.random.split(key, multiple)).reshape(-1, d)

    return jax.lax.map(jax.vmap(draw), keys)


def measured(
    scheme: uci.Scheme, coupling: str, multiple: int, stacked: Split, scale: np.ndarray, draws: int
) -> np.ndarray:
    """Return scores by split and draw, (s, draws, scores), in the units of the targets."""
    d = stacked.x.shape[-1]
    options: Any = dict(kernel=scheme.kernel, coupling=scheme.couplings[coupling])
    options |= dict(multiple=multiple, m=scheme.per_dimension * d, d=d)
    frequencies = ensembles(uci.split_keys(len(scale), draws), **options)
    return in_units(scored(stacked, frequencies, scheme.kernel), scale)


def in_units(raw: jax.Array | np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return scores (s, ..., scores) with RMSE and NLL in the units of the targets."""
    scores_in_units, scale = np.array(raw), scale.reshape(-1, *[1] * (raw.ndim - 2))
    scores_in_units[..., 2] *= scale
    scores_in_units[..., 3] += np.log(scale)
    return scores_in_units


@jax.jit
def exact_scores(stacked: Split) -> jax.Array:
    """Return RMSE and NLL of the exact Gaussian process, (s, 2)."""
    return jax.lax.map(lambda split: jnp.stack(predictive_scores(exact(split), split)), stacked)


def baselines(splits: sets.Split, stacked: Split) -> dict[str, np.ndarray]:
    """Return the exact Gaussian process and ridge regression, (s, scores)."""
    scores = exact_scores(stacked)
    linear = [
        RidgeCV(np.logspace(-3, 3, 13)).fit(x, y).predict(test_x) - test_y
        for x, y, test_x, test_y in zip(*splits[:4], strict=True)
    ]
    references = {"exact": np.zeros((len(scores), 5)), "linear": np.full((len(scores), 5), np.nan)}
    references["exact"][:, 2:4] = scores
    references["linear"][:, 2] = np.sqrt(np.mean(np.square(linear), axis=1))
    return {name: in_units(values, splits.scale) for name, values in references.items()}


def rows_of(name: str, splits: sets.Split, draws: int) -> list[harness.Row]:
    """Return a row for each scheme, m, coupling and quantity: its values by split."""
    rows, fits = [], {fixed: split_of(name, splits, fixed) for fixed in (False, True)}
    for scheme, multiple in itertools.product(uci.SCHEMES, MULTIPLES):
        stacked = fits[uci.fixes_lengthscale(scheme, multiple)]
        means = {
            coupling: measured(scheme, coupling, multiple, stacked, splits.scale, draws).mean(1)
            for coupling in scheme.couplings
        }
        m = "d" if multiple == 1 else f"{multiple}d"
        case = {"data set": name, "d": stacked.x.shape[-1], "features": scheme.name, "m": m}
        for coupling, values in (means | baselines(splits, stacked)).items():
            chosen = values[:, : len(QUANTITIES)]
            rows += harness.rows_of(case | {"coupling": coupling}, chosen, quantity=QUANTITIES)
        print(*case.values(), flush=True)
    return rows


def ratios(rows: Sequence[harness.Row], quantity: str) -> list[harness.Row]:
    """Return new rows with the means of a quantity over the mean of iid frequencies."""
    chosen = [row for row in rows if row["quantity"] == quantity and row["coupling"] in uci.PAPER]
    word = quantity.replace("kernel RMSE", "kernel") + " ratio"
    return [
        row | {"quantity": word, "mean": row["ratio"], "mean ±": row["ratio ±"]}
        for row in harness.relative(chosen, CASE)
    ]


def with_ratios(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Return the rows, with further rows for the two ratios of the paper."""
    return [*rows, *ratios(rows, "kernel RMSE"), *ratios(rows, "RMSE")]


def table(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Return a line for each coupling: mean, standard error and the paper's values."""
    lines = []
    for group in harness.grouped(with_ratios(rows), CASE + ": {coupling}").values():
        line = {k: group[0][k] for k in ("data set", "d", "features", "m", "coupling")}
        name, _, features, m, coupling = line.values()
        measured = {row["quantity"]: row for row in group}
        for quantity in COLUMNS:
            mean, error = (measured.get(quantity, {}).get(k, np.nan) for k in ("mean", "mean ±"))
            line |= {quantity: "" if np.isnan(mean) else mean}
            line |= {f"{quantity} ±": "" if np.isnan(mean) else error}
            known = uci.printed(f"{quantity}, m = {m}", features, coupling, name)
            line |= zip(
                (f"{quantity}, paper", f"{quantity}, paper ±"), known or ("", ""), strict=True
            )
        lines.append(line)
    return lines


def spread(first: Sequence[harness.Row], others: Sequence[Sequence[harness.Row]]) -> list[dict]:
    """Return a line for each quantity of each coupling: its mean for each order of the rows."""
    lines = []
    for row, *same in zip(with_ratios(first), *map(with_ratios, others), strict=True):
        means = np.array([one["mean"] for one in same])
        line = {k: row[k] for k in ("data set", "features", "m", "coupling", "quantity")}
        line |= {"authors' order": row["mean"], "other orders": means.mean()}
        line |= {"standard deviation": means.std(ddof=1)}
        lines.append(line | {"lowest": means.min(), "highest": means.max()})
    return [line for line in lines if np.isfinite(line["other orders"])]


def differences(rows: Sequence[harness.Row]) -> tuple[list[harness.Row], str]:
    """Return the paired differences of "+ pnc" to "orthogonal", and their verdict."""
    lines, said = [], ""
    for quantity, group in harness.grouped(rows, "{quantity}").items():
        for name, values in harness.cases_of(group, CASE).items():
            mean = float(np.mean(values["orthogonal"]))
            line = {"quantity": quantity, "case": name, "orthogonal": mean}
            lines.append(line | statistics.paired(values["+ pnc"], values["orthogonal"])._asdict())
        pairs = [("+ pnc", "orthogonal")]
        said += harness.verdict(group, CASE, pairs=pairs, bullet=f"- {quantity}: {{}}.\n")
    return lines, said


def figure_1(name: str, splits: sets.Split, draws: int, out: Path) -> None:
    """Measure scores against m on the first split, Fourier features."""
    scheme, first = uci.SCHEMES[0], sets.Split(*(part[:1] for part in splits))
    stacked, rows = split_of(name, first), []
    for coupling, size in itertools.product(scheme.couplings, SIZES):
        by_draw = measured(scheme, coupling, size, stacked, first.scale, draws)
        row: harness.Row = {"coupling": coupling, "m": size * stacked.x.shape[-1]}
        for label, values in zip(SCORES, by_draw[0].T, strict=True):
            row |= zip((label, f"{label} ±"), statistics.mean_and_error(values), strict=True)
        rows.append(row)
    for word, (values,) in baselines(first, stacked).items():
        known = {k: v for k, v in zip(SCORES[2:4], values[2:4].tolist(), strict=True) if v == v}
        rows.append(dict.fromkeys(rows[0], "") | {"coupling": word} | known)
    harness.show(rows, out, FIGURES)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    splits: int = 20,
    points: int = 256,
    draws: int = 100,
    permutations: int = 5,
    figure: str = "",
    out: Path = Path("results/tabular/gp"),
) -> None:
    """Print the tables.

    Args:
        draws: in each split; a fifth of them with other orders.
        permutations: number of other orders of the rows; 0 to leave permutations.csv out.
        figure: the data set of Fig. 1; power_plant if it is among them.
    """
    read = partial(uci.tables, data_sets, data_dir, splits, points)
    tables, *others = (dict(read(number)) for number in range(permutations + 1))
    figure = figure or ("power_plant" if "power_plant" in tables else "")
    rows, moved = [], [[] for _ in others]
    with jax.enable_x64(True):  # posteriors are differences of near-equal matrices
        for name in tables:
            rows += rows_of(name, tables[name], draws)
            for moved_rows, other in zip(moved, others, strict=True):
                moved_rows += rows_of(name, other[name], max(draws // 5, 2))
            jax.clear_caches()  # programs of six sets together exceed a process's memory maps
        harness.show(table(rows), out / "gp")
        if len(moved) > 1:
            harness.show(spread(rows, moved), out / "permutations")
        if figure:
            figure_1(figure, tables[figure], draws, out / "figure_1")
    apart, said = differences(rows)
    harness.show(apart, out / "differences", text=said)


if __name__ == "__main__":
    quick = {"data_sets": ("diabetes",), "figure": "diabetes", "splits": 2}
    launch.run(main, quick=quick | {"points": 32, "draws": 2, "permutations": 2})
