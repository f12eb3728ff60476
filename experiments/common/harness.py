"""One sweep, one figure: an experiment measures cases, and shows the rows as table, figure, tests.

    rows = sweep(cases(coupling=names), measure, m=(16, 32))    # a row for each case and each m
    print(show(rows, out, "m = {m}", x="m", panel="{data set}", case="{data set}, m = {m}"))

writes a figure (a panel for each data set, a line for each coupling), a table (a line for each
case, a column for each m) and below it paired tests between the couplings. The parts can be called
alone: `figure`, `wide`, `verdict`.

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

import jax
import numpy as np

from experiments.common import statistics
from vit.reports import report

Row = dict[str, Any]
RATIO = ("ratio", "ratio ±")
ESTIMATE = ("values", "mean", "±", *RATIO)
ERRORS = {"mean": "±", "ratio": "ratio ±"}
"""Keys of standard errors; of any other number the key is its own with "±" behind."""


def cases(**names: Iterable) -> list[Row]:
    """All combinations of the values of these names, the last name fastest."""
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*names.values())]


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


def draws(one: Callable[[Any], Any], count: int, seed: int = 0, batch_size: int = 10) -> np.ndarray:
    """one(key) of each of so many keys, compiled, in float64: (count, ...)."""
    keys = jax.random.split(jax.random.key(seed), count)
    found = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=batch_size))(keys)
    return np.asarray(found, np.float64)


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


def regrouped(rows: Iterable[Row], template: str) -> list[Row]:
    """The rows, those of one text side by side."""
    return list(itertools.chain.from_iterable(grouped(rows, template).values()))


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


def verdict(
    rows: Iterable[Row],
    case: str,
    line: str = "coupling",
    pairs: Iterable[tuple[str, str]] = (),
    bullet: str = "- {}.",
) -> str:
    """Paired tests of each coupling against each of those before it, or of `pairs`, over cases."""
    found = cases_of(rows, case, line)
    names = list(next(iter(found.values())))
    return "\n".join(
        bullet.format(
            statistics.verdict(name, other, {k: (x[name], x[other]) for k, x in found.items()})
        )
        for name, other in pairs or itertools.combinations(reversed(names), 2)
    )


def show(
    rows: Sequence[Row],
    out: Path,
    column: str,
    *,
    case: str = "",
    tested: str = "coupling",
    text: str = "",
    lines: Sequence[Row] = (),
    **options: Any,
) -> str:
    """Write `figure`, the table `lines` or `wide` and, for a `case`, `verdict`; the markdown."""
    figure(rows, out, **options)
    said = "\n\n".join(filter(None, [text, case and verdict(rows, case, tested)]))
    return report.table(lines or wide(rows, column), out, said)


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
    """Write `out`.png: y against x, with the errors where rows have them.

    Args:
        rows: those of `sweep`, or any with x and y; with "paper", the paper's number, as diamonds.
        out: path without a suffix.
        x: key of the abscissa, for lines with bands; a template, "{data set}", for points with
            error bars, side by side at the place of each text.
        y: key of the ordinate; several make a panel each.
        line: template; a colour for each of its texts.
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
    styles = {k: {"color": f"C{i % 10}"} | style(k) for i, k in enumerate(grouped(rows, line))}
    high, across = -(-len(parts) // columns), min(len(parts), columns)
    size = (1 + 4 * across, 3.6 * high)
    drawn, axes = report.figure(out, across, high, size=size, squeeze=False)
    for axis in axes.flat[len(parts) :]:
        axis.set_axis_off()
    for axis, ((title, here), key) in zip(axes.flat, parts, strict=False):
        own = error if error and key == ys[0] else ERRORS.get(key, f"{key} ±")
        lines_of(axis, here, x, key, own, line, styles)
        if log:
            report.log_log(axis, sorted({row[x] for row in here}))
            axis.get_legend().remove()
        axis.set(**{"title": title, "xlabel": "" if "{" in x else x, "ylabel": key} | labels)
        if finish:
            finish(axis, here)
    shown = {
        name: handle
        for axis in axes.flat
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    outside = dict(loc="center left", bbox_to_anchor=(1, 0.5)) if len(shown) > 8 else {}
    place = axes.flat[len(parts) - 1 if outside else 0]
    place.legend(shown.values(), shown.keys(), fontsize="small", **outside)
    drawn.suptitle(suptitle)
    report.save(drawn, out)


def lines_of(
    axis: Any, rows: list[Row], x: str, y: str, error: str, line: str, styles: Mapping[str, Row]
) -> None:
    """Lines with bands of their errors; estimates side by side, with the paper's, at texts of x."""
    places, names = list(grouped(rows, x)) if "{" in x else [], list(styles)
    for name, own in grouped(rows, line).items():
        estimates = [(row[y], row.get(error) or 0.0) for row in own]
        if not places:
            band(axis, [row[x] for row in own], estimates, name, **styles[name])
            continue
        shift = 0.8 * ((names.index(name) + 0.5) / len(names) - 0.5)
        at = [places.index(x.format_map(row)) + shift for row in own]
        style: Row = dict(markersize=4) | styles[name]
        axis.errorbar(at, *zip(*estimates, strict=True), fmt="o", label=name, **style)
        theirs = [row.get("paper") or np.nan for row in own]
        axis.plot(at, theirs, "D", markerfacecolor="none", **style)
    if places:
        axis.set_xticks(range(len(places)), places, rotation=25, ha="right")


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
