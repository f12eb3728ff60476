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
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from experiments.common import harness, launch, tabular
from experiments.common.statistics import estimate, paired, plus_minus, verdict
from experiments.tabular.kernel_regression import Problem, accuracies, exact_accuracies, problems
from performer import hadamard
from vit import report

SIGMAS = tuple(2 ** (k / 2) for k in range(-10, 5))
MULTIPLES = 10
FIGURE_8 = ("iid", "orf", "simrf")
TABLE_2 = ("orf", "simrf", "simrf+")
TABLE_3 = ("iid", "orf", "sorf", "simrf", "fast-simrf")
PRINTED = Path(__file__).parent / "simrf_tables.csv"
"""Tables 2 and 3 of the paper; the former has no column for ORF."""

Draws = Mapping[str, Mapping[str, np.ndarray]]
"""Accuracies (draws,) by data set and coupling."""


class Tuned(NamedTuple):
    """A problem with the factor on its inputs."""

    problem: Problem
    sigma: float


def printed(number: int, name: str) -> Mapping[str, str]:
    """The row of the paper's table for a data set, empty if it has none."""
    return harness.printed(PRINTED, "table", "data set").get((str(number), name), {})


def search(problem: Problem, sigmas: Sequence[float], draws: int = 10) -> list[dict]:
    """One row for each sigma: the exact kernel's accuracy, and the iid features' at m = 10 d."""
    rows = []
    for sigma, exact in zip(sigmas, exact_accuracies(problem, sigmas), strict=True):
        values = accuracies(problem, sigma, "iid", blocks=MULTIPLES, draws=draws, seed=0)[:, -1]
        _, mean, error = harness.estimated(values).values()
        rows.append({"sigma": sigma, "exact": exact, "iid": mean, "standard error": error})
    return rows


def best_sigma(rows: Sequence[Mapping]) -> float:
    """The sigma at which iid features are most accurate; the smallest of equals."""
    return max(rows, key=lambda row: row["iid"])["sigma"]


def mean_length(problem: Problem) -> float:
    """Mean |x + y| over test points x and training points y: v_bar at sigma = 1."""
    return float(cdist(problem.test_x, -problem.train_x).mean())


def papers_sigma(problem: Problem) -> float | None:
    """The sigma at which v_bar is that of Table 2, for a data set that it has."""
    theirs = printed(2, problem.name)
    return float(theirs["v_bar"]) / mean_length(problem) if theirs else None


def tune(
    tables: Sequence[tabular.Table], max_rows: int, out: Path, paper_sigma: bool = False
) -> tuple[list[Tuned], str]:
    """Fig. 10: the sigma of each data set, or the paper's where it is known and wanted."""
    tuned, summary, searched = [], [], []
    for table in tables:
        problem, validation = problems(table, max_rows)
        rows = search(validation, SIGMAS)
        sigma, theirs = best_sigma(rows), papers_sigma(problem)
        used = theirs if paper_sigma and theirs else sigma
        tuned.append(Tuned(problem, used))
        searched += [{"data set": table.name, **row} for row in rows]
        best = max(rows, key=lambda row: row["exact"])
        largest = int(np.argmax(validation.one_hot.sum(axis=0)))
        summary.append(
            {
                "data set": table.name,
                "d": problem.train_x.shape[1],
                "classes": problem.one_hot.shape[1],
                "rows: training": len(problem.train_x),
                "test": len(problem.test_x),
                "sigma": sigma,
                "iid": next(row["iid"] for row in rows if row["sigma"] == sigma),
                "best sigma, exact": best["sigma"],
                "exact": best["exact"],
                "largest class": float(np.mean(validation.test_y == largest)),
                "paper's sigma": theirs or "",
                "used": used,
            }
        )
        print(f"{table.name}: sigma = {used:.3g}", flush=True)
    curves = [row | {"mean": row["iid"], "±": row["standard error"]} for row in searched]

    def finish(axis: Any, rows: Sequence[harness.Row]) -> None:
        axis.plot(SIGMAS, [row["exact"] for row in rows], "C1:", label="exact kernel")
        used = {line["data set"]: line["used"] for line in summary}
        axis.axvline(used[rows[0]["data set"]], color="gray", linewidth=0.8)

    show = partial(harness.figure, x="sigma", line="iid", panel="{data set}", finish=finish)
    show(curves, out / "sigma", xscale="log", ylabel="validation accuracy")
    report.table(searched, out / "sigma_search")
    text = (
        "Accuracies are those on the validation part; largest class: of always saying the class"
        " that the training part has most of. Paper's sigma: where v_bar is that of its Table 2."
    )
    return tuned, report.table(summary, out / "sigma", text)


def measured(
    tuned: Sequence[Tuned], names: Sequence[str], draws: int, blocks: int = 1
) -> list[harness.Row]:
    """Accuracies with m = d, ..., blocks d features; all couplings have the same keys."""
    by_name = {problem.name: (problem, sigma) for problem, sigma in tuned}

    def measure(case: harness.Row) -> np.ndarray:
        problem, sigma = by_name[case["data set"]]
        return accuracies(problem, sigma, case["coupling"], blocks=blocks, draws=draws, seed=1)

    cases = [{"data set": name, "coupling": coupling} for name in by_name for coupling in names]
    return harness.sweep(cases, measure, **{"m / d": range(1, blocks + 1)})


def figure_8(tuned: Sequence[Tuned], draws: int, out: Path) -> str:
    """Accuracy against m / d."""
    rows = measured(tuned, FIGURE_8, draws, MULTIPLES)
    exact = {problem.name: exact_accuracies(problem, [sigma])[0] for problem, sigma in tuned}

    def finish(axis: Any, rows: Sequence[harness.Row]) -> None:
        level = exact[rows[0]["data set"]]
        axis.axhline(level, color="black", linestyle=":", label="exact kernel")

    show = partial(harness.figure, x="m / d", panel="{data set}", finish=finish)
    show(rows, out, ylabel="test accuracy")
    order = []
    for size, of_size in harness.grouped(rows, "{m / d} d").items():
        results = harness.cases_of(of_size, "{data set}")
        row = {"m": size, "iid <= orf <= simrf": ordered(results)}
        order.append(row | {x: said(results, x, y) for x, y in (("orf", "iid"), ("simrf", "orf"))})
    text = f"In how many of the {len(tuned)} data sets the means are in that order:\n\n"
    text += report.table(order, out.with_name(f"{out.name}_order"))
    lines = harness.wide(rows, "m = {m / d} d")
    return report.table([x | {"exact kernel": exact[x["data set"]]} for x in lines], out, text)


def table_2(tuned: Sequence[Tuned], draws: int, out: Path) -> str:
    """SimRF+ beside SimRF, and ORF, at m = d."""
    results = harness.cases_of(measured(tuned, TABLE_2, draws), "{data set}")
    pairs = (("simrf", "orf"), ("simrf+", "simrf"))
    rows = []
    for problem, sigma in tuned:
        row = {"data set": problem.name, "whose": "ours", "m": problem.train_x.shape[1]}
        rows.append(row | {"v_bar": sigma * mean_length(problem)})
        rows[-1] |= compared(results[problem.name], pairs)
        if theirs := printed(2, problem.name):
            row |= {"whose": "paper", "m": "d", "v_bar": float(theirs["v_bar"])}
            row |= {name: theirs[name] for name in TABLE_2} | {"simrf - orf": ""}
            rows.append(row | gaps(theirs, pairs[1:]))
    return report.table(rows, out, "\n\n".join(said(results, *pair) for pair in pairs))


def table_3(tuned: Sequence[Tuned], draws: int, out: Path) -> str:
    """Fast rotations beside Haar ones at m = d', the next power of two."""
    tuned = [Tuned(padded(problem), sigma) for problem, sigma in tuned]
    results = harness.cases_of(measured(tuned, TABLE_3, draws), "{data set}")
    rows, shown = [], (("orf", "iid"), ("simrf", "orf"))
    for problem, _ in tuned:
        row = {"data set": problem.name, "whose": "ours", "m": problem.train_x.shape[1]}
        rows.append(row | compared(results[problem.name], shown))
        if theirs := printed(3, problem.name):
            texts = {k: plus_minus(*map(float, theirs[k].split(" ± "))) for k in TABLE_3}
            rows.append(row | {"whose": "paper"} | texts | gaps(theirs, shown))
    text = [f"iid <= orf <= simrf in {ordered(results)} of {len(results)} data sets."]
    text += [said(results, *pair) for pair in (*shown, ("sorf", "orf"), ("fast-simrf", "simrf"))]
    return report.table(rows, out, "\n\n".join(text))


def compared(values: Mapping[str, np.ndarray], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Columns of the means, and of the paired differences."""
    columns = {name: estimate(x) for name, x in values.items()}
    for name, other in pairs:
        apart = paired(values[name], values[other])
        sign = "+" * (apart.mean >= 0)
        columns[f"{name} - {other}"] = sign + plus_minus(apart.mean, apart.standard_error)
    return columns


def gaps(theirs: Mapping[str, str], pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Columns of the differences between printed means."""
    means = {name: float(text.split()[0]) for name, text in theirs.items() if " ± " in text}
    return {f"{name} - {other}": f"{means[name] - means[other]:+.4f}" for name, other in pairs}


def padded(problem: Problem) -> Problem:
    """With zeros up to the next power of two dimensions."""
    d = problem.train_x.shape[1]
    width = ((0, 0), (0, hadamard.next_power_of_two(d) - d))
    return problem._replace(
        train_x=np.pad(problem.train_x, width), test_x=np.pad(problem.test_x, width)
    )


def ordered(results: Draws) -> int:
    """In how many data sets the means are in the paper's order."""
    means = [{name: np.mean(v) for name, v in values.items()} for values in results.values()]
    return sum(bool(m["iid"] <= m["orf"] <= m["simrf"]) for m in means)


def said(results: Draws, name: str, other: str) -> str:
    """Paired tests over the data sets."""
    return verdict(name, other, {k: (of[name], of[other]) for k, of in results.items()})


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
    """Tunes sigma and prints the tables asked for.

    Args:
        data_dir: folder of csv files; scikit-learn's sets without.
        data_sets: names; all there are if none is given.
        parts: of the paper.
        draws: of the frequencies.
        max_rows: rows of a data set, halved.
        paper_sigma: sigma from v_bar of SimRF Table 2.
        out: folder of tables and figures.
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
