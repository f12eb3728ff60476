"""What others install: a source distribution, and the wheel that is built from it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import performer

DISTRIBUTION = "performer-jax"


def run(*arguments, **options):
    done = subprocess.run(arguments, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The two files of a release: `build` makes the wheel of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", f"--outdir={folder}", ".")
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def test_the_wheel_holds_the_two_packages_and_nothing_else(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"performer", "vit", f"performer_jax-{performer.__version__}.dist-info"}
    wanted = {str(p) for top in ("performer", "vit") for p in Path(top).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == wanted
    assert {"performer/py.typed", "vit/py.typed"} <= names


def test_the_source_distribution_holds_what_its_readers_need(archives):
    with tarfile.open(archives[0]) as source:
        names = {name.split("/", 1)[1] for name in source.getnames()}
    files = ["README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"]
    assert {*files, "pyproject.toml", "docs/conf.py", "docs/index.md", ".ci/run"} <= names
    folders = "tests", "experiments", "experiments/configs"
    assert {str(p) for folder in folders for p in Path(folder).glob("*.py")} <= names
    left = [n for n in names if "__pycache__" in n or n.startswith(("docs/_build", ".venv"))]
    assert not left


PROGRAM = f"""
import importlib.metadata, pathlib
import performer, vit
for package in performer, vit:
    folder = pathlib.Path(package.__file__).parent
    assert (folder / "py.typed").exists()
    print(folder)
assert importlib.metadata.version("{DISTRIBUTION}") == performer.__version__
"""


def test_the_wheel_is_imported_from_where_it_is_installed(archives, tmp_path):
    folder = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, f"--target={folder}", archives[1])
    information = f"performer_jax-{performer.__version__}.dist-info"
    assert sorted(path.name for path in folder.iterdir()) == ["performer", information, "vit"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    printed = run(sys.executable, "-P", "-c", PROGRAM, cwd=tmp_path, env=environment)
    assert printed.split() == [str(folder / "performer"), str(folder / "vit")]


def test_every_place_has_the_same_version():
    assert f"\nversion: {performer.__version__}\n" in Path("CITATION.cff").read_text()
    assert f"\n## {performer.__version__}\n" in Path("CHANGELOG.md").read_text()
