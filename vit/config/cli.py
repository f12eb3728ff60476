"""Console scripts, which run the programs by their names; and how one program names the next.

`performer-vit` alone lists them; `performer-vit train ...` is `python -m vit.train ...`.
"""

import ast
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from performer.choices import unknown

_typed: list[str] = []
"""Name of the console script as it was typed; empty where there was none."""


def command(name: str, *words: str, **flags: object) -> str:
    """Return a command that runs as printed: by the script or interpreter that runs this one.

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


def programs(*packages: str) -> dict[str, tuple[str, str]]:
    """Return the programs of packages: name -> module and first line of its docstring.

    One in a folder has the name "folder.program"; that of a folder itself is its `__main__`.
    """
    found = {}
    for package in packages:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                text = path.read_text()
                if "\nif __name__ ==" in text:  # it can be run
                    line = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
                    parts = path.relative_to(folder).with_suffix("").parts
                    name = ".".join(parts).removesuffix(".__main__")
                    found.setdefault(name, (f"{package}.{name}", line))
    return found


def run(script: str, found: dict[str, tuple[str, str]]) -> None:
    """Run the program that the first argument names, as `python -m` would; else list them.

    Args:
        script: the name of the console script.
        found: what there is.
    """
    typed, *words = sys.argv
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, found))
        print("\n".join(f"{script} {name:{width}}  {line}" for name, (_, line) in found.items()))
        print(f"\n{script} NAME --help lists its flags.")
        return
    name = words.pop(0)
    if name not in found:
        sys.exit(unknown(f"command of {script}:", name, found))
    _typed[:] = [script if shutil.which(script) == typed else typed]
    sys.argv = [typed, *words]
    runpy.run_module(found[name][0], run_name="__main__", alter_sys=True)


def vit() -> None:
    """Run the console script `performer-vit`."""
    run("performer-vit", programs("vit") | {"compare": programs("experiments")["compare"]})


def experiments() -> None:
    """Run the console script `performer-experiments`."""
    run("performer-experiments", programs("experiments"))
