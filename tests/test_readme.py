"""The README is true: its Python runs, its commands, files and links exist, and it is short."""

import re
from pathlib import Path

import pytest

import performer
from tests.pages import code
from vit import bundled, cli, config

README = Path("README.md").read_text()


def test_python_runs():
    namespace: dict = {}
    for body in code(README, "python"):
        exec(body, namespace)
    assert namespace["output"].shape == (2, 197, 768)
    assert namespace["attention_fn"].frequencies[...].shape == (128, 64)


def test_commands_exist():
    makefile = Path("Makefile").read_text()
    for body in code(README, "bash"):
        for target in re.findall(r"^make (\S+)", body, flags=re.M):
            assert re.search(rf"^{target}:", makefile, flags=re.M)
        for module in re.findall(r"python -m (\S+)", body):
            assert Path(*module.split(".")).with_suffix(".py").exists()
        for name in re.findall(r"performer-vit (\S+)", body):
            assert name in cli.programs("vit")
        for name in re.findall(r"--config=(\w+)", body):
            assert bundled.path(name).exists()
        for flag in re.findall(r"--config\.([\w.]+)=", body):
            assert flag in config.flatten(config.Config())


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
