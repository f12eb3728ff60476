"""Pages of the reference that are made of the code: modules, commands, fields of a config."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import performer
from vit import arguments, cli
from vit import config as configs

ROOT = Path(__file__).parent.parent
DROP_INS = ("nnx", "linen", "sklearn")


def write(folder: Path) -> None:
    """Writes the pages; Sphinx reads again only those that changed."""
    pages = {"config": config(), "commands": commands(), **modules()}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def modules() -> dict[str, str]:
    """One page for each public module, and a list of them."""
    names = (*performer.MODULES, *DROP_INS)
    pages, rows = {}, []
    for name in names:
        parts = [path.stem for path in sorted((ROOT / "performer" / name).glob("*.py"))]
        public = [name, *(f"{name}.{part}" for part in parts if not part.startswith("_"))]
        shown = "\n".join(automodule(f"performer.{part}") for part in public)
        pages[f"api/{name}"] = f"# performer.{name}\n\n{shown}"
        rows.append(f"- [`performer.{name}`]({name}.md): {first_line(f'performer.{name}')}")
    listed, hidden = "\n".join(rows), "\n".join(names)
    toctree = f"```{{toctree}}\n:hidden:\n\n{hidden}\n```"
    return pages | {"api/index": f"# Modules\n\n{listed}\n\n{toctree}\n"}


def automodule(name: str) -> str:
    """The directive that shows a module."""
    return f"```{{eval-rst}}\n.. automodule:: {name}\n```\n"


def first_line(module: str) -> str:
    """Of its docstring."""
    analyzer = ModuleAnalyzer.for_module(module)
    return analyzer.code.strip().strip('"').split("\n")[0].strip('"')


def config() -> str:
    """Every field of a config: its flag, default, meaning and range."""
    lines = ["# Fields of a config", ""]
    lines += ["A flag sets one field, as `--config.attention.coupling=pm`; a file sets them all."]

    def table(kind: type, prefix: str) -> None:
        nested = []
        lines.extend(["", f"## {kind.__name__}", "", (kind.__doc__ or "").strip(), ""])
        lines.extend(["| field | default | meaning |", "|---|---|---|"])
        for field in dataclasses.fields(kind):
            name = f"{prefix}.{field.name}"
            if dataclasses.is_dataclass(field.type):
                nested.append((field.type, name))
                continue
            path = name.removeprefix("config.")
            shown = f"{configs.MEANINGS[path]} It {configs.allowed(path)}.".replace("|", "&#124;")
            lines.append(f"| `{name}` | `{field.default!r}` | {shown} |")
        for part, name in nested:
            table(part, name)

    table(configs.Config, "config")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What the commands of `vit` print for --help; the fields of a config have a page."""
    text = "# Commands\n\n`performer-vit train` is `python -m vit.train`, and so on.\n"
    for name, (module, _) in cli.programs("vit").items():
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "100"},
            capture_output=True,
            text=True,
        )
        shown = done.stdout.split(arguments.FIELDS)[0].strip()
        text += f"\n## vit.{name}\n\n```text\n{shown}\n```\n"
    return text
