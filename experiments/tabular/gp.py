"""Gaussian processes on tabular data with coupled features: VRC Tables 3 and 4, Fig. 1.

    python -m experiments.tabular.gp --data_dir=DIR --data_sets=boston_housing,power_plant
    python -m experiments.tabular.gp                      # the sets that come with scikit-learn

With k d Fourier (2 k d Laplace) frequencies, k = 1 and 8, on the splits and with the scales of
`experiments.tabular.uci`, in the units of the targets:

    kernel RMSE   of the Gram matrix of the test points, over the draws, too; targets standardised
    KL            KL(exact || approximate) of the predictive laws of the test values, over their
                  number: the order and the scale that the paper's figures have
    RMSE          of the predictive mean
    NLL           negative log density of the test values, each by itself

Values are means over splits of means over draws, ± two standard errors over the splits. What the
couplings themselves change is far smaller than what the splits do, and is told from the paired
differences between "+ pnc" and "orthogonal", split by split: t-tests under Holm's correction over
the cases of a quantity, and intervals where they show nothing.
"exact" is the exact Gaussian process, "linear" ridge regression on the inputs.

Fig. 1 (--figure=NAME, power_plant or the first set by default): one split, m from d to 32 d, and
the KL of the priors besides. Writes gp, differences and figure_1 (csv, md, png) to --out.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import RidgeCV

from experiments.common import harness, launch, statistics, tabular
from experiments.tabular import uci
from performer import gp, kernels
from performer.typing import Coupling
from vit import report

MULTIPLES = (1, 8)
SIZES = (1, 2, 4, 8, 16, 32)
QUANTITIES = ("kernel RMSE", "KL", "RMSE", "NLL")


class Scores(NamedTuple):
    """What one draw of the frequencies, or the exact kernel, comes to."""

    kernel_mse: Any
    kl: Any
    rmse: Any
    nll: Any
    prior_kl: Any


class Split(NamedTuple):
    """One split, and its scales."""

    x: jax.Array
    y: jax.Array
    test_x: jax.Array
    test_y: jax.Array
    scales: gp.Scales


def split_of(name: str, scheme: uci.Scheme, splits: tabular.Splits) -> Split:
    """All splits, stacked, with their scales."""
    scales = uci.hyperparameters(name, scheme, splits)
    return Split(*(jnp.asarray(part) for part in splits[:4]), scales)  # pyright: ignore


def gram(split: Split, x: jax.Array, y: jax.Array) -> jax.Array:
    """The exact kernel with the scales of the split."""
    lengthscale, output_scale, _ = split.scales
    return kernels.gaussian(x, y, lengthscale=lengthscale, output_scale=output_scale)


def exact(split: Split) -> gp.Gaussian:
    """The exact law of the test values."""
    x, test_x, noise = split.x, split.test_x, split.scales.noise_scale
    f = gp.condition(
        gram(split, x, x), gram(split, test_x, x), gram(split, test_x, test_x), split.y, noise
    )
    return gp.observed(f, noise)


def law_scores(law: gp.Gaussian, split: Split) -> tuple[jax.Array, jax.Array]:
    """RMSE and NLL of a predictive law."""
    rmse = jnp.sqrt(jnp.mean((law.mean - split.test_y) ** 2))
    return rmse, gp.negative_log_density(law, split.test_y)


def scores(
    split: Split, frequencies: jax.Array, reference: gp.Gaussian, kernel: kernels.Kernel
) -> Scores:
    """The scores of the random-feature Gaussian process; `reference` is `exact(split)`."""
    lengthscale, output_scale, noise = split.scales
    options = dict(lengthscale=lengthscale, output_scale=output_scale)
    points = (split.x, split.test_x)
    phi, test_phi = (kernel.feature_map(x, frequencies, **options) for x in points)
    law = gp.observed(gp.condition_features(phi, test_phi, split.y, noise), noise)
    test_gram, estimate = gram(split, split.test_x, split.test_x), test_phi @ test_phi.T
    count, zero = len(split.test_y), jnp.zeros_like(split.test_y)
    prior, approximate = (gp.observed(gp.Gaussian(zero, k), noise) for k in (test_gram, estimate))
    return Scores(
        jnp.mean((estimate - test_gram) ** 2),
        gp.kl(reference, law) / count,
        *law_scores(law, split),
        gp.kl(prior, approximate) / count,
    )


@partial(jax.jit, static_argnames=("coupling", "m", "kernel"))
def all_scores(
    splits: Split, keys: jax.Array, *, coupling: str | Coupling, m: int, kernel: kernels.Kernel
) -> Scores:
    """Scores by split and draw, (s, draws) each."""

    def one(arguments):
        split, keys = arguments
        reference = exact(split)

        def draw(key):
            w = kernels.frequencies(key, kernel, m, split.x.shape[-1], coupling)
            return scores(split, w, reference, kernel)

        return jax.lax.map(draw, keys)

    return jax.lax.map(one, (splits, keys))


def scores_of(
    scheme: uci.Scheme, coupling: str, multiple: int, splits: Split, keys: jax.Array
) -> Scores:
    """The same for a row of the paper's tables."""
    return all_scores(
        splits,
        keys,
        coupling=scheme.couplings[coupling],
        m=multiple * scheme.per_dimension * splits.x.shape[-1],
        kernel=scheme.kernel,
    )


def in_units(raw: Scores, scale: np.ndarray) -> Scores:
    """RMSE and NLL in the units of the targets."""
    scale = scale.reshape(-1, *[1] * (np.ndim(raw.rmse) - 1))
    rmse, nll = np.asarray(raw.rmse) * scale, np.asarray(raw.nll) + np.log(scale)
    return Scores(*map(np.asarray, (raw.kernel_mse, raw.kl, rmse, nll, raw.prior_kl)))


def over_draws(by_draw: Scores) -> Scores:
    """Means over the draws, (s, draws) -> (s,); of the kernel's error the root mean square."""
    means = Scores(*(np.mean(values, axis=1) for values in by_draw))
    return means._replace(kernel_mse=np.sqrt(means.kernel_mse))


def baselines(name: str, splits: tabular.Splits, stacked: Split) -> dict[str, Scores]:
    """The exact Gaussian process and ridge regression, by split."""
    rmse, nll = jax.jit(
        lambda stacked: jax.lax.map(lambda split: law_scores(exact(split), split), stacked)
    )(stacked)
    zero, none = np.zeros(len(rmse)), np.full(len(rmse), np.nan)
    linear = [
        RidgeCV(np.logspace(-3, 3, 13)).fit(x, y).predict(test_x) - test_y
        for x, y, test_x, test_y in zip(*splits[:4], strict=True)
    ]
    raw = {
        "exact": Scores(zero, zero, rmse, nll, zero),
        "linear": Scores(none, none, np.sqrt(np.mean(np.square(linear), axis=1)), none, none),
    }
    return {key: in_units(value, splits.scale) for key, value in raw.items()}


def rows_of(name: str, splits: tabular.Splits, draws: int) -> list[harness.Row]:
    """A row for each scheme, m, coupling and quantity: its values by split."""
    keys = uci.split_keys(len(splits.scale), draws)
    stacks = [(scheme, split_of(name, scheme, splits)) for scheme in uci.SCHEMES]
    rows = []
    for (scheme, stacked), multiple in itertools.product(stacks, MULTIPLES):
        by_coupling = {
            coupling: in_units(scores_of(scheme, coupling, multiple, stacked, keys), splits.scale)
            for coupling in scheme.couplings
        }
        for number, quantity in enumerate(QUANTITIES):
            values = {coupling: row[number] for coupling, row in by_coupling.items()}
            uci.check_finite(name, scheme, quantity, values)
        means = {coupling: over_draws(values) for coupling, values in by_coupling.items()}
        m = "d" if multiple == 1 else f"{multiple}d"
        case = {"data set": name, "d": splits.test_x.shape[-1], "features": scheme.name, "m": m}
        for coupling, values in (means | baselines(name, splits, stacked)).items():
            here = case | {"coupling": coupling}
            for quantity, x in zip(QUANTITIES, values, strict=False):
                rows += harness.rows_of(here | {"quantity": quantity}, x.tolist())
            print(*here.values(), flush=True)
    return rows


def table(rows: Sequence[harness.Row]) -> list[harness.Row]:
    """A line for each coupling: mean, two standard errors and the paper's for each quantity."""
    lines = []
    for group in harness.grouped(rows, "{data set} {features} {m} {coupling}").values():
        line = {k: group[0][k] for k in ("data set", "d", "features", "m", "coupling")}
        name, _, features, m, coupling = line.values()
        for row in group:
            quantity, empty = row["quantity"], np.isnan(row["mean"])
            theirs = uci.printed(f"{quantity}, m = {m}", features, coupling, name)
            line[quantity] = "" if empty else row["mean"]
            line[f"{quantity} ±"] = "" if empty else 2 * row["±"]
            line[f"{quantity}, paper"] = f"{theirs[0]:g} ± {theirs[1]:g}" if theirs else ""
        lines.append(line)
    return lines


def differences(rows: Sequence[harness.Row]) -> tuple[list[harness.Row], str]:
    """The paired differences of "+ pnc" to "orthogonal", and what they say."""
    lines, said = [], []
    for quantity, group in harness.grouped(rows, "{quantity}").items():
        cases = {
            case: (values["+ pnc"], values["orthogonal"])
            for case, values in harness.cases_of(group, "{data set}, {features}, m = {m}").items()
        }
        for case, (a, b) in cases.items():
            line = {"quantity": quantity, "case": case, "orthogonal": float(np.mean(b))}
            lines.append(line | statistics.paired(a, b)._asdict())
        said.append(f"- {quantity}: {statistics.verdict('+ pnc', 'orthogonal', cases)}.\n")
    return lines, "".join(said)


def figure_1(name: str, splits: tabular.Splits, draws: int, out: Path) -> str:
    """Scores against m on the first split, Fourier features."""
    scheme = uci.SCHEMES[0]
    first = tabular.Splits(*(part[:1] for part in splits))
    stacked = split_of(name, scheme, first)
    keys, d = uci.split_keys(1, draws), first.test_x.shape[-1]
    labels, rows = (*QUANTITIES, "prior KL"), []
    for coupling, size in itertools.product(scheme.couplings, SIZES):
        by_draw = in_units(scores_of(scheme, coupling, size, stacked, keys), first.scale)
        row: dict = {"coupling": coupling, "m": size * d}
        for label, values, mean in zip(labels, by_draw, over_draws(by_draw), strict=True):
            _, error = statistics.mean_and_error(values[0].tolist())
            if label == "kernel RMSE":  # d sqrt(x) = dx / (2 sqrt(x))
                error /= 2 * mean[0]
            row |= {label: float(mean[0]), f"{label} ±": float(error)}
        rows.append(row)
    references = baselines(name, first, stacked)

    def lines(axis: Any, _: Any) -> None:
        if (label := axis.get_ylabel()) in ("RMSE", "NLL"):
            for (word, scores), style in zip(references.items(), (":", "--"), strict=True):
                level = scores[QUANTITIES.index(label)][0]
                axis.axhline(level, color="black", ls=style, label=word)
            axis.legend()

    title = f"VRC Fig. 1: {name}, one split"
    harness.figure(rows, out, x="m", y=labels, columns=5, log=True, finish=lines, suptitle=title)
    return report.table(rows, out)


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    splits: int = 20,
    points: int = 256,
    draws: int = 10,
    figure: str = "",
    out: Path = Path("results/tabular/gp"),
) -> None:
    """Prints the tables.

    Args:
        data_dir: folder of csv files; scikit-learn's sets without.
        data_sets: names; all there are if none is given.
        splits: random splits.
        points: training and test points at most.
        draws: of the frequencies per split.
        figure: the data set of Fig. 1; power_plant, or the first one.
        out: folder for tables and figures.
    """
    launch.at_least(2, splits=splits, points=points)
    launch.at_least(1, draws=draws)
    parts = dict(uci.tables(data_sets, data_dir, splits, points))
    figure = figure or ("power_plant" if "power_plant" in parts else next(iter(parts)))
    if figure not in parts:
        raise ValueError(f"--figure={figure} is none of the data sets {', '.join(parts)}")
    with jax.enable_x64(True):  # posteriors are differences of near-equal matrices
        rows = [row for name, of_name in parts.items() for row in rows_of(name, of_name, draws)]
        print(report.table(table(rows), out / "gp"))
        print(figure_1(figure, parts[figure], 5 * draws, out / "figure_1"))
    apart, said = differences(rows)
    print(report.table(apart, out / "differences", said))


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("diabetes",), "splits": 2, "points": 32, "draws": 2})
