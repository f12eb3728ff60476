"""Pages of the reference that are made of the code: modules, commands, fields of a config."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import performer
from vit import config as configs
from vit.config import arguments, cli

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
    pages, rows, names = {}, "", (*performer.MODULES, *DROP_INS)
    for name in names:
        home = performer.MODULES.get(name, f"performer.{name}")
        parts = [path.stem for path in sorted((ROOT / home.replace(".", "/")).glob("[!_]*.py"))]
        public = [home, *(f"{home}.{part}" for part in parts if part not in performer.MODULES)]
        shown = "\n".join(f"```{{eval-rst}}\n.. automodule:: {part}\n```\n" for part in public)
        pages[f"api/{name}"] = f"# performer.{name}\n\n{shown}"
        docstring = importlib.import_module(home).__doc__ or ""
        rows += f"- [`performer.{name}`]({name}.md): {docstring.splitlines()[0]}\n"
    hidden = "\n".join(names)
    toctree = f"```{{toctree}}\n:hidden:\n\n{hidden}\n```"
    return pages | {"api/index": f"# Modules\n\n{rows}\n{toctree}\n"}


def config() -> str:
    """Every field of a config: its flag, default, meaning and range."""
    text = "# Fields of a config\n\n"
    text += "A flag sets one field, as `--config.attention.coupling=pm`; a file sets them all.\n"
    whole = configs.Config()
    parts = {f"{name}.": x for name, x in vars(whole).items() if dataclasses.is_dataclass(x)}
    for prefix, section in ({"": whole} | parts).items():
        text += f"\n## {type(section).__name__}\n\n{(section.__doc__ or '').strip()}\n\n"
        text += "| field | default | meaning |\n|---|---|---|\n"
        for name, default in vars(section).items():
            if field := configs.FIELDS.get(path := prefix + name):
                shown = f"{field.metadata['help']} It {field.metadata['allowed']}."
                shown = shown.replace("|", "&#124;")
                text += f"| `config.{path}` | `{default!r}` | {shown} |\n"
    return text


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
        shown = done.stdout.split(arguments.HEADING)[0].strip()
        text += f"\n## vit.{name}\n\n```text\n{shown}\n```\n"
    return text
