"""Tables that grow a row at a time: what is there already is not computed again."""

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vit import files, report

Row = dict[str, Any]


def grown(
    out: Path,
    asked: Mapping[str, Any],
    cases: Iterable[tuple[Any, ...]],
    names: tuple[str, ...],
    measured: Callable[..., Row],
) -> list[Row]:
    """The rows of all cases, in their order; each is written as soon as it is known.

    Args:
        out: of the table, without suffix: `out`.csv and .md, and .json, which says what was asked.
        asked: what the rows depend on beside their cases.
        cases: the first cells of each row, which tell it from others.
        names: of these cells.
        measured: (*case) -> the other cells.

    Raises:
        ValueError: where there is a table already that was made with something else.
    """
    known = {tuple(row[name] for name in names): row for row in _read(out, dict(asked))}
    rows: list[Row] = []
    for case in cases:
        first = dict(zip(names, case, strict=True))
        rows.append(known[case] if case in known else first | measured(*case))
        later = [row for row in known.values() if row not in rows]
        report.table([*rows, *later], out)
        print(", ".join(f"{name} {_shown(x)}" for name, x in rows[-1].items()), flush=True)
    return rows


def _read(out: Path, asked: Row) -> list[Row]:
    note = out.with_name(f"{out.name}.json")
    noted = files.noted(note)
    if noted is not None and noted != asked:
        changed = {name: noted.get(name) for name in asked if noted.get(name) != asked[name]}
        raise ValueError(f"{out}.csv was made with {changed}; take those, or another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    files.note(note, asked)
    return whole(out) if out.with_suffix(".csv").exists() else []


def whole(out: Path) -> list[Row]:
    """All rows of the table, those of earlier commands, too."""
    with out.with_suffix(".csv").open(newline="") as lines:
        return [{name: _value(x) for name, x in row.items()} for row in csv.DictReader(lines)]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)
