"""Parquet files of pictures, as Hugging Face's `datasets` writes them.

Their metadata name the columns: one feature `Image`, and one `ClassLabel` with the names of the
classes. `--images` and `--labels` name others. A column of bytes, or of structs with a field
`bytes`, holds encoded pictures. The files are in the folder or in one below it, with the split as
the first word, as train-00000-of-00002.parquet, or as the folder, as train/0000.parquet. If no file
names a split, all are training.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.classes import in_order, word
from vit.data.sources.source import Example, Source, Unsaid, ordered, reading
from vit.data.sources.tables import NAMES
from vit.data.sources.words import LIKE_SPLITS, SPLITS, Words
from vit.storage import files


def paths(source: Path) -> list[Path]:
    """Return the parquet files of pictures in a folder, in folders below it if there are none."""
    below = (sorted(source.glob(x)) for x in ("*.parquet", "*/*.parquet", "*/*/*.parquet"))
    there = ([path for path in each if path.name not in NAMES] for each in below)
    return next(filter(None, there), [])


def read(source: Path, words: Words) -> Source:
    """Read the pictures of all files.

    Raises:
        Unsaid: if no metadata name the columns, and none are said.
        ValueError: if a file cannot be read, or has no pictures or classes.
    """
    split_of = _splits(source)
    files = {path: _file(path, words) for path in split_of}
    classes = ordered({str(path): file.names for path, file in files.items()})

    def examples(split: str) -> Iterator[Example]:
        for path in (path for path, part in split_of.items() if part == split):
            image, label, _, name = files[path]
            with _opened(path) as file:
                # One by one: every row may have the same large entry of the file's dictionary.
                for number, row in enumerate(file.iter_batches(1, columns=[image, label])):
                    content, x = (row.column(column)[0].as_py() for column in (image, label))
                    encoded = content["bytes"] if isinstance(content, dict) else content
                    yield Example(f"{path}[{number}]", partial(_bytes, encoded, content), name[x])

    splits = {split: partial(examples, split) for split in dict.fromkeys(split_of.values())}
    return Source(0, splits, list(split_of), classes)


def _bytes(encoded: bytes | None, content: Any) -> bytes:
    if encoded is None:
        raise FileNotFoundError(f"it has no bytes, but the path {dict(content or {}).get('path')}")
    return encoded


def _splits(source: Path) -> dict[Path, str]:
    """Return the split of each file, those of training first."""
    below = {path: path.relative_to(source).with_suffix("") for path in paths(source)}
    places = {x.parent.parent if x.parent.name in SPLITS else x.parent for x in below.values()}
    if len(places) > 1:
        names = ", ".join(sorted(str(source / x) for x in places))
        raise ValueError(f"{source} holds parquet files in several folders; give one of {names}")
    named = {
        path: SPLITS.get(x.name.split("-")[0]) or SPLITS.get(x.parent.name)
        for path, x in below.items()
    }
    for path in (path for path, split in named.items() if not split):
        if any(named.values()) or LIKE_SPLITS.search(below[path].as_posix().lower()):
            raise ValueError(
                f"{path} names none of the splits train, validation and test: rename it, as"
                " train-0.parquet"
            )
    splits = {path: split or "train" for path, split in named.items()}
    return dict(sorted(splits.items(), key=lambda item: item[1] != "train"))


class File(NamedTuple):
    """Columns of pictures and of labels, and the names of the classes in order."""

    image: str
    label: str
    names: list[str]
    name: dict[Any, str]
    """Name of each label that occurs."""


def _file(path: Path, words: Words) -> File:
    """Return the columns and classes of a file."""
    image, label, names = _columns(path, words)
    with _opened(path) as file:
        labels = file.read([label]).column(label).unique().to_pylist()
    for x in labels:
        if x is None or (isinstance(x, int) and not 0 <= x < (len(names) or math.inf)):
            raise ValueError(
                f"{path}: the column {label!r} has {x}, but the classes are 0 to"
                f" {len(names) - 1 if names else '...'}: leave out rows without a label (None, or"
                " -1 where it is secret)"
            )
    name = {x: names[x] if names and isinstance(x, int) else word(x) for x in labels}
    if not names and not (labels and all(isinstance(x, int) for x in labels)):
        return File(image, label, in_order(name.values()), name)
    return File(image, label, names, name)


def _columns(path: Path, words: Words) -> tuple[str, str, list[str]]:
    """Return the columns of pictures and classes; and the names of the classes if there are any.

    The metadata "huggingface" have {"info": {"features": {"label": {"_type": "ClassLabel",
    "names": [...]}, "image": {"_type": "Image"}}}}.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
    try:
        features = files.parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        kinds = {name: feature.get("_type") for name, feature in features.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        features, kinds = {}, {}
    images, labels = words.images, words.labels
    images = images or [name for name, kind in kinds.items() if kind == "Image"]
    labels = labels or [name for name, kind in kinds.items() if kind == "ClassLabel"]
    there = ", ".join(f"{field.name} {field.type}" for field in schema)
    if len(images) != 1 or len(labels) != 1:
        raise Unsaid(f"{path} has no metadata with one Image and one ClassLabel; it has {there}")
    for name, fits, kind in (
        (images[0], _is_bytes, "encoded pictures (bytes)"),
        (labels[0], _is_label, "text or whole numbers, one for each picture"),
    ):
        if name not in schema.names or not fits(schema.field(name).type):
            raise ValueError(f"{path}: the column {name!r} must hold {kind}; there are {there}")
    names = features.get(labels[0], {}).get("names", [])
    return images[0], labels[0], [word(name) for name in names]


def fitting(path: Path) -> tuple[list[str], list[str]]:
    """Return the columns that may hold pictures, and those that may hold labels."""
    with _opened(path) as file:
        schema = file.schema_arrow
    images = [field.name for field in schema if _is_bytes(field.type)]
    return images, [field.name for field in schema if _is_label(field.type)]


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
