"""Pages with code run, in a process of their own each; `make docs` runs all of them."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.pages import code

PAGES = [path for name in ("learn", "howto") for path in Path("docs", name).glob("*.md")]
QUICK = {"error", "add-a-data-set", "add-a-task"}
"""Pages of the second tier; the others are in the slow one."""


def marked(path):
    mark = pytest.mark.thorough if path.stem in QUICK else pytest.mark.slow
    return pytest.param(path, marks=mark, id=path.stem)


def run(cells):
    """All cells as one program, on one device where they do not ask for more."""
    return subprocess.run(
        [sys.executable, "-"],
        input="\n".join(cells),
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )


RUN = [path for path in PAGES if "```{code-cell}" in path.read_text()]


@pytest.mark.parametrize("path", [marked(path) for path in sorted(RUN)])
def test_a_page_runs(path):
    cells = code(path.read_text(), "{code-cell}")
    done = run(cells)
    assert done.returncode == 0, done.stderr[-3000:]


def test_pages_quote_the_same_numbers():
    """In prose: `test_results` compares tables with their csv."""
    for number in tomllib.loads(Path("docs/numbers.toml").read_text())["number"]:
        assert Path(number["source"]).exists()
        values = set(number["values"])
        for page in number["pages"]:
            prose = re.sub(r"^\|.*\n", "", Path(page).read_text(), flags=re.MULTILINE)
            paragraphs = re.split(r"\n\n|^- ", prose, flags=re.MULTILINE)
            quoted = [set(re.findall(r"\b\d[\d,.]*\d\b|\b\d\b", text)) for text in paragraphs]
            assert any(values <= x for x in quoted), f"{page}: {number['name']} is not {values}"
