"""Imports go only downwards: from folder to folder, and without a cycle among the files."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("performer", "vit", "experiments")
"""Each imports only what stands before it."""
LIBRARIES = {"jax", "numpy", "optax", "scipy", "jaxtyping"}
OPTIONAL = {
    "nnx": {"flax"},
    "linen.py": {"flax"},
    "sklearn.py": {"sklearn"},
    "graph.py": {"networkx"},
}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """Absolute names of everything that a file imports, however deep in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


SOURCES = [p for top in FOLDERS for p in sorted((ROOT / top).rglob("*.py"))]
MODULES = {module_name(path): path for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_folders_import_what_is_below(path):
    above = (*FOLDERS[FOLDERS.index(module_name(path).split(".")[0]) + 1 :], "tests")
    for imported in imports(path):
        assert imported.split(".")[0] not in above, f"{module_name(path)} imports {imported}"


def test_no_cycle():
    lazy = {"performer", "vit"}  # their TYPE_CHECKING blocks name what they bring in later
    graph = {
        name: {other for other in imports(path) if other in MODULES}
        for name, path in MODULES.items()
        if name not in lazy
    }
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"files import one another: {' <- '.join(error.args[1])}")


def test_commands_are_imported_by_nobody():
    """What two of them share is a module of its own."""
    commands = {
        n for n, path in MODULES.items() if '\nif __name__ == "__main__":' in path.read_text()
    }
    shared = {
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in commands & set(imports(path))
    }
    assert not shared


PICTURES = {"vit.model", "vit.classification", "vit.augment", "vit.class_report"}
BLIND = (
    *("attention_report", "checkpoint", "conversion", "costs", "devices", "display", "extension"),
    *("loggers", "loop", "metrics", "optim", "safety", "steps", "task"),
)


@pytest.mark.parametrize("name", BLIND)
def test_only_the_task_knows_pictures(name):
    path = MODULES[f"vit.{name}"]
    assert not PICTURES & set(imports(path))
    for word in ("num_classes", "model.head", ".blocks", '"image"', '"label"'):
        assert word not in path.read_text()


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "performer" in p.parts[-3:-1]], ids=module_name
)
def test_the_library_needs_only_its_dependencies(path):
    allowed = (
        LIBRARIES | {"performer"} | OPTIONAL.get(path.name, OPTIONAL.get(path.parent.name, set()))
    )
    import sys

    for imported in imports(path):
        top = imported.split(".")[0]
        assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {imported}"
