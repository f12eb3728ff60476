"""Words with which the user describes a source that follows no convention.

    --table=labels.csv --picture='train/{id}.jpg' --label='{breed}'
    --table=train.txt:train,test.txt:test --no_header --picture='{0}.jpg' --label='{0:folder}'
    --table=images.txt+split.txt --no_header --picture='images/{1}' --label='{1:folder}' \\
        --split='{2}' --splits=1:train,0:test
    --classes=color
    --classes=batch_1:train,batch_2:train,held_out:test
    --images=imgs --labels=targets
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from vit.data.classes import word

SPLITS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
"""Split of a word."""
LIKE_SPLITS = re.compile(
    r"(?<![a-z])(train|training|val|valid|validation|dev|eval|test|testing)(?![a-z])"
)
"""Other words in names that may mean a split: such names are refused, not read."""
LEFT_OUT = "none"
"""Word of --splits for rows that are left out."""
_COLUMN = re.compile(r"\{([^{}]+?)(?::(name|stem|folder))?\}")


class Words(NamedTuple):
    """Description of a source. Nothing is described by default.

    Args:
        table: files with a row for each picture, as labels.csv, or train.csv:train,test.csv:test.
            a.txt+b.txt joins tables by their first columns
        picture: path of the picture of a row in --source, as 'train/{id}.jpg'. {COLUMN} is the
            entry of the row; {COLUMN:name}, :stem and :folder are parts of a path; a folder * is
            any folder
        label: class of a row, as '{breed}'
        split: split of a row, as '{part}', instead of the split of its table
        splits: splits of the words of --split, as 0:train,1:validation,2:none; none leaves out
        group: rows with the same value stay on one side of the hold-out, as '{patient}'
        no_header: tables have no header; their columns are {0}, {1} and so on
        max_missing: share of the rows that may name no picture; they are listed and left out
        classes: folders whose folders are the classes, as color, or a:train,b:test; . is --source
        images: array of the pictures in npz files, as imgs or imgs_train:train,imgs_test:test, or
            train.npz/x:train; column of the pictures in parquet files
        labels: arrays or column of their classes, in the same form
        bits: bits of grey values that are stored in 16, as 12
    """

    table: Sequence[str] = ()
    picture: str = ""
    label: str = ""
    split: str = ""
    splits: Sequence[str] = ()
    group: str = ""
    no_header: bool = False
    max_missing: float = 0.0
    classes: Sequence[str] = ()
    images: Sequence[str] = ()
    labels: Sequence[str] = ()
    bits: int = 16

    def flags(self) -> dict[str, object]:
        """Return the flags that give these words."""
        given = {k: x for k, x in self._asdict().items() if x != Words._field_defaults[k]}
        return {
            k: ",".join(x) if isinstance(x, Sequence) and not isinstance(x, str) else x
            for k, x in given.items()
        }


NONE = Words()


def check(words: Words) -> None:
    """Raise ValueError for words that lack others, or contradict one another."""
    if words.table and not (words.picture and words.label):
        raise ValueError(
            "--table needs --picture and --label, as --picture='train/{id}.jpg' --label='{breed}'"
        )
    if not words.table:
        for name in ("picture", "label", "split", "splits", "group", "no_header"):
            if getattr(words, name) != Words._field_defaults[name]:
                raise ValueError(f"--{name} describes a table: give --table=FILE")
    for name in ("picture", "label", "group"):
        template = getattr(words, name)
        if template and not columns_of(template):
            raise ValueError(f"--{name}={template} has no column of the table, as {{{name}}}")
    if bool(words.images) != bool(words.labels):
        raise ValueError("--images and --labels describe arrays or columns: give both")
    if words.images and (words.table or words.classes):
        raise ValueError("--images describes arrays or columns, --table and --classes files")
    check_bits(words.bits)
    if not 0 <= words.max_missing < 1:
        raise ValueError(f"--max_missing={words.max_missing} must be a share from 0 to below 1")


def check_bits(bits: int) -> None:
    """Raise ValueError unless grey values may have as many bits."""
    if not 8 <= bits <= 16:
        raise ValueError(f"--bits={bits} must be 8 to 16")


def with_splits(flag: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the split of words such as "a.csv:test" or "a.csv" (train)."""
    parts = [
        (name, split) if colon else (split, "train")
        for name, colon, split in (x.rpartition(":") for x in words)
    ]
    return [(name, known_split(f"--{flag}", split)) for name, split in parts]


def meaning(words: Words) -> dict[str, str]:
    """Return the split of each word of a column of splits."""
    if not words.splits:
        return SPLITS
    pairs = (x.rpartition(":")[::2] for x in words.splits)
    return {
        word(name): split if split == LEFT_OUT else known_split("--splits", split)
        for name, split in pairs
    }


def known_split(flag: str, split: str) -> str:
    """Return the split of a word; ValueError if it is none."""
    if split not in SPLITS:
        raise ValueError(f"{flag}: {split!r} is no split; these are train, validation and test")
    return SPLITS[split]


def columns_of(template: str) -> list[str]:
    """Return the columns of a template."""
    return [column for column, _ in _COLUMN.findall(template)]


def filled(template: str, row: Mapping[str, str]) -> str:
    """Return a template with the entries of a row.

    >>> filled("images/{file:stem}.jpg", {"file": "/home/me/a.png"})
    'images/a.jpg'
    """

    def entry(match: re.Match[str]) -> str:
        text, part = row[match[1]], match[2]
        if not part:
            return text
        path = PurePosixPath(text.replace("\\", "/"))
        return path.parent.name if part == "folder" else getattr(path, part)

    return _COLUMN.sub(entry, template)
