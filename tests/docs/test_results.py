"""Tables print the cells of their csv, row by row, and name their source.

`tests.support.tables` describes the comment above a table. Below a table of results stands "Data:"
with its csv files, or "Test:" with the test that measures its numbers.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import figures
from tests.support import tables
from tests.support.tables import Table

PAGES = [
    Path("README.md"),
    *(x for x in sorted(Path("docs").rglob("*.md")) if "_build" not in x.parts),
]
TABLE = re.compile(r"((?:^\|.*\n)+)\n?((?:Data|Test): .*(?:\n.+)*)?", re.MULTILINE)
COMMAND = re.compile(r"python -m [\w.]+|performer-vit \w+|commit [0-9a-f]{7}")
EXCHANGES = 200


def recorded_tables() -> list[Table]:
    return [x for page in PAGES for x in tables.tables(page) if isinstance(x.source, tables.Source)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_their_csv(page):
    for table in tables.tables(page):
        if isinstance(table.source, tables.Source):
            assert not list(tables.wrong(table)), table.head


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_numbers_name_their_csv_or_why_there_is_none(page):
    for table in tables.tables(page):
        if any(tables.is_measured(cell) for row in table.rows for cell in row[1:]):
            assert table.source, f"{table.head}: no comment 'table: ...' above it"


def exchanged(table: Table, rng: random.Random) -> Iterator[list[list[str]]]:
    """Yield the rows with two cells of a row exchanged, then with the values of two rows."""
    assert isinstance(table.source, tables.Source)
    first = table.source.labels
    body = [list(row) for row in table.rows]
    pairs = [
        (row, i, j)
        for row in range(len(body))
        for i in range(first, len(body[row]))
        for j in range(i)
        if j >= first and {*map(tables.is_measured, (body[row][i], body[row][j]))} == {True}
    ]
    if pairs := [(row, i, j) for row, i, j in pairs if body[row][i] != body[row][j]]:
        row, i, j = rng.choice(pairs)
        new = [list(x) for x in body]
        new[row][i], new[row][j] = new[row][j], new[row][i]
        yield new
    pairs = [
        (i, j) for i in range(len(body)) for j in range(i) if body[i][first:] != body[j][first:]
    ]
    if pairs:
        i, j = rng.choice(pairs)
        new = [list(x) for x in body]
        new[i][first:], new[j][first:] = new[j][first:], new[i][first:]
        yield new


def test_exchanged_cells_and_rows_are_found():
    """At least 95% of 200 exchanges in tables of all pages; a fixed seed."""
    rng = random.Random(0)
    everything, found, number = recorded_tables(), 0, 0
    while number < EXCHANGES:
        table = rng.choice(everything)
        for body in exchanged(table, rng):
            number += 1
            found += any(tables.wrong(table, body))
    assert found >= 0.95 * number, f"{found} of {number}"
    print(f"{found} of {number} exchanges in {len(everything)} tables are found")


def test_a_label_that_is_exchanged_is_found():
    table = next(tables.tables(Path("docs/results/graph-transformer.md")))
    table.rows[0][0], table.rows[1][0] = table.rows[1][0], table.rows[0][0]
    assert list(tables.wrong(table))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_name_what_makes_them(page):
    """A source below each table of results, and a command in its section or at the top."""
    if page.parent.name != "results" and page.name != "README.md":
        return
    first, *others = re.split(r"^##+ ", page.read_text(), flags=re.MULTILINE)
    for section in (first, *others):
        for table, source in TABLE.findall(section):
            head, _, *rows = table.splitlines()
            measured = any(tables.is_measured(x) for row in rows for x in tables.cells(row)[1:])
            if measured and not re.search("verdict|expected|if exchanged", head):
                assert source, f"{head}: no Data or Test below it"
                assert not source.startswith("Data") or COMMAND.search(first + section), head


def state_of(folder: Path) -> str:
    """Return "" for a folder whose commands exist, else what is missing."""
    if not (folder / "run.json").exists():
        return "none"
    commands = [run["command"] for run in json.loads((folder / "run.json").read_text())]
    called = re.findall(r"(?:-m |performer-(?=vit ))([\w.]+(?: [\w-]+)?)", " ".join(commands))
    names = [x.split()[0].replace(".", "/") for x in called if not x.startswith("vit ")]
    names += [x.replace(" ", "/").replace("-", "_") for x in called if x.startswith("vit ")]
    there = all(Path(f"{x}.py").exists() or Path(x, "__main__.py").exists() for x in names)
    return "" if there else "program removed"


def test_folders_have_a_command_of_today_or_are_listed():
    folders = sorted({path.parent for path in tables.RESULTS.rglob("*.csv")})
    states = {str(x.relative_to(tables.RESULTS)): state_of(x) for x in folders}
    text = Path("docs/results/index.md").read_text()
    listed = re.findall(r"^\| `(\S+)` \| (none|program removed) \|", text, flags=re.MULTILINE)
    assert dict(listed) == {folder: state for folder, state in states.items() if state}


@pytest.mark.thorough
def test_every_figure_is_drawn_from_the_csv_next_to_it(tmp_path, monkeypatch):
    shutil.copytree(figures.RESULTS, tmp_path, dirs_exist_ok=True)
    pictures = sorted(tmp_path.rglob("*.png"))
    for picture in pictures:
        picture.write_bytes(b"")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.main()
    assert len(pictures) > 30
    assert [picture for picture in pictures if not picture.read_bytes()] == []
