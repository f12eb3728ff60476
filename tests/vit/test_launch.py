"""The flags of a command are the parameters of its main, and say what is wrong with them."""

import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import pytest
from absl import flags

from tests.support import commands
from tests.support.pages import code
from vit.config import arguments, cli
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
    arguments.define(example, {"draws": 1}, values)
    parse_flags(["program", *given], values)
    return {name: values[name].value for name in values if "help" not in name}


def test_values_are_of_their_kinds():
    given = parsed(
        *("--workdir=x", "--names=c, d", "--sizes=16,32", "--parts=two,one", "--rate=2", "--deep"),
        *("--folder", "y"),
    )
    assert given == {
        "workdir": Path("x"),
        "names": ("c", "d"),
        "sizes": (16, 32),
        "parts": ("two", "one"),
        "rate": 2.0,
        "draws": 3,
        "folder": Path("y"),
        "deep": True,
        "quick": False,
    }
    defaults = parsed("--workdir=x")
    assert (defaults["names"], defaults["sizes"], defaults["folder"]) == (("a", "b"), (), None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--draws=3"], "--workdir is missing: of a run"),
        (["--workdir=x", "--draws=3.5"], "flag --draws=3.5: '3.5' is no integer"),
        (["--workdir=x", "--sizes=16,a"], "flag --sizes=16,a: 'a' is no integer"),
        (
            ["--workdir=x", "--parts=one,too"],
            "flag --parts=one,too: unknown value 'too'; did you mean 'two'? Choices: one, two",
        ),
    ],
)
def test_a_bad_value_ends_in_one_line(given, said):
    with pytest.raises(SystemExit) as end:
        parsed(*given)
    assert str(end.value).startswith(said)
    assert "\n" not in str(end.value)


PROGRAMS = [
    f"{module}.__main__" if Path(*module.split(".")).is_dir() else module
    for module, _ in cli.programs("experiments").values()
]
LAUNCHED = [
    module
    for module in PROGRAMS
    if "launch.run(main" in Path(*module.split(".")).with_suffix(".py").read_text()
]


def test_every_experiment_starts_and_explains_its_flags():
    """Its default of a flag is one that the command line can give."""
    assert len(LAUNCHED) >= 18
    for module in LAUNCHED:
        main = importlib.import_module(module).main
        values, told = flags.FlagValues(), arguments.meanings(main)
        parameters = arguments.define(main, None, values)
        assert list(told) == [p.name for p in parameters]
        for p in parameters:
            assert told[p.name] or hasattr(p.annotation, "_fields")  # a group explains its own
            given = p.name in values and p.default not in (None, p.empty, (), "")
            if given and p.annotation is not bool:
                parser = arguments.Parser(p.annotation)
                assert parser.parse(parser.serialize(p.default)) == p.default


@pytest.mark.thorough
def test_the_recipe_runs(tmp_path):
    """Of docs/howto/add-an-experiment.md: as a module that Python calls."""
    page = Path("docs/howto/add-an-experiment.md").read_text()
    (body,) = code(page, "python")
    namespace = {"__name__": "recipe"}
    exec(compile(body, "recipe", "exec", dont_inherit=True), namespace)
    namespace["main"](couplings=("iid", "orf"), draws=40, out=tmp_path)
    written = (tmp_path / "gram_error.md").read_text()
    assert "orf below iid in 3 and above in 0 of 3 cases" in written
    assert len((tmp_path / "gram_error.csv").read_text().splitlines()) == 1 + 2 * 3


@pytest.mark.thorough
def test_tables_say_what_made_them(tmp_path):
    """run.json: the command that can be typed again, versions; none where no table was written."""
    (tmp_path / "program.py").write_text(
        "from pathlib import Path\n"
        "from vit.study import launch\n"
        "def main(out: Path, lines: int = 1):\n"
        "    'Writes.\\n\\n    Args:\\n        out: folder.\\n        lines: how many.\\n    '\n"
        "    out.mkdir(exist_ok=True)\n"
        "    lines and (out / 'table.csv').write_text('a')\n"
        "launch.run(main)\n"
    )
    out, none = tmp_path / "out with a space", tmp_path / "none"
    lines = [["program", f"--out={out}", f"--lines={number}"] for number in (2, 3, 2)]
    lines.append(["program", f"--out={none}", "--lines=0"])
    outcomes = commands.start_all(lines, ("vit.study.launch",), tmp_path)
    assert outcomes == [(0, "", "")] * 4
    assert not (none / "run.json").exists()
    records = json.loads((out / "run.json").read_text())
    typed = [shlex.split(each["command"]) for each in records]
    started = ["python", "-m", "program", f"--out={out}"]
    assert typed == [[*started, "--lines=3"], [*started, "--lines=2"]]
    assert records[-1]["jax"] == jax.__version__
    assert len(records[-1]["date"]) == 10
