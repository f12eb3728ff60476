"""Verdicts on the papers' figures and tables, computed from the csv of the results.

    python -m experiments.verdicts        # writes the tables of verdicts in docs/results

Each item of the four papers is a number of comparisons, of which some agree:

    printed   our mean and the printed one are within two joint standard errors and half a unit of
              the last printed digit
    order     the paper's order of two couplings is not contradicted: the mean of the lower one is
              above the other by at most two joint standard errors. The order is shown where it is
              below by more than two

The papers' figures have no numbers, so that only orders can be compared. By chance 5% of the
comparisons may fail. An item "agrees" if 90% of its comparisons do (but for the named ones), agrees
"in part" if half of them do, and "does not" agree otherwise. An order that is shown in less than
half of the comparisons is "not contradicted".
"""

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import harness, launch

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"
BEGIN, END = "<!-- verdicts: by `python -m experiments.verdicts` -->", "<!-- end of verdicts -->"
Agreement = Iterator[bool | float]
"""Agreement of printed values; of orders the difference in joint standard errors, positive
in the paper's order."""


class Item(NamedTuple):
    """A figure or table of a paper."""

    paper: str
    name: str
    page: str
    """Page of `docs/results`, without its suffix."""
    compared: str
    """Statement or values that are compared."""
    agreement: Callable[[], Agreement] | None
    """True for each comparison that agrees; None for an item that was not run."""
    why: str = ""
    """Disagreements, and the cause if it is known."""


def rows_of(*paths: str) -> list[harness.Row]:
    """Return the rows of csv files below `RESULTS`."""
    return [row for path in paths for row in harness.read(RESULTS / f"{path}.csv")]


def close(ours: float, error: float, theirs: float, their_error: float, digit: float) -> bool:
    """Return whether two values agree; `digit` is a unit of the last printed digit."""
    return abs(ours - theirs) <= 2 * np.hypot(error, their_error) + digit / 2


def order(
    rows: Sequence[harness.Row],
    case: str,
    value: str,
    *lines: str,
    line: str = "coupling",
    error: str = "",
    sign: int = 1,
) -> Agreement:
    """Compare each line with the next, which should not be above it.

    Args:
        rows: rows of a csv.
        case: template of the cases.
        value: column of the means.
        lines: from the highest to the lowest.
        line: column of the names of the lines.
        error: column of the standard errors; the column of the means with " ±" if empty.
        sign: -1 if larger values are better: `lines` are then from the lowest to the highest.
    """
    for group in harness.grouped(rows, case).values():
        means = {
            row[line]: (sign * row[value], row.get(error or f"{value} ±") or 0) for row in group
        }
        for higher, lower in itertools.pairwise(lines):
            if {higher, lower} <= means.keys():
                (high, first), (low, second) = means[higher], means[lower]
                yield float((high - low) / max(np.hypot(first, second), 1e-12))


def vrc_table(m: str, *quantities: str) -> Agreement:
    """Compare the values of VRC Tables 1, 3 and 4, of which ratios are 1 for iid frequencies."""
    for row in rows_of("tabular/gp/gp"):
        for quantity in quantities:
            known = row["m"] == m and row[f"{quantity}, paper"] != ""
            if known and not ("ratio" in quantity and row["coupling"] == "iid"):
                ours = row[quantity], row[f"{quantity} ±"]
                yield close(*ours, row[f"{quantity}, paper"], row[f"{quantity}, paper ±"], 0.001)


def simrf_table(number: int) -> Agreement:
    """Compare the accuracies of SimRF Table 2 or 3."""
    rows = rows_of(f"tabular/classification/table_{number}")
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        for name in ours:
            if name != "v_bar" and f"{name} ±" in theirs:
                printed = theirs[name], theirs[f"{name} ±"]
                yield close(ours[name], ours[f"{name} ±"], *printed, 1e-4)


def qgrf_table(number: int) -> Agreement:
    """Compare the values of qGRF Table 1, 2 or 3, with the error of the last digit in brackets."""
    with (RESULTS / "graphs" / "tasks" / f"table_{number}.csv").open() as file:
        for row in csv.DictReader(file):
            for name, paper in (("independent", "GRFs"), ("antithetic", "q-GRFs")):
                text, _, error = row[f"paper {paper}"].rstrip(")").partition("(")
                digit = 10.0 ** -len(text.partition(".")[2])
                ours = float(row[name]), float(row[f"{name} ±"])
                yield close(*ours, float(text), digit * float(error or 0), digit)


def smaller_sigma() -> Agreement:
    """Compare the best sigma of random features and of the exact kernel, SimRF Fig. 10."""
    for row in rows_of("tabular/classification/sigma"):
        yield row["best sigma, iid"] <= row["best sigma, exact"]


def walks(path: str, name: str = "", *, sizes: bool = False) -> Agreement:
    """Compare sigma-coupled, antithetic and independent walks; with `sizes` the last two."""
    rows = [row for row in rows_of(path) if not name or row["graph"] == name]
    if sizes:
        return order(rows, "{graph} {m}", "mean", "independent", "antithetic", line="walks")
    return order(rows, "{graph} {p_halt}", "mean", "independent", "antithetic", "sigma")


def meshes(*paths: str) -> Agreement:
    """Compare the couplings of walks by kernel error, KL and RMSE, VRC Figs 4 and 11."""
    for quantity in ("error", "KL", "RMSE"):
        yield from order(
            rows_of(*paths), "{graph} {m}", quantity, "independent", "antithetic", "sigma"
        )


def quadrature(figure: str, value: str, sign: int) -> Agreement:
    """Compare B with each of the other methods at n = 5, Quad Figs 1 and 2."""
    rows = [row | {"half": row["95%"] / 2} for row in rows_of(figure) if row["n"] == 5]
    options: harness.Row = dict(line="method", error="half", sign=sign)
    for name in ("G", "Gort", "ROM", "QMC", "GQ"):
        yield from order(rows, "{data set} {kernel}", value, name, "B", **options)


def counts(item: Item) -> tuple[int, int, int] | None:
    """Return how many comparisons agree, of how many, and in how many the order is shown.

    None for an item that was not run.
    """
    if item.agreement is None:
        return None
    values = list(item.agreement())
    agree = sum(value if isinstance(value, bool | np.bool_) else value >= -2 for value in values)
    shown = sum(not isinstance(value, bool | np.bool_) and value > 2 for value in values)
    return int(agree), len(values), shown


def verdict(item: Item) -> str:
    """Return the verdict on an item."""
    count = counts(item)
    if count is None:
        return f"not run: {item.why}"
    agree, number, shown = count
    share = agree / number
    if share >= 0.9:
        word = "not contradicted" if 0 < shown < number / 2 else "agrees"
        return word + f" but for {item.why}" * (agree < number)
    return f"in part, not {item.why}" if share >= 0.5 else f"does not: {item.why}"


SIMRF, VRC, QGRF, QUAD = "SimRF", "VRC", "qGRF", "Quad"
RUN = "it takes accelerators and ImageNet"
ROWS = (
    "abalone, cmc, wifi, nursery and chess: one sign for all couplings, so the rows or the split"
    " differ, not the couplings; the accuracies of other splits differ more"
)
ITEMS = (
    Item(SIMRF, "Fig. 4", "simrf", "order of the conformities", lambda: order(
        [row | {"error": 0.0} for row in rows_of("kernels/conformity/figure_4")], "", "conformity",
        "iid", "orf", "simrf", "simrf+", line="arrangement", error="error")),
    Item(SIMRF, "Fig. 5", "simrf", "closed form against draws", lambda: (
        row["Kolmogorov-Smirnov p"] > 0.05 / 3 for row in rows_of("kernels/conformity/figure_5"))),
    Item(SIMRF, "Fig. 6", "simrf", "closed form against draws", lambda: (
        abs(row["standard errors apart"]) <= 2 for row in rows_of("kernels/conformity/figure_6"))),
    Item(SIMRF, "Fig. 7", "simrf", "order of the errors", lambda: order(
        rows_of("kernels/conformity/figure_7"), "{m}", "mean", "iid", "orf", "simrf")),
    Item(SIMRF, "Fig. 8", "simrf", "order of the accuracies", lambda: order(
        rows_of("tabular/classification/figure_8"), "{data set} {m / d}", "mean",
        "iid", "orf", "simrf", sign=-1)),
    Item(SIMRF, "Fig. 9", "simrf", "ViTs", None,
         f"{RUN}; the small run of (b) shows no difference"),
    Item(SIMRF, "Fig. 10", "simrf", "the best σ is at most that of the exact kernel",
         smaller_sigma),
    Item(SIMRF, "Table 2", "simrf", "printed accuracies", lambda: simrf_table(2), ROWS),
    Item(SIMRF, "Table 3", "simrf", "printed accuracies", lambda: simrf_table(3), ROWS),
    Item(VRC, "Table 1", "vrc", "printed ratios", lambda: vrc_table("d", "kernel ratio"),
         "abalone, and orthogonal Laplace features, all 7 to 17% lower: no cause found"),
    Item(VRC, "Table 2", "vrc", "ViTs", None, RUN),
    Item(VRC, "Table 3", "vrc", "printed KL, RMSE, RMSE ratio, NLL",
         lambda: vrc_table("d", "KL", "RMSE", "RMSE ratio", "NLL"),
         "the KL of abalone, which depends on the rows"),
    Item(VRC, "Table 4", "vrc", "printed kernel RMSE, KL, RMSE, RMSE ratio, NLL",
         lambda: vrc_table("8d", "kernel RMSE", "KL", "RMSE", "RMSE ratio", "NLL"),
         "two kernel errors of power plant with Laplace features"),
    Item(VRC, "Fig. 1", "vrc", "order of the kernel errors", lambda: order(
        [row for row in rows_of("tabular/gp/figure_1") if row["m"] != ""], "{m}", "kernel RMSE",
        "iid", "orthogonal", "+ pnc")),
    Item(VRC, "Fig. 6", "vrc", "learned lengths are not below PNC by more than 5%", lambda: (
        row["to + pnc"] - 2 * row["±"] >= -0.1 for row in rows_of("tabular/copula/copula")
        if row["coupling"] == "copula, learned")),
    Item(VRC, "Fig. 7", "vrc", "order of the attention errors", lambda: order(
        [row | {"x": row["x ~ N(0, .)"]} for row in rows_of("attention_mse/figure7/figure7")],
        "{x} {m}", "attention error",
        "orf", "pm")),
    Item(VRC, "Fig. 12", "vrc", "order of the kernel errors", lambda: order(
        rows_of("kernels/matern/matern"), "{points} {nu} {m / d}", "mean", "iid", "orf", "pnc")),
    Item(VRC, "Fig. 3", "vrc-walks", "order of the errors on cora",
         lambda: walks("graphs/sigma/figure_10", "cora")),
    Item(VRC, "Fig. 4", "vrc-walks", "order of error, KL and RMSE", lambda: meshes(
        "graphs/gp_meshes/figure_4", "graphs/gp_busted/figure_4", "graphs/gp_torus/figure_4")),
    Item(VRC, "Fig. 8", "vrc-walks", "both objectives have the same error", lambda: order(
        rows_of("graphs/sigma/figure_8"), "{graph} {n}", "error / independent", "quadratic",
        "linear", line="learned", error="±")),
    Item(VRC, "Fig. 9", "vrc-walks", "order of the errors", lambda: walks("graphs/sigma/figure_9")),
    Item(VRC, "Fig. 10", "vrc-walks", "order of the errors",
         lambda: walks("graphs/sigma/figure_10")),
    Item(VRC, "Fig. 11", "vrc-walks", "order of error, KL and RMSE",
         lambda: meshes("graphs/gp/figure_11")),
    Item(QGRF, "Fig. 2", "qgrf", "order of the errors", lambda: walks(
        "graphs/kernels/figure_2", sizes=True)),
    Item(QGRF, "Fig. 4", "qgrf", "order of the errors", lambda: walks(
        "graphs/kernels/figure_4", sizes=True)),
    Item(QGRF, "Table 1", "qgrf", "printed errors", lambda: qgrf_table(1),
         "the two random graphs: other draws, or a misprint of Larger ER"),
    Item(QGRF, "Table 2", "qgrf", "printed errors", lambda: qgrf_table(2),
         "σ, walks and starts are not stated"),
    Item(QGRF, "Table 3", "qgrf", "printed errors", lambda: qgrf_table(3),
         "the cylinder, +35%; means weighted equally, by area or by angle do not fit all meshes"),
    Item(QUAD, "Fig. 1", "quad", "B is not above G, Gort, ROM, QMC, GQ", lambda: quadrature(
        "kernels/quadrature/figure_1", "error", 1),
         "the Gaussian kernel on power plant and LETTER, and order 0 on power plant, where QMC or"
         " Gort is lower"),
    Item(QUAD, "Fig. 2", "quad", "B is not below G, Gort, ROM, QMC, GQ", lambda: quadrature(
        "kernels/quadrature_svm/figure_2", "score", -1),
         "order 0 on digits and LETTER, whose reflected features are redundant to a linear model,"
         " and the Gaussian kernel on power plant"),
    Item(QUAD, "Fig. 3", "quad", "butterfly matrices are faster from d = 1024", lambda: (
        row["butterfly, ms"] < row["dense, ms"]
        for row in rows_of("kernels/quadrature_time/figure_3") if row["d"] >= 1024)),
)  # fmt: skip


def table(items: Sequence[Item], links: bool) -> str:
    """Return the markdown table of items; `links` adds the page of each."""
    lines = ["| item | compared | agree | verdict |", "|---|---|---|---|"]
    for item in items:
        name = f"[{item.paper} {item.name}]({item.page}.md)" if links else item.name
        count = counts(item)
        share = f"{count[0]} of {count[1]}" if count else ""
        share += f", shown in {count[2]}" if count and count[2] else ""
        lines.append(f"| {name} | {item.compared} | {share} | {verdict(item)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the text of a page with its table of verdicts made again."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    items = [item for item in ITEMS if page in ("index", item.page)]
    block = f"{BEGIN}\n\n{table(items, page == 'index')}\n\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


def main() -> None:
    """Write the tables of verdicts."""
    for page in ("index", *dict.fromkeys(item.page for item in ITEMS)):
        (PAGES / f"{page}.md").write_text(written(page), encoding="utf-8")
    print(table(ITEMS, False))


if __name__ == "__main__":
    launch.run(main)
