"""Prints the test files that a change can reach, by the graph of imports: `make test-changed`.

    python -m tests.changed [COMMIT]

The change is everything that differs from COMMIT (from the upstream branch if there is one, else
from the last commit) and what git does not track yet. A file reaches another one that imports it,
or that names it in a string, as commands and configs are named. A module of a package is asked for
by its own name: `from performer import gp` is an import of `performer.gp` and of nothing else that
the package holds.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = ("performer", "vit", "experiments", "tests")
EVERYTHING = {"tests/conftest.py", "tests/checker.py", "pyproject.toml", "Makefile", ".ci/run"}


@cache
def files() -> dict[str, str]:
    """{"performer.gp": "performer/kernels/gp.py", "performer": "performer/__init__.py", ...}."""
    paths = [p.relative_to(ROOT) for top in TOPS for p in sorted((ROOT / top).rglob("*.py"))]
    return {".".join(p.with_suffix("").parts).removesuffix(".__init__"): str(p) for p in paths}


@cache
def exports(package: str) -> dict[str, str]:
    """{"Graph": "performer.graphs.graph", ...}: what a package takes from its modules."""
    tree = ast.parse((ROOT / files()[package]).read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.name: _module(f"{node.module}.{a.name}", node.module) for a in node.names}
    return found


def _module(full: str, otherwise: str) -> str:
    return full if full in files() else otherwise


@cache
def dependencies(path: str) -> set[str]:
    """The modules that a file imports or names."""
    known, found = files(), set()
    packages = {m for m, p in known.items() if p.endswith("__init__.py")}

    def add(full: str) -> None:
        """The longest module in a dotted name, and the files of the packages on the way."""
        parts = full.split(".")
        names = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
        module = next((name for name in names if name in known), None)
        found.update(name for name in names if name in packages)
        if module in packages and module != full:
            module = exports(module).get(full[len(module) + 1 :].split(".")[0], module)
        if module:
            found.add(module)

    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            if re.fullmatch(r"(performer|vit)(\.\w+)+", name := ast.unparse(node)):
                add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in re.findall(r"[\w./]+", node.value):
                name = word.removesuffix(".py").replace("/", ".")
                if name in known and "." in name:
                    add(name)
    return found


def reached(changed: set[str]) -> list[str]:
    """The test files that changed files reach."""
    known = files()
    tests = [p for p in known.values() if Path(p).name.startswith("test_")]
    if changed & EVERYTHING:
        return tests
    # A package's own file is asked for by all that name one of its modules, and passes on nothing.
    after = {
        path: {known[m] for m in dependencies(path)}
        for path in known.values()
        if not path.endswith("__init__.py")
    }
    new = set(changed)
    found = set(changed)
    while new:
        new = {path for path, needs in after.items() if needs & new} - found
        found |= new
    if changed:  # these read names, examples and commands wherever they stand
        always = ("readme", "pages", "howto", "docs", "docstrings", "floors")
        found |= {f"tests/test_{name}.py" for name in always}
    return sorted(set(tests) & found)


def changed_files(commit: str = "") -> set[str]:
    """What differs from the commit, and what git does not track."""

    def git(*words: str) -> list[str]:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.splitlines() if run.returncode == 0 else []

    upstream = git("merge-base", "HEAD", "@{upstream}")
    base = commit or (upstream[0] if upstream else "HEAD")
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


if __name__ == "__main__":
    print(*reached(changed_files(*sys.argv[1:])), sep="\n")
