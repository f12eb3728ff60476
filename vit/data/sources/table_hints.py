"""Which words may describe the tables of a folder: guesses, which stand in messages alone."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.sources import tables
from vit.data.sources.folders import pictures
from vit.data.sources.words import SPLITS, Words, filled

LABELS = "label", "labels", "class", "classid", "category", "target", "species", "breed", "dx"
"""Usual names of the column of classes."""
COLUMNS = "split", "subset", "set", "partition", "is_train", "is_training"
"""Usual names of the column of splits."""
GROUPS = re.compile("patient|lesion|subject|group|person")
"""Words in the name of a column whose equal entries are pictures of one object."""
PARTS = {
    "train": "train",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
"""Split of a word by its beginning."""
LONGEST = 64 * 2**20
"""Bytes of a table that is looked at."""

Index = Mapping[str, Sequence[str]]
"""Paths of the pictures of a folder by their names, with and without suffix."""
Columns = Mapping[str, tuple[str, ...]]
"""The entries of each column."""


def part_of(name: str) -> str:
    """Return the split that a name may mean; "" for none."""
    words = re.findall("[a-z]+", name.lower())
    return next((PARTS[x] for word in words for x in PARTS if word.startswith(x)), "")


def rank(words: Words) -> int:
    """Return 0 for a column of classes with a usual name, 1 for the folder of a picture, else 2."""
    is_usual = words.label.strip("{}").lower() in LABELS
    return 0 if is_usual else 1 if words.label.endswith(":folder}") else 2


def described(folder: Path) -> Iterator[Words | str]:
    """Yield words for the tables near a folder that name pictures, or why there are none.

    Tables of the same columns whose names differ only in a split are one.
    """
    index: dict[str, list[str]] = defaultdict(list)
    for path in pictures(folder):
        for name in {path.name, path.stem}:
            index[name].append(path.relative_to(folder).as_posix())
    alike: dict[tuple[Words | str, str], list[str]] = defaultdict(list)
    for path in sorted([*folder.glob("*.*"), *folder.glob("*/*.*")]):
        name = str(path.relative_to(folder))
        without = re.sub(f"({'|'.join(PARTS)})[a-z]*", "", name.lower())
        with contextlib.suppress(ValueError):
            for words in _words(path, index) if _is_table(path) else ():
                alike[words, without].append(name)
    for (words, _), names in alike.items():
        if isinstance(words, str):
            yield words
            continue
        parts = [part_of(name) for name in names]
        if "train" in parts and len({*parts} - {""}) == len(parts) > 1:
            pairs = zip(names, parts, strict=True)
            yield words._replace(table=tuple(f"{name}:{part}" for name, part in pairs))
        yield from (words._replace(table=(name,)) for name in names)


def _is_table(path: Path) -> bool:
    """Detect a table by its suffix; Kaggle's sample_submission.csv has no classes."""
    is_small = path.is_file() and path.stat().st_size < LONGEST
    suffixes = (".csv", ".tsv", ".txt", ".jsonl", ".parquet")
    return is_small and path.suffix in suffixes and "submission" not in path.stem


def _words(path: Path, index: Index) -> Iterator[Words | str]:
    """Yield words for a table: a column that names pictures, and one that may have the classes."""
    table = tables.load(path)
    is_head = not any(x.rpartition("/")[2] in index for x in table.columns)
    table = table if is_head else tables.load(path, has_header=False)
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    found = {name: x for name, each in columns.items() if name and (x := _named(name, each, index))}
    most = max((x.number for x in found.values()), default=0)  # numbers of classes are few
    named = {name: x for name, x in found.items() if x.number == most}
    others = {name: each for name, each in columns.items() if name not in named}
    if named and _is_one_hot(others):
        yield (
            f"{path} has a column for each class, but a picture has one class: write its name into"
            " one column"
        )
        return
    for column, (picture, _, missing) in named.items():
        words = Words((), picture, no_header=not is_head, max_missing=missing, **_parts(others))
        yield from (words._replace(label=f"{{{name}}}") for name in _labels(others))
        if all("/" in entry for entry in columns[column]):
            yield words._replace(label=f"{{{column}:folder}}")


def _is_one_hot(columns: Columns) -> bool:
    digits = all({*each} <= {"0", "1", "0.0", "1.0"} for each in columns.values())
    return digits and sum(len({*each}) == 2 for each in columns.values()) > 2


def _labels(columns: Columns) -> Iterator[str]:
    """Yield columns that may have the classes, those with a usual name first."""
    for name in sorted(columns, key=lambda x: x.lower() not in LABELS):
        if 1 < len({*columns[name]}) < len(columns[name]) + (name.lower() in LABELS):
            yield name


def _parts(columns: Columns) -> dict[str, Any]:
    """Return the words for a column of splits and one of groups, if there are such."""
    words: dict[str, Any] = {}
    for name, each in columns.items():
        splits = {x: _split(name, x) for x in dict.fromkeys(each)}
        if name.lower() in COLUMNS and all(splits.values()):
            said = tuple(f"{x}:{split}" for x, split in splits.items())
            words |= {"split": f"{{{name}}}", "splits": () if {*splits} <= {*SPLITS} else said}
        if GROUPS.search(name.lower()):
            words["group"] = f"{{{name}}}"
    return words


def _split(column: str, word: str) -> str:
    """Return the split that a word of a column may mean; "" for none."""
    if "train" in column.lower() and word in ("0", "1"):
        return "train" if word == "1" else "test"
    return {"0": "train", "1": "validation", "2": "test"}.get(word) or part_of(word)


class Named(NamedTuple):
    """Template of a column, the number of pictures, and the share of rows without one."""

    template: str
    number: int
    missing: float


def _named(column: str, entries: tuple[str, ...], index: Index) -> Named | None:
    """Return the template of a column that names pictures in most rows."""
    for form in (f"{{{column}}}", f"{{{column}:name}}"):
        values = [filled(form, {column: entry}) for entry in entries]
        paths = [next((x for x in _below(index, value) if value in x), None) for value in values]
        hits = [(value, path) for value, path in zip(values, paths, strict=True) if path]
        parted = (path.rpartition(value) for value, path in hits)
        ends = [(start, end) for start, _, end in parted]
        if 2 * len(hits) >= len(entries) and (template := _common(ends, form)):
            missing = -(-100 * (len(entries) - len(hits)) // len(entries)) / 100
            return Named(template, len({path for _, path in hits}), missing)
    return None


def _below(index: Index, value: str) -> Sequence[str]:
    return index.get(value.rpartition("/")[2], [])


def _common(ends: Sequence[tuple[str, str]], form: str) -> str:
    """Return what is before and after all words, with * for folders that differ; "" if none is."""
    starts = [start.split("/") for start in dict.fromkeys(start for start, _ in ends)]
    if len({end for _, end in ends}) > 1 or len({*map(len, starts)}) > 1:
        return ""
    folders = (x[0] if len({*x}) == 1 else "*" for x in zip(*starts, strict=True))
    return f"{'/'.join(folders)}{form}{ends[0][1]}"
