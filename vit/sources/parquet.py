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

from vit import bounded
from vit.sources.source import (
    Example,
    Source,
    check_class_name,
    column_of_labels,
    in_order,
    split_of,
)


class Columns(NamedTuple):
    """Which columns hold what."""

    image: str
    label: str
    class_names: tuple[str, ...]
    """Of integers; empty for text, or where the names are not known."""

    def name(self, label: Any, path: Path) -> str:
        """Return the class of a label in the file.

        Raises:
            ValueError: for a missing label, or an integer that stands for no class.
        """
        if isinstance(label, str):
            return label
        place = f"{path}: the column {self.label!r}"
        if label is None:
            raise ValueError(f"{place} has rows without a label: remove them")
        last = len(self.class_names) - 1 if self.class_names else label
        if not isinstance(label, int) or not 0 <= label <= last:
            numbers = f"the classes are 0 to {last}" if self.class_names else "classes begin at 0"
            secret = " (-1 stands for a secret label: leave out that file)" * (label == -1)
            raise ValueError(f"{place} has {label}, but {numbers}{secret}")
        return self.class_names[label] if self.class_names else str(label)


def found(folder: Path) -> bool:
    """Whether there are parquet files."""
    return bool(_paths(folder))


def read(source: Path, labels_column: str = "") -> Source:
    """The pictures of all files.

    Raises:
        ValueError: when one cannot be read, or has no pictures or classes.
    """
    paths = _paths(source)
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
    labels = {columns.name(x, path) for path in paths for (x,) in _rows(path, [columns.label])}
    class_names = list(columns.class_names) or in_order(labels)
    for name in class_names:
        check_class_name(name, f"{name!r} in {source}")
    examples = {split: partial(_examples, files, columns) for split, files in splits.items()}
    return Source(class_names, 0, examples)


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("*/*.parquet"))


def _columns(path: Path, named: str) -> Columns:
    import pyarrow

    types = pyarrow.types
    with _opened(path) as file:
        schema = file.schema_arrow
    kinds = {field.name: field.type for field in schema}
    images = [name for name, kind in kinds.items() if _is_bytes(kind)]
    labels = [
        name
        for name, kind in kinds.items()
        if types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
    ]
    if len(images) != 1:
        shown = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise ValueError(f"{path}: one column must hold encoded pictures; there are {shown}")
    label = column_of_labels(path, labels, named)
    return Columns(images[0], label, _class_names(schema.metadata or {}, label))


def _is_bytes(kind: Any) -> bool:
    """Whether values of the type may be encoded pictures."""
    import pyarrow

    types = pyarrow.types
    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _class_names(metadata: dict[bytes, bytes], label: str) -> tuple[str, ...]:
    """{"info": {"features": {"label": {"names": [...]}}}} in the metadata "huggingface"."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[label]["names"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()


def _examples(paths: Sequence[Path], columns: Columns) -> Iterator[Example]:
    for path in paths:
        for number, (image, label) in enumerate(_rows(path, [columns.image, columns.label])):
            yield Example(f"{path}[{number}]", partial(_bytes, image), columns.name(label, path))


def _bytes(image: Any) -> bytes:
    encoded = image["bytes"] if isinstance(image, dict) else image
    if encoded is None:
        raise ValueError("there are no bytes")
    return encoded


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """The values of the columns, row by row.

    They are read one by one: one entry of a file's dictionary may stand in every row.
    """
    with _opened(path) as file:
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}, as another file here has")
        for row in file.iter_batches(1, columns=columns):
            yield tuple(row.column(name)[0].as_py() for name in columns)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file.

    Raises:
        ValueError: when it is none, is damaged, or would unpack to more than `bounded` allows.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with bounded.regular(path) as opened:
            most = bounded.unpacked(bounded.size(opened))
            with parquet.ParquetFile(opened, buffer_size=2**20, pre_buffer=False) as file:
                groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
                announced = sum(group.total_byte_size for group in groups)
                if not 0 <= announced <= most:
                    raise ValueError(f"it announces {announced:,} bytes; at most {most:,} are read")
                yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as a parquet file: {error}") from error
