"""What the README and the pages of the documentation name is there: commands, flags, tests."""

import re
from pathlib import Path

import pytest

from tests.support import commands

PAGES = [Path("README.md"), *(p for p in Path("docs").rglob("*.md") if "_build" not in p.parts)]
WRITTEN = [page for page in PAGES if "reference" not in page.parts]
"""By hand; the others are made of the code."""

TEXTS = {str(page): page.read_text() for page in WRITTEN} | commands.docstrings()
WITH_COMMANDS = [name for name, text in TEXTS.items() if commands.COMMAND.search(text)]


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_printed_commands_are_what_the_programs_take(name):
    """Flags and their values, fields of configs and theirs; or the page shows how to write it."""
    for module, given in commands.printed(TEXTS[name]):
        path = module.replace(".", "/") + ".py"
        if f"`{path}`" in TEXTS[name] and not Path(path).exists():
            continue
        try:
            commands.check(module, given)
        except Exception as error:
            pytest.fail(f"{module} {given}: {error}")


def test_tests_that_pages_name_are_there():
    named = {name for page in PAGES for name in re.findall(r"test_\w+\.py::\w+", page.read_text())}
    assert len(named) > 20
    for name in named:
        file, function = name.split("::")
        assert f"\ndef {function}(" in next(Path("tests").rglob(file)).read_text(), name
