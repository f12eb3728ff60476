"""The flags of a command are the parameters of its main, and say what is wrong with them."""

import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import pytest
from absl import flags

from experiments.common import launch
from tests.pages import code
from vit.config import cli, signature
from vit.config.arguments import parse_flags


def example(
    workdir: Path,
    names: Sequence[str] = ("a", "b"),
    sizes: Sequence[int] = (),
    parts: Sequence[Literal["one", "two"]] = ("one",),
    rate: float = 0.5,
    draws: int = 3,
    folder: Path | None = None,
    deep: bool = False,
) -> None:
    """Does it.

    Args:
        workdir: of a run.
        names: to take.
        sizes: each m;
            even numbers.
        parts: which.
        rate: of all.
        draws: how many.
        folder: of data.
        deep: or not.

    Raises:
        ValueError: never.
    """


def parsed(*given):
    values = flags.FlagValues()
    launch.define(example, {"draws": 1}, values)
    parse_flags(["program", *given], values)
    return {name: values[name].value for name in values}


def test_values_are_of_their_kinds():
    given = parsed(
        *("--workdir=x", "--names=c, d", "--sizes=16,32", "--parts=two,one", "--rate=2", "--deep"),
        *("--folder", "y"),
    )
    assert given | {"names": given["names"]} == {
        "workdir": Path("x"),
        "names": ("c", "d"),
        "sizes": (16, 32),
        "parts": ("two", "one"),
        "rate": 2.0,
        "draws": 3,
        "folder": Path("y"),
        "deep": True,
        "quick": False,
    } | {k: v for k, v in given.items() if k in ("help", "helpshort", "helpfull", "helpxml")}
    defaults = parsed("--workdir=x")
    assert (defaults["names"], defaults["sizes"], defaults["folder"]) == (("a", "b"), (), None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--draws=3"], "--workdir is missing: of a run"),
        (["--workdir="], "flag --workdir=: '' is no path"),
        (["--workdir=x", "--draws=3.5"], "flag --draws=3.5: '3.5' is no integer"),
        (["--workdir=x", "--sizes=16,a"], "flag --sizes=16,a: 'a' is no integer"),
        (["--workdir=x", "--rate=fast"], "flag --rate=fast: 'fast' is no number"),
        (
            ["--workdir=x", "--parts=one,too"],
            "flag --parts=one,too: unknown value 'too'; did you mean 'two'? Choices: one, two",
        ),
        (["--workdir=x", "--draw=3"], "unknown flag '--draw'; did you mean '--draws'?"),
        (["--workdir=x", "draws=3"], "'draws=3' is no flag: did you mean '--draws=3'?"),
    ],
)
def test_a_bad_value_ends_in_one_line(given, said):
    with pytest.raises(SystemExit) as end:
        parsed(*given)
    assert str(end.value).startswith(said)
    assert "\n" not in str(end.value)


def test_the_help_is_that_of_the_docstring():
    told = signature.meanings(example)
    assert told["sizes"] == "each m; even numbers"
    assert list(told) == list(inspect.signature(example).parameters)


def test_at_least():
    launch.at_least(2, draws=2, repeats=3)
    for value in (1, float("nan")):
        with pytest.raises(ValueError, match=f"^--draws={value} must be at least 2$"):
            launch.at_least(2, repeats=3, draws=value)


PROGRAM = '''
"""What it does."""
from pathlib import Path
from typing import Literal
from experiments.common import launch

def words(what: Literal["a", "b"], /, draws: int = 3, out: Path = Path("x")) -> None:
    """Does it.

    Args:
        what: of them.
        draws: how many.
        out: folder.
    """
    launch.at_least(2, draws=draws)
    print(what, draws, out)

if __name__ == "__main__":
    launch.run({}, {})
'''


@pytest.mark.parametrize(
    ("main", "quick", "given", "said"),
    [
        ("words", {"draws": 2}, ["--out=y", "a", "--quick"], "a 2 y/quick"),
        ("words", {"draws": 2}, ["a", "--quick", "--draws=9"], "a 9 x/quick"),
        ("words", None, ["c"], "ValueError: unknown value 'c'; did you mean 'b'? Choices: a, b"),
        ("words", None, ["a", "--draws=1"], "ValueError: --draws=1 must be at least 2"),
    ],
)
def test_a_program(main, quick, given, said, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("{}, {}", f"{main}, {quick}"))
    done = subprocess.run(
        [sys.executable, str(path), *given],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert (done.stdout + done.stderr).strip() == said


LAUNCHED = [
    module
    for module, _ in cli.programs("experiments").values()
    if "launch.run(main" in Path(*module.split(".")).with_suffix(".py").read_text()
]


@pytest.mark.parametrize("module", LAUNCHED)
def test_every_flag_of_every_experiment_is_told(module):
    main = importlib.import_module(module).main
    values, told = flags.FlagValues(), signature.meanings(main)
    parameters = launch.define(main, None, values)
    assert list(told) == [p.name for p in parameters]
    assert all(told.values())
    for p in parameters:  # the default is one that the command line can say
        if p.name in values and p.default not in (None, p.empty, (), ""):
            text = launch.Parser(p.annotation).serialize(p.default)
            if p.annotation is not bool:
                assert launch.Parser(p.annotation).parse(text) == p.default


def test_there_are_experiments():
    assert len(LAUNCHED) >= 18


def test_the_recipe_runs(tmp_path):
    """Of docs/howto/add-an-experiment.md: as a module that Python calls."""
    page = Path("docs/howto/add-an-experiment.md").read_text()
    (body,) = code(page, "python")
    namespace = {"__name__": "recipe"}
    exec(compile(body, "recipe", "exec", dont_inherit=True), namespace)
    namespace["main"](couplings=("iid", "orf"), draws=40, out=tmp_path)
    written = (tmp_path / "gram_error.md").read_text()
    assert "orf below iid in 3 and above in 0 of 3 cases" in written
    assert len((tmp_path / "gram_error.csv").read_text().splitlines()) == 3


def test_tables_say_what_made_them(tmp_path):
    """run.json: the command that can be typed again, versions; none where no table was written."""
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path\n"
        "from experiments.common import launch\n"
        "def main(out: Path, draws: int = 1):\n"
        "    'Writes.\\n\\n    Args:\\n        out: folder.\\n        draws: how many.\\n    '\n"
        "    out.mkdir(exist_ok=True)\n"
        "    draws and (out / 'table.csv').write_text('a')\n"
        "launch.run(main)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    runs = (
        (["--draws=2"], True),
        (["--draws=3"], True),
        (["--draws=2"], True),
        (["--draws=0"], False),
    )
    for flags_, made in runs:
        out = tmp_path / f"out {made}"
        typed = ["-m", "program", f"--out={out}", *flags_]
        subprocess.run([sys.executable, *typed], check=True, env=environment)
        assert (out / "run.json").exists() == made
    records = json.loads((tmp_path / "out True" / "run.json").read_text())
    assert [shlex.split(each["command"])[-1] for each in records] == ["--draws=3", "--draws=2"]
    record = records[-1]
    assert shlex.split(record["command"]) == [
        "python",
        "-m",
        "program",
        *shlex.split(f"'--out={tmp_path / 'out True'}' --draws=2"),
    ]
    assert record["jax"] == jax.__version__
    assert len(record["date"]) == 10
