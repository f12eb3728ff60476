"""One sweep, one figure: an experiment measures cases, and shows the rows as table, figure, tests.

    rows = sweep(cases, measure, m=(16, 32))      # a row for each case and each m
    report.table(wide(rows, "m = {m}"), out)      # a line for each case, a column for each m
    figure(rows, out, x="m", panel="{data set}")  # a panel for each data set, a line each coupling
    verdict(rows, "{data set}, m = {m}")          # paired tests between couplings

A row is a dict: the names of its case, then "values" (draws,), their "mean" and "±", its standard
error. Any other rows of numbers can be drawn, too. A template such as "{data set}, m = {m}" is
filled in from a row; rows with the same text belong together.
"""

import csv
import itertools
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import statistics
from vit import report

Row = dict[str, Any]
RATIO = ("ratio", "ratio ±")
ESTIMATE = ("values", "mean", "±", *RATIO)
ERRORS = {"mean": "±", "ratio": "ratio ±"}
"""Keys of standard errors; of any other number it is its own with "±" behind."""


def sweep(cases: Iterable[Row], measure: Callable[..., Any], **sizes: Sequence) -> list[Row]:
    """Measure each case, and print its names.

    Args:
        cases: {name: value} each.
        measure: case -> values (draws,); with sizes (draws, sizes).
        sizes: at most one name with the sizes, `m=(16, 32)`.
    """
    rows = []
    for case in cases:
        rows += rows_of(case, measure(case), **sizes)
        print(*case.values(), flush=True)
    return rows


def rows_of(case: Row, values: Any, **sizes: Sequence) -> list[Row]:
    """The rows of one case, of which the values are known already."""
    if not sizes:
        return [case | estimated(values)]
    ((name, steps),) = sizes.items()
    columns = zip(steps, np.asarray(values).T, strict=True)
    return [case | {name: step} | estimated(column) for step, column in columns]


def estimated(values: Any) -> Row:
    """The values with their mean and its standard error."""
    return dict(zip(ESTIMATE, (values, *statistics.mean_and_error(values)), strict=False))


def grouped(rows: Iterable[Row], template: str) -> dict[str, list[Row]]:
    """The rows by the text that they make of a template, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(template.format_map(row), []).append(row)
    return groups


def wide(rows: Iterable[Row], column: str, y: str = "mean", text: bool = True) -> list[Row]:
    """One line for all rows of a case; their estimates are its columns.

    Args:
        rows: those of `sweep`.
        column: template of a column's name; what it names is no part of the case.
        y: "mean", or "ratio" of `relative`.
        text: estimate and error as text, "0.98 ± 0.01"; two columns of numbers otherwise.
    """
    lines: dict[tuple, Row] = {}
    told = {*ESTIMATE, *(field for _, field, _, _ in string.Formatter().parse(column))}
    for row in rows:
        names = {k: v for k, v in row.items() if k not in told}
        line, name = lines.setdefault(tuple(names.values()), names), column.format_map(row)
        if text:
            line[name] = statistics.plus_minus(row[y], row[ERRORS[y]])
        else:
            line |= {name: row[y], f"± ({name})": row[ERRORS[y]]}
    return list(lines.values())


def relative(rows: Iterable[Row], case: str) -> list[Row]:
    """The rows with the "ratio" of their mean to that of the first of the same case."""
    return [
        row | dict(zip(RATIO, statistics.ratio(row["values"], group[0]["values"]), strict=True))
        for group in grouped(rows, case).values()
        for row in group
    ]


def melted(rows: Sequence[Row], names: Iterable[str]) -> list[Row]:
    """A row for each of these columns that has a number: its name as "line", its number "mean"."""
    named = [(name, row) for name in names for row in rows if row[name] != ""]
    return [row | {"line": name, "mean": row[name]} for name, row in named]


def cases_of(rows: Iterable[Row], case: str, line: str = "coupling") -> dict[str, dict[str, Any]]:
    """{case: {coupling: values}} of rows."""
    groups = grouped(rows, case).items()
    return {name: {row[line]: row["values"] for row in group} for name, group in groups}


def verdict(rows: Iterable[Row], case: str, line: str = "coupling") -> str:
    """Paired tests of each coupling against each of those before it, over all cases."""
    cases = cases_of(rows, case, line)
    names = list(next(iter(cases.values())))
    return "\n".join(
        "- "
        + statistics.verdict(name, other, {k: (x[name], x[other]) for k, x in cases.items()})
        + "."
        for name, other in itertools.combinations(reversed(names), 2)
    )


def panels(out: Path, count: int, columns: int = 4) -> tuple[Any, Any]:
    """A figure with so many axes, by rows, and these axes; `report.save` writes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = min(count, columns)
    rows = -(-count // columns)
    drawn, axes = report.subplots(
        rows, columns, figsize=(1 + 4 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return drawn, axes.flat[:count]


def curves(
    axis: Any,
    rows: Iterable[Row],
    x: str,
    y: str = "mean",
    line: str = "{coupling}",
    error: str = "",
    style: Callable[[str], Row] = lambda line: {},
) -> None:
    """Lines of y against x, one for each text of the template, with bands of their errors."""
    error = error or ERRORS.get(y, f"{y} ±")
    for name, own in grouped(rows, line).items():
        estimates = [(row[y], row.get(error) or 0.0) for row in own]
        band(axis, [row[x] for row in own], estimates, name, **style(name))


def figure(
    rows: Sequence[Row],
    out: Path,
    *,
    x: str,
    y: str | Sequence[str] = "mean",
    line: str = "{coupling}",
    panel: str = "",
    error: str = "",
    columns: int = 4,
    log: bool = False,
    style: Callable[[str], Row] = lambda line: {},
    finish: Callable[[Any, list[Row]], Any] | None = None,
    suptitle: str = "",
    **labels: Any,
) -> None:
    """Write `out`.png: lines of y against x, with bands of their errors where rows have them.

    Args:
        rows: those of `sweep`, or any with x and y.
        out: path without a suffix.
        x: key of the abscissa.
        y: key of the ordinate; several make a panel each.
        line: template; a line for each of its texts.
        panel: template; a panel for each of its texts, which is its title.
        error: key of the error of the first y, if it is another than in `ERRORS`.
        columns: panels side by side, at most.
        log: logarithmic axes, a tick at each x.
        style: text of a line -> options of matplotlib.
        finish: called with each panel's axes and rows at the end.
        suptitle: of the whole.
        labels: of all panels, as `axis.set` takes them.
    """
    ys = [y] if isinstance(y, str) else y
    parts = list(itertools.product(grouped(rows, panel).items(), ys))
    colors = {name: {"color": f"C{i % 10}"} for i, name in enumerate(grouped(rows, line))}
    drawn, axes = panels(out, len(parts), columns)
    for axis, ((title, here), key) in zip(axes, parts, strict=True):
        own = error if key == ys[0] else ""
        curves(axis, here, x, key, line, own, lambda name: colors[name] | style(name))
        if log:
            report.log_log(axis, sorted({row[x] for row in here}))
            axis.get_legend().remove()
        axis.set(**{"title": title, "xlabel": x, "ylabel": key} | labels)
        if finish:
            finish(axis, here)
    shown = {
        name: handle
        for axis in axes
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    outside = dict(loc="center left", bbox_to_anchor=(1, 0.5)) if len(shown) > 8 else {}
    place = axes[-1] if outside else axes[0]
    place.legend(shown.values(), shown.keys(), fontsize="small", **outside)
    drawn.suptitle(suptitle)
    report.save(drawn, out)


def points(
    rows: Sequence[Row],
    out: Path,
    *,
    x: str,
    y: str = "mean",
    error: str = "±",
    line: str = "{coupling}",
    panel: str = "",
    **labels: Any,
) -> None:
    """Write `out`.png: estimates side by side at each text of x; diamonds are the paper's.

    Args:
        rows: with y, its error and perhaps the number "paper".
        out: path without a suffix.
        x: template; a place for each of its texts.
        y: key of the ordinate.
        error: key of its error.
        line: template; a colour for each of its texts.
        panel: template; a panel for each of its texts, which is its title.
        labels: of all panels, as `axis.set` takes them.
    """
    groups, names = grouped(rows, panel), list(grouped(rows, line))
    drawn, axes = panels(out, len(groups))
    for axis, (title, here) in zip(axes, groups.items(), strict=True):
        places = list(grouped(here, x))
        for number, name in enumerate(names):
            own = grouped(here, line).get(name, [])
            shift = 0.8 * ((number + 0.5) / len(names) - 0.5)
            at = [places.index(x.format_map(row)) + shift for row in own]
            style: Row = dict(color=f"C{number}", markersize=4)
            values, errors = ([row[key] for row in own] for key in (y, error))
            axis.errorbar(at, values, errors, fmt="o", label=name, **style)
            theirs = [row.get("paper") or np.nan for row in own]
            axis.plot(at, theirs, "D", markerfacecolor="none", **style)
        axis.set_xticks(range(len(places)), places, rotation=25, ha="right")
        axis.set(**{"title": title, "ylabel": y} | labels)
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    report.save(drawn, out)


def band(axis: Any, x: Sequence[float], estimates: Any, label: str, **style: Any) -> None:
    """A line of means with a band of their errors, as (mean, error) for each x."""
    means, errors = np.asarray(estimates, float).T
    style = dict(marker="o", markersize=3) | style
    (line,) = axis.plot(x, means, label=label, **style)
    axis.fill_between(
        x, means - errors, means + errors, color=line.get_color(), alpha=0.2, linewidth=0
    )


def printed(path: Path, *keys: str) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Read a table of printed numbers: its rows by the values in the columns `keys`."""
    with path.open(newline="", encoding="utf-8") as file:
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
