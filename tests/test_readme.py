"""The README is true: its Python runs, its commands and files exist, its tables are complete."""

import re
from pathlib import Path

import jax
import pytest

import performer
from tests.pages import code
from vit import config

README = Path("README.md").read_text()


def test_python_runs():
    namespace: dict = {}
    for body in code(README, "python"):
        exec(body, namespace)
    assert namespace["output"].shape == (2, 197, 768)
    assert namespace["matern"](jax.random.key(0), 6, 3).shape == (6, 3)


def test_commands_exist():
    makefile = Path("Makefile").read_text()
    for body in code(README, "bash"):
        for target in re.findall(r"^make (\S+)", body, flags=re.M):
            assert re.search(rf"^{target}:", makefile, flags=re.M)
        for module in re.findall(r"python -m (\S+)", body):
            assert Path(*module.split(".")).with_suffix(".py").exists()
        for path in re.findall(r"--config=(\S+)", body):
            assert Path(path).exists()
        for flag in re.findall(r"--config\.([\w.]+)=", body):
            assert flag in config.flatten(config.Config())


@pytest.mark.parametrize("name", performer.couplings.COUPLINGS)
def test_every_coupling_is_explained(name):
    assert f"\n| `{name}` |" in README.split("## Couplings")[1]


def test_the_map_names_every_module():
    for folder in ("performer", "vit", "experiments"):
        for path in Path(folder).glob("[a-z]*.py"):
            assert re.search(rf"\b{path.stem}\b", README), path


@pytest.mark.parametrize("name", [*performer.couplings.DIRECTIONS, *performer.couplings.NORMS])
def test_every_part_is_named(name):
    assert f"`{name}`" in README


def test_ci_runs_the_commands_of_the_readme():
    script = Path(".ci/run").read_text()
    assert "make lint" in script
    assert "make test" in script
