"""What the README and the pages of the documentation name is there: commands, flags, tests."""

import re
from pathlib import Path

import pytest

from vit import bundled, config

PAGES = [Path("README.md"), *(p for p in Path("docs").rglob("*.md") if "_build" not in p.parts)]
WRITTEN = [page for page in PAGES if "reference" not in page.parts]
"""By hand; the others are made of the code."""

COMMAND = re.compile(
    r"(?:python -m (vit|experiments|tests)\.|performer-(vit|experiments) )(\w+)((?: \\\n|[^\n`])*)"
)
SHARED = "".join(
    Path(name).read_text()
    for name in ("experiments/uci.py", "experiments/graph_data.py", "vit/devices.py")
)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_commands_and_their_flags_exist(page):
    """Or the page shows how to write them."""
    text = page.read_text()
    for module, script, name, arguments in COMMAND.findall(text):
        path = Path(module or script, f"{name}.py")
        if not path.exists() and name == "compare":
            path = Path("experiments/compare.py")  # `performer-vit compare`
        if path.with_suffix("").is_dir():  # of a folder, which the first word names
            word, _, arguments = arguments.strip().partition(" ")
            path = path.with_suffix("") / f"{word or '__main__'}.py"
        if f"`{path}`" in text and not path.exists():
            continue
        source = path.read_text()
        for flag in re.findall(r"--([a-z]\w*)(?=[= ]|$)", arguments.split("#")[0]):
            known = rf"""DEFINE_\w+\(\s*"{flag}"|"--{flag}\""""
            assert flag == "help" or re.search(known, source + SHARED), flag


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_configs_and_their_fields_exist(page):
    text = page.read_text()
    for name in re.findall(r"--config=([\w/]+(?:\.py)?)", text):
        assert bundled.path(name).exists()
    for field in re.findall(r"(?:--|grid )config\.([\w.]+)=", text):
        assert field in config.flatten(config.Config())


def test_tests_that_pages_name_are_there():
    named = {name for page in PAGES for name in re.findall(r"test_\w+\.py::\w+", page.read_text())}
    assert len(named) > 20
    for name in named:
        file, function = name.split("::")
        assert f"\ndef {function}(" in Path("tests", file).read_text(), name


def test_there_are_pages():
    assert len(WRITTEN) > 30
    assert sum(len(COMMAND.findall(page.read_text())) for page in WRITTEN) > 100
