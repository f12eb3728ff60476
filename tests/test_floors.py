"""Imports go downwards: performer, vit, experiments; without a cycle among the files."""

import ast
import graphlib
import sys
from pathlib import Path

FLOORS = ("performer", "vit", "experiments")
LIBRARIES = {"performer", "jax", "numpy", "optax", "scipy", "jaxtyping", *sys.stdlib_module_names}
OPTIONAL = {"nnx": "flax", "linen.py": "flax", "sklearn.py": "sklearn", "graph.py": "networkx"}
MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
    for floor in FLOORS
    for path in Path(floor).rglob("*.py")
}


def imports(path):
    """The modules that a file imports, however deep in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def test_imports():
    """`vit/run` serves any task: but for the default of `runs` it knows no model of images."""
    graph = {name: set(imports(path)) for name, path in MODULES.items()}
    for name, path in MODULES.items():
        tops, own = {x.split(".")[0] for x in graph[name]}, name.split(".")[0]
        assert not tops & {*FLOORS[FLOORS.index(own) + 1 :], "tests"}, name
        if own == "performer":
            more = {OPTIONAL.get(path.name), OPTIONAL.get(path.parent.name)}
            assert tops <= LIBRARIES | more, name
        if path.parent.name == "run" and path.stem != "runs":
            assert not {"vit.model", "vit.model.classification"} & graph[name], name
    lazy = {"performer", "vit"}  # their TYPE_CHECKING blocks name what they bring in later
    edges = {name: graph[name] & set(MODULES) for name in graph if name not in lazy}
    list(graphlib.TopologicalSorter(edges).static_order())
