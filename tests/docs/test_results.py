"""Tables of results and of the README name their source, and their numbers stand in its csv.

Below a table stands "Data:" with its csv files, or "Test:" with the test that measures its numbers.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = [Path("README.md"), *sorted(Path("docs/results").glob("*.md"))]
TABLE = re.compile(r"((?:^\|.*\n)+)\n?((?:Data|Test): .*(?:\n.+)*)?", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+)(?:e-?\d+)?%?(?!\w)")
PRINTED_PAPER = re.compile(r"\(paper[^)]*\)|\([\d., ±−-]*\)|`[^`]*`|\[[^]]*\]\([^)]*\)")
COMMAND = re.compile(r"python -m [\w.]+|commit [0-9a-f]{7}")
Row = list[float]


def sections(text: str) -> list[str]:
    return re.split(r"^##+ ", text, flags=re.MULTILINE)


def measured(table: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """First cells, and numbers that stand side by side in a csv: an estimate and its error, or one.

    Heads, words and a paper's values are left out.
    """
    for row in table.splitlines()[2:]:
        first, *cells = row.strip("|").split("|")
        for cell in (PRINTED_PAPER.sub("", cell) for cell in cells):
            if not re.search("[A-Za-z]{2}", cell):
                for part in re.split(r"[,/] ", cell):
                    numbers = [x.replace(",", "") for x in NUMBER.findall(part)]
                    both = [tuple(numbers)] if "±" in part else [(x,) for x in numbers]
                    yield from ((first, numbers) for numbers in both)


def recorded(paths: list[Path]) -> list[tuple[set[str], Row]]:
    """The words of each row of csv files, and its numbers."""
    rows = []
    for path in paths:
        with path.open() as file:
            for cells in csv.reader(file):
                numbers = re.findall(r"\d*\.?\d+(?:e[-+]?\d+)?", " ".join(cells))
                words = {word for cell in cells for word in cell.split(", ")}
                rows.append((words, list(map(float, numbers))))
    return rows


def of_first_cell(first: str, rows: list[tuple[set[str], Row]]) -> list[Row]:
    """The rows that share most words with a first cell that has a name, such as `orf`; else all."""
    names = set(re.findall(r"`([^`]+)`", first))
    words = names and names | set(first.strip().split(", "))
    shared = [len(words & cells) for cells, _ in rows]
    most = max(shared)
    return [numbers for (_, numbers), n in zip(rows, shared, strict=True) if n == most]


def rounds_to(value: float, printed: str) -> bool:
    """True if the value rounds to the printed number; 0.963 also to "96.3%"."""
    number, scales = printed.rstrip("%"), (1, 100) if "%" in printed else (1,)
    half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(scale * value - float(number)) <= half for scale in scales)


def is_recorded(printed: tuple[str, ...], rows: list[Row]) -> bool:
    """True if a row has these numbers side by side."""
    return any(
        all(map(rounds_to, row[i:], printed))
        for row in rows
        for i in range(len(row) - len(printed) + 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_their_csv(page):
    for table, source in TABLE.findall(page.read_text()):
        if source.startswith("Data"):
            names = re.findall(r"\]\(([^)]*\.csv)\)", source)
            rows = recorded([page.parent / name for name in names])
            wrong = [
                x for first, x in measured(table) if not is_recorded(x, of_first_cell(first, rows))
            ]
            assert rows, source
            assert not wrong, f"{wrong} are not in the csv of {table.splitlines()[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_name_what_makes_them(page):
    """A source below each table, and a command in its section or before the first heading."""
    first, *others = sections(page.read_text())
    for section in (first, *others):
        for table, source in TABLE.findall(section):
            head = table.splitlines()[0]
            if list(measured(table)) and "verdict" not in head:
                assert source, f"{head}: no Data or Test below it"
                assert not source.startswith("Data") or COMMAND.search(first + section), head
