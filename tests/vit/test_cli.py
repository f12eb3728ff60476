"""Console scripts, and the commands that one command names for the next."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import performer
from vit.config import cli


def test_an_unknown_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["performer-vit", "trian"])
    with pytest.raises(SystemExit, match="unknown command of performer-vit: 'trian'.*'train'"):
        cli.vit()


def test_the_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["performer-vit", "--version"])
    cli.vit()
    expected = f"performer-jax {performer.__version__}, jax {version('jax')}"
    assert capsys.readouterr().out.strip() == expected


PROGRAM = """
import sys
print(__name__, sys.argv[1:])
from vit.config import cli
print(cli.command("next"))
print(cli.typed())
if __name__ == "__main__":
    print("runs")
"""


@pytest.mark.parametrize(
    ("script", "typed", "again"),
    [
        ("script", "bin/script", "bin/script"),
        ("python -m tools", "/folder/tools/__main__.py", "python -m tools"),
    ],
)
def test_the_program_runs_as_main_and_names_the_script(
    tmp_path, monkeypatch, capsys, script, typed, again
):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "one.py").write_text(f'"""Does one thing.\n\nMore."""\n{PROGRAM}')
    (tmp_path / "tools" / "part.py").write_text('"""Is imported."""')
    monkeypatch.syspath_prepend(tmp_path)
    found = cli.programs("tools")
    assert found == {"one": ("tools.one", "Does one thing.")}
    monkeypatch.setattr(cli, "_typed", [])
    monkeypatch.setattr(cli, "_programs", {})
    monkeypatch.setattr(sys, "argv", [typed, "one", "--flag=3"])
    cli.run(script, found)
    lines = ["__main__ ['--flag=3']", f"{again} next", f"{again} one --flag=3", "runs"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_command_has_the_name_that_it_has_in_the_script(monkeypatch):
    """`vit.train` trains a run of the language model on under the name "resume"."""
    monkeypatch.setattr(cli, "_typed", ["python", "-m", "tools", "convert"])
    found = {"train": ("tools.train", ""), "resume": ("vit.train", "")}
    monkeypatch.setattr(cli, "_programs", found)
    assert cli.command("train", workdir="a") == "python -m tools resume --workdir=a"


WITHOUT_EXTRAS = """
import sys

ABSENT = "absl etils flax PIL grain orbax rich safetensors sklearn tensorflow_datasets".split()

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    "code",
    [
        "sys.argv = ['performer-vit', 'train']; from vit.config import cli; cli.vit()",
        "import vit; vit.load('runs/photos')",
    ],
)
def test_without_the_extra_it_is_named(code):
    """With the library alone: one line, or an error of import that says what to install."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(
        r"is not installed: pip install [\w-]+; pip install '.\[vit\]' in a checkout", last
    )
    if "cli" in code:
        assert done.stderr.count("\n") == 1
