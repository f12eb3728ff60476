"""Verdicts on the papers' figures and tables, computed from the csv of the results.

    python -m experiments.verdicts        # writes the tables of verdicts in docs/results

Each item of the four papers is a number of comparisons, of which some agree. The rules are these
functions; they were fixed for all items of a kind:

    close       a printed value: our mean is within two joint standard errors and half a unit of its
                last digit
    order       the paper's order of two couplings is not contradicted: the mean of the lower one is
                above the other by at most two joint standard errors. The order is shown where it is
                below by more than two
    no_better   a bound: the value is not below another by more than a share, with two standard
                errors (VRC Fig. 6: 5%)
    a statement true or false of each row, over all rows of the csv (SimRF Figs 5, 6 and 10, Quad
                Fig. 3)

The papers' figures have no numbers, so that only orders can be compared. By chance 5% of the
comparisons may fail. An item "agrees" if 90% of its comparisons do (but for the named ones), agrees
"in part" if half of them do, and "does not" agree otherwise. An order that is shown in less than
half of the comparisons is "not contradicted".

Each count of values or orders has a second one next to it, with exchanged couplings: our values of
the first coupling are compared with the printed ones of the last, and so on, and orders are
reversed. Where at least half of the comparisons agree even so, the item "hardly tells couplings
apart".
"""

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit.study import harness, launch

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"
BEGIN, END = "<!-- verdicts: by `python -m experiments.verdicts` -->", "<!-- end of verdicts -->"
COUNTS = "<!-- counts: by `python -m experiments.verdicts` -->", "<!-- end of counts -->"


class Printed(NamedTuple):
    """Comparison with a printed value."""

    case: str
    """Data set or graph."""
    apart: float
    """Our value less the printed one, in joint standard errors."""
    agrees: bool
    exchanged: bool
    """True if our value of the exchanged coupling agrees with it."""


Agreement = Iterator[bool | float | Printed]
"""Statements, printed values, or orders: the difference in joint standard errors, positive in the
paper's order."""
Value = tuple[float, float]
"""Mean and standard error."""


class Item(NamedTuple):
    """A figure or table of a paper."""

    paper: str
    name: str
    page: str
    """Page of `docs/results`, without its suffix."""
    compared: str
    """Statement or values that are compared."""
    agreement: Callable[[], Agreement] | None
    """Comparisons; None for an item that was not run."""
    why: str | Callable[[Sequence[Printed]], str] = ""
    """Disagreements, and the cause if it is known; or a function of all comparisons."""


class Counts(NamedTuple):
    """Comparisons of an item."""

    agree: int
    number: int
    shown: int
    """Orders that are significant."""
    exchanged: int | None
    """Comparisons that agree with exchanged couplings; None for statements."""


def rows_of(*paths: str) -> list[harness.Row]:
    """Return the rows of csv files below `RESULTS`."""
    return [row for path in paths for row in harness.read(RESULTS / f"{path}.csv")]


def close(ours: float, error: float, theirs: float, their_error: float, digit: float) -> bool:
    """Return whether two values agree; `digit` is a unit of the last printed digit."""
    return abs(ours - theirs) <= 2 * np.hypot(error, their_error) + digit / 2


def no_better(difference: float, error: float, share: float) -> bool:
    """Return whether a relative difference is above -share with two standard errors."""
    return difference - 2 * error >= -share


def printed(case: str, ours: Sequence[Value], theirs: Sequence[Value], digit: float) -> Agreement:
    """Compare the values of several couplings with the printed ones, and in reversed order."""
    for mine, other, value in zip(ours, ours[::-1], theirs, strict=True):
        apart = (mine[0] - value[0]) / max(np.hypot(mine[1], value[1]), 1e-12)
        yield Printed(case, apart, close(*mine, *value, digit), close(*other, *value, digit))


def order(
    rows: Sequence[harness.Row],
    case: str,
    value: str,
    *lines: str,
    line: str = "coupling",
    error: str = "",
    sign: int = 1,
) -> Iterator[float]:
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
    """Compare the values of VRC Tables 1, 3 and 4; ratios to iid frequencies are 1 for these."""
    groups = harness.grouped(rows_of("tabular/gp/gp"), "{data set} {features} {m}")
    for group, quantity in itertools.product(groups.values(), quantities):
        known = [row for row in group if row["m"] == m and row[f"{quantity}, paper"] != ""]
        ours = [(row[quantity], row[f"{quantity} ±"]) for row in known]
        theirs = [(row[f"{quantity}, paper"], row[f"{quantity}, paper ±"] or 0) for row in known]
        for row, comparison in zip(
            known, printed(str(group[0]["data set"]), ours, theirs, 0.001), strict=True
        ):
            if not ("ratio" in quantity and row["coupling"] == "iid"):
                yield comparison


def draws_alone() -> Agreement:
    """Compare kernel errors by the noise of the draws alone, `experiments.tabular.draws`."""
    groups = harness.grouped(rows_of("tabular/draws/draws"), "{data set} {features} {m}")
    for group in groups.values():
        known = [row for row in group if row["paper"] != ""]
        ours, theirs = ([(row[k], row[f"{k} ±"]) for row in known] for k in ("value", "paper"))
        for row, comparison in zip(
            known, printed(str(group[0]["data set"]), ours, theirs, 0.001), strict=True
        ):
            if not (row["m"] == "d" and row["coupling"] == "iid"):
                yield comparison


def simrf_table(number: int) -> Agreement:
    """Compare the accuracies of SimRF Table 2 or 3."""
    rows = rows_of(f"tabular/classification/table_{number}")
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        names = [name for name in ours if name != "v_bar" and f"{name} ±" in theirs]
        values = [[(row[x], row[f"{x} ±"]) for x in names] for row in (ours, theirs)]
        yield from printed(str(ours["data set"]), values[0], values[1], 1e-4)


def qgrf_table(number: int) -> Agreement:
    """Compare the values of qGRF Table 1, 2 or 3, with the error of the last digit in brackets."""
    with (RESULTS / "graphs" / "tasks" / f"table_{number}.csv").open() as file:
        for row in csv.DictReader(file):
            ours = [(float(row[x]), float(row[f"{x} ±"])) for x in ("independent", "antithetic")]
            texts = [row[f"paper {x}"].rstrip(")").partition("(") for x in ("GRFs", "q-GRFs")]
            digit = 10.0 ** -len(texts[0][0].partition(".")[2])
            theirs = [(float(text), digit * float(error or 0)) for text, _, error in texts]
            yield from printed(row["graph"], ours, theirs, digit)


def deviating(comparisons: Sequence[Printed]) -> str:
    """Name the cases with a value that disagrees, by whether all their values deviate one way."""
    cases = harness.grouped([x._asdict() for x in comparisons], "{case}")
    one, both = [], []
    for case, group in cases.items():
        if not all(x["agrees"] for x in group):
            signs = {x["apart"] > 0 for x in group}
            (one if len(signs) == 1 else both).append(case.replace("_krkopt", ""))
    said = [f"{', '.join(one)} (all couplings deviate in one direction)"] if one else []
    said += [f"{', '.join(both)} (in both directions)"] if both else []
    return " and ".join(said)


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


def counted(comparisons: Sequence[bool | float | Printed]) -> Counts:
    """Count the comparisons that agree, as they are and with exchanged couplings."""
    values = [x for x in comparisons if isinstance(x, Printed)]
    orders = [x for x in comparisons if isinstance(x, float)]
    statements = [x for x in comparisons if isinstance(x, bool | np.bool_)]
    agree = sum(statements) + sum(x.agrees for x in values) + sum(x >= -2 for x in orders)
    exchanged = sum(x.exchanged for x in values) + sum(x <= 2 for x in orders)
    none = len(statements) > 0
    shown = sum(x > 2 for x in orders)
    return Counts(int(agree), len(comparisons), int(shown), None if none else int(exchanged))


def counts(item: Item) -> Counts | None:
    """Return the counts of an item; None if it was not run."""
    return counted(list(item.agreement())) if item.agreement else None


def reason(item: Item) -> str:
    """Return why an item does not agree."""
    if isinstance(item.why, str):
        return item.why
    assert item.agreement
    return item.why([x for x in item.agreement() if isinstance(x, Printed)])


def verdict(item: Item) -> str:
    """Return the verdict on an item."""
    count, why = counts(item), reason(item)
    if count is None:
        return f"not run: {why}"
    share = count.agree / count.number
    if share < 0.9:
        return f"in part, not {why}" if share >= 0.5 else f"does not: {why}"
    word = "not contradicted" if 0 < count.shown < count.number / 2 else "agrees"
    word += f" but for {why}" * (count.agree < count.number)
    blind = not count.shown and (count.exchanged or 0) >= count.number / 2
    return word + "; hardly tells couplings apart" * blind


SIMRF, VRC, QGRF, QUAD = "SimRF", "VRC", "qGRF", "Quad"
RUN = "it takes accelerators and ImageNet"
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
    Item(SIMRF, "Fig. 10", "simrf", "the best σ is at most the best σ of the exact kernel",
         smaller_sigma),
    Item(SIMRF, "Table 2", "simrf", "printed accuracies", lambda: simrf_table(2), deviating),
    Item(SIMRF, "Table 3", "simrf", "printed accuracies", lambda: simrf_table(3), deviating),
    Item(VRC, "Table 1", "vrc", "printed ratios", lambda: vrc_table("d", "kernel ratio"),
         "abalone, and Laplace features with opposite frequencies on three sets"),
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
        no_better(row["to + pnc"], row["±"], 0.05) for row in rows_of("tabular/copula/copula")
        if row["coupling"] == "copula, learned"),
         "Laplace features, for which the draws are too few: 2.6% ± 2.8%"),
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
    Item(VRC, "Fig. 8", "vrc-walks", "both objectives have the same error", lambda: (
        abs(apart) <= 2 for apart in order(
            rows_of("graphs/sigma/figure_8"), "{graph} {n}", "error / independent", "quadratic",
            "linear", line="learned", error="±"))),
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
    Item(QUAD, "Fig. 3", "quad", "butterfly matrices are faster, at each d from 64", lambda: (
        row["butterfly, ms"] < row["dense, ms"]
        for row in rows_of("kernels/quadrature_time/figure_3")),
         "dense matrices are faster below d = 1024"),
)  # fmt: skip


def table(items: Sequence[Item], links: bool) -> str:
    """Return the markdown table of items; `links` adds the page of each."""
    lines = ["| item | compared | agree | if exchanged | verdict |", "|---|---|---|---|---|"]
    for item in items:
        name = f"[{item.paper} {item.name}]({item.page}.md)" if links else item.name
        count = counts(item)
        share = f"{count.agree} of {count.number}" if count else ""
        share += f", shown in {count.shown}" if count and count.shown else ""
        exchanged = "" if count is None or count.exchanged is None else count.exchanged
        lines.append(f"| {name} | {item.compared} | {share} | {exchanged} | {verdict(item)} |")
    return "\n".join(lines)


def values_table() -> str:
    """Return the markdown table of the values of VRC Tables 1, 3 and 4 by quantity."""
    groups: dict[str, Callable[[], Agreement]] = {
        "kernel error (Table 1, and RMSE of Table 4)": lambda: itertools.chain(
            vrc_table("d", "kernel ratio"), vrc_table("8d", "kernel RMSE")
        ),
        "the same by the noise of the draws alone, two sets": draws_alone,
    }
    for name in ("KL", "RMSE", "NLL", "RMSE ratio"):
        groups[name] = lambda name=name: itertools.chain(
            vrc_table("d", name), vrc_table("8d", name)
        )
    lines = ["| values | number | agree | if exchanged |", "|---|---|---|---|"]
    for name, agreement in groups.items():
        count = counted(list(agreement()))
        lines.append(f"| {name} | {count.number} | {count.agree} | {count.exchanged} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the text of a page with its tables of verdicts and counts made again."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    items = [item for item in ITEMS if page in ("index", item.page)]
    text = replaced(text, BEGIN, END, table(items, page == "index"))
    return replaced(text, *COUNTS, values_table()) if page == "vrc" else text


def replaced(text: str, begin: str, end: str, body: str) -> str:
    """Return a text with what stands between two marks replaced."""
    pattern = f"{re.escape(begin)}.*{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{begin}\n\n{body}\n\n{end}", text, flags=re.DOTALL)


def main() -> None:
    """Write the tables of verdicts."""
    for page in ("index", *dict.fromkeys(item.page for item in ITEMS)):
        (PAGES / f"{page}.md").write_text(written(page), encoding="utf-8")
    print(table(ITEMS, False))


if __name__ == "__main__":
    launch.run(main)
