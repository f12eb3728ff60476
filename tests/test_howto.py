"""The how-to pages name commands, configs and flags that exist. Their code runs in `make docs`."""

import re
from pathlib import Path

import pytest

from vit import bundled, config

PAGES = sorted(Path("docs/howto").glob("*.md"))
COMMAND = re.compile(
    r"(python -m (?:vit|experiments)\.|performer-vit |performer-experiments )(\w+)"
    r"((?: \\\n|[^\n`])*)"
)
SHARED = "".join(
    Path(name).read_text()
    for name in ("experiments/uci.py", "experiments/graph_data.py", "vit/devices.py")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page):
    for start, name, arguments in COMMAND.findall(page.read_text()):
        if name == "kernel_error":  # that one is made on its page
            continue
        package = "experiments" if "experiments" in start else "vit"
        source = Path(package, f"{name}.py").read_text()
        for flag in re.findall(r"--([a-z]\w*)(?=[= ]|$)", arguments.split("#")[0]):
            assert re.search(rf"""DEFINE_\w+\(\s*"{flag}"|"--{flag}\"""", source + SHARED), flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_and_their_fields_exist(page):
    text = page.read_text()
    for name in re.findall(r"--config=([\w/]+(?:\.py)?)", text):
        assert bundled.path(name).exists()
    for field in re.findall(r"(?:--|grid )config\.([\w.]+)=", text):
        assert field in config.flatten(config.Config())


def test_there_are_pages():
    assert len(PAGES) > 10
    assert sum(len(COMMAND.findall(page.read_text())) for page in PAGES) > 40
