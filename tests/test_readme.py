"""The README is true: its Python runs, its files and links exist, and it is short."""

import re
from pathlib import Path

import pytest

import performer
from tests.pages import code

README = Path("README.md").read_text()


def test_python_runs():
    namespace: dict = {}
    for body in code(README, "python"):
        exec(body, namespace)
    assert namespace["output"].shape == (2, 197, 768)
    assert namespace["attention_fn"].frequencies[...].shape == (128, 64)


def test_targets_exist():
    targets = re.findall(r"^make (\S+)", "\n".join(code(README, "bash")), flags=re.M)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", Path("Makefile").read_text(), flags=re.M)


def test_links_and_length():
    paths = re.findall(r"\]\(([^)#]+)", README)
    assert len(paths) > 10
    for path in paths:
        assert Path(path).exists(), path
    assert 120 <= len(README.splitlines()) <= 180


WORDS = [
    *performer.couplings.DIRECTIONS,
    *performer.couplings.NORMS,
    *performer.couplings.COUPLINGS,
]


@pytest.mark.parametrize("name", WORDS)
def test_every_coupling_and_part_is_explained(name):
    assert f"`{name}`" in Path("docs/why/couplings.md").read_text()


def test_ci_runs_the_commands_of_the_readme():
    script = Path(".ci/run").read_text()
    assert "make lint" in script
    assert "make test" in script
