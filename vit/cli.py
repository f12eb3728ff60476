"""The commands by their names: `performer-vit train ...`, and how one names the next.

`performer-vit` alone lists them; `python -m vit.train ...` does the same as `performer-vit train ...`.
"""

import ast
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

SCRIPT = "performer-vit"
_typed: list[str] = []
"""What the shell was given for the console script; empty where there was none."""


def command(name: str, *words: str, **flags: object) -> str:
    """The text of a command that runs as printed: by the script or interpreter that runs this one.

    Args:
        name: of the command, as "train".
        words: that follow it.
        flags: that follow these, by name; True stands for the flag alone.

    Returns:
        "performer-vit train --workdir=runs/photos", or "python -m vit.train --workdir=runs/photos";
        quoted as a shell needs it.
    """
    program = [*_typed, name] if _typed else [sys.orig_argv[0], "-m", f"vit.{name}"]
    given = [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]
    return shlex.join([*program, *words, *given])


def commands(package: str) -> dict[str, str]:
    """The programs of a package by name, each with the first line of its docstring."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    found = {}
    for path in sorted(Path(folders[0]).glob("*.py")) if folders else ():
        text = path.read_text()
        if '\nif __name__ == "__main__":' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return found


def run(package: str, script: str) -> None:
    """Runs the command of `package` that the first argument names; without one lists them."""
    from performer.choices import unknown

    found = commands(package)
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "help"):
        width = max(map(len, found))
        lines = [f"    {name:{width}}  {line}" for name, line in found.items()]
        print("\n".join([f"{script} COMMAND --flag=value ...", "", *lines]))
        print(f"\nWhat a command takes: {script} COMMAND --help")
        return
    typed, name, *_ = sys.argv
    if name not in found:
        sys.exit(unknown("command", name, found))
    _typed[:] = [script if shutil.which(script) == typed else typed]
    del sys.argv[0]
    runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=True)


def main() -> None:
    """The console script `performer-vit`."""
    run("vit", SCRIPT)
