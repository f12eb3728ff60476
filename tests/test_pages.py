"""What the pages of the documentation name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts]


def test_tests_that_pages_name_are_there():
    named = {name for page in PAGES for name in re.findall(r"test_\w+\.py::\w+", page.read_text())}
    assert len(named) > 20
    for name in named:
        file, function = name.split("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), name


def test_modules_that_pages_run_are_there():
    commands = {
        name
        for page in PAGES
        for name in re.findall(r"python -m ((?:vit|experiments|tests)[\w.]+)", page.read_text())
    }
    assert len(commands) > 10
    for name in commands - {"experiments.kernel_error"}:  # that one is made on its page
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name
