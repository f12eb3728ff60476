"""A folder of pictures with a csv file that has a row for each: its file and its class.

The column of files is the one whose words are names of pictures: in the folder or a folder in it,
with their suffix or without. That of classes has a usual name, or is the only other one, or is
named. A file without a header has the columns "1", "2", ...
"""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vit import bounded
from vit.sources.source import (
    SUFFIXES,
    Example,
    Source,
    check_class_name,
    column_of_labels,
    in_order,
)

LOOKED_AT = 10
"""Rows by which columns are told apart, and folders in which their files are looked for."""


class Table(NamedTuple):
    """The rows of a csv file, all as long as the header."""

    path: Path
    columns: list[str]
    rows: list[list[str]]


class Files(NamedTuple):
    """Where the words of a column are names of files."""

    column: int
    folder: Path
    suffix: str

    def path(self, word: str) -> Path:
        """Of the picture."""
        return self.folder / f"{word}{self.suffix}"


def found(folder: Path) -> bool:
    """Whether a csv file of the folder names pictures."""
    return any(_files(table) for table in map(load, _paths(folder)))


def read(source: Path, labels_column: str = "") -> Source:
    """The pictures that the csv file names.

    Raises:
        ValueError: when several files do, or no column of classes can be told.
    """
    tables = [table for table in map(load, _paths(source)) if _files(table)]
    if len(tables) > 1:
        names = ", ".join(table.path.name for table in tables)
        raise ValueError(f"{source} holds {len(tables)} tables of pictures ({names}): leave one")
    (table,) = tables
    files = _files(table)
    assert files is not None
    column = _labels(table, files, labels_column)
    for row in table.rows:
        picture = Path(os.path.abspath(files.path(row[files.column])))
        if not picture.is_relative_to(os.path.abspath(source)):
            raise ValueError(f"{table.path} names {row[files.column]!r}, outside {source}")
    class_names = in_order(row[column] for row in table.rows)
    for name in class_names:
        check_class_name(name, f"{name!r} in {table.path}")

    def examples() -> Iterator[Example]:
        for row in table.rows:
            path = files.path(row[files.column])
            yield Example(str(path), partial(bounded.content, path), row[column])

    return Source(class_names, 0, {"train": examples})


def load(path: Path) -> Table:
    """The whole file; its delimiter is a comma, semicolon or tabulator.

    Raises:
        ValueError: when it is none; the message names the row.
    """
    try:
        text = bounded.content(path).decode("utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        rows = [row for row in csv.reader(io.StringIO(text, ""), delimiter=delimiter) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a csv file: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty")
    header, *rest = [[word.strip() for word in row] for row in rows]
    for number, row in enumerate(rest, 2):
        if len(row) != len(header):
            raise ValueError(f"{path}: row {number} has {len(row)} fields, the first {len(header)}")
    numbers = [str(number) for number in range(1, len(header) + 1)]
    if _files(Table(path, numbers, [header])):  # it names a picture: no header
        return Table(path, numbers, [header, *rest])
    return Table(path, header, rest)


def _paths(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in (".csv", ".tsv"))


def _files(table: Table) -> Files | None:
    """The column, folder and suffix by which most of the first rows name a file."""
    folder = table.path.parent
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())[:LOOKED_AT]]
    suffixes = ["", *SUFFIXES, *(suffix.upper() for suffix in SUFFIXES)]
    tried = [Files(c, p, s) for c in range(len(table.columns)) for p in places for s in suffixes]
    rows = table.rows[:LOOKED_AT]

    def hits(files: Files) -> int:
        return sum(_is_picture(files, row[files.column]) for row in rows)

    best = max(tried, key=hits)
    return best if hits(best) else None


def _is_picture(files: Files, word: str) -> bool:
    path = files.path(word)
    return bool(word) and path.suffix.lower() in SUFFIXES and path.is_file()


def _labels(table: Table, files: Files, named: str) -> int:
    """The number of the column of classes."""
    others = [name for number, name in enumerate(table.columns) if number != files.column]

    def same(usual: Sequence[str]) -> bool:
        return len({_partition(table, table.columns.index(name)) for name in usual}) == 1

    return table.columns.index(column_of_labels(table.path, others, named, same))


def _partition(table: Table, column: int) -> tuple[int, ...]:
    """Which rows are of one class, whatever it is called."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(row[column], len(numbers)) for row in table.rows)
