"""The commands that texts print, the flags of the programs that they name, and starting them."""

import ast
import importlib
import inspect
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

from vit import config as configs
from vit.config import arguments, cli

COMMAND = re.compile(
    r"(?:python -m (vit|experiments|tests)\.|performer-(vit) )(\w[\w-]*(?:\.\w+)*)"
    r"((?: \\\n|[^\n`])*)"
)
SHARED = "experiments.language_model"
"""Package that has the commands of vit also."""
programs = cache(cli.programs)


def printed(text: str) -> Iterator[tuple[str, list[str]]]:
    """(module, arguments) of each command of a text."""
    for package, script, name, rest in COMMAND.findall(text):
        names = programs(package or script)
        name = name.replace("-", "_")
        module = f"{package or script}.{name}"
        if name in names:
            module = names[name][0]
        given = rest.split("#")[0].replace("\\\n", " ").rstrip(".,;:) ")
        for quote in "'\"":  # where a script within quotes ends
            given = given if given.count(quote) % 2 == 0 else given[: given.rindex(quote)]
        words = shlex.split(given)
        folder = Path(*module.split("."))
        if words and (folder / f"{words[0]}.py").exists():  # in a folder
            module = f"{module}.{words.pop(0)}"
        elif words and module == SHARED and words[0] in programs("vit"):
            module = f"vit.{words.pop(0)}"
        yield module, words


def docstrings() -> dict[str, str]:
    """By file; a backtick ends a command in prose."""
    paths = [p for top in ("performer", "vit", "experiments") for p in Path(top).rglob("*.py")]
    return {str(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}


def check(module: str, given: list[str]) -> None:
    """Raises where the program would: for an unknown flag, or a value that no field takes."""
    own = [x for x in given if not re.match(r"--config\b", x)]
    kind: type = configs.Config
    for argument in given:
        if argument == "--config=FILE":  # of the reader's own fields
            return
        if argument.startswith("--config="):
            path = configs.bundled_path(argument.split("=")[1].split(":")[0])
            named = re.search(r"from ([\w.]+) import .*\bConfig\b", path.read_text())
            kind = importlib.import_module(named[1]).Config if named else kind
        elif argument.startswith("--config.") or argument.startswith("config."):
            name, _, value = argument.removeprefix("--").removeprefix("config.").partition("=")
            for text in value.split(",") if argument.startswith("config.") else [value]:
                arguments.Parser(configs.flag_types(kind)[name]).parse(text)
    names = re.findall(r"^--(\w+)", "\n".join(own), flags=re.MULTILINE)
    if names and not module.startswith("tests."):
        known = flags_of(module) | {"help"}
        for name in names:
            assert name in known or name.removeprefix("no") in known, f"--{name} of {module}"


def flags_of(module: str) -> set[str]:
    """The names of the flags that a program defines."""
    program, values = importlib.import_module(module), flags.FlagValues()
    if not hasattr(program, "main"):  # a package
        program = importlib.import_module(f"{module}.__main__")
    quick = {} if ".run(main, quick=" in inspect.getsource(program) else None
    arguments.define(program.main, quick, values)
    return {*values}


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
