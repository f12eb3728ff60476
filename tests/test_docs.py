"""The pages with code run, in a process of their own each; those that teach name all couplings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import performer
from tests.pages import code

LEARN = Path("docs/learn")
PAGES = [*LEARN.glob("*.md"), *Path("docs/howto").glob("*.md")]
SLOW = {"calibrate", "couplings", "gp", "graphs", "linearize"}
SLOW |= {"add-a-coupling", "add-a-kernel", "add-a-task"}
"""Pages whose code takes longer than some 15 s."""


def marked(path):
    mark = pytest.mark.slow if path.stem in SLOW else pytest.mark.thorough
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


def test_a_cell_that_raises_is_seen():
    text = "```{code-cell}\n:tags: [hide-input]\nx = 1\n```\n\n```{code-cell}\nx.absent\n```\n"
    done = run(code(text, "{code-cell}"))
    assert done.returncode == 1
    assert "has no attribute 'absent'" in done.stderr


def test_every_coupling_is_explained():
    """In a row of a table, on the page that teaches it; parts by name. Such pages have code."""
    assert set(LEARN.glob("*.md")) <= set(RUN)
    pages = {name: (LEARN / f"{name}.md").read_text() for name in ("couplings", "graphs")}
    couplings, graphs = performer.couplings, performer.graphs.couplings
    for page, names in (("couplings", couplings.COUPLINGS), ("graphs", graphs.COUPLINGS)):
        assert not [name for name in names if f"\n| `{name}` |" not in pages[page]]
    parts = [*couplings.DIRECTIONS, *couplings.NORMS]
    assert not [name for name in parts if f"`{name}`" not in pages["couplings"]]
