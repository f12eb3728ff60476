"""Tabular data sets: read from csv files or from scikit-learn, split and standardised.

A csv file has a header, commas between its cells and the target in its last column. A column of
text is nominal: it becomes one column of zeros and ones for each of its distinct values (one-hot).
A text column whose values are nearly all distinct is an identifier (yeast's SequenceName) and is
left out.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from absl import logging
from sklearn import datasets

from performer.choices import unknown

Kind = Literal["regression", "classification"]

BUNDLED: dict[str, tuple[str, ...]] = {
    "regression": ("diabetes", "wine", "breast_cancer", "digits"),
    "classification": ("wine", "breast_cancer", "digits"),
}
"""Data sets of scikit-learn, by kind."""


MISSING = {"", "?", "na", "n/a", "nan", "null"}
"""Cells without a value, in lower case."""


class Table(NamedTuple):
    """A data set of n rows and d columns, in raw units."""

    name: str
    x: np.ndarray
    """(n, d) float64, not scaled."""
    y: np.ndarray
    """(n,): float64 targets, or class numbers 0, 1, ... as integers."""


class Split(NamedTuple):
    """Training and test rows, standardised by the training rows; `folds` stacks them (s, ...)."""

    train_x: np.ndarray
    """(n, d), each column with mean 0 and standard deviation 1."""
    train_y: np.ndarray
    """(n,): class numbers, or targets with mean 0 and standard deviation 1."""
    test_x: np.ndarray
    """(k, d), shifted and scaled as the training rows."""
    test_y: np.ndarray
    """(k,), shifted and scaled as the training targets."""
    mean: Any
    """Targets in raw units are mean + scale * train_y; 0 for class numbers."""
    scale: Any
    """1 for class numbers."""


def names(value: Sequence[str], kind: Kind, data_dir: Path | None = None) -> list[str]:
    """Return the data sets that a flag names, checked; all by default.

    Raises:
        ValueError: for an unknown name, with the choices; for a folder without csv files.
    """
    choices = _sources(kind, data_dir)
    for name in value:
        if name not in choices:
            place = f"(in {data_dir})" if data_dir else "; or give a data_dir"
            raise ValueError(f"{unknown(f'data set for {kind}', name, choices)} {place}")
    return list(dict.fromkeys(value)) or list(choices)


def load(name: str, kind: Kind, data_dir: Path | None = None, nominal: bool = False) -> Table:
    """Read a data set.

    Args:
        name: of a file without its `.csv`, or without `data_dir` of a set in `BUNDLED`. For
            regression the targets of wine, breast_cancer and digits are their class numbers.
            Three pixels of digits are always 0 and are left out: d = 61.
        kind: with "classification" the distinct targets, sorted, become class numbers.
        data_dir: folder with `<name>.csv` or `uci_<kind>/<name>.csv`.
        nominal: columns of numbers are also nominal.

    Raises:
        ValueError: for an unknown name, or a file whose rows or cells cannot be used.
    """
    names([name], kind, data_dir)
    path, classes = _sources(kind, data_dir)[name], kind == "classification"
    if path is None:
        loaded = getattr(datasets, f"load_{name}")()
        varying = np.ptp(loaded.data, axis=0) > 0
        return Table(name, loaded.data[:, varying], loaded.target.astype(int if classes else float))
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    named = {column for column in header if column and _number(column) is None}
    if len(named) < max(len(header), 2) or {len(row) for row in rows} != {len(header)}:
        raise ValueError(
            f"{path} must begin with the names of two columns or more, with commas between, and"
            " have as many cells in each row"
        )
    *columns, target = zip(*rows, strict=True)
    x = []
    for column, cells in zip(header[:-1], columns, strict=True):
        where = f"column {column!r} of {path}"
        values, is_text = _column(where, cells, nominal)
        if is_text and values.max() + 1 > 0.9 * len(cells):
            logging.warning("%s is left out: an identifier, not a feature", where)
        elif is_text:
            x += [1.0 * (values == rank) for rank in range(int(values.max()) + 1)]
        else:
            x.append(values)
    y, is_text = _column(f"target {header[-1]!r} of {path}", target, classes)
    if is_text and not classes:
        raise ValueError(f"the last column of {path} is text: regression needs numbers")
    return Table(name, np.stack(x, axis=1), y.astype(int if classes else np.float64))


def folds(table: Table, count: int, train: int, order: np.ndarray) -> Split:
    """Stack the splits of a cross-validation, by the settings of the code of VRC.

    Of the rows in this order each fold tests once. The others train: they standardise, and the
    first `train` of them are kept. With half as many as rows, all folds keep nearly the same ones.
    """
    size = len(order) // count
    slices = [slice(i * size, (i + 1) * size) for i in range(count)]
    folds = [standardised(table, np.delete(order, test), order[test]) for test in slices]
    arrays = [np.stack(arrays) for arrays in zip(*folds, strict=True)]
    return Split(arrays[0][:, :train], arrays[1][:, :train], *arrays[2:])


def standardised(table: Table, train: np.ndarray, test: np.ndarray) -> Split:
    """Split the table into rows of these numbers, standardised by the former.

    A column that is constant in them (a rare flag) has the mean and the standard deviation of the
    whole table.
    """
    x, y, mean, scale = table.x, table.y, 0.0, 1.0
    constant = np.ptp(x[train], axis=0) == 0
    centre = np.where(constant, x.mean(axis=0), x[train].mean(axis=0))
    spread = np.where(constant, x.std(axis=0), x[train].std(axis=0))
    if not np.issubdtype(y.dtype, np.integer):
        mean, scale = y[train].mean(), y[train].std()
        y = (y - mean) / scale
    x = (x - centre) / spread
    return Split(x[train], y[train], x[test], y[test], mean, scale)


def _sources(kind: str, data_dir: Path | None) -> dict[str, Path | None]:
    """Return the csv file of each data set; None for a bundled one."""
    if data_dir is None:
        return dict.fromkeys(BUNDLED[kind])
    folders = data_dir / f"uci_{kind}", data_dir
    files = {path.stem: path for folder in folders for path in sorted(folder.glob("*.csv"))}
    if not files:
        raise ValueError(f"no csv file in {' or '.join(map(str, folders))}: give another data_dir")
    return {**files}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _column(where: str, cells: Sequence[str], classes: bool = False) -> tuple[np.ndarray, bool]:
    """Return the column as float64, text and classes as ranks, and whether it is nominal."""
    numbers = [_number(cell) for cell in cells]
    is_text = classes or numbers.count(None) > 0.1 * len(cells)  # car's doors: 2, 3, 4, 5more
    ranks = np.unique(cells if None in numbers else numbers, return_inverse=True)[1]  # pyright: ignore
    values = np.array(ranks if is_text else numbers, np.float64)  # None becomes NaN
    if MISSING & {cell.lower() for cell in cells} or not np.isfinite(values).all():
        raise ValueError(f"{where} has a cell without a value: fill it in, or drop row or column")
    if not ranks.any():
        raise ValueError(f"{where} is constant: drop it, or choose another target")
    return values, is_text
