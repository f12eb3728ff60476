"""Tables with a row for each picture: those that the user describes, and Hugging Face's.

Hugging Face's image folder has metadata.csv, .jsonl or .parquet next to the pictures, in the folder
or in those of splits, with the columns `file_name` and `label`. Other tables are described by
`--table`, `--picture` and `--label` (`vit.data.sources.words`). Columns are separated by the most
frequent one of comma, semicolon, tabulator and bar in the first line, or else by blanks: all of
them if each line has as many, or only the first.
"""

import csv
import io
import posixpath
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vit.data.classes import word
from vit.data.sources.folders import pictures
from vit.data.sources.source import Example, Source, Unsaid, content, reading
from vit.data.sources.words import (
    LEFT_OUT,
    SPLITS,
    Words,
    columns_of,
    filled,
    meaning,
    with_splits,
)
from vit.storage import files

NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Hugging Face's tables."""
SHOWN = 3
"""Rows that are named."""


class Table(NamedTuple):
    """Columns and rows of one table, or of several that are joined."""

    paths: tuple[Path, ...]
    columns: list[str]
    rows: list[list[str]]

    @property
    def name(self) -> str:
        """Its files."""
        return "+".join(map(str, self.paths))


class Row(NamedTuple):
    """A row: the path of its picture below the folder, its class, split and group."""

    picture: str
    label: str
    split: str
    group: str = ""


def metadata(source: Path) -> list[tuple[Path, str]]:
    """Return Hugging Face's tables in a folder and in those of splits, with the split or ""."""
    places = [(source, ""), *((source / name, split) for name, split in SPLITS.items())]
    paths = ((folder / name, split) for folder, split in places for name in NAMES)
    return [(path, split) for path, split in paths if path.is_file() and _has_file_names(path)]


def _has_file_names(path: Path) -> bool:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return "file_name" in parquet.read_schema(path).names
    with path.open("rb") as file:
        return b"file_name" in file.readline()


def read_metadata(source: Path, words: Words) -> Source:
    """Read Hugging Face's tables.

    Raises:
        Unsaid: if one has no column `file_name` or `label`.
        ValueError: as `of_rows`.
    """
    rows: list[tuple[Table, Row]] = []
    for path, split in metadata(source):
        table = load(path)
        if missing := {"file_name", "label"} - {*table.columns}:
            raise Unsaid(f"{path} has no column {max(missing)!r}, but {listed(table.columns)}")
        for row in _dicts(table):
            picture = path.parent.relative_to(source) / row["file_name"]
            top = SPLITS.get(picture.parts[0], "train") if picture.parts else ""
            rows.append((table, Row(str(picture), row["label"], split or top)))
    return of_rows(source, rows, words.max_missing)


def read_said(source: Path, words: Words) -> Source:
    """Read the tables of the words.

    Raises:
        ValueError: if a table has no such column or split; and as `of_rows`.
    """
    splits, rows = meaning(words), []
    templates = words.picture, words.label, words.group, words.split
    for name, split in with_splits("table", words.table):
        table = joined([load(source / x, not words.no_header) for x in name.split("+")])
        _check_columns(table, [x for each in templates for x in columns_of(each)])
        for row in _dicts(table):
            picture, label, group, part = (filled(template, row) for template in templates)
            part = _split_of(table, splits, part) if words.split else split
            if part != LEFT_OUT:
                group = group or picture * bool(words.group)  # alone without an entry
                rows.append((table, Row(picture.replace("\\", "/"), label, part, group)))
    return of_rows(source, rows, words.max_missing)


def _split_of(table: Table, splits: Mapping[str, str], part: str) -> str:
    """Return the split that a row's word means; ValueError for an unknown one."""
    if (part := word(part)) not in splits:
        raise ValueError(
            f"{table.name}: the split {part!r} is none of {listed(splits)}; say what it is, as"
            f" --splits={part}:train, or {part}:none to leave its rows out"
        )
    return splits[part]


def of_rows(source: Path, rows: Sequence[tuple[Table, Row]], max_missing: float = 0.0) -> Source:
    """Return the source of the rows that name a picture; a picture is read once.

    Raises:
        ValueError: if a row names several pictures, a larger share than `max_missing` none, or a
            picture has several classes or splits.
    """
    find, there = finder(source)
    examples: dict[str, dict[str, Example]] = defaultdict(dict)
    first: dict[Path, Row] = {}
    missing: list[str] = []
    for table, row in rows:
        paths = find(row.picture)
        if len(paths) > 1:
            raise ValueError(
                f"{table.name}: {row.picture!r} names several pictures, {listed(paths[:2])}"
            )
        if not paths:
            missing.append(row.picture)
            continue
        row = row._replace(label=word(row.label))
        other = first.setdefault(paths[0], row)
        if other[1:] != row[1:]:
            raise ValueError(
                f"{table.name}: {row.picture} has the class {row.label!r} in {row.split}, and in"
                f" another row {other.label!r} in {other.split}: a picture has one class and one"
                " split"
            )
        example = Example(str(paths[0]), partial(content, paths[0]), row.label, row.group)
        examples[row.split].setdefault(example.name, example)
    tables = list(dict.fromkeys(path for table, _ in rows for path in table.paths))
    notes = _missing(tables, missing, len(rows), there, max_missing)
    splits = {part: partial(iter, list(x.values())) for part, x in examples.items()}
    return Source(0, splits, [*tables, *first], notes=notes)


def _missing(
    tables: Sequence[Path],
    missing: Sequence[str],
    number: int,
    there: Iterable[str],
    max_missing: float,
) -> list[str]:
    """Return a line on the rows without a picture; ValueError for too many of them."""
    if not missing:
        return []
    line = (
        f"{len(missing)} of {number} rows of {listed(tables)} name no picture:"
        f" {listed(missing[:SHOWN])}{', ...' * (len(missing) > SHOWN)}"
    )
    if len(missing) <= max_missing * number:
        return [f"left out: {line}"]
    share = -(-100 * len(missing) // number) / 100
    hint = f"--max_missing={share} leaves them out" if share < 1 else "check --picture"
    raise ValueError(f"{line}{_difference(missing[0], there)}; {hint}")


def _difference(name: str, there: Iterable[str]) -> str:
    """Return the picture from which a name differs only in case, Unicode form or suffix."""

    def plain(path: str) -> str:
        return unicodedata.normalize("NFC", posixpath.splitext(path)[0]).casefold()

    near = (x for x in there if plain(x) == plain(name))
    differing = " ({!a} is {!a} on the disk: only case, Unicode form or suffix differ)"
    return next((differing.format(name, x) for x in near), "")


def finder(source: Path) -> tuple[Callable[[str], list[Path]], list[str]]:
    """Return a function: path below a folder -> pictures with it; and all paths below the folder.

    A folder * stands for any folder. Nothing outside the folder is a picture of it.
    """
    paths = {path.relative_to(source).as_posix(): path for path in pictures(source)}
    starred: dict[tuple[int, ...], dict[tuple[str, ...], list[Path]]] = {}

    def find(name: str) -> list[Path]:
        parts = PurePosixPath(name).parts
        stars = tuple(i for i, part in enumerate(parts) if part == "*")
        if not stars:
            return [paths[x] for x in ("/".join(parts),) if x in paths]
        if stars not in starred:
            index = starred.setdefault(stars, defaultdict(list))
            for key, path in paths.items():
                each = key.split("/")
                masked = ("*" if i in stars else part for i, part in enumerate(each))
                index[tuple(masked)].append(path)
        return starred[stars].get(parts, [])

    return find, list(paths)


def load(path: Path, has_header: bool = True) -> Table:
    """Read a table: .parquet, .jsonl, or text; without a header its columns are "0", "1", ...

    Raises:
        ValueError: if it cannot be read, is empty, or a row has another number of fields.
    """
    errors = UnicodeDecodeError, csv.Error, ValueError
    with reading(path, " as a table", *errors):
        if path.suffix == ".parquet":
            return Table((path,), *_of_records(_of_parquet(path)))
        text = path.read_text("utf-8-sig")
        if path.suffix == ".jsonl":
            records = [files.parse_json(line) for line in text.splitlines() if line.strip()]
            return Table((path,), *_of_records(records))
        rows = _split(text)
        if not rows[has_header:]:
            raise ValueError("it has no rows")
        for number, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise ValueError(f"row {number} has {len(row)} fields, the first {len(rows[0])}")
    columns = rows.pop(0) if has_header else list(map(str, range(len(rows[0]))))
    return Table((path,), columns, rows)


def _split(text: str) -> list[list[str]]:
    first = text.partition("\n")[0]
    delimiter = max(",;\t|", key=first.count)
    if delimiter in first:
        lines = csv.reader(io.StringIO(text, ""), delimiter=delimiter)
    else:
        lines = [line.split() for line in text.splitlines() if line.strip()]
        if len({*map(len, lines)}) > 1:  # "a.png golden retriever"
            lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [[entry.strip() for entry in row] for row in lines if row]


def _of_parquet(path: Path) -> list[dict]:
    from pyarrow import parquet, types

    table = parquet.read_table(path).flatten()
    kept = [field.name for field in table.schema if not types.is_binary(field.type)]
    return table.select(kept).to_pylist()


def _of_records(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of records; of a list of classes "a|b", which is refused."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    return columns, [[_entry(record.get(name)) for name in columns] for record in records]


def _entry(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(str, value)) if len(value) != 1 else str(value[0])
    return "" if value is None else str(value)


def joined(tables: Sequence[Table]) -> Table:
    """Join tables by their first columns, of which others have those of the first table.

    Raises:
        ValueError: if a row of the first table has none, or several, in another one.
    """
    table, *others = tables
    for other in others:
        by_key = {row[0]: row[1:] for row in other.rows}
        lost = [row[0] for row in table.rows if row[0] not in by_key]
        if lost or len(by_key) < len(other.rows):
            cause = f"has no row {lost[0]!r}" if lost else "has several rows of the same key"
            raise ValueError(f"{other.name} cannot be joined with {table.name}: it {cause}")
        columns = [*table.columns, *other.columns[1:]]
        if table.columns == list(map(str, range(len(table.columns)))):
            columns = list(map(str, range(len(columns))))
        rows = [row + by_key[row[0]] for row in table.rows]
        table = Table((*table.paths, *other.paths), columns, rows)
    return table


def _check_columns(table: Table, named: Sequence[str]) -> None:
    """Raise ValueError unless the table has each named column once."""
    for column in named:
        if table.columns.count(column) != 1:
            several = "several columns" if column in table.columns else "no column"
            hint = "; with --no_header they are {0}, {1}, ..." if column.isdecimal() else ""
            raise ValueError(
                f"{table.name} has {several} {column!r}, but {listed(table.columns)}{hint}"
            )


def _dicts(table: Table) -> Iterator[dict[str, str]]:
    return (dict(zip(table.columns, row, strict=True)) for row in table.rows)


def listed(names: Iterable[object]) -> str:
    """Return names separated by commas."""
    return ", ".join(map(str, names))
