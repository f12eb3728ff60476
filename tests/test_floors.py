"""Imports go only downwards; the floors are those of the README's map of the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"performer.typing", "performer.choices"},
    {"performer.norms", "performer.hadamard", "performer.theory"},
    {"performer.kernels", "performer.descent", "performer.directions", "performer.butterfly"},
    {"performer.graphs.graph", "performer.graphs.modulations", "performer.graphs.couplings"},
    {"performer.features", "performer.couplings", "performer.structured"},
    {"performer.graphs.kernels", "performer.graphs.matching", "performer.graphs.walks"},
    {"performer.graphs.reinforced", "performer.graphs.features", "performer.graphs.pagerank"},
    {"performer.graphs.tasks"},
    {"performer.attention.state", "performer.testing", "performer.quadrature"},
    {"performer.attention.sweep", "performer.attention.parallel", "performer.attention.checks"},
    {"performer.calibration"},
    {"performer.attention.op"},
    {"performer.attention.dropin", "performer.attention"},
    {"performer.analysis", "performer.gp", "performer.copula"},
    {"performer.graphs.gp"},
    {"performer.graphs"},
    {"performer"},
    {"performer.nnx", "performer.linen", "performer.sklearn"},
    {"vit", "vit.files", "vit.bounded"},
    {"vit.config", "vit.augment"},
    {"vit.metrics", "vit.safety", "vit.checkpoint"},
    {"vit.report", "vit.devices", "vit.costs"},
    {"vit.model", "vit.data", "vit.optim"},
    {"vit.steps"},
    {"vit.train", "vit.prepare", "vit.attention_report", "vit.class_report"},
    {"vit.evaluate"},
    {"vit.conversion"},
    {"vit.convert"},
    {"vit.pretrained"},
]
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}
LIBRARIES = {"jax", "numpy", "optax", "scipy", "jaxtyping"}
OPTIONAL = {
    "nnx.py": {"flax"},
    "linen.py": {"flax"},
    "sklearn.py": {"sklearn"},
    "graph.py": {"networkx"},
}


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """Absolute names of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FLOOR else node.module


SOURCES = [p for top in ("performer", "vit") for p in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_down(path):
    name = module_name(path)
    assert name in FLOOR, f"{name} stands on no floor: add it to FLOORS"
    for imported in imports(path):
        if imported.split(".")[0] in ("performer", "vit"):
            assert FLOOR[imported] < FLOOR[name], f"{name} imports {imported}"
        assert imported.split(".")[0] not in ("experiments", "tests")


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "performer" in p.parts[-3:-1]], ids=module_name
)
def test_the_library_needs_only_its_dependencies(path):
    allowed = LIBRARIES | {"performer"} | OPTIONAL.get(path.name, set())
    import sys

    for imported in imports(path):
        top = imported.split(".")[0]
        assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {imported}"
