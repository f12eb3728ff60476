"""Imports go downwards, without a cycle among the files; extras list what is imported."""

import ast
import graphlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from vit import config
from vit.run import loggers
from vit.storage import buckets

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
    """`vit/run` serves any task: it imports no model, and no fields but those of the trainer."""
    graph = {name: set(imports(path)) for name, path in MODULES.items()}
    for name, path in MODULES.items():
        tops, own = {x.split(".")[0] for x in graph[name]}, name.split(".")[0]
        assert not tops & {*FLOORS[FLOORS.index(own) + 1 :], "tests"}, name
        if own == "performer":
            more = {OPTIONAL.get(path.name), OPTIONAL.get(path.parent.name)}
            assert tops <= LIBRARIES | more, name
        if path.parent.name == "run" or name == "vit.task":
            own = {"vit.model", "vit.model.classification", "vit.config.images"}
            assert not own & graph[name], name
    lazy = {"performer", "vit"}  # their TYPE_CHECKING blocks name what they bring in later
    edges = {name: graph[name] & set(MODULES) for name in graph if name not in lazy}
    list(graphlib.TopologicalSorter(edges).static_order())


ROOMS = ("storage", "config", "data", "model", "run", "weights", "reports", "study")
"""Folders of vit; each imports those before it."""
UPWARDS = {
    ("config", "data"): {"vit.config.recipe"},
    ("run", "reports"): {"vit.run.checkpoint", "vit.run.loggers", "vit.run.loop", "vit.run.runs"}
    | {"vit.run.steps"},
}
"""Files that import a later folder: the recipe reads a data set, the log is one of the reports."""


def test_the_folders_of_vit_import_those_below_them():
    upwards = {}
    for name, path in MODULES.items():
        room = name.split(".")[1] if name.startswith("vit.") else ""
        for other in imports(path) if room in ROOMS else ():
            top = other.split(".")[1] if other.startswith("vit.") else ""
            if top in ROOMS and ROOMS.index(top) > ROOMS.index(room):
                upwards.setdefault((room, top), set()).add(name)
    assert upwards == UPWARDS


def test_the_trainer_reads_no_fields_of_a_task():
    """Fields of the trainer: two of `Batches`, the section `optim` and its own."""
    for path in [*Path("vit/run").glob("*.py"), Path("vit/task.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            read = re.fullmatch(r"(?:self\.|run\.)?config\.(\w+(?:\.\w+)?)", ast.unparse(node))
            if isinstance(node, ast.Attribute) and read:
                top, _, field = read[1].partition(".")
                of_section = {"data": config.Batches, "optim": config.Optimizer}.get(top)
                known = hasattr(config.TrainConfig, top) or hasattr(config, top)
                assert known, (path, read[0])
                assert not field or hasattr(of_section, field), (path, read[0])


WHERE = {"": "performer", "flax": "performer", "graphs": "performer", "sklearn": "performer"}
"""Package that imports the requirements of an extra; others by its name, or vit."""
OPENED_BY_JAX = {
    "flatbuffers": ("jax.export", "jax._src.export.serialization"),
    "filelock": ("jax", "jax._src.lru_cache"),
}
"""Imported by a module of JAX that a module of ours uses: no requirement of JAX."""


def requirements():
    """(extra, distribution) of each line in pyproject.toml, without this project's own name."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        names = (re.match(r"[\w.-]+", line)[0] for line in lines)
        yield from ((extra, name) for name in names if name != project["name"])


@pytest.mark.parametrize(("extra", "distribution"), [*requirements()])
def test_each_requirement_is_imported_by_what_its_extra_is_for(extra, distribution):
    """Nothing is installed; the modules of a distribution are those of this environment."""
    modules = {m for m, names in packages_distributions().items() if distribution in names}
    modules = modules or {distribution}  # of the loggers, which need not be installed
    floor = WHERE.get(extra, extra if extra in FLOORS else "vit")
    files = [path for path in MODULES.values() if path.parts[0] == floor]
    imported = {name for path in files for name in imports(path)}
    if distribution in OPENED_BY_JAX:
        used, importer = OPENED_BY_JAX[distribution]
        assert any(name.startswith(used) for name in imported)
        imported = set(imports(Path(find_spec(importer).origin)))
    by_name = {**loggers.PACKAGES, "gcs": buckets.PACKAGE}  # at run time
    imported |= {by_name[extra].lower()} if extra in by_name else set()
    assert modules & {name.split(".")[0] for name in imported}
