"""What others install: a source distribution, and the wheel that is built from it."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import performer

PACKAGES = ("performer", "vit")


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


@pytest.mark.thorough
def test_the_wheel_holds_the_packages_and_nothing_else(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, f"performer_jax-{performer.__version__}.dist-info"}
    wanted = {str(p) for top in PACKAGES for p in Path(top).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == wanted
    assert not [name for name in names if name.endswith(".png")]
    assert {"performer/py.typed", "vit/py.typed"} <= names


@pytest.mark.thorough
def test_the_source_distribution_holds_what_its_readers_need(archives):
    with tarfile.open(archives[0]) as source:
        names = {name.split("/", 1)[1] for name in source.getnames()}
    files = ["README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"]
    assert {*files, "pyproject.toml", "docs/conf.py", "docs/index.md", ".ci/run"} <= names
    folders = "tests", "experiments", "vit/configs"
    assert {str(p) for folder in folders for p in Path(folder).glob("*.py")} <= names
    left = [n for n in names if "__pycache__" in n or n.startswith(("docs/_build", ".venv"))]
    assert not left


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """Folder of the installed wheel, and the environment in which it is found."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, f"--target={folder}", archives[1])
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return folder, os.environ | {"PYTHONPATH": str(folder), "PATH": path}


@pytest.mark.thorough
def test_the_scripts_find_programs_and_configs_from_any_folder(installed, tmp_path):
    """Packages of the user's own on the path, named as folders of this repository, are not used."""
    for name in ("experiments", "tests", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')")
    environment = installed[1] | {"PYTHONPATH": f"{tmp_path}:{installed[1]['PYTHONPATH']}"}
    listed = run("performer-vit", cwd=tmp_path, env=environment)
    programs = re.findall(r"^performer-vit ([a-z-]+) ", listed, re.MULTILINE)
    assert {"train", "compare", "attention-mse", "benchmark"} < set(programs)
    for name in programs:
        shown = run("performer-vit", name, "--help", cwd=tmp_path, env=environment)
        assert f"performer-vit {name} " in shown
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.jpg").write_bytes(b"")
    (tmp_path / "work").mkdir()  # the folder of the program, not of the environment
    (tmp_path / "work" / "lattices.py").write_text("lattice = 3")
    for name, message in {
        "digits": "ValueError: config.optim.warmup_steps=44",
        "my_images:../photos": "by performer-vit prepare --source=../photos --out=data",
        "digits --config.attention.coupling=lattices:lattice": "has no function 'lattice'",
    }.items():
        given = f"--config={name}".split()
        command = ["performer-vit", "train", *given, "--config.num_epochs=1"]
        done = subprocess.run(
            [*command, "--workdir=run", "--config.optim.warmup_steps=44"],  # the whole run
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert message in done.stderr, name


def photographs(folder):
    """Two classes that colour tells apart, 14 pictures each."""
    rng = np.random.default_rng(0)
    for name, colour in ("forest", (40, 160, 60)), ("sea", (30, 80, 200)):
        (folder / name).mkdir(parents=True)
        for i in range(14):
            pixels = np.clip(rng.normal(colour, 25, (16, 18, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


ALONE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("performer", "vit", "experiments", "flax"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
"""


SHORT = (
    *("--config.model.depth=1", "--config.num_epochs=10", "--config.optim.warmup_steps=6"),
    *("--config.eval_every=30", "--config.checkpoint_every=30"),
)
"""Thirty steps; the recipe has 600."""


@pytest.mark.thorough
def test_from_photographs_to_a_program_that_jax_alone_runs(installed, tmp_path):
    """Four commands in an empty folder, each as the one before it printed it.

    The training is shortened by flags.
    """
    _, environment = installed

    def shell(text):
        return run("sh", "-c", text, cwd=tmp_path, env=environment)

    def printed(name, text):
        return re.search(f"performer-vit {name} .*", text)[0]

    photographs(tmp_path / "photos")
    done = shell("performer-vit prepare --source=photos --out=data --validation=0.15")
    assert "24 train, 4 validation" in done
    done = shell(f"{printed('train', done)} {' '.join(SHORT)}")
    assert float(re.search("validation accuracy ([0-9.]+)", done)[1]) == 1.0
    predict = printed("predict", done).replace("FILE_OR_FOLDER ...", "photos --top=1")
    done = shell(f"{predict} 2>&1")  # standard output has predictions alone
    right = re.findall(r"photos/(\w+)/\d+.png  (\w+) ", done)
    assert len(right) == 28
    assert all(truth == said for truth, said in right)
    done = shell(printed("export", done))
    (tmp_path / "alone.py").write_text(ALONE + done[done.index("import json") :])
    (tmp_path / "photos" / "sea" / "0.png").rename(tmp_path / "photo.jpg")
    said = shell(f"{sys.executable} alone.py")
    assert said.strip() == "['sea']"


def test_every_place_has_the_same_version():
    assert f"\nversion: {performer.__version__}\n" in Path("CITATION.cff").read_text()
    assert f"\n## {performer.__version__}\n" in Path("CHANGELOG.md").read_text()
