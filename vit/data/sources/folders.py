"""Pictures as files: class folders, and folders with a csv file that has a row for each picture.

Class folders are train/<class>/*.jpg, and val/ or test/ alike; or <class>/*.jpg at once.

In a csv file the column of files is the one whose words are names of pictures, with or without
suffix, in the folder or a folder in it. The column of classes has a usual name, is the only other
one, or is named. A file without a header has the columns "1", "2", ...
"""

import csv
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vit.data.classes import in_order
from vit.data.sources.source import (
    SPLITS,
    SUFFIXES,
    Example,
    Source,
    by_split,
    column_of_labels,
    is_picture,
    reading,
)

INSPECTED = 10
"""Rows by which columns are told apart, and folders in which their files are searched."""


def read_splits(source: Path, _: str = "") -> Source | None:
    """Read the folders of splits, with class folders in them.

    Raises:
        ValueError: if there is no training split, training lacks a class of another split, or a
            folder has no pictures.
    """
    parts = _split_folders(source)
    if not any(map(_classes, parts)):
        return None
    folders = by_split(source, ((SPLITS[part.name], f"{part.name}/", part) for part in parts))
    classes = {split: _classes(folder) for split, folder in folders.items()}
    for split, folder in folders.items():
        if not classes[split]:
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
        if unknown := sorted(classes[split] - classes.get("train", set())):
            raise ValueError(f"{folder} has classes that train/ lacks: {unknown[:5]}")
    examples = {split: partial(_examples, folder) for split, folder in folders.items()}
    return Source(in_order(classes["train"]), 0, examples)


def read_classes(source: Path, _: str = "") -> Source | None:
    """Read class folders, if none has the name of a split."""
    classes = set() if _split_folders(source) else _classes(source)
    return Source(in_order(classes), 0, {"train": partial(_examples, source)}) if classes else None


def _split_folders(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_dir() and path.name in SPLITS)


def _classes(folder: Path) -> set[str]:
    return {path.parent.name for path in _pictures(folder)}


def _pictures(folder: Path) -> list[Path]:
    paths = folder.glob("*/*")
    return sorted(p for p in paths if is_picture(p) and not p.parent.name.startswith("."))


def _examples(folder: Path) -> Iterator[Example]:
    for path in _pictures(folder):
        yield Example(str(path), path.read_bytes, path.parent.name)


class Naming(NamedTuple):
    """Rule by which the words of a column name pictures: `folder`/word`suffix`."""

    column: int
    folder: Path
    suffix: str

    def path(self, row: Sequence[str]) -> Path:
        """Return the picture of a row."""
        return self.folder / f"{row[self.column]}{self.suffix}"


def read_table(source: Path, labels_column: str = "") -> Source | None:
    """Read the pictures that the csv file names.

    Raises:
        ValueError: if a csv file cannot be read, several name pictures, one names a picture
            elsewhere, or the column of classes is ambiguous.
    """
    paths = sorted(path for path in source.iterdir() if path.suffix.lower() in (".csv", ".tsv"))
    tables = {path: table for path in paths if (table := _table(path))}
    if not tables:
        return None
    if len(tables) > 1:
        names = ", ".join(path.name for path in tables)
        raise ValueError(f"{source} holds {len(tables)} tables of pictures ({names}): leave one")
    ((path, (columns, rows, naming)),) = tables.items()
    others = [name for number, name in enumerate(columns) if number != naming.column]
    label = columns.index(column_of_labels(path, others, labels_column))
    for row in rows:
        if not Path(os.path.abspath(naming.path(row))).is_relative_to(os.path.abspath(source)):
            raise ValueError(f"{path} names {row[naming.column]!r}, outside {source}")

    def examples() -> Iterator[Example]:
        for row in rows:
            picture = naming.path(row)
            yield Example(str(picture), picture.read_bytes, row[label])

    return Source(in_order(row[label] for row in rows), 0, {"train": examples})


def _table(path: Path) -> tuple[list[str], list[list[str]], Naming] | None:
    """Return columns, rows and naming rule of a table; None if it names no pictures.

    The delimiter is a comma, semicolon or tabulator.
    """
    with reading(path, " as a csv file", UnicodeDecodeError, csv.Error):
        text = path.read_text("utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        lines = csv.reader(io.StringIO(text, ""), delimiter=delimiter)
        rows = [[word.strip() for word in row] for row in lines if row]
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{path}: row {number} has {len(row)} fields, the first {len(rows[0])}"
            )
    if _naming(path.parent, rows[:1]):  # the first row names a picture: there is no header
        rows.insert(0, [str(number) for number in range(1, len(rows[0]) + 1)])
    naming = _naming(path.parent, rows[1 : INSPECTED + 1])
    return (rows[0], rows[1:], naming) if naming else None


def _naming(folder: Path, rows: Sequence[Sequence[str]]) -> Naming | None:
    """Return the rule by which most of the rows name a picture."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())[:INSPECTED]]
    suffixes = ["", *SUFFIXES, *(suffix.upper() for suffix in SUFFIXES)]

    def hits(naming: Naming) -> int:
        paths = [naming.path(row) for row in rows if row[naming.column]]
        return sum(is_picture(path) and path.is_file() for path in paths)

    columns = range(len(rows[0]) if rows else 0)
    tried = itertools.starmap(Naming, itertools.product(columns, places, suffixes))
    best = max(tried, key=hits, default=None)
    return best if best and hits(best) else None
