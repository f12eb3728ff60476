"""The console script, and the commands that programs print.

`performer-vit` lists its programs; `performer-vit train ...` is `python -m vit.train ...`.
"""

import ast
import os
import runpy
import shlex
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from performer.choices import unknown
from vit import missing

WORK = "prepare", "train", "evaluate", "predict", "export", "convert"
"""Programs in the order in which they are used; the others follow."""
_typed: list[str] = []
"""The console script as typed, then its program; empty without one."""
_programs: dict[str, tuple[str, str]] = {}
"""Programs of the console script."""


def command(name: str, /, *words: str, **flags: object) -> str:
    """Return a command line for the script or interpreter of this process, quoted for a shell.

    Args:
        name: name of the command, as "train".
        words: positional words.
        flags: values of flags by name; True for a flag without a value.

    Returns:
        "performer-vit train --workdir=runs/photos" or "python -m vit.train --workdir=runs/photos".
    """
    module = f"vit.{name}"
    given_name = next((key for key, (other, _) in _programs.items() if other == module), name)
    program = [*_typed[:-1], given_name] if _typed else [sys.orig_argv[0], "-m", module]
    given = [f"--{key}" if value is True else f"--{key}={value}" for key, value in flags.items()]
    return shlex.join([*program, *words, *given])


def typed() -> str:
    """Return the command line of this process, as it can be typed again."""
    spec = sys.modules["__main__"].__spec__
    module = ["-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    program = _typed or ["python", *module]
    return shlex.join([*program, *sys.argv[1:]])


def programs(package: str) -> dict[str, tuple[str, str]]:
    """Return the programs of a package: name -> module and first line of its docstring.

    A program in a folder is named "folder.program"; `__main__` has the name of its folder.
    """
    listed, spec = {}, find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text()
            if "\nif __name__ ==" in text:  # a program
                line = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__main__")
                listed[name] = f"{package}.{name}", line
    return listed


def run(script: str, listed: dict[str, tuple[str, str]]) -> None:
    """Run the program named by the first argument, as `python -m` would; without one list them.

    --version prints the versions of this library and of JAX.

    Args:
        script: name of the console script.
        listed: its programs, as returned by `programs`.
    """
    first, *words = sys.argv
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, listed))
        print("\n".join(f"{script} {name:{width}}  {line}" for name, (_, line) in listed.items()))
        print(f"\n{script} NAME --help lists the flags of a program.")
        return
    if words == ["--version"]:
        print(f"performer-jax {version('performer-jax')}, jax {version('jax')}")
        return
    name = words.pop(0)
    if name not in listed:
        sys.exit(unknown(f"command of {script}:", name, listed))
    is_given = shutil.which(script) == first or first.endswith(".py")  # a file by "python -m"
    _programs.update(listed)
    _typed[:] = [*(script.split() if is_given else [first]), name]
    sys.argv = [first, *words]
    try:
        runpy.run_module(listed[name][0], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        sys.exit(f"{script} {name}: {missing(error)}")


def vit_programs() -> dict[str, tuple[str, str]]:
    """Return the programs of `performer-vit` by name, in the order in which they are used."""
    listed = {name.replace("_", "-"): program for name, program in programs("vit").items()}
    others = sorted(listed.keys() - set(WORK))
    return {name: listed[name] for name in (*WORK, *others)}


def vit() -> None:
    """Run the console script `performer-vit`, with modules of the current folder, as `python -m`.

    The folder is last on the path, so that no file in it takes the place of a package.
    """
    sys.path.append(os.getcwd())
    run("performer-vit", vit_programs())
