"""Parquet files of pictures, as Hugging Face's `datasets` writes them.

A column of bytes, or of structs with a field `bytes`, holds encoded pictures. The column of classes
has text or integers, whose names may be in the metadata. The split is in the file's name, as in
train-00000-of-00002.parquet; the files are in the folder or in one below it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.classes import in_order
from vit.data.sources.source import (
    LABELS,
    Example,
    Labels,
    Source,
    class_names,
    column_of_labels,
    reading,
    split_of,
)
from vit.run import files


def read(source: Path, labels_column: str = "") -> Source | None:
    """Read the pictures of all files.

    Raises:
        ValueError: if one cannot be read, or has no pictures or classes.
    """
    paths = sorted(source.glob("*.parquet")) or sorted(source.glob("*/*.parquet"))
    if not paths:
        return None
    if len(folders := sorted({str(path.parent) for path in paths})) > 1:
        raise ValueError(f"{source} holds parquet files in several folders; give one of {folders}")
    paths.sort(key=lambda path: split_of(path.stem) != "train")
    files = {path: _file(path, labels_column) for path in paths}
    classes = class_names(source, {str(path): file.names for path, file in files.items()})
    names = {name for file in files.values() for name in file.name.values()}

    def examples(split: str) -> Iterator[Example]:
        for path in (path for path in paths if split_of(path.stem) == split):
            image, label, _, name = files[path]
            with _opened(path) as file:
                # One by one: every row may have the same large entry of the file's dictionary.
                for number, row in enumerate(file.iter_batches(1, columns=[image, label])):
                    content, x = (row.column(column)[0].as_py() for column in (image, label))
                    encoded = content["bytes"] if isinstance(content, dict) else content
                    yield Example(f"{path}[{number}]", partial(bytes, encoded), name[x])

    splits = {split_of(path.stem): partial(examples, split_of(path.stem)) for path in paths}
    return Source(classes or in_order(names), 0, splits, paths)


class File(NamedTuple):
    """Columns of pictures and of labels, and the names of these."""

    image: str
    label: str
    names: Labels
    name: dict[Any, str]
    """Name of each label that occurs."""


def _file(path: Path, labels_column: str) -> File:
    """Return the columns and classes of a file."""
    image, label, names = _columns(path, labels_column)
    with _opened(path) as file:
        labels = file.read([label]).column(label).unique().to_pylist()
    for x in labels:
        if x is None or (isinstance(x, int) and not 0 <= x < (len(names) or math.inf)):
            raise ValueError(
                f"{path}: the column {label!r} has {x}, but the classes are 0 to"
                f" {len(names) - 1 if names else '...'}: leave out rows without a label (None, or"
                " -1 where it is secret)"
            )
    name = {x: names[x] if names and isinstance(x, int) else str(x) for x in labels}
    if not names and not (labels and all(isinstance(x, int) for x in labels)):
        return File(image, label, frozenset(name.values()), name)
    return File(image, label, names or None, name)


def _columns(path: Path, named: str) -> tuple[str, str, list[str]]:
    """Return the columns of pictures and classes; and the names of the classes if there are any.

    The metadata "huggingface" has them: {"info": {"features": {"label": {"names": [...]}}}}.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
    images = [field.name for field in schema if _is_bytes(field.type)]
    if len(images) != 1:
        shown = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise ValueError(f"{path}: one column must hold encoded pictures; there are {shown}")
    fit = [field.name for field in schema if _is_label(field.type)]
    usual = [name for name in schema.names if name.lower() in LABELS and name not in images]
    label = column_of_labels(path, list(dict.fromkeys([*fit, *usual])), named)
    if label not in fit:
        kind = schema.field(label).type
        raise ValueError(f"{path}: the column {label!r} has {kind}: make it text or integers")
    try:
        features = files.parsed(schema.metadata[b"huggingface"])["info"]["features"]
        return images[0], label, [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return images[0], label, []


def _is_label(kind: Any) -> bool:
    """Detect text and integers, also as entries of a dictionary (categories of pandas)."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    kinds = (types.is_integer, types.is_string, types.is_large_string)
    return any(is_kind(kind) for is_kind in kinds)


def _is_bytes(kind: Any) -> bool:
    """Detect a type whose values may be encoded pictures."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    errors = (KeyError, pyarrow.ArrowException)
    with reading(path, " as a parquet file", *errors), ParquetFile(path) as file:
        yield file
