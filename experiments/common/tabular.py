"""Tabular data sets: read from csv files or from scikit-learn, checked, split and standardised.

A csv file has a header, commas between its cells and the target in its last column. A column of
text becomes the rank of its value among the distinct ones in sorted order, 0, 1, ...: so that the
dimension is the number of columns, as in the papers' tables (abalone d = 8, car 6, chess 6), at the
price of an order that nominal values do not have. A text column whose values are nearly all
distinct is an identifier (yeast's SequenceName) and is left out.

Every error names the data set, the column and the line of the file where there is one, and what to
do about it.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from absl import logging
from sklearn import datasets

from performer.choices import unknown
from vit import bounded

Kind = Literal["regression", "classification"]

BUNDLED: dict[str, tuple[str, ...]] = {
    "regression": ("diabetes", "wine", "breast_cancer", "digits"),
    "classification": ("wine", "breast_cancer", "digits"),
}
"""What scikit-learn brings along, by kind."""

MISSING = ("", "?", "na", "n/a", "nan", "null")
"""Cells without a value, in lower case."""


LARGEST = 1e30
"""Of a number: float64 holds its square, float32 itself."""


class Table(NamedTuple):
    """A data set of n rows and d columns, in raw units."""

    name: str
    x: np.ndarray
    """(n, d) float64, not scaled."""
    y: np.ndarray
    """(n,): float64 targets, or class numbers 0, 1, ... as integers."""
    columns: tuple[str, ...]
    """The names of the d columns."""


class Splits(NamedTuple):
    """Random splits of one table, stacked: s splits, n training and k test rows each."""

    train_x: np.ndarray
    """(s, n, d), each column with mean 0 and standard deviation 1 in each split."""
    train_y: np.ndarray
    """(s, n): class numbers, or targets with mean 0 and standard deviation 1 in each split."""
    test_x: np.ndarray
    """(s, k, d), shifted and scaled as the training rows of the split."""
    test_y: np.ndarray
    """(s, k), shifted and scaled as the training targets of the split."""
    mean: np.ndarray
    """(s,): y = mean + scale * train_y in raw units; 0 for class numbers."""
    scale: np.ndarray
    """(s,): 1 for class numbers."""


def load(name: str, kind: Kind, data_dir: Path | None = None) -> Table:
    """Reads a data set.

    Args:
        name: of a file without its `.csv`, or without `data_dir` of a set in `BUNDLED`. For
            regression the targets of wine, breast_cancer and digits are their class numbers.
            Three pixels of digits are always 0 and are left out: d = 61.
        kind: with "classification" the distinct targets, sorted, become class numbers.
        data_dir: folder with `<name>.csv` or `uci_<kind>/<name>.csv`.

    Raises:
        ValueError: for an unknown name; a file without a header, rows, or two columns; column
            names that are empty or there twice; a row with too few or too many cells; a cell that
            is empty, not finite, or text among numbers; a constant column; a target that does not
            suit the kind.
    """
    if kind not in BUNDLED:
        raise ValueError(unknown("kind of data set", kind, BUNDLED))
    if data_dir is None:
        return _bundled(name, kind)
    files = _files(kind, data_dir)
    if name not in files:
        raise ValueError(f"{unknown('data set', name, files)} (in {data_dir})")
    header, rows, lines = _read(name, files[name])
    *features, target = zip(*rows, strict=True)
    kept = {}
    for column, cells in zip(header[:-1], features, strict=True):
        values = _feature(f"column {column!r} of data set {name!r}", cells, lines)
        if values is not None:
            kept[column] = values
    if not kept:
        raise ValueError(f"data set {name!r} has no column but identifiers: add one to learn from")
    where = f"target {header[-1]!r} of data set {name!r}"
    y = (_classes if kind == "classification" else _targets)(where, target, lines)
    return Table(name, np.stack(list(kept.values()), axis=1), y, tuple(kept))


def names(value: Sequence[str], kind: Kind, data_dir: Path | None = None) -> list[str]:
    """The data sets that a flag asks for, checked; all there are if it asks for none.

    Raises:
        ValueError: for a name that is not there, with the choices; for a folder without csv files.
    """
    choices = list(BUNDLED[kind] if data_dir is None else _files(kind, data_dir))
    for name in value:
        if data_dir is None:
            _check_bundled(name, kind)
        elif name not in choices:
            raise ValueError(unknown(f"data set for {kind}", name, choices))
    return list(dict.fromkeys(value)) or choices


def splits(table: Table, count: int, *, train: int, test: int, seed: int = 0) -> Splits:
    """Random splits into training and test rows, standardised by the training rows of each.

    A column that is constant in the training rows of a split (a rare flag) has the mean and the
    standard deviation of the whole data set there.

    Args:
        table: the data set.
        count: how many splits. Split i depends on the seed and i alone, not on the count.
        train: training rows of a split; at most half of the rows are taken.
        test: test rows of a split; at most what is left is taken.
        seed: of the permutations.

    Raises:
        ValueError: for a count or size that is not positive, a table too small for two training
            rows and one test row, a column that is constant in the whole table, or regression
            targets that are constant in the training rows of a split.
    """
    for part, number in {"count": count, "train": train, "test": test}.items():
        if number < 1:
            raise ValueError(f"{part} must be positive, got {number} for data set {table.name!r}")
    rows = len(table.x)
    n = min(train, rows // 2)
    k = min(test, rows - n)
    if n < 2:
        raise ValueError(
            f"data set {table.name!r} has {rows} rows, of which train={train} and test={test}"
            f" leave {n} to train on and {k} to test on: two and one are needed"
        )
    for column, values in zip(table.columns, table.x.T, strict=True):
        _not_constant(f"column {column!r} of data set {table.name!r}", values)
    parts = [_split(table, i, n, k, seed) for i in range(count)]
    return Splits(*(np.stack(arrays) for arrays in zip(*parts, strict=True)))


def _split(table: Table, number: int, n: int, k: int, seed: int) -> tuple[np.ndarray, ...]:
    order = np.random.default_rng((seed, number)).permutation(len(table.x))
    first, second = order[:n], order[n : n + k]
    x, y = table.x, table.y
    constant = np.ptp(x[first], axis=0) == 0
    centre = np.where(constant, x.mean(axis=0), x[first].mean(axis=0))
    spread = np.where(constant, x.std(axis=0), x[first].std(axis=0))
    mean, scale = 0.0, 1.0
    if not np.issubdtype(y.dtype, np.integer):
        if np.ptp(y[first]) == 0:
            raise ValueError(
                f"all {n} training targets of data set {table.name!r} are {y[first[0]]:g} in split"
                f" {number}: take a larger training part"
            )
        mean, scale = y[first].mean(), y[first].std()
        y = (y - mean) / scale
    x = (x - centre) / spread
    return x[first], y[first], x[second], y[second], np.asarray(mean), np.asarray(scale)


def _check_bundled(name: str, kind: str) -> None:
    if name == "diabetes" and kind == "classification":
        raise ValueError(
            "data set 'diabetes' has 214 distinct targets: it is for regression;"
            f" for classification there are {', '.join(BUNDLED[kind])}, or give a data_dir"
        )
    if name not in BUNDLED[kind]:
        raise ValueError(
            f"{unknown(f'data set for {kind}', name, BUNDLED[kind])}; or give a data_dir"
        )


def _bundled(name: str, kind: str) -> Table:
    _check_bundled(name, kind)
    loaded = getattr(datasets, f"load_{name}")()
    x, y = np.asarray(loaded.data, np.float64), np.asarray(loaded.target)
    varying = np.ptp(x, axis=0) > 0
    columns = tuple(str(c) for c, kept in zip(loaded.feature_names, varying, strict=True) if kept)
    return Table(
        name, x[:, varying], y.astype(int if kind == "classification" else np.float64), columns
    )


def _files(kind: str, data_dir: Path) -> dict[str, Path]:
    """The csv files by name; one beside the folder of its kind wins."""
    if not data_dir.is_dir():
        raise ValueError(f"data_dir={str(data_dir)!r} is not a folder")
    folders = data_dir / f"uci_{kind}", data_dir
    files = {path.stem: path for folder in folders for path in sorted(folder.glob("*.csv"))}
    if not files:
        raise ValueError(f"no csv file in {' or '.join(map(str, folders))}: give another data_dir")
    return files


def _read(name: str, path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows of cells and the lines of the file that they end in."""
    rows, lines = [], []
    source = f"data set {name!r} ({path})"
    try:
        with io.TextIOWrapper(bounded.regular(path), "utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for cells in reader:
                if cells:
                    rows.append([cell.strip() for cell in cells])
                    lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{source} cannot be read after line {lines[-1] if lines else 0}: {error}"
        ) from error
    if not rows:
        raise ValueError(f"{source} is empty: it needs a header and rows")
    header = rows[0]
    _check_header(source, header)
    for cells, line in zip(rows, lines, strict=True):
        if len(cells) != len(header):
            raise ValueError(
                f"line {line} of {source} has {len(cells)} cells, but its header has"
                f" {len(header)}: correct or drop the line"
            )
    if len(rows) == 1:
        raise ValueError(f"{source} has a header but no rows")
    return header, rows[1:], lines[1:]


def _check_header(source: str, header: list[str]) -> None:
    if all(_number(cell) is not None for cell in header):
        raise ValueError(
            f"{source} has no header, its first line holds numbers: put the names of the columns"
            " before it, the target last"
        )
    if len(header) < 2:
        raise ValueError(
            f"{source} has one column, {header[0]!r}, but features and a target are needed, with"
            " commas between them"
        )
    for number, column in enumerate(header, 1):
        if not column:
            raise ValueError(f"column {number} of {source} has no name: name it or drop it")
        if header.count(column) > 1:
            raise ValueError(f"{source} has column {column!r} twice: rename or drop one")


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)  # Python's 1_000
    except ValueError:
        return None


def _feature(where: str, cells: Sequence[str], lines: Sequence[int]) -> np.ndarray | None:
    """The column as numbers, or None for an identifier."""
    _all_there(where, cells, lines)
    if (values := _numbers(where, cells, lines)) is None:
        distinct, ranks = np.unique(np.asarray(cells), return_inverse=True)
        if len(distinct) > 0.9 * len(cells):
            logging.warning("%s is left out: an identifier, not a feature", where)
            return None
        values = ranks.astype(np.float64)
    _not_constant(where, values)
    return values


def _targets(where: str, cells: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    _all_there(where, cells, lines)
    if (values := _numbers(where, cells, lines)) is None:
        raise ValueError(
            f"{where} is text: regression needs numbers in the last column (or read it as"
            " classification)"
        )
    if np.ptp(values) == 0:
        raise ValueError(f"{where} is constant: there is nothing to learn; choose another target")
    return values


def _classes(where: str, cells: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    """The rank of each cell among the distinct ones, which are numbers or text."""
    _all_there(where, cells, lines)
    values = [_number(cell) for cell in cells]
    numeric = None not in values
    distinct, y = np.unique(np.asarray(values if numeric else cells), return_inverse=True)
    if len(distinct) == 1:
        raise ValueError(f"{where} has one class, {cells[0]!r}: two are needed; choose another one")
    if numeric and len(distinct) > len(cells) / 2:
        raise ValueError(
            f"{where} has {len(distinct)} distinct values in {len(cells)} rows: these are no"
            " classes; put the class last or read it as regression"
        )
    return y.astype(int)


def _all_there(where: str, cells: Iterable[str], lines: Iterable[int]) -> None:
    for cell, line in zip(cells, lines, strict=True):
        if cell.lower() in MISSING:
            raise ValueError(
                f"{where} has no value in line {line} (the cell is {cell!r}): fill it in, or drop"
                " the row or the column"
            )


def _numbers(where: str, cells: Sequence[str], lines: Sequence[int]) -> np.ndarray | None:
    """The cells as finite numbers, or None for a column of text."""
    values = [_number(cell) for cell in cells]
    texts = [i for i, value in enumerate(values) if value is None]
    if len(texts) > 0.1 * len(cells):  # car's doors: 2, 3, 4, 5more
        return None
    for i, value in enumerate(values):
        if value is None or not abs(value) <= LARGEST:
            kind = "the text" if value is None else "the infinite value"
            if value is not None and np.isfinite(value):
                kind = f"beyond {LARGEST:g} the value"
            raise ValueError(
                f"{where} has {kind} {cells[i]!r} in line {lines[i]} among numbers: correct the"
                " cell, or drop the row"
            )
    return np.asarray(values, np.float64)


def _not_constant(where: str, values: np.ndarray) -> None:
    if np.ptp(values) == 0:
        raise ValueError(f"{where} is constant: drop it")
