"""The numbers in tables of results stand in the csv files that the pages name below them."""

import csv
import re
from pathlib import Path

import pytest

PAGES = sorted(Path("docs/results").glob("*.md"))
TABLE = re.compile(r"((?:^\|.*\n)+)\n?(Data: .*(?:\n.+)*)?", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+)(?:e-?\d+)?(?!\w)")
PRINTED_PAPER = re.compile(r"\(paper[^)]*\)|\([\d., ±−-]*\)|`[^`]*`|\[[^]]*\]\([^)]*\)")
SOURCE = r"python -m|pytest|make demo|test_\w+\.py|commit [0-9a-f]{7}|config"


def sections(text: str) -> list[str]:
    return re.split(r"^##+ ", text, flags=re.MULTILINE)


def numbers(table: str) -> list[str]:
    """Numbers of the cells, without heads, first columns, words and a paper's values."""
    rows = table.splitlines()[2:]
    cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
    cells = [PRINTED_PAPER.sub("", cell) for cell in cells]
    cells = [cell for cell in cells if not re.search("[A-Za-z]{2}", cell)]
    return [x.replace(",", "") for cell in cells for x in NUMBER.findall(cell)]


def recorded(paths: list[str]) -> list[float]:
    """All numbers of csv files."""
    found = []
    for path in paths:
        with Path("docs/results", path).open() as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        found += [float(x) for cell in cells for x in re.findall(r"\d*\.?\d+(?:e[-+]?\d+)?", cell)]
    return found


def is_recorded(printed: str, values: list[float]) -> bool:
    """True if a value, or the value in percent, rounds to the printed number."""
    half = 0.5000001 * 10.0 ** -len(printed.partition(".")[2])
    return any(abs(scale * x - float(printed)) <= half for x in values for scale in (1, 100))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_their_csv(page):
    for table, data in TABLE.findall(page.read_text()):
        if data:
            values = recorded(re.findall(r"\]\(([^)]*\.csv)\)", data))
            wrong = [x for x in numbers(table) if not is_recorded(x, values)]
            assert values, data
            assert not wrong, f"{wrong} are not in the csv of {table.splitlines()[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_name_what_makes_them(page):
    """A csv; or a command, a test or a commit in the same section, or in the page's list of items.

    That list, before the first heading, names the command of each figure and table of a paper.
    """
    first, *others = sections(page.read_text())
    for section in (first, *others):
        listed = re.match("Fig|Table|Theorem", section) and re.search(SOURCE, first)
        for table, data in TABLE.findall(section):
            if numbers(table):
                assert data or listed or re.search(SOURCE, section), table.splitlines()[0]
