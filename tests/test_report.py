"""Tables: text stays text in a spreadsheet, in Markdown and in a figure."""

import csv

import numpy as np

from vit import class_report, report

HOSTILE = [
    '=HYPERLINK("http://x")',
    "+1+cmd|' /C calc'!A0",
    "-2+3+SUM(A1)",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1+1",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "a|b\nc",
]


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_text_is_no_formula_and_no_html(tmp_path):
    """Nor is a name that comes from a data set, in the three tables of the classes."""
    report.table([{"name": text, "m": 3} for text in HOSTILE], tmp_path / "table")
    counted = class_report.Tally(*(np.eye(10, dtype=np.int64), np.ones(10, np.int64)))
    class_report.write(counted, HOSTILE, tmp_path)
    cells = [cell for path in tmp_path.glob("*.csv") for line in read(path) for cell in line]
    assert not [cell for cell in cells if cell.startswith(tuple("=+-@\t\r"))]
    assert sum(cell == f"'{HOSTILE[0]}" for cell in cells) == 4
    for path in tmp_path.glob("*.md"):
        text = path.read_text()
        assert "<" not in text
        assert "](" not in text
        assert text.count("\n") == 2 + len(HOSTILE)
        assert r"a\|b c" in text


def test_numbers_and_intervals_stay_as_they_are(tmp_path):
    row = {"a": "-0.5", "b": "+0.0012", "c": "-0.01 to +0.02", "d": -1e-5, "e": "-3.0e-05 ± 1"}
    report.table([row | {"f": "+nan to +nan"}], tmp_path / "table")
    assert read(tmp_path / "table.csv")[1] == [
        *("-0.5", "+0.0012", "-0.01 to +0.02", "-1e-05", "-3.0e-05 ± 1", "+nan to +nan")
    ]


def test_a_dollar_in_a_figure_begins_no_formula(tmp_path):
    drawn, axis = report.figure(tmp_path / "figure")
    axis.set(title=report.literal(r"/data/$\x$"))
    report.save(drawn, tmp_path / "figure")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
