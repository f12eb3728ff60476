"""One sweep, one figure: an experiment measures cases; its csv is the source of its figure.

    rows = sweep(cases(coupling=names), measure, m=(16, 32))    # a row for each case and each m
    show(rows, out / "errors", FIGURES, shown=pivot(rows, "m = {m}"), case="{data set}, m = {m}")

`show` writes the rows as errors.csv, and a table of `shown` rows as errors.md: here a line for each
case and a column for each m. Paired tests between the couplings stand below the table. `figure`
draws errors.png from errors.csv with the options `FIGURES["errors"]`, and
`python -m experiments.figures` draws all committed figures again.

A row is a dict: the names of its case, then "values" (draws,), which the csv leaves out, their
"mean" and standard error "mean ±". The error of any number "x" is "x ±". A template such as
"{data set}, m = {m}" is filled in from a row; rows with equal texts form a group.
"""

import contextlib
import csv
import itertools
import math
import string
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from vit.reports import report
from vit.reports.report import INK, PALETTE
from vit.study import statistics

Row = dict[str, Any]
Figures = Mapping[str, Row]
"""Options of `figure` by the stem of the csv."""
RATIO = ("ratio", "ratio ±")
ESTIMATE = ("values", "mean", "mean ±", *RATIO)

LOWER = ("uniform", "linear", "window alone")
"""Baselines to be better than, dotted."""
WORDS = (
    ("iid", "independent", "G", "performer", "ours"),
    ("orf", "orthogonal", "Gort", "close pairs"),
    ("simrf", "sigma", "B"),
    ("pnc", "+ pnc", "circles", "H"),
    ("pm", "ensembles", "B rejected"),
    ("pm-antithetic", "antithetic", "pairs"),
    ("orf-antithetic", "reinforced", "ROM", "two orthogonal blocks", "public"),
    ("simrf+", "halton", "QMC"),
    ("fast-simrf", "simrf-antithetic", "GQ", "fixed-antithetic"),
    ("exact", "softmax", *LOWER),
)
COLORS = {w: color for words, color in zip(WORDS, (*PALETTE, INK), strict=True) for w in words}
"""The colour of each coupling, the same in all figures; of other words by their order."""
DASHES = ("-", "--", ":", "-.")


def cases(**names: Iterable) -> list[Row]:
    """Return all combinations of the values of these names, the last name fastest.

    Raises:
        ValueError: for a name without values, as of the flag `--couplings=`.
    """
    names = {name: tuple(values) for name, values in names.items()}
    if empty := [name for name, values in names.items() if not values]:
        raise ValueError(f"{', '.join(empty)}: give at least one value")
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
    """Return one(key) for `count` keys, compiled, in float64: (count, ...)."""
    keys = jax.random.split(jax.random.key(seed), count)
    values = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=batch_size))(keys)
    return np.asarray(values, np.float64)


def resumed(
    path: Path,
    cases: Iterable[Row],
    measure: Callable[[Row, list[Row]], Row | None],
    columns: Sequence[str],
    deadline: float = math.inf,
) -> list[Row]:
    """Measure the cases that path.csv has no row of, and write each row when it is measured.

    Args:
        path: csv and markdown, without a suffix.
        cases: rows with the names of a case.
        measure: returns the `columns` of a case, or None to leave it out; reads the rows before it.
        columns: names of the results; "note" has the exception of a case that failed.
        deadline: time of `time.monotonic` after which nothing is begun.
    """
    csv = path.with_suffix(".csv")
    rows = read(csv) if csv.exists() else []
    for case in cases:
        if any(all(row[name] == case[name] for name in case) for row in rows):
            continue
        if time.monotonic() > deadline:
            print("Time is up: the same command goes on.", flush=True)
            break
        try:
            results = measure(case, rows)
        except Exception as error:  # out of memory, or not supported there
            results = {"note": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        if results is None:
            continue
        rows.append(case | dict.fromkeys((*columns, "note"), "") | results)
        report.table(rows, path)
        print(*(f"{k} {x}" for k, x in rows[-1].items() if x != ""), sep=", ", flush=True)
    return rows


def rows_of(case: Row, values: Any, **sizes: Sequence) -> list[Row]:
    """Return the rows of one case whose values are known, with their mean and standard error."""
    if not sizes:
        numbers = values, *statistics.mean_and_error(values)
        return [case | dict(zip(ESTIMATE, numbers, strict=False))]
    ((name, steps),) = sizes.items()
    columns = zip(steps, np.asarray(values).T, strict=True)
    return [row for step, column in columns for row in rows_of(case | {name: step}, column)]


def grouped(rows: Iterable[Row], template: str) -> dict[str, list[Row]]:
    """Return the rows by their text of a template, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(template.format_map(row), []).append(row)
    return groups


def pivot(rows: Iterable[Row], column: str, y: str = "mean") -> list[Row]:
    """Return one row for all rows of a case; their estimates are its columns.

    Args:
        rows: rows of `sweep`.
        column: template of a column's name; its fields are no part of the case.
        y: "mean", or "ratio" of `relative`.
    """
    lines: dict[tuple, Row] = {}
    left_out = {*ESTIMATE, *(field for _, field, _, _ in string.Formatter().parse(column))}
    for row in rows:
        names = {k: v for k, v in row.items() if k not in left_out}
        line, name = lines.setdefault(tuple(names.values()), names), column.format_map(row)
        line |= {name: row[y], f"{name} ±": row[f"{y} ±"]}
    return list(lines.values())


def melt(rows: Iterable[Row], columns: Iterable[str]) -> list[Row]:
    """Return a row for each of these columns, with its name as "line": the inverse of `pivot`.

    Its number is the "mean", the number in "COLUMN ±" the "mean ±". Empty cells are left out.
    """
    return [
        row | {"line": name, "mean": row[name], "mean ±": row.get(f"{name} ±")}
        for row in rows
        for name in columns
        if row.get(name, "") != ""
    ]


def with_text(row: Row) -> Row:
    """Return the row with "0.98 ± 0.01" as "x" in place of two numbers, "x" and "x ±"."""
    numbers = {k: row[k] for k in row if not (k.endswith(" ±") and k[:-2] in row)}
    pairs = {k: row[f"{k} ±"] for k in numbers if row.get(f"{k} ±", "") != ""}
    return numbers | {k: statistics.plus_minus(row[k], error) for k, error in pairs.items()}


def relative(rows: Iterable[Row], case: str) -> list[Row]:
    """Return the rows with the "ratio" of their mean to the first mean of the same case."""
    return [
        row | dict(zip(RATIO, statistics.ratio(row["values"], group[0]["values"]), strict=True))
        for group in grouped(rows, case).values()
        for row in group
    ]


def cases_of(rows: Iterable[Row], case: str, line: str = "coupling") -> dict[str, dict[str, Any]]:
    """Return {case: {coupling: values}} of rows."""
    groups = grouped(rows, case).items()
    return {name: {row[line]: row["values"] for row in group} for name, group in groups}


def verdict(
    rows: Iterable[Row],
    case: str,
    line: str = "coupling",
    pairs: Iterable[tuple[str, str]] = (),
    bullet: str = "- {}.",
) -> str:
    """Test each coupling against each of those before it, or only `pairs`, paired, over cases."""
    values = cases_of(rows, case, line)
    names = list(next(iter(values.values())))
    return "\n".join(
        bullet.format(
            statistics.verdict(name, other, {k: (x[name], x[other]) for k, x in values.items()})
        )
        for name, other in pairs or itertools.combinations(reversed(names), 2)
    )


def show(
    rows: Sequence[Row],
    out: Path,
    figures: Figures | None = None,
    text: str = "",
    *,
    shown: Sequence[Row] | None = None,
    case: str = "",
    tested: str = "coupling",
) -> str:
    """Write a csv, a table, and a figure if `figures` has one of its name; print the table.

    Args:
        rows: rows of the csv.
        out: path of the files, without a suffix.
        figures: options of `figure` by the stem of the csv.
        text: conclusion below the table.
        shown: rows of the table, for example by `pivot`; the rows of the csv if None.
        case: argument of `verdict`, which ends the text.
        tested: name that `verdict` compares the values of.
    """
    text = "\n\n".join(filter(None, [text, case and verdict(rows, case, tested)]))
    numbers = [{k: v for k, v in row.items() if k != "values"} for row in rows]
    lines = [with_text(row) for row in (numbers if shown is None else shown)]
    table = report.table(numbers, out, text, lines)
    if figures and out.name in figures:
        figure(out, **figures[out.name])
    print(f"{out.name}\n\n{table}", flush=True)
    return table


def read(path: Path) -> list[Row]:
    """Read a csv: numbers as numbers, "0.98 ± 0.01" as two columns, "x" and "x ±"."""
    rows: list[Row] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            rows.append({})
            for name, cell in line.items():
                value, mark, error = cell.partition(" ± ")
                rows[-1] |= {name: _parsed(value)} | ({f"{name} ±": _parsed(error)} if mark else {})
    return rows


def _parsed(text: str) -> float | str:
    """Return the int or float that a text is, or the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def figure(
    path: Path,
    *,
    x: str,
    y: str | Mapping[str, str] = "mean",
    change: Callable[[list[Row]], list[Row]] = lambda rows: rows,
    line: str = "{coupling}",
    panel: str = "",
    error: str = "",
    across: int = 4,
    high: float = 0.0,
    log: str = "",
    tables: Sequence[str] = (),
    finish: Callable[[Any, list[Row]], Any] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    **axis_options: Any,
) -> None:
    """Draw `path`.csv as `path`.png: y against x, with bands or bars of the standard errors.

    A line has the colour of its text up to the first comma (`COLORS`), and dashes for the rest.

    Args:
        path: without a suffix.
        x: key of the abscissa, for lines with bands; a template, "{data set}", for points with
            error bars, side by side at the position of each text.
        y: key of the ordinate; {key: label} makes a panel for each key.
        change: called with all rows first, for example `melt`.
        line: template; a colour for each of its texts.
        panel: template; a panel for each of its texts, which is its title.
        error: key of the errors; the key of the numbers with " ±" behind if empty.
        across: panels side by side, at most.
        high: height of a panel in inches; by their number if 0.
        log: "x", "y" or "xy", the logarithmic axes; x then has a tick at each size.
        tables: stems of the csv files in the folder whose rows are drawn together.
        finish: called with the axes and the rows of each panel at the end.
        xlabel: one label for all panels; x, or "m (features)", if empty.
        ylabel: one label for all panels, for a single y.
        axis_options: options of `axis.set` for all panels.
    """
    rows = [
        row | {"table": table}
        for table in tables or [path.name]
        for row in read(path.with_name(f"{table}.csv"))
    ]
    rows = change(rows)
    ys = dict(y) if isinstance(y, Mapping) else {y: ""}
    panels = [(title, group, key) for title, group in grouped(rows, panel).items() for key in ys]
    across = min(len(panels), across)
    down = -(-len(panels) // across)
    size = 5.5 if across == 1 else 7.4, down * (high or (3.2, 2.5, 2.1, 1.8)[min(across, 4) - 1])
    with report.style():
        drawn = Figure(figsize=(size[0], size[1] + 0.5), layout="constrained")
        axes = drawn.subplots(down, across, squeeze=False)
        styles = styles_of(grouped(rows, line))
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, group, key) in zip(axes.flat, panels, strict=False):
            group = [row for row in group if row[key] != ""]
            lines_of(axis, group, x, key, error or f"{key} ±", line, styles)
            for side in log:
                logarithmic(axis, side, [row[x] for row in group if side == "x" and row[x] != ""])
            axis.set(**{"title": title, "ylabel": ys[key]} | axis_options)
            if finish:
                finish(axis, group)
        xlabel = xlabel or ("m (features)" if x == "m" else "" if "{" in x else x)
        for axis in axes.flat[max(len(panels) - across, 0) : len(panels)]:  # lowest of a column
            axis.set_xlabel(xlabel)
        drawn.supylabel(ylabel)
        legend(drawn, axes)
        report.save(drawn, path)


def styles_of(lines: Iterable[str]) -> dict[str, Row]:
    """Return the colour and the dashes of each line."""
    split = {name: name.partition(", ")[::2] for name in lines}
    firsts, rests = (list(dict.fromkeys(part)) for part in zip(*split.values(), strict=True))
    colors = {first: COLORS[first] for first in firsts if first in COLORS}
    spare = (color for color in itertools.cycle(PALETTE) if color not in colors.values())
    for first in (first for first in firsts if first not in COLORS):
        colors[first] = next(spare)
    dashes = {first: DASHES[2] for first in LOWER}
    dash = {rest: DASHES[number % len(DASHES)] for number, rest in enumerate(rests)}
    return {
        name: {"color": colors[first], "linestyle": dashes.get(first, dash[rest])}
        for name, (first, rest) in split.items()
    }


def logarithmic(axis: Any, side: str, sizes: Sequence[float]) -> None:
    """Make the axis x or y logarithmic, with ticks at the sizes or at plain decimals."""
    axis.set(**{f"{side}scale": "log"})
    scale = getattr(axis, f"{side}axis")
    if 0 < len(set(sizes)) < 9:
        scale.set_ticks(sorted(set(sizes)), [f"{size:,.10g}" for size in sorted(set(sizes))])
    else:
        low, high = scale.get_view_interval()
        subs = {5: (1, 1.5, 2, 3, 5, 7), 30: (1, 2, 5), 500: (1, 3)}
        steps = next((steps for span, steps in subs.items() if high < span * low), (1,))
        scale.set_major_locator(LogLocator(subs=steps))
        scale.set_major_formatter("{x:,.6g}")
    scale.set_minor_formatter(NullFormatter())
    scale.set_tick_params(which="minor", length=0)


def legend(drawn: Any, axes: Any) -> None:
    """Put one legend of all panels below them, never on the data."""
    shown = {
        name: handle
        for axis in axes.flat
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if len(shown) > 1:
        letters = max(map(len, shown)) + 6
        columns = max(1, min(len(shown), int(14 * drawn.get_figwidth() / letters)))
        drawn.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns)


def lines_of(
    axis: Any, rows: list[Row], x: str, y: str, error: str, line: str, styles: Mapping[str, Row]
) -> None:
    """Draw lines with bands of their errors; for a template x points, the paper's as diamonds.

    A row without x is a baseline, a horizontal line.
    """
    texts, names = list(grouped(rows, x)) if "{" in x else [], list(styles)
    for name, series in grouped(rows, line).items():
        estimates = [(row[y], row.get(error) or 0.0) for row in series]
        if not texts and series[0][x] == "":
            axis.axhline(series[0][y], label=name, **styles[name])
            continue
        if not texts:
            at, (means, errors) = [row[x] for row in series], np.asarray(estimates, float).T
            axis.plot(at, means, marker="o", label=name, **styles[name])
            shade: Row = dict(color=styles[name]["color"], alpha=0.2, linewidth=0)
            axis.fill_between(at, means - errors, means + errors, **shade)
            continue
        shift = 0.6 * ((names.index(name) + 0.5) / len(names) - 0.5) * (line != x)
        at = [texts.index(x.format_map(row)) + shift for row in series]
        color = styles[name]["color"]
        label = None if line == x else name
        axis.errorbar(at, *zip(*estimates, strict=True), fmt="o", label=label, color=color)
        theirs = [row.get("paper") or np.nan for row in series]
        paper = f"{name}, paper" if np.isfinite(theirs).any() else None
        axis.plot(at, theirs, "D", color=color, markerfacecolor="none", label=paper)
    if texts:
        long = max(map(len, texts)) > 4
        axis.set_xticks(
            range(len(texts)), texts, rotation=30 * long, ha="right" if long else "center"
        )


def printed(path: Path, *keys: str) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Read a table of printed numbers: its rows by the values in the columns `keys`."""
    with path.open(newline="", encoding="utf-8") as file:
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
