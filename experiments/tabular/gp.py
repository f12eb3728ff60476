"""Kernels and Gaussian processes on tabular data: VRC Tables 1, 3 and 4, Fig. 1.

    python -m experiments.tabular.gp --data_dir=DIR --data_sets=boston_housing,power_plant
    python -m experiments.tabular.gp                      # the sets that come with scikit-learn

With k d Fourier (2 k d Laplace) frequencies, k = 1 and 8, on the splits and with the scales of
`experiments.tabular.uci`, in the units of the targets:

    kernel RMSE   of the Gram matrix of the test points in one draw; targets standardised. The
                  kernel ratio is its mean over that of iid frequencies (Table 1)
    KL            KL(exact || approximate) of the predictive laws of the test values, over their
                  number: the order and the scale that the paper's figures have
    RMSE          of the predictive mean
    NLL           negative log density of all test values, over their number

Values are means over splits of means over draws, ± two standard errors over the splits (of the
kernel ratio one, as in the paper). What the
couplings themselves change is far smaller than what the splits do. It is tested by the paired
differences between "+ pnc" and "orthogonal", split by split: t-tests under Holm's correction over
the cases of a quantity, and intervals where they are not significant.
"exact" is the exact Gaussian process, "linear" ridge regression on the inputs.

Fig. 1 (--figure=NAME, power_plant by default if it is there): one split, m from d to 32 d, and the
KL of the priors besides. Writes gp, differences and figure_1 (csv, md, png) to --out.
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

from experiments.common import harness, launch, statistics, tabular
from experiments.tabular import uci
from performer import gp, kernels

MULTIPLES = (1, 8)
SIZES = (1, 2, 4, 8, 16, 32)
SCORES = ("kernel RMSE", "KL", "RMSE", "NLL", "prior KL")
"""The last axis of scores."""
QUANTITIES = SCORES[:4]
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


def split_of(name: str, scheme: uci.Scheme, splits: tabular.Split) -> Split:
    """Return all splits, stacked, with their scales."""
    scales = uci.hyperparameters(name, scheme, splits)
    return Split(*(jnp.asarray(part) for part in splits[:4]), scales)  # pyright: ignore


def gram(split: Split, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the exact kernel with the scales of the split."""
    lengthscale, output_scale, _ = split.scales
    return kernels.gaussian(x, y, lengthscale=lengthscale, output_scale=output_scale)


def exact(split: Split) -> gp.Gaussian:
    """Return the exact law of the test values."""
    x, test_x, noise = split.x, split.test_x, split.scales.noise_scale
    f = gp.condition(
        gram(split, x, x), gram(split, test_x, x), gram(split, test_x, test_x), split.y, noise
    )
    return gp.observed(f, noise)


def law_scores(law: gp.Gaussian, split: Split) -> list[jax.Array]:
    """Return RMSE and NLL of a predictive law."""
    rmse = jnp.sqrt(jnp.mean((law.mean - split.test_y) ** 2))
    density = multivariate_normal.logpdf(split.test_y, *law)
    return [rmse, jnp.negative(density) / len(split.test_y)]


def scores(
    split: Split, frequencies: jax.Array, reference: gp.Gaussian, kernel: kernels.Kernel
) -> jax.Array:
    """Return the `SCORES` of the random-feature Gaussian process; `reference` is `exact(split)`."""
    lengthscale, output_scale, noise = split.scales
    options: Any = dict(lengthscale=lengthscale, output_scale=output_scale)
    points = (split.x, split.test_x)
    phi, test_phi = (kernel.feature_map(x, frequencies, **options) for x in points)
    law = gp.observed(gp.condition_features(phi, test_phi, split.y, noise), noise)
    test_gram, estimate = gram(split, split.test_x, split.test_x), test_phi @ test_phi.T
    count, zero = len(split.test_y), jnp.zeros_like(split.test_y)
    prior, approximate = (gp.observed(gp.Gaussian(zero, k), noise) for k in (test_gram, estimate))
    rmse = jnp.sqrt(jnp.mean((estimate - test_gram) ** 2))
    divergence = gp.kl(reference, law) / count
    prior_kl = gp.kl(prior, approximate) / count
    return jnp.stack([rmse, divergence, *law_scores(law, split), prior_kl])


@partial(jax.jit, static_argnames="kernel")
def scored(stacked: Split, frequencies: jax.Array, kernel: kernels.Kernel) -> jax.Array:
    """The scores of frequencies (s, draws, m, d): (s, draws, scores); compiled once for each m."""

    def of_split(arguments):
        split, of_draws = arguments
        reference = exact(split)
        return jax.lax.map(lambda w: scores(split, w, reference, kernel), of_draws)

    return jax.lax.map(of_split, (stacked, frequencies))


def measured(
    scheme: uci.Scheme, coupling: str, multiple: int, stacked: Split, scale: np.ndarray, draws: int
) -> np.ndarray:
    """Return scores by split and draw, (s, draws, scores), in the units of the targets."""
    d, kernel, chosen = stacked.x.shape[-1], scheme.kernel, scheme.couplings[coupling]

    def draw(key):
        """Independent ensembles of k d frequencies, k = 1 or 2: `multiple` of them."""
        keys = jax.random.split(key, multiple)
        m = scheme.per_dimension * d
        return jax.vmap(lambda key: kernels.frequencies(key, kernel, m, d, chosen))(keys)

    keys = uci.split_keys(len(scale), draws)
    frequencies = jax.jit(partial(jax.lax.map, jax.vmap(draw)))(keys).reshape(*keys.shape, -1, d)
    return in_units(scored(stacked, frequencies, kernel), scale)


def in_units(raw: jax.Array | np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return scores (s, ..., scores) with RMSE and NLL in the units of the targets."""
    found, scale = np.array(raw), scale.reshape(-1, *[1] * (raw.ndim - 2))
    found[..., 2] *= scale
    found[..., 3] += np.log(scale)
    return found


def baselines(splits: tabular.Split, stacked: Split) -> dict[str, np.ndarray]:
    """Return the exact Gaussian process and ridge regression, (s, scores)."""
    of_split = partial(jax.lax.map, lambda split: jnp.stack(law_scores(exact(split), split)))
    laws = jax.jit(of_split)(stacked)
    linear = [
        RidgeCV(np.logspace(-3, 3, 13)).fit(x, y).predict(test_x) - test_y
        for x, y, test_x, test_y in zip(*splits[:4], strict=True)
    ]
    references = {"exact": np.zeros((len(laws), 5)), "linear": np.full((len(laws), 5), np.nan)}
    references["exact"][:, 2:4] = laws
    references["linear"][:, 2] = np.sqrt(np.mean(np.square(linear), axis=1))
    return {name: in_units(values, splits.scale) for name, values in references.items()}


def rows_of(name: str, splits: tabular.Split, draws: int) -> list[harness.Row]:
    """Return a row for each scheme, m, coupling and quantity: its values by split."""
    rows = []
    for scheme in uci.SCHEMES:
        stacked = split_of(name, scheme, splits)
        references = baselines(splits, stacked)
        for multiple in MULTIPLES:
            means = {
                coupling: measured(scheme, coupling, multiple, stacked, splits.scale, draws).mean(1)
                for coupling in scheme.couplings
            }
            m = "d" if multiple == 1 else f"{multiple}d"
            case = {"data set": name, "d": stacked.x.shape[-1], "features": scheme.name, "m": m}
            for coupling, values in (means | references).items():
                chosen = values[:, : len(QUANTITIES)]
                own = case | {"coupling": coupling}
                rows += harness.rows_of(own, chosen, quantity=QUANTITIES)
            print(*case.values(), flush=True)
    return rows


def table(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """Return a line for each coupling: mean, two standard errors and the paper's values."""
    ratios = harness.relative([row for row in rows if row["quantity"] == "kernel RMSE"], CASE)
    ratios = [
        row | {"quantity": "kernel ratio", "mean": row["ratio"], "±": row["ratio ±"] / 2}
        for row in ratios
        if row["coupling"] not in ("exact", "linear")
    ]
    lines = []
    for group in harness.grouped([*ratios, *rows], CASE + ": {coupling}").values():
        line = {k: group[0][k] for k in ("data set", "d", "features", "m", "coupling")}
        name, _, features, m, coupling = line.values()
        line |= dict.fromkeys(("kernel ratio", "kernel ratio ±", "kernel ratio, paper"), "")
        for row in group:
            quantity, empty = row["quantity"], np.isnan(row["mean"])
            line[quantity] = "" if empty else row["mean"]
            line[f"{quantity} ±"] = "" if empty else 2 * row["±"]
            names = f"{quantity}, m = {m}", features, coupling, name
            line[f"{quantity}, paper"] = uci.printed(*names)
        lines.append(line)
    return lines


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


def figure_1(name: str, splits: tabular.Split, draws: int, out: Path) -> None:
    """Measure scores against m on the first split, Fourier features."""
    scheme, first = uci.SCHEMES[0], tabular.Split(*(part[:1] for part in splits))
    stacked, rows = split_of(name, scheme, first), []
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
    points: int = 512,
    draws: int = 10,
    figure: str = "",
    out: Path = Path("results/tabular/gp"),
) -> None:
    """Print the tables.

    Args:
        figure: the data set of Fig. 1; power_plant if it is among them.
    """
    parts = dict(uci.tables(data_sets, data_dir, splits, points))
    figure = figure or ("power_plant" if "power_plant" in parts else "")
    with jax.enable_x64(True):  # posteriors are differences of near-equal matrices
        rows = [row for name, of_name in parts.items() for row in rows_of(name, of_name, draws)]
        harness.show(table(rows), out / "gp")
        if figure:
            figure_1(figure, parts[figure], 5 * draws, out / "figure_1")
    apart, said = differences(rows)
    harness.show(apart, out / "differences", text=said)


if __name__ == "__main__":
    quick = {"data_sets": ("diabetes",), "figure": "diabetes", "splits": 2}
    launch.run(main, quick=quick | {"points": 32, "draws": 2})
