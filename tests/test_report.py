"""Tables: text stays text in Markdown and in a figure."""

import csv

import numpy as np

from vit.reports import class_report, report

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "a|b\nc",
    *("=1+1", "+1", "-2", "@x", "\\", "#"),
]


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_text_is_no_html(tmp_path):
    """Nor is a name that comes from a data set, in the three tables of the classes."""
    report.table([{"name": text, "m": 3} for text in HOSTILE], tmp_path / "table")
    counted = class_report.Tally(*(np.eye(10, dtype=np.int64), np.ones(10, np.int64)))
    class_report.write(counted, HOSTILE, tmp_path)
    cells = [cell for path in tmp_path.glob("*.csv") for line in read(path) for cell in line]
    assert sum(cell == HOSTILE[0] for cell in cells) == 4
    for path in tmp_path.glob("*.md"):
        text = path.read_text()
        assert "<" not in text
        assert "](" not in text
        assert text.count("\n") == 2 + len(HOSTILE)
        assert r"a\|b c" in text
