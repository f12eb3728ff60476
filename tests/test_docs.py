"""The pages that teach run, in a process of their own each, and name every coupling."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import performer
from tests.pages import code

LEARN = Path("docs/learn")
SLOW = {"calibrate", "couplings", "gp", "graphs"}
"""Pages whose code takes longer than some 15 s."""


def marked(path):
    return pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))


def run(cells):
    """All cells as one program, on one device where they do not ask for more."""
    return subprocess.run(
        [sys.executable, "-"],
        input="\n".join(cells),
        env=os.environ | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", [marked(path) for path in sorted(LEARN.glob("*.md"))])
def test_a_page_runs(name):
    cells = code((LEARN / f"{name}.md").read_text(), "{code-cell}")
    assert cells
    done = run(cells)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_cell_that_raises_is_seen():
    text = "```{code-cell}\n:tags: [hide-input]\nx = 1\n```\n\n```{code-cell}\nx.absent\n```\n"
    done = run(code(text, "{code-cell}"))
    assert done.returncode == 1
    assert "has no attribute 'absent'" in done.stderr


COUPLINGS = (LEARN / "couplings.md").read_text()


@pytest.mark.parametrize("name", performer.couplings.COUPLINGS)
def test_every_coupling_is_explained(name):
    assert f"\n| `{name}` |" in COUPLINGS


@pytest.mark.parametrize("name", [*performer.couplings.DIRECTIONS, *performer.couplings.NORMS])
def test_every_part_is_named(name):
    assert f"`{name}`" in COUPLINGS


@pytest.mark.parametrize("name", performer.graphs.couplings.COUPLINGS)
def test_every_coupling_of_walks_is_explained(name):
    assert f"\n| `{name}` |" in (LEARN / "graphs.md").read_text()
