"""Imports go downwards: performer, vit, experiments; without a cycle among the files."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("performer", "vit", "experiments")
LIBRARIES = {"performer", "jax", "numpy", "optax", "scipy", "jaxtyping", *sys.stdlib_module_names}
OPTIONAL = {"nnx": "flax", "linen.py": "flax", "sklearn.py": "sklearn", "graph.py": "networkx"}
SOURCES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


def imports(path):
    """The modules that a file imports, however deep in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports(path):
    """`vit/run` serves any task: but for the default of `runs` it knows no model of images."""
    tops = {name.split(".")[0] for name in imports(path)}
    own = module_name(path).split(".")[0]
    assert not tops & {*FLOORS[FLOORS.index(own) + 1 :], "tests"}
    if own == "performer":
        assert tops <= LIBRARIES | {OPTIONAL.get(path.name), OPTIONAL.get(path.parent.name)}
    if path.parent.name == "run" and path.stem != "runs":
        assert not {"vit.model", "vit.model.classification"} & set(imports(path))


def test_no_cycle():
    lazy = {"performer", "vit"}  # their TYPE_CHECKING blocks name what they bring in later
    graph = {
        name: set(imports(p)) & set(MODULES) for name, p in MODULES.items() if name not in lazy
    }
    list(graphlib.TopologicalSorter(graph).static_order())
