"""Tables with a row for each picture: csv files, text files and the metadata of Hugging Face.

The column of files is the one whose words are names of pictures in the folder, with or without
suffix. Of a path only its end counts, so that paths of another machine and of Windows are read. The
column of classes has a usual name, is the only other one, or is named. A file without a header has
the columns "1", "2", ... A first column without a name, of row numbers, is ignored. A column
`split` has the split, else the folder of the picture, or the table's name or folder. A picture that
is named several times is read once.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vit.data.classes import in_order
from vit.data.sources.folders import folders, pictures
from vit.data.sources.source import (
    LABELS,
    SPLITS,
    Example,
    Source,
    column_of_labels,
    content,
    is_picture,
    reading,
    split_of,
)
from vit.run import files

SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
SPLIT_COLUMNS = ("split", "subset", "set", "is_train", "partition")
IS_TRAIN = {"1": "train", "0": "test", "true": "train", "false": "test"}
"""Split of a word in the column `is_train`; in another one 0 may be training."""

Rows = list[list[str]]


class Table(NamedTuple):
    """Columns and rows of a table, and the picture of each row."""

    path: Path
    columns: list[str]
    rows: Rows
    named: int
    """Column of the pictures."""
    pictures: list[Path | None]


def read(source: Path, labels_column: str = "") -> Source | None:
    """Read the pictures that the tables in the folder, or in folders of splits, name.

    Raises:
        ValueError: if a table cannot be read, names few pictures of the folder, a column of classes
            or splits is ambiguous, or a picture has several classes or splits.
    """
    places = [(source, None)]
    places += [(f, SPLITS[f.name.lower()]) for f in folders(source) if f.name.lower() in SPLITS]
    examples: dict[str, list[Example]] = defaultdict(list)
    files: list[Path] = []
    of_picture: dict[str, tuple[str, str]] = {}
    for folder, split in places:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        paths = [path for path in paths if not (path.is_dir() or _is_placeholder(path))]
        find = _finder(folder)
        tables = [table for path in paths if (table := _table(path, find)) is not None]
        for table in tables:
            files += [table.path, *(path for path in table.pictures if path)]
            for part, example in _examples(table, folder, split, labels_column):
                first = of_picture.setdefault(example.name, (part, example.label))
                if first != (part, example.label):
                    raise ValueError(
                        f"{table.path}: {example.name} has the split and class {part},"
                        f" {example.label!r}, and in another row {first[0]}, {first[1]!r}: a"
                        " picture has one of each. Remove rows, or tables that others contain"
                    )
                examples[part].append(example)
    if not examples:
        return None
    unique = {part: list({x.name: x for x in rows}.values()) for part, rows in examples.items()}
    names = in_order(example.label for rows in unique.values() for example in rows)
    splits = {part: partial(iter, rows) for part, rows in unique.items()}
    return Source(names, 0, splits, list(dict.fromkeys(files)))


def _is_placeholder(table: Path) -> bool:
    """Detect Kaggle's sample_submission.csv, whose labels are made up."""
    return "submission" in table.stem.lower()


def _examples(
    table: Table, folder: Path, split: str | None, labels_column: str
) -> Iterator[tuple[str, Example]]:
    """Yield the split and the example of each row."""
    path, columns, rows = table.path, table.columns, table.rows
    by_word = [i for i, name in enumerate(columns) if name.lower() in SPLIT_COLUMNS]
    by_word = [i for i in by_word if columns[i] != labels_column][:1]
    others = [name for i, name in enumerate(columns) if i not in (table.named, *by_word)]
    label = columns.index(column_of_labels(path, others, labels_column))
    tops = [_top(picture, folder) for picture in table.pictures]
    class_folders = {top for top in tops if top and top.lower() not in SPLITS}
    if len(class_folders) > 1 and not labels_column and columns[label].lower() not in LABELS:
        raise ValueError(
            f"{path}: are the classes those of the column {columns[label]!r}, or the folders of the"
            f" pictures? Give --labels_column={columns[label]}, or remove the table"
        )
    of_folder = SPLITS if len(class_folders) < 2 else {}
    for row, picture, top in zip(rows, table.pictures, tops, strict=True):
        part = split or of_folder.get(top.lower()) or split_of(path.stem)
        for column in by_word:
            words = SPLITS | IS_TRAIN if columns[column].lower() == "is_train" else SPLITS
            if (word := row[column].lower()) not in words:
                raise ValueError(
                    f"{path}: the column {columns[column]!r} has {row[column]!r}: the splits are"
                    " train, validation and test; rename its words, or the column"
                )
            part = words[word]
        word = row[table.named]
        name = str(picture or f"{word}, named by {path}")
        read = partial(content, picture) if picture else partial(_missing, word, folder)
        yield part, Example(name, read, row[label])


def _top(picture: Path | None, folder: Path) -> str:
    """Return the first folder of a picture below the folder."""
    parts = picture.relative_to(folder).parts if picture else ("",)
    return parts[0] if parts[1:] else ""


def _missing(word: str, folder: Path) -> bytes:
    raise FileNotFoundError(f"no picture of {folder} has the name {word!r}, or several have it")


def _table(path: Path, find: Callable[[str], Path | None]) -> Table | None:
    """Return a table; None if it names no pictures.

    Raises:
        ValueError: if it cannot be read, or has the names of pictures of which most are missing.
    """
    rows = _rows(path)
    if not rows:
        return None
    columns = [[find(row[column]) for row in rows] for column in range(len(rows[0]))]
    words = zip(*rows, strict=True)
    certain = [_names_pictures(*each) for each in zip(columns, words, strict=True)]
    if not rows[0][0] and any(certain[1:]):  # row numbers, as pandas writes them
        rows, columns, certain = [row[1:] for row in rows], columns[1:], certain[1:]
    # Classes that are numbers may also be names of pictures, but of few.
    named = max(range(len(columns)), key=lambda column: len({*columns[column]} - {None}))
    hits = sum(map(bool, columns[named]))
    if 2 * hits < len(rows) - 1:
        look = [sum(is_picture(Path(row[i])) for row in rows) for i in range(len(columns))]
        if 2 * max(look) < len(rows):
            return None
        raise ValueError(
            f"{path} names {max(look)} pictures, of which {hits} are in {path.parent}: complete"
            " the folder, or remove the table"
        )
    if not hits:
        return None
    for column, others in enumerate(columns):
        pairs = zip(others, columns[named], strict=True)
        if certain[column] and any(a and b and a != b for a, b in pairs):
            raise ValueError(
                f"{path}: the columns {rows[0][named]!r} and {rows[0][column]!r} name different"
                " pictures in a row (a number may be the name of a picture): remove one"
            )
    has_suffix = [is_picture(Path(row[named])) for row in rows]
    is_header = not columns[named][0] or (any(has_suffix) and not has_suffix[0])
    if not is_header:
        return Table(path, [str(i + 1) for i in range(len(columns))], rows, named, columns[named])
    return Table(path, rows[0], rows[1:], named, columns[named][1:])


def _names_pictures(pictures: Sequence[Path | None], words: Sequence[str]) -> bool:
    """Detect a column that names a picture in most rows, by names with a suffix, or each once.

    Numbers of classes name the same pictures again and again, without a suffix.
    """
    there = [picture for picture in pictures if picture]
    is_most = 2 * len(there) >= len(words) - 1 and len(there) > 1
    has_suffix = 2 * sum(is_picture(Path(word)) for word in words) >= len(words)
    return is_most and (has_suffix or len(there) == len({*there}))


def _rows(path: Path) -> Rows:
    """Return the rows of a table, the header first; [] for a text that is none.

    Columns are separated by a comma, semicolon, tabulator, bar, or the first blank of a line.
    """
    suffix = path.suffix.lower()
    with reading(path, " as a table", UnicodeDecodeError, csv.Error, ValueError):
        text = path.read_text("utf-8-sig")
        if suffix == ".jsonl":
            return _of_records([files.parsed(line) for line in text.splitlines() if line.strip()])
        delimiter = max(",;\t|", key=text.partition("\n")[0].count)
        if delimiter not in text.partition("\n")[0]:
            rows = [line.split(None, 1) for line in text.splitlines() if line.strip()]
        else:
            lines = csv.reader(io.StringIO(text, ""), delimiter=delimiter)
            rows = [row for row in lines if row]
    rows = [[word.strip() for word in row] for row in rows]
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            if suffix == ".txt":
                return []
            raise ValueError(
                f"{path}: row {number} has {len(row)} fields, the first {len(rows[0])}"
            )
    return rows if rows and rows[0][1:] else []


def _of_records(records: Sequence[dict]) -> Rows:
    """Return the rows of records, the names first."""
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [[record.get(name) for name in names] for record in records]
    return [names, *(["" if x is None else str(x) for x in row] for row in rows)]


def _finder(folder: Path) -> Callable[[str], Path | None]:
    """Return a function: name of a picture in the folder or below -> its path; None for none.

    Of several pictures with the same name it is the one with most of the given folders. It is in
    those given folders that exist here: a lost picture is not replaced by one of another folder.
    """

    @cache
    def index() -> tuple[dict[str, list[Path]], set[str]]:
        by_name: dict[str, list[Path]] = defaultdict(list)
        names: set[str] = set()
        for path in pictures(folder):
            names |= {*folders_of(path)}
            for name in {path.name, path.stem}:
                by_name[name].append(path)
        return by_name, names

    def folders_of(path: Path) -> tuple[str, ...]:
        return path.relative_to(folder).parts[:-1]

    def find(word: str) -> Path | None:
        parts = PurePosixPath(word.replace("\\", "/")).parts[::-1]
        by_name, names = index()
        given = names.intersection(parts[1:])
        candidates = by_name.get(parts[0], []) if parts else []
        candidates = [path for path in candidates if given <= {*folders_of(path)}]
        for depth, part in enumerate(parts[1:], 2):
            if len(candidates) < 2:
                break
            nearer = [path for path in candidates if path.parts[-depth:][0] == part]
            candidates = nearer or candidates
        direct = [path for path in candidates if path.parent == folder]
        candidates = direct if len(candidates) > 1 and len(direct) == 1 else candidates
        return candidates[0] if len(candidates) == 1 else None

    return find
