"""Classification by kernel regression with random features: SimRF Sec. 5.3, App. B.1 and B.2.

    python -m experiments.tabular.classification                     # the sets of scikit-learn
    python -m experiments.tabular.classification --data_dir=DIR      # every csv file there
    python -m experiments.tabular.classification --data_dir=DIR --parts=table_3

    y'(x) = sum_i K(sigma x, sigma x_i) y_i / sum_i K(sigma x, sigma x_i),    the class its argmax

with K the Gaussian kernel, exact or estimated by m positive features, and y_i one-hot. Of at most
--max_rows rows, drawn at random, one half trains and the other tests; columns have mean 0 and
standard deviation 1 in the training half. (The paper says neither how it split nor whether it
scaled, and has no --max_rows.)

    sigma      Fig. 10, always: on the last quarter of the training half, fitted on the rest, the
               sigma at which m = 10 d iid features are most accurate, the mean of 10 draws; with
               sets of more than 10,000 rows on 100 rows, fitted on 1000. With --paper_sigma the
               tables take the sigma that gives the v_bar of the paper's Table 2 instead
    figure_8   accuracy against m / d; one draw gives all m, by its first m frequencies
    table_2    SimRF+ beside SimRF and ORF at m = d, with v_bar = mean |sigma (x + y)| over test
               points x and training points y
    table_3    fast rotations: inputs padded with zeros to d' = 2^k dimensions, m = d'

Errors are standard errors over --draws draws of the frequencies: of the split they say nothing. In
one draw all couplings share the random key, and so the lengths of their frequencies; differences
are paired.
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

from experiments.common import harness, launch, tabular
from experiments.common.statistics import estimate, mean_and_error, paired, plus_minus
from performer import couplings
from performer.couplings import hadamard
from vit.reports import report

SIGMAS = tuple(2 ** (k / 2) for k in range(-10, 5))
MULTIPLES = 10
LARGE, TUNING_ROWS = 10_000, (1000, 100)
FIGURE_8 = ("iid", "orf", "simrf")
TABLE_2 = ("orf", "simrf", "simrf+")
TABLE_3 = ("iid", "orf", "sorf", "simrf", "fast-simrf")
PRINTED = Path(__file__).parent / "simrf_tables.csv"
"""Tables 2 and 3 of the paper; the former has no column for ORF."""
Pairs = Sequence[tuple[str, str]]
PAIRS_3 = (("orf", "iid"), ("simrf", "orf"))
"""Compared in Fig. 8 and Table 3."""


class Problem(NamedTuple):
    """Points to learn from and points to classify, standardised, float32, and their factor."""

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


def problems(table: tabular.Table, max_rows: int) -> tuple[Problem, Problem]:
    """The problem of a data set, and the one inside its training half that tunes sigma.

    Raises:
        ValueError: for a single column, where no simplex exists, or too few rows.
    """
    if table.x.shape[1] < 2:
        raise ValueError(
            f"data set {table.name!r} has the column {table.columns[0]!r} alone: SimRF needs two"
        )
    split = tabular.splits(table, 1, train=max_rows // 2, test=max_rows // 2)
    x, y, test_x, test_y = (np.asarray(array[0]) for array in split[:4])
    one_hot = np.eye(table.y.max() + 1, dtype=np.float32)

    def problem(train_x, train_y, test_x, test_y):
        points = train_x.astype(np.float32), one_hot[train_y], test_x.astype(np.float32)
        return Problem(table.name, *points, test_y)

    fitted = len(x) - max(1, len(x) // 4)
    first, second = TUNING_ROWS if len(table.x) > LARGE else (len(x), len(x))
    fit, held = slice(min(first, fitted)), slice(fitted, fitted + second)
    return problem(x, y, test_x, test_y), problem(x[fit], y[fit], x[held], y[held])


def regress(
    train_x: Float[Array, "n d"],
    one_hot: Float[Array, "n c"],
    test_x: Float[Array, "k d"],
    W: Float[Array, "m d"],
    blocks: int = 1,
) -> Float[Array, "b k c"]:
    """y' of the test points, from the first m / blocks, 2 m / blocks, ... and from all m features.

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
    """Accuracies (draws, blocks) with m = d, 2 d, ..., blocks d features.

    Raises:
        ValueError: when an estimate is not finite.
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
    """Accuracies with the exact kernel, in float64."""
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
    """The row of the paper's table for a data set, empty if it has none."""
    return harness.printed(PRINTED, "table", "data set").get((str(number), name), {})


def search(problem: Problem, sigmas: Sequence[float], draws: int = 10) -> list[harness.Row]:
    """One row for each sigma: the exact kernel's accuracy, and the iid features' at m = 10 d."""
    rows = []
    for sigma, exact in zip(sigmas, exact_accuracies(problem, sigmas), strict=True):
        tried = problem._replace(sigma=sigma)
        values = accuracies(tried, "iid", blocks=MULTIPLES, draws=draws, seed=0)[:, -1]
        estimates = zip(("iid", "standard error"), mean_and_error(values), strict=True)
        rows.append({"sigma": sigma, "exact": exact} | dict(estimates))
    return rows


def mean_length(problem: Problem) -> float:
    """v_bar: mean |sigma (x + y)| over test points x and training points y."""
    return problem.sigma * float(cdist(problem.test_x, -problem.train_x).mean())


def papers_sigma(problem: Problem) -> float | None:
    """The sigma at which v_bar is that of Table 2, for a data set that it has."""
    theirs = printed(2, problem.name)
    return float(theirs["v_bar"]) / mean_length(problem) if theirs else None


def tune(
    tables: Sequence[tabular.Table], max_rows: int, out: Path, paper_sigma: bool = False
) -> tuple[list[Problem], str]:
    """Fig. 10: the sigma of each data set, or the paper's where it is known and wanted."""
    tuned, summary, searched = [], [], []
    for table in tables:
        problem, validation = problems(table, max_rows)
        rows = search(validation, SIGMAS)
        best, exact = (max(rows, key=itemgetter(y)) for y in ("iid", "exact"))
        theirs = papers_sigma(problem)
        tuned.append(problem._replace(sigma=(paper_sigma and theirs) or best["sigma"]))
        searched += [{"data set": table.name, **row} for row in rows]
        largest = int(np.argmax(validation.one_hot.sum(axis=0)))
        row = {"data set": table.name, "d": problem.train_x.shape[1]}
        row |= {"classes": problem.one_hot.shape[1], "rows: training": len(problem.train_x)}
        row |= {"test": len(problem.test_x), "sigma": best["sigma"], "iid": best["iid"]}
        row |= {"best sigma, exact": exact["sigma"], "exact": exact["exact"]}
        row |= {"largest class": float(np.mean(validation.test_y == largest))}
        summary.append(row | {"paper's sigma": theirs or "", "used": tuned[-1].sigma})
        print(f"{table.name}: sigma = {tuned[-1].sigma:.3g}", flush=True)
    used = {row["data set"]: row["used"] for row in summary}

    def finish(axis: Any, rows: Sequence[harness.Row]) -> None:
        axis.plot(SIGMAS, [row["exact"] for row in rows], "C1:", label="exact kernel")
        axis.axvline(used[rows[0]["data set"]], color="gray", linewidth=0.8)

    options: Any = dict(line="iid", panel="{data set}", finish=finish, xscale="log")
    options |= dict(y="iid", error="standard error", ylabel="validation accuracy")
    harness.figure(searched, out / "sigma", x="sigma", **options)
    report.table(searched, out / "sigma_search")
    text = (
        "Accuracies are those on the validation part; largest class: of always saying the class"
        " that the training part has most of. Paper's sigma: where v_bar is that of its Table 2."
    )
    return tuned, report.table(summary, out / "sigma", text)


def measured(
    tuned: Sequence[Problem], names: Sequence[str], draws: int, blocks: int = 1
) -> list[harness.Row]:
    """Accuracies with m = d, ..., blocks d features; all couplings have the same keys."""
    by_name = {problem.name: problem for problem in tuned}

    def measure(case: harness.Row) -> np.ndarray:
        problem = by_name[case["data set"]]
        return accuracies(problem, case["coupling"], blocks=blocks, draws=draws, seed=1)

    cases = harness.cases(**{"data set": by_name, "coupling": names})
    return harness.sweep(cases, measure, **{"m / d": range(1, blocks + 1)})


def figure_8(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """Accuracy against m / d."""
    rows = measured(tuned, FIGURE_8, draws, MULTIPLES)
    exact = {of.name: exact_accuracies(of, [of.sigma])[0] for of in tuned}
    order = []
    for size, of_size in harness.grouped(rows, "{m / d} d").items():
        row = {"m": size, "iid <= orf <= simrf": ordered(of_size)}
        order.append(row | {pair[0]: said(of_size, [pair], "{}") for pair in PAIRS_3})

    def finish(axis: Any, rows: Sequence[harness.Row]) -> None:
        style: Any = dict(color="black", linestyle=":", label="exact kernel")
        axis.axhline(exact[rows[0]["data set"]], **style)

    text = f"In how many of the {len(tuned)} data sets the means are in that order:\n\n"
    text += report.table(order, out.with_name(f"{out.name}_order"))
    wide = harness.wide(rows, "m = {m / d} d")
    lines = [line | {"exact kernel": exact[line["data set"]]} for line in wide]
    options: Any = dict(x="m / d", panel="{data set}", finish=finish, ylabel="test accuracy")
    return harness.show(rows, out, "", lines=lines, text=text, **options)


def table_2(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """SimRF+ beside SimRF, and ORF, at m = d."""
    pairs = (("simrf", "orf"), ("simrf+", "simrf"))
    rows, measures = beside_paper(2, tuned, TABLE_2, pairs, draws)
    return report.table(rows, out, said(measures, pairs))


def table_3(tuned: Sequence[Problem], draws: int, out: Path) -> str:
    """Fast rotations beside Haar ones at m = d', the next power of two."""
    rows, measures = beside_paper(3, [*map(padded, tuned)], TABLE_3, PAIRS_3, draws)
    text = f"iid <= orf <= simrf in {ordered(measures)} of {len(tuned)} data sets.\n\n"
    pairs = (*PAIRS_3, ("sorf", "orf"), ("fast-simrf", "simrf"))
    return report.table(rows, out, text + said(measures, pairs))


def beside_paper(
    number: int, tuned: Sequence[Problem], names: Sequence[str], pairs: Pairs, draws: int
) -> tuple[list[harness.Row], list[harness.Row]]:
    """Means and paired differences of each data set with the paper's, and what was measured."""
    measures, lines = measured(tuned, names, draws), []
    for problem in tuned:
        theirs = printed(number, problem.name)
        row = {"data set": problem.name, "whose": "ours", "m": problem.train_x.shape[1]}
        papers = row | {"whose": "paper"}
        if number == 2:
            row["v_bar"] = mean_length(problem)
            papers |= {"m": "d", "v_bar": float(theirs.get("v_bar", "nan"))}
        values = harness.cases_of(measures, "{data set}")[problem.name]
        means = {k: float(text.split()[0]) for k, text in theirs.items() if " ± " in text}
        columns = {name: (estimate(x), theirs.get(name)) for name, x in values.items()}
        for name, other in pairs:
            apart = paired(values[name], values[other])
            ours = "+" * (apart.mean >= 0) + plus_minus(apart.mean, apart.standard_error)
            gap = f"{means[name] - means[other]:+.4f}" if {name, other} <= means.keys() else ""
            columns[f"{name} - {other}"] = ours, gap
        lines.append(row | {name: ours for name, (ours, _) in columns.items()})
        if theirs:
            lines.append(papers | {name: text for name, (_, text) in columns.items()})
    return lines, measures


def padded(problem: Problem) -> Problem:
    """The problem with zeros up to the next power of two dimensions."""
    d = problem.train_x.shape[1]
    width = ((0, 0), (0, hadamard.next_power_of_two(d) - d))
    train_x, test_x = (np.pad(x, width) for x in (problem.train_x, problem.test_x))
    return problem._replace(train_x=train_x, test_x=test_x)


def ordered(rows: Sequence[harness.Row]) -> int:
    """The number of data sets in which the means are in the paper's order."""
    means = [
        {row["coupling"]: row["mean"] for row in group}
        for group in harness.grouped(rows, "{data set}").values()
    ]
    return sum(bool(m["iid"] <= m["orf"] <= m["simrf"]) for m in means)


def said(rows: Sequence[harness.Row], pairs: Pairs, bullet: str = "- {}.") -> str:
    """Paired tests over the data sets."""
    return harness.verdict(rows, "{data set}", pairs=pairs, bullet=bullet)


PARTS = {"figure_8": figure_8, "table_2": table_2, "table_3": table_3}


def main(
    data_dir: Path | None = None,
    data_sets: Sequence[str] = (),
    parts: Sequence[Literal["figure_8", "table_2", "table_3"]] = ("figure_8", "table_2", "table_3"),
    draws: int = 500,
    max_rows: int = 5000,
    paper_sigma: bool = False,
    out: Path = Path("results/tabular/classification"),
) -> None:
    """Tune sigma and print the tables asked for.

    Args:
        max_rows: rows of a data set, halved.
        paper_sigma: sigma from v_bar of SimRF Table 2.
    """
    launch.at_least(2, draws=draws)
    launch.at_least(20, max_rows=max_rows)
    names = tabular.names(data_sets, "classification", data_dir)
    tables = [tabular.load(name, "classification", data_dir) for name in names]
    tuned, text = tune(tables, max_rows, out, paper_sigma)
    print(f"sigma\n\n{text}", flush=True)
    for part in dict.fromkeys(parts):
        print(f"{part}\n\n{PARTS[part](tuned, draws, out / part)}", flush=True)


if __name__ == "__main__":
    launch.run(main, quick={"data_sets": ("wine",), "draws": 4, "max_rows": 100})
