"""Parquet files of pictures, as Hugging Face's `datasets` writes them.

A column of bytes, or of structs with a field `bytes`, holds encoded pictures; that of classes has
text, or integers, whose names the metadata may hold. The split is in the file's name, as in
train-00000-of-00002.parquet; the files lie in the folder or in one below it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vit.sources.source import Example, Source, column_of_labels, in_order, split_of


class Columns(NamedTuple):
    """Which columns hold what."""

    image: str
    label: str
    class_names: Sequence[str]
    """Of integers; empty for text, or where the names are not known."""

    def name(self, label: Any, path: Path) -> str:
        """Return the class of a label in the file.

        Raises:
            ValueError: for a missing label, or an integer that stands for no class.
        """
        if isinstance(label, str):
            return label
        if label is None or not 0 <= label < (len(self.class_names) or label + 1):
            last = len(self.class_names) - 1 if self.class_names else "..."
            raise ValueError(
                f"{path}: the column {self.label!r} has {label}, but the classes are 0 to {last}:"
                " leave out rows without a label (None, or -1 where it is secret)"
            )
        return self.class_names[label] if self.class_names else str(label)


def read(source: Path, labels_column: str = "") -> Source | None:
    """The pictures of all files.

    Raises:
        ValueError: when one cannot be read, or has no pictures or classes.
    """
    paths = sorted(source.glob("*.parquet")) or sorted(source.glob("*/*.parquet"))
    if not paths:
        return None
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1:
        raise ValueError(
            f"{source} holds parquet files in several folders; give --source={folders[0]}"
            f" or another of {', '.join(folders[1:])}"
        )
    splits: dict[str, list[Path]] = {}
    for path in paths:
        splits.setdefault(split_of(path.stem), []).append(path)
    columns = _columns(paths[0], labels_column)
    labels = {columns.name(label, path) for path in paths for label in _labels(path, columns)}
    examples = {split: partial(_examples, files, columns) for split, files in splits.items()}
    return Source(columns.class_names or in_order(labels), 0, examples)


def _columns(path: Path, named: str) -> Columns:
    from pyarrow import types

    with _opened(path) as file:
        schema = file.schema_arrow
    images = [field.name for field in schema if _is_bytes(field.type)]
    if len(images) != 1:
        shown = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise ValueError(f"{path}: one column must hold encoded pictures; there are {shown}")
    kinds = (types.is_integer, types.is_string, types.is_large_string)
    labels = [field.name for field in schema if any(is_kind(field.type) for is_kind in kinds)]
    label = column_of_labels(path, labels, named)
    try:  # {"info": {"features": {"label": {"names": [...]}}}}
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return Columns(images[0], label, [str(name) for name in features[label]["names"]])
    except (KeyError, TypeError, ValueError):
        return Columns(images[0], label, [])


def _is_bytes(kind: Any) -> bool:
    """Whether values of the type may be encoded pictures."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _examples(paths: Sequence[Path], columns: Columns) -> Iterator[Example]:
    """The rows one by one: one entry of a file's dictionary may stand in every row."""
    for path in paths:
        with _opened(path) as file:
            for number, row in enumerate(file.iter_batches(1, columns=list(columns[:2]))):
                image, label = (row.column(name)[0].as_py() for name in columns[:2])
                encoded = image["bytes"] if isinstance(image, dict) else image
                name = columns.name(label, path)
                yield Example(f"{path}[{number}]", partial(bytes, encoded), name)


def _labels(path: Path, columns: Columns) -> list[Any]:
    with _opened(path) as file:
        return file.read([columns.label]).column(columns.label).unique().to_pylist()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file; what pyarrow says of a damaged one, or of a missing column, names it."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            yield file
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as a parquet file: {error}") from error
