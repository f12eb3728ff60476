"""Tables of the pages, and the cells of csv files that they print.

Above a table stands a comment that names the csv of its numbers, and for each of its columns and
rows which cells of the csv they are:

    <!-- table: gp.csv where m == d
    columns:
    * := KL; KL ± where data set == *
    rows:
    *, * := where features == * & coupling == *
    exact kernel := exact RMSE where features == Fourier
    -->

A line is "PRINTED := COLUMN; COLUMN where KEY == VALUE & KEY == VALUE". PRINTED is the text of a
head or of a first cell. "*" in it stands for any text, which is inserted for the "*" behind ":=",
in order. Lines without "*" are used once, so that heads may repeat. A cell prints the numbers of
its COLUMNs, in order, from the rows that satisfy the conditions of table, column and row. "-" as
COLUMN leaves a cell out.

- "KEY =~ PATTERN" is a regular expression; "file" and "folder" name one of several csv files;
- of several rows "first of COLUMN" is the first, "range of COLUMN" the least and the largest, "mean
  of COLUMN" the mean with its standard error; else all numbers are printed, equal ones once;
- "two digits of COLUMN" is rounded to them, "A ÷ B" is a ratio, "{KEY}" in COLUMN is the value of
  that condition;
- "labels: 2" states that two columns name a row; leading blank ones repeat the cells above.

The comment "<!-- table: no csv; SOURCE -->" stands above a table whose numbers are in no csv.
"""

import csv
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

RESULTS = Path("experiments/results")
TABLE = re.compile(r"(?:<!-- table: ((?:(?!-->)[\s\S])*?)\s*-->\n)?((?:^\|.*\n)+)", re.M)
GENERATED = re.compile(r"<!-- (verdicts|counts):.*?<!-- end of \1 -->", re.S)
NUMBER = re.compile(r"(?<![\w.^])[+\-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*\.?\d+)(?:e-?\d+)?%?(?!\w)")
FUNCTIONS = ("first", "range", "mean", "two digits")
Line = tuple[str, tuple[str, ...], dict[str, str]]
"""Pattern of the printed text, columns of the csv, conditions on its rows."""


class Source(NamedTuple):
    """The csv files of a table, and which of their cells it prints."""

    paths: tuple[str, ...]
    where: dict[str, str]
    labels: int
    columns: list[Line]
    rows: list[Line]


class Table(NamedTuple):
    """A printed table; `source` is None without a comment, a text if there is no csv."""

    page: Path
    source: Source | str | None
    head: list[str]
    rows: list[list[str]]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: Path) -> Iterator[Table]:
    """Yield the tables of a page, but those that `experiments.verdicts` writes."""
    text = GENERATED.sub("", page.read_text())
    for comment, body in TABLE.findall(text):
        head, _, *rows = body.splitlines()
        yield Table(page, parsed(comment), cells(head), [cells(row) for row in rows])


def parsed(comment: str) -> Source | str | None:
    if not comment or comment.startswith("no csv"):
        return comment.removeprefix("no csv;").strip() or None
    first, *others = comment.splitlines()
    _, files, where = line_of(f"*:={first}")
    parts: dict[str, list[str]] = {"columns": [], "rows": []}
    labels, part = 1, "columns"
    for other in others:
        if other.startswith("labels: "):
            labels = int(other.removeprefix("labels: "))
        elif other.rstrip(":") in parts:
            part = other.rstrip(":")
        else:
            parts[part].append(other)
    return Source(files, where, labels, *([line_of(x) for x in parts[k]] for k in parts))


def line_of(text: str) -> Line:
    printed, selection = text.split(":=", 1)
    columns, _, where = f" {selection} ".partition(" where ")
    conditions = dict(map(condition, filter(None, where.strip().split(" & "))))
    return printed.strip(), tuple(x.strip() for x in columns.split(";") if x.strip()), conditions


def condition(text: str) -> tuple[str, str]:
    """Return key and value of "KEY == VALUE"; "KEY =~ PATTERN" is a key of its own."""
    key, _, value = text.partition(" == ")
    return key.removesuffix(" ==").strip(), value.strip()


def satisfies(row: dict[str, str], key: str, value: str) -> bool:
    """True if a row of a csv satisfies a condition, or if its csv has no such column."""
    name, _, pattern = key.partition(" =~ ")
    if name not in row:
        return True
    return bool(re.search(pattern, row[name])) if pattern else equal(row[name], value)


def plain(text: str) -> str:
    """Return a label without marks of code, bold, italics and footnotes."""
    return re.sub(r"\*\*|`|[¹²]|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)", "", text.strip()).strip()


def chosen(printed: str, lines: list[Line]) -> Line:
    """Return the first line that fits, its "*" replaced; a line without "*" is taken out."""
    for i, (pattern, columns, where) in enumerate(lines):
        literal = pattern == printed
        glob = "(.*?)".join(map(re.escape, re.split(r"(?<![\w`])\*|\*(?![\w`])", pattern)))
        match = None if literal else re.fullmatch(glob, printed)
        if literal:
            del lines[i]
            return printed, columns, where
        if match and match.groups():
            found = match.groups()
            texts = itertools.cycle(found) if len(found) == 1 else iter(found)
            columns = tuple(x.replace("*", next(texts)) if "*" in x else x for x in columns)
            filled = {k: v.replace("*", next(texts)) if "*" in v else v for k, v in where.items()}
            return printed, columns, filled
    raise ValueError(f"no line of the comment is for {printed!r}")


@functools.cache
def recorded(names: tuple[str, ...]) -> list[dict[str, str]]:
    rows = []
    for path in (RESULTS / name for name in names):
        with path.open(encoding="utf-8") as file:
            heads, *others = csv.reader(file)
        # two columns of one name: the second belongs to the column before it
        heads = [f"{heads[i - 1]}, {x}" if x in heads[:i] else x for i, x in enumerate(heads)]
        rows += [dict(zip(heads, row, strict=True)) | names_of(path) for row in others]
    return rows


def names_of(path: Path) -> dict[str, str]:
    return {"file": path.stem, "folder": path.parent.name}


def equal(value: str, wanted: str) -> bool:
    """Compare as numbers if both are, else without case, "_" and thousands' commas."""
    try:
        return float(value.replace(",", "")) == float(wanted.replace(",", ""))
    except ValueError:
        return value.lower().replace("_", " ") == wanted.lower().replace("_", " ")


def numbers(text: str) -> list[str]:
    return [x.replace(",", "").replace("−", "-") for x in NUMBER.findall(text)]


def values(rows: Sequence[dict[str, str]], column: str) -> list[float]:
    """Return the numbers of a column; equal ones of several rows are one."""
    function = next((x for x in FUNCTIONS if column.startswith(f"{x} of ")), "")
    name = column.removeprefix(f"{function} of ")
    if "÷" in name:
        over, under = (values(rows, x.strip()) for x in name.split("÷"))
        return [x / y for x, y in zip(over, under, strict=True)]
    per_row = [[float(x) for x in numbers(row[name].replace("(", " ("))] for row in rows]
    every = [x for row in per_row for x in row]
    if function == "first":
        return per_row[0]
    if function == "range":
        return sorted({min(every), max(every)}) if every else []
    if function == "mean":
        return [float(np.mean(every)), *([float(stats.sem(every))] if len(every) > 1 else [])]
    if function == "two digits":
        return [float(f"{x:.2g}") for x in every]
    return per_row[0] if all(row == per_row[0] for row in per_row) else every


def rounds_to(value: float, printed: str) -> bool:
    """True if the value rounds to the printed number; 0.963 also to "96.3%"."""
    number, scales = printed.rstrip("%"), (1, 100) if "%" in printed else (1,)
    mantissa, _, exponent = number.partition("e")
    half = 0.5000001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return any(abs(scale * value - float(number)) <= half for scale in scales)


def fits(printed: Sequence[str], groups: Sequence[Sequence[float]]) -> bool:
    """True if the groups hold these numbers, in order; zeros may be left out."""
    if not groups:
        return not printed
    first, *others = groups
    same = len(printed) >= len(first) and all(map(rounds_to, first, printed))
    return (same and fits(printed[len(first) :], others)) or (
        not any(first) and fits(printed, others)
    )


def is_measured(cell: str) -> bool:
    """True for a cell of numbers: a text, code or a formula with a number in it is none."""
    rest = re.sub(r"\$[^$]*\$|`[^`]*`|\([^)]*\)|(?<=\d)e-?\d+", "", cell)
    return bool(numbers(rest)) and not re.search("[A-Za-z]", rest)


def selections(table: Table) -> tuple[list[Line], list[Line]]:
    """The lines of the columns and of the rows of a table."""
    source = table.source
    assert isinstance(source, Source)
    columns, rows = list(source.columns), list(source.rows)
    heads = [chosen(plain(x), columns) for x in table.head[source.labels :]]
    labels, above = [], [""] * source.labels
    for row in table.rows:
        first = next(i for i, x in enumerate(row) if x)
        above = [*above[:first], *row[first : source.labels]]
        labels.append(chosen(", ".join(filter(None, map(plain, above))), rows))
    unused = [x for x, _, _ in (*columns, *rows) if "*" not in x]
    assert not unused, f"no head or row is {unused}"
    return heads, labels


def wrong(table: Table, body: Sequence[Sequence[str]] = ()) -> Iterator[str]:
    """Yield the cells that differ from the csv; `body`: in place of the table's rows."""
    source = table.source
    assert isinstance(source, Source)
    data = recorded(source.paths)
    keys = set().union(*data)
    heads, labels = selections(table)
    for row, (label, of_row, row_where) in zip(body or table.rows, labels, strict=True):
        for cell, (head, of_column, where) in zip(row[source.labels :], heads, strict=True):
            conditions = source.where | where | row_where
            columns = [x.format(**conditions) for x in of_row or of_column]
            if not numbers(cell) or columns == ["-"]:
                continue
            unknown = {key.partition(" =~ ")[0] for key in conditions} - keys
            assert not unknown, f"{label}: no csv has a column {unknown}"
            rows = [x for x in data if all(satisfies(x, k, v) for k, v in conditions.items())]
            groups = [values(rows, column) for column in columns] if rows else [[float("nan")]]
            if not fits(numbers(cell), groups):
                yield f"{label} | {head}: {cell}, csv: {groups}, {len(rows)} rows"
