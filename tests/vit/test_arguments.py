"""The command line: what --help says, what a flag is called elsewhere, configs by name."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from absl import flags

from tests.support import commands
from vit import config
from vit.config import arguments

FLAGS = config.flag_types(config.Config)
FIELDS = {name: x for name, x in config.flatten(config.Config()).items() if name in FLAGS}


def program(*given):
    """The flags of a program that takes a config, as its command line sets them."""
    argv, values = ["program", *given], flags.FlagValues()
    flags.DEFINE_string("config", None, "file", values)
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_integer("steps_shown", 3, "of them", flag_values=values)
    return argv, values


def message(*given):
    argv, values = program(*given)

    def run():
        arguments.parse_flags(argv, values)
        arguments.chosen_config(values)

    with pytest.raises(SystemExit) as error:
        run()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--config.learning_rate=1", "--config.optim.learning_rate"),
        ("--coupling=pm", "--config.attention.coupling"),
        ("--attention=softmax", "--config.attention.kind"),
        ("--config.attention.cupling=pm", "--config.attention.coupling"),
        ("--wrkdir=x", "--workdir"),
        ("--config.optim.lr=1", "--config.optim.learning_rate"),
    ],
)
def test_the_flag_that_is_meant(given, meant):
    told = message("--config=digits", given)
    assert told.startswith(f"unknown flag '{given.split('=')[0]}'; did you mean '{meant}'?")
    word = given.lstrip("-")
    told = message("--config=digits", word)
    assert told == f"{word!r} is no flag: did you mean '{meant}={word.split('=')[1]}'?"


def test_no_flag_is_meant():
    assert message("--config=digits", "--zzz=1") == "unknown flag '--zzz'. --help lists all flags"
    assert message("--config=digits", "zzz=1") == "'zzz=1' is no flag: see --help"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_field(flag, capsys):
    argv, values = program(flag)
    with pytest.raises(SystemExit) as end:
        arguments.parse_flags(argv, values)
    assert end.value.code == 0
    text = capsys.readouterr().out
    shown = dict(re.findall(r"^  --config\.([\w.]+)=(\S*)", text, flags=re.MULTILINE))
    assert shown == {field: str(value) for field, value in FIELDS.items()}
    words = " ".join(text.split())
    assert "It must be one of performer, softmax." in words
    assert "It must be 0 (the variant's), or an integer from 1 to 1024." in words
    assert "--steps_shown of them; default 3" in words
    assert text.index("--workdir") < text.index(arguments.HEADING)
    assert max(map(len, text.splitlines())) <= 120


def test_bundled_configs_by_name_from_any_folder(tmp_path, monkeypatch):
    expected = config.bundled("digits")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments" / "configs").mkdir(parents=True)
    (tmp_path / "experiments" / "configs" / "digits.py").write_text("def get_config(): return 3")
    for given in (["--config=digits"], ["--config", "digits"], ["-config=digits"]):
        argv, values = program(*given, "--config.seed=5")
        arguments.parse_flags(argv, values)
        assert arguments.chosen_config(values) == config.with_values(expected, {"seed": 5})
    assert config.bundled("simrf:places365").data.name == "places365"
    (tmp_path / "digits").write_text("def get_config():\n    return int('own')")
    assert "invalid literal for int() with base 10: 'own'" in message("--config=digits")


def test_a_field_needs_a_config():
    argv, values = program("--config.optim.learning_rate=1")
    arguments.parse_flags(argv, values)
    with pytest.raises(ValueError, match="optim.learning_rate is a field of a config: give --conf"):
        arguments.chosen_config(values)


def test_a_quick_trial_leaves_given_flags_alone():
    """And writes into a folder of its own."""

    def main(draws: int = 50, sizes: Sequence[int] = (), out: Path = Path("results/x")) -> None:
        """Args:
        draws: of them.
        sizes: of them.
        """

    quick = {"draws": 3, "sizes": (16,)}

    def given(*words):
        values = flags.FlagValues()
        parameters = arguments.define(main, quick, values)
        arguments.parse_flags(["program", *words], values)
        return arguments.given(parameters, (), quick, values)[1]

    whole = {"draws": 50, "sizes": (), "out": Path("results/x")}
    assert given() == whole
    assert given("--quick") == {"draws": 3, "sizes": (16,), "out": Path("results/x/quick")}
    assert given("--quick", "--draws=50", "--out=y") == {
        **{"draws": 50, "sizes": (16,), "out": Path("y/quick")}
    }


@pytest.mark.thorough
def test_a_failure_is_one_line(tmp_path):
    """A package `experiments` of the user's own, in the current folder, is no obstacle."""
    failures = {
        "ValueError('m=0 must be positive')": (1, "ValueError: m=0 must be positive\n"),
        "OSError(28, 'No space left', 'x')": (1, "OSError: [Errno 28] No space left: 'x'\n"),
        "FloatingPointError('nan')": (1, "FloatingPointError: nan\n"),
        "KeyboardInterrupt": (130, "interrupted\n"),
    }
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "failing.py").write_text(
        "import sys\nfrom vit.config import arguments\n"
        "def main(*words: str): raise eval(words[0])\narguments.run(main)\n"
    )
    lines = [["failing", error] for error in failures]
    mine = "--config=simrf:places365 --dry_run --config.data.name=mine --config.data.dir"
    trained = {
        "--config=digits": "--workdir is missing: folder of the run; created if missing\n",
        f"{mine}={tmp_path}": "ValueError: unknown config.data.name 'mine'",
        "--workdir=nowhere": "ValueError: nowhere holds no run",
        "--config=imagenet --dry_run --topology=v5e:4x": "ValueError: --topology=v5e:4x: a TPU sl",
        "--config=digits --workdir=run --topology=v5e:4x4": "ValueError: --topology requires",
    }
    lines += [["vit.train", *words.split()] for words in trained]
    outcomes = commands.start_all(lines, ("vit.train",), tmp_path)
    assert [(code, err) for code, _, err in outcomes[:4]] == list(failures.values())
    for (code, output, said), begin in zip(outcomes[4:], trained.values(), strict=True):
        assert (code, output) == (1, "")
        assert said.startswith(begin)
        assert said.count("\n") == 1
    made = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert made == {"experiments", "failing.py"}


def test_an_empty_flag_is_not_a_default():
    """`--out=` was the current folder."""
    values = flags.FlagValues()
    flags.DEFINE_string("out", "data", "folder", flag_values=values)
    flags.DEFINE_string("name", "", "of it", flag_values=values)
    assert arguments.parse_flags(["program", "--name="], values) == ["program"]
    flags.DEFINE_bool("no_header", False, "of a table", flag_values=values)
    arguments.parse_flags(["program", "--no-header", "--name=a-b"], values)
    assert (values.no_header, values.name) == (True, "a-b")
    with pytest.raises(SystemExit, match="--out= is empty: leave it out"):
        arguments.parse_flags(["program", "--out="], values)
