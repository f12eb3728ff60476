"""Classification by kernel regression with random features: SimRF Sec. 5.3, App. B.1 and B.2.

    python -m experiments.tabular.classification --data_dir=DIR      # every csv file there
    python -m experiments.tabular.classification --data_dir=DIR --parts=table_2 --draws=10000
    python -m experiments.tabular.classification --data_dir=DIR --parts=table_3 --draws=4000
    python -m experiments.tabular.classification                     # the sets of scikit-learn

    y'(x) = sum_i K(sigma x, sigma x_i) y_i / sum_i K(sigma x, sigma x_i),    the class its argmax

with K the Gaussian kernel, exact or estimated by m positive features, and y_i one-hot. The settings
follow the authors' code (https://github.com/isaac-reid/simplex_random_features,
example.py and data_loader.py): nominal columns are one-hot, 95% of the rows train and 5% test, in
the order of NumPy's generator with seed 42; the training rows standardise. Sigma and the number of
rows are listed, with the printed values, in simrf_tables.csv: their loader drops the last row of
each file but nursery's. For another data set sigma is the best of Fig. 10, and all rows are used.
The printed errors are over 10,000 draws in Table 2 and 4,000 in Table 3; the code has 500.

    figure_10  sigma: accuracy on the last quarter of the training rows, fitted on the rest, of
               the exact kernel and of m = 10 d iid features, the mean of 10 draws; with sets of
               more than 10,000 rows on 100 rows, fitted on 1000
    figure_8   accuracy against m / d; one draw gives all m, by its first m frequencies
    table_2    SimRF+, SimRF and ORF at m = d, with v_bar = mean |sigma (x + y)| over test
               points x and training points y
    table_3    fast rotations: inputs padded with zeros to d' = 2^k dimensions, m = d'
    splits     SimRF at m = d on other splits of the same rows, which no printed error covers: the
               mean of --draws / 10 draws on each, and their spread

Errors are standard errors over --draws draws of the frequencies. In one draw all couplings share
the random key, and so the lengths of their frequencies; differences are paired.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.spatial.distance import cdist

from experiments.tabular import sets
from performer import couplings, hadamard
from vit.study import harness, launch, statistics

SIGMAS = tuple(2 ** (k / 2) for k in range(-10, 5))
MULTIPLES = 10
LARGE, TUNING_ROWS = 10_000, (1000, 100)
TEST_SHARE, SEED = 0.05, 42
OTHER_SEEDS = range(40)
"""Seeds of the orders of other splits."""
NOMINAL = ("chess_krkopt",)
"""Data sets whose columns of numbers are also nominal."""
FIGURE_8 = ("iid", "orf", "simrf")
TABLES = {2: ("orf", "simrf", "simrf+"), 3: ("iid", "orf", "sorf", "simrf", "fast-simrf")}
PRINTED = Path(__file__).parent / "simrf_tables.csv"
"""Tables 2 and 3 of the paper; the former has no column for ORF."""


def mark_sigma(axis: Any, rows: list[harness.Row]) -> None:
    """Mark the sigma that is used, where it is listed."""
    if sigma := printed(2, rows[0]["data set"]).get("sigma"):
        axis.axvline(float(sigma), color=harness.INK, linewidth=0.8)


FIGURES: harness.Figures = {
    "figure_8": dict(
        x="m / d",
        panel="{data set}",
        ylabel="test accuracy",
    ),
    "figure_10": dict(
        change=lambda rows: harness.melt(rows, ("iid", "exact")),
        x="sigma",
        line="{line}",
        panel="{data set}",
        finish=mark_sigma,
        log="x",
        ylabel="validation accuracy",
    ),
}


class Problem(NamedTuple):
    """Points to learn from and points to classify, standardised, float32, with their sigma."""

    name: str
    train_x: np.ndarray
    """(n, d)"""
    one_hot: np.ndarray
    """(n, c)"""
    test_x: np.ndarray
    """(k, d)"""
    test_y: np.ndarray
    """(k,) class numbers."""
    sigma: float = 1.0


def problems(table: sets.Table, seed: int = SEED) -> tuple[Problem, Problem]:
    """Return the problem of a data set, and the one inside its training rows that tunes sigma."""
    count = min(len(table.x), int(printed(2, table.name).get("rows") or len(table.x)))
    held = int(count * TEST_SHARE)
    order = np.random.default_rng(seed).permutation(count)
    split = sets.standardised(table, order[: int(count * (1 - TEST_SHARE))], order[-held:])
    x, y, test_x, test_y, *_ = split
    one_hot = np.eye(table.y.max() + 1, dtype=np.float32)

    def problem(train_x, train_y, test_x, test_y):
        points = train_x.astype(np.float32), one_hot[train_y], test_x.astype(np.float32)
        return Problem(table.name, *points, test_y)

    fitted = len(x) - len(x) // 4
    first, second = TUNING_ROWS if count > LARGE else (count, count)
    fit, held = slice(min(first, fitted)), slice(fitted, fitted + second)
    return problem(x, y, test_x, test_y), problem(x[fit], y[fit], x[held], y[held])


def regress(
    train_x: Float[Array, "n d"],
    one_hot: Float[Array, "n c"],
    test_x: Float[Array, "k d"],
    W: Float[Array, "m d"],
    blocks: int = 1,
) -> Float[Array, "b k c"]:
    """Predict y' of the test points from the first m / blocks, 2 m / blocks, ..., m features.

    The points come multiplied by sigma. In O((n + k) m c): the sum over the training points first.
    """
    # The features exp(w.x - |x|^2) underflow in float32 for |x|^2 > 100, one outlier being enough.
    # A factor common to all features of a test point cancels, |x|^2 among them; what the training
    # points have in common in one feature (`top`) moves to the test points.
    project = partial(jnp.matmul, precision="highest")
    train = project(train_x, W.T) - jnp.sum(train_x**2, axis=-1, keepdims=True)
    top = jnp.max(train, axis=0)
    class_sums = project(jnp.exp(train - top).T, one_hot)
    test = (project(test_x, W.T) + top).reshape(len(test_x), blocks, -1)
    maximum = jnp.max(test, axis=-1)
    block_sums = jnp.einsum(
        "kbf,bfc->kbc",
        jnp.exp(test - maximum[..., None]),
        class_sums.reshape(blocks, -1, one_hot.shape[-1]),
        precision="highest",
    )
    # Sums of the first blocks, relative to the largest of their maxima.
    running = jax.lax.cummax(maximum, axis=1)
    scales = jnp.tril(jnp.exp(jnp.minimum(maximum[:, None] - running[:, :, None], 0)))
    sums = jnp.einsum("ksb,kbc->skc", scales, block_sums, precision="highest")
    return sums / jnp.sum(sums, axis=-1, keepdims=True)


@partial(jax.jit, static_argnames=("name", "m", "d"))
def _frequencies(keys, *, name, m, d):
    return jax.vmap(lambda key: couplings.get(name)(key, m, d))(keys)


@partial(jax.jit, static_argnames=("blocks", "batch"))
def _right(frequencies, train_x, one_hot, test_x, test_y, *, blocks, batch):
    def draw_counts(W):
        predicted = regress(train_x, one_hot, test_x, W, blocks)
        right = jnp.argmax(predicted, axis=-1) == test_y
        return jnp.sum(right, axis=-1), jnp.all(jnp.isfinite(predicted))

    return jax.lax.map(draw_counts, frequencies, batch_size=batch)


def accuracies(
    problem: Problem, coupling: str, *, blocks: int, draws: int, seed: int
) -> np.ndarray:
    """Return accuracies (draws, blocks) with m = d, 2 d, ..., blocks d features.

    Raises:
        ValueError: for an estimate that is not finite.
    """
    _, train_x, one_hot, test_x, test_y, sigma = problem
    (n, d), (k, c) = train_x.shape, (len(test_x), one_hot.shape[-1])
    numbers = blocks * ((n + k) * d + k * (c + blocks))
    # A divisor of the draws: a batch that is left over would be compiled once more.
    batch = max(i for i in range(1, draws + 1) if draws % i == 0 and (i == 1 or i * numbers < 4e6))
    keys = jax.random.split(jax.random.key(seed), draws)
    frequencies, factor = _frequencies(keys, name=coupling, m=blocks * d, d=d), np.float32(sigma)
    points = factor * train_x, one_hot, factor * test_x, test_y
    counts, finite = _right(frequencies, *points, blocks=blocks, batch=batch)
    if not np.all(finite):
        raise ValueError(
            f"data set {problem.name!r} with {coupling} at sigma = {sigma:g}: the estimate is not"
            " finite; take a smaller sigma, or look for extreme values in the columns"
        )
    return np.asarray(counts, np.float64) / k


def exact_accuracies(problem: Problem, sigmas: Sequence[float]) -> list[float]:
    """Return accuracies with the exact kernel, in float64."""
    right = np.zeros(len(sigmas))
    for start in range(0, len(problem.test_x), 1000):
        rows = slice(start, start + 1000)
        squares = cdist(problem.test_x[rows], problem.train_x, "sqeuclidean")
        squares -= squares.min(axis=1, keepdims=True)  # so that no row is all zeros
        for i, sigma in enumerate(sigmas):
            predicted = np.exp(-(sigma**2) * squares / 2) @ problem.one_hot
            right[i] += np.sum(np.argmax(predicted, axis=1) == problem.test_y[rows])
    return (right / len(problem.test_x)).tolist()


def printed(number: int, name: str) -> Mapping[str, str]:
    """Return the row of the paper's table for a data set, empty if it has none."""
    return harness.printed(PRINTED, "table", "data set").get((str(number), name), {})


def search(problem: Problem, sigmas: Sequence[float], draws: int = 10) -> list[harness.Row]:
    """Return a row for each sigma: accuracy of the exact kernel and of iid features, m = 10 d."""
    rows = []
    for sigma, exact in zip(sigmas, exact_accuracies(problem, sigmas), strict=True):
        tried = problem._replace(sigma=sigma)
        values = accuracies(tried, "iid", blocks=MULTIPLES, draws=draws, seed=0)[:, -1]
        mean, error = statistics.mean_and_error(values)
        rows.append({"sigma": sigma, "exact": exact, "iid": mean, "iid ±": error})
    return rows


def tune(tables: Sequence[sets.Table], out: Path | None) -> list[Problem]:
    """Return the problems with their sigma; write Fig. 10 and the table of sigmas to `out`.

    Args:
        tables: the data sets.
        out: folder; None to search only for the sigmas that the paper does not list.
    """
    tuned, summary, searched = [], [], []
    for table in tables:
        problem, validation = problems(table)
        sigma = printed(2, table.name).get("sigma")
        if sigma and not out:
            tuned.append(problem._replace(sigma=float(sigma)))
            continue
        rows = search(validation, SIGMAS)
        best, exact = (max(rows, key=itemgetter(y)) for y in ("iid", "exact"))
        tuned.append(problem._replace(sigma=float(sigma or best["sigma"])))
        searched += [{"data set": table.name, **row} for row in rows]
        largest = problem.one_hot.sum(axis=0).argmax()
        summary.append(
            {
                "data set": table.name,
                "d": problem.train_x.shape[1],
                "sigma": tuned[-1].sigma,
                "classes": problem.one_hot.shape[1],
                "training rows": len(problem.train_x),
                "test rows": len(problem.test_x),
                "best sigma, iid": best["sigma"],
                "iid": best["iid"],
                "best sigma, exact": exact["sigma"],
                "exact": exact["exact"],
                "largest class": float(np.mean(problem.test_y == largest)),
            }
        )
    if out:
        harness.show(searched, out / "figure_10", FIGURES)
        harness.show(summary, out / "sigma", text="Largest class: its share of the test rows.")
    return tuned


def measured(
    tuned: Sequence[Problem], names: Sequence[str], draws: int, blocks: int = 1
) -> list[harness.Row]:
    """Return accuracies with m = d, ..., blocks d features; all couplings have the same keys."""
    by_name, options = {problem.name: problem for problem in tuned}, dict(draws=draws, seed=1)
    return harness.sweep(
        harness.cases(**{"data set": by_name, "coupling": names}),
        lambda case: accuracies(
            by_name[case["data set"]], case["coupling"], blocks=blocks, **options
        ),
        **{"m / d": range(1, blocks + 1)},
    )


def figure_8(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """Measure accuracy against m / d."""
    rows = measured(tuned, FIGURE_8, draws, MULTIPLES)
    exact = {of.name: exact_accuracies(of, [of.sigma])[0] for of in tuned}
    wide = harness.pivot(rows, "m = {m / d} d")
    lines = [line | {"exact kernel": exact[line["data set"]]} for line in wide]
    text = harness.verdict(rows, "{data set}, m = {m / d} d")
    for name, accuracy in exact.items():  # without m: a horizontal line of the figure
        row = {"data set": name, "coupling": "exact", "m / d": "", "mean": accuracy, "mean ±": ""}
        rows.append(row)
    return harness.show(rows, out, FIGURES, text, shown=lines)


def table_2(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """Compare SimRF+ with SimRF and ORF at m = d; the table has v_bar also."""
    v_bar = {of.name: of.sigma * float(cdist(of.test_x, -of.train_x).mean()) for of in tuned}
    return with_paper(2, tuned, draws, out, v_bar)


def table_3(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """Compare fast rotations with Haar ones at m = d', the next power of two."""
    return with_paper(3, [*map(padded, tuned)], draws, out, {})


def with_paper(
    number: int, tuned: Sequence[Problem], draws: int, out: Path, v_bar: Mapping[str, float]
) -> str:
    """Measure accuracies at m = d; the paper's stand below ours. All pairs are tested."""
    rows, lines = measured(tuned, TABLES[number], draws), []
    columns = [*(["v_bar"] if v_bar else []), *TABLES[number]]
    for line in map(harness.with_text, harness.pivot(rows, "{coupling}")):
        name = line["data set"]
        whose = {"ours": line | {"v_bar": v_bar.get(name)}, "paper": printed(number, name)}
        lines += [
            {"data set": name, "whose": who} | {k: numbers.get(k, "") for k in columns}
            for who, numbers in whose.items()
            if numbers
        ]
    return harness.show(lines, out, text=harness.verdict(rows, "{data set}"))


def padded(problem: Problem) -> Problem:
    """Pad the problem with zeros to the next power of two dimensions."""
    d = problem.train_x.shape[1]
    width = ((0, 0), (0, hadamard.next_power_of_two(d) - d))
    train_x, test_x = (np.pad(x, width) for x in (problem.train_x, problem.test_x))
    return problem._replace(train_x=train_x, test_x=test_x)


def splits(tables: Sequence[sets.Table], tuned: Sequence[Problem], draws: int, out: Path) -> None:
    """Measure SimRF at m = d on other splits of the same rows."""
    lines = []
    for table, listed in zip(tables, tuned, strict=True):
        others = [problems(table, seed)[0]._replace(sigma=listed.sigma) for seed in OTHER_SEEDS]
        options: Any = dict(blocks=1, draws=draws, seed=1)
        means = np.array([accuracies(of, "simrf", **options).mean() for of in [listed, *others]])
        known = printed(2, table.name).get("simrf", "")
        line = {"data set": table.name, "this split": means[0], "other splits": means[1:].mean()}
        line |= {"standard deviation": means[1:].std(ddof=1)}
        line |= {"lowest": means[1:].min(), "highest": means[1:].max(), "paper": known}
        lines.append(line)
    harness.show(lines, out)


PARTS = {"figure_8": figure_8, "table_2": table_2, "table_3": table_3}
Part = Literal["figure_8", "figure_10", "table_2", "table_3", "splits"]


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    parts: Sequence[Part] = ("figure_10", "figure_8", "table_2", "table_3", "splits"),
    draws: int = 500,
    out: Path = Path("results/tabular/classification"),
) -> None:
    """Draw the figures and print the tables."""
    names = sets.names(data_sets, "classification", data_dir)
    tables = [sets.load(n, "classification", data_dir, n in NOMINAL) for n in names]
    tuned = tune(tables, out if "figure_10" in parts else None)
    for part in dict.fromkeys(parts):
        if part == "splits":
            splits(tables, tuned, max(draws // 10, 2), out / part)
        elif part != "figure_10":
            PARTS[part](tuned, draws, out / part)


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("wine",), "draws": 4})
