"""The commands that texts print, the flags of the programs that they name, and starting them."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from absl import flags

from experiments.common import launch
from vit import config as configs
from vit.config import cli
from vit.config.arguments import Parser

COMMAND = re.compile(
    r"(?:python -m (vit|experiments|tests)\.|performer-(vit|experiments) )(\w+(?:\.\w+)*)"
    r"((?: \\\n|[^\n`])*)"
)
FIELDS = configs.flatten(configs.Config())
SHARED = {
    "experiments.language_model": {
        "convert": "vit.convert",
        "evaluate": "vit.evaluate",
        "resume": "vit.train",
    }
}
"""Commands of vit under the name of a task."""
programs = cache(cli.programs)


def printed(text: str) -> Iterator[tuple[str, list[str]]]:
    """(module, arguments) of each command of a text."""
    for package, script, name, rest in COMMAND.findall(text):
        names = programs(package or script)
        module = f"experiments.{name}" if name == "compare" else f"{package or script}.{name}"
        if name in names:
            module = names[name][0]
        given = rest.split("#")[0].replace("\\\n", " ").rstrip(".,;:) ")
        for quote in "'\"":  # where a script within quotes ends
            given = given if given.count(quote) % 2 == 0 else given[: given.rindex(quote)]
        words = shlex.split(given)
        folder = Path(*module.split("."))
        if words and (folder / f"{words[0]}.py").exists():  # in a folder
            module = f"{module}.{words.pop(0)}"
        elif words and module in SHARED and words[0] in SHARED[module]:
            module = SHARED[module][words.pop(0)]
        yield module, words


def docstrings() -> dict[str, str]:
    """By file; a backtick ends a command in prose."""
    paths = [p for top in ("performer", "vit", "experiments") for p in Path(top).rglob("*.py")]
    return {str(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}


def check(module: str, given: list[str]) -> None:
    """Raises where the program would: for an unknown flag, or a value of another kind."""
    own = [x for x in given if not re.match(r"--config\b", x)]
    for argument in given:
        if argument.startswith("--config="):
            assert configs.bundled_path(argument.split("=")[1].split(":")[0])
        elif argument.startswith("--config.") or argument.startswith("config."):
            name, _, value = argument.removeprefix("--").removeprefix("config.").partition("=")
            for text in value.split(",") if argument.startswith("config.") else [value]:
                Parser(type(FIELDS[name])).parse(text)
    if not own or "--help" in own or module.startswith("tests."):  # without flags: a name in prose
        return
    values = defined(module)
    values(["program", *own])


def source(module: str) -> str:
    """Of a program."""
    path = Path(*module.split("."))
    return (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def defined(module: str) -> flags.FlagValues:
    """The flags of a program, as it defines them when it is started."""
    values = flags.FlagValues()
    if "launch.run(main" in source(module) and "DEFINE_" not in source(module):
        main = importlib.import_module(module).main
        launch.define(main, {} if "launch.run(main, quick=" in source(module) else None, values)
    else:
        for function in re.findall(r"    define\((\w+)\)", source(module)):
            launch.define(getattr(importlib.import_module(module), function), None, values)
        for text in (source(module), Path("vit/run/devices.py").read_text()):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    _define(node.func.attr, node.args, values)
    values.set_gnu_getopt(True)
    return values


def _define(kind: str, arguments: list[ast.expr], values: flags.FlagValues) -> None:
    """A flag of this kind, if it is one."""
    if kind == "add_argument":
        name = ast.literal_eval(arguments[0])
        flags.DEFINE_string(name.lstrip("-"), None, "", flag_values=values)
    if not kind.startswith("DEFINE_"):
        return
    name = ast.literal_eval(arguments[0])
    if kind == "DEFINE_enum":
        flags.DEFINE_enum(name, None, ast.literal_eval(arguments[2]), "", flag_values=values)
    elif kind in ("DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_list"):
        getattr(flags, kind)(name, None, "", flag_values=values)
    elif name != "config":
        flags.DEFINE_multi_string(name, None, "", flag_values=values)


# A process that imports once, then starts every command line in a copy of itself.
START_ALL = """
import importlib, json, os, runpy, sys, tempfile, traceback, warnings
imported, lines = json.loads(sys.argv[1])
for module in imported:
    importlib.import_module(module)
warnings.simplefilter("ignore")  # runpy's, that a module is imported already
outcomes = []
for program, *given in lines:
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    if not os.fork():
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        sys.argv, code = [program, *given], 0
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    out.seek(0), err.seek(0)
    outcomes.append((code, out.read(), err.read()))
print(json.dumps(outcomes))
"""


def start_all(
    lines: list[list[str]], imported: tuple[str, ...] = (), folder: Path = Path()
) -> list[tuple[int, str, str]]:
    """Return exit status, output and errors of each command line, as `python -m` starts it.

    Args:
        lines: module or file of each program, and its arguments.
        imported: modules that they need, to be imported once.
        folder: where they are started, the last place in which modules are looked for.
    """
    path = os.pathsep.join([str(Path.cwd()), str(folder.resolve())])
    done = subprocess.run(
        [sys.executable, "-c", START_ALL, json.dumps([imported, lines])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]
