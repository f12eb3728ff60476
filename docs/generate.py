"""Pages made of the code: modules, commands, fields of a config, figures; pages as notebooks."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook

import performer
from vit import config as configs
from vit.config import arguments, cli

ROOT = Path(__file__).parent.parent
NOTEBOOKS = "_build/notebooks"


def write(folder: Path) -> None:
    """Write the pages; Sphinx reads again only those that changed."""
    pages = {"config": config(), "commands": commands(), "gallery": gallery(), **modules()}
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        put(folder / f"{name}.md", text)


def put(path: Path, text: str) -> None:
    """Write a file whose text has changed."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def modules() -> dict[str, str]:
    """One page for each public module, by the name that users import, and a list of them."""
    top = "".join(f".. autofunction:: performer.{name}\n\n" for name in performer.__all__)
    pages = {"api/performer": f"# performer\n\n{evaluated(top)}"}
    rows = {}
    names = (*performer.MODULES, *performer.EXTRAS, "vit")
    for name in names:
        path = name if name == "vit" else f"performer.{name}"
        home = importlib.import_module(path)
        shown = "".join(automodule(part) for part in (path, *PARTS.get(path, ())))
        pages[f"api/{name}"] = f"# {path}\n\n{evaluated(shown)}"
        rows[name] = f"- [`{path}`]({name}.md): {(home.__doc__ or '').splitlines()[0]}\n"
    first = "- [`performer`](performer.md): attention, and conversion of a trained function.\n\n"
    hidden = "\n".join(("performer", *names))
    toctree = f"```{{toctree}}\n:hidden:\n\n{hidden}\n```"
    return pages | {"api/index": f"# Modules\n\n{first}{grouped(rows)}{toctree}\n"}


def grouped(rows: dict[str, str]) -> str:
    """Return rows of modules under the headings of the docstring of `performer`."""
    text, left = "", dict(rows)
    for title, lines in re.findall(r"^(\w[\w ]+)\n\n((?:.+\n)+)", performer.__doc__, re.MULTILINE):
        words = [x for line in lines.splitlines() for x in re.split(r",? +", line)[:3]]
        own = "".join(left.pop(name) for name in words if name in left)
        text += f"## {title}\n\n{own}\n"
    return text + "".join(left.values()) + "\n"


GRAPHS = sorted(path.stem for path in (ROOT / "performer" / "graphs").glob("[!_]*.py"))
PARTS = {
    "performer.couplings": ["performer.structured"],
    "performer.graphs": [f"performer.graphs.{name}" for name in GRAPHS if name != "graph"],
    "vit": ["vit.use", "vit.task"],
}
"""Public modules of a folder, which share its page."""
SHOWN = {"vit.use": ("Trained", "Prediction"), "vit.task": ("Task",)}
"""Names for users of a module that has others, too."""
ELSEWHERE = {("performer.attention", "performer_attention")}
"""Names that another page has."""


def automodule(path: str) -> str:
    """The directive for a module: its docstring and its public names."""
    names = [name for name in public(path) if (path, name) not in ELSEWHERE]
    return f".. automodule:: {path}\n   :members: {', '.join(names)}\n\n"


def evaluated(text: str) -> str:
    """A block of reStructuredText on a page of Markdown."""
    return f"```{{eval-rst}}\n{text}```\n"


def public(path: str) -> list[str]:
    """Names of `__all__` that are no modules; without it, what the module or its folder defines."""
    module = importlib.import_module(path)
    home = f"{module.__name__}."
    if names := SHOWN.get(path, getattr(module, "__all__", None)):
        return [name for name in names if not inspect.ismodule(getattr(module, name))]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value)
        if f"{getattr(inspect.getmodule(value), '__name__', '')}.".startswith(home)
    ]


def gallery() -> str:
    """The figures of the results, each with a link to the section that explains it."""
    text = "# Gallery\n\nThe figures of the [results](../results/index.md), by page and section.\n"
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        section, anchor, shown = "", "", ""
        for line in page.read_text().splitlines():
            if heading := re.match(r"(#+) (.*)", line):
                section = heading[2]
                anchor = f"#{slug(section)}" if len(heading[1]) in (2, 3) else ""
            if image := re.match(r"!\[(.*?)\]\((.*?)\)", line):
                link = f"[{section}](../results/{page.name}{anchor})"
                shown += f"\n**{link}**\n\n![{image[1]}]({image[2]})\n"
        if shown:
            title = page.read_text().split("\n", 1)[0].removeprefix("# ")
            text += f"\n## {title}\n{shown}"
    return text


def slug(heading: str) -> str:
    """Return the anchor of a heading, as MyST makes it: without formulas."""
    heading = re.sub(r"\$.*?\$", "", heading)
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def notebooks(docs: Path) -> None:
    """Write each page that has code as a notebook, for download."""
    for page in [*docs.glob("*.md"), *docs.glob("[!_]*/*.md")]:
        text = page.read_text()
        if "```{code-cell}" in text and page.stem != "index":
            notebook = read_myst_markdown_notebook(text)
            for cell in notebook.cells:
                if cell.cell_type == "markdown":  # pages of the site are not beside a notebook
                    cell.source = re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", cell.source)
            notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
            for number, cell in enumerate(notebook.cells):
                cell.id = f"cell-{number}"
            path = docs / NOTEBOOKS / page.relative_to(docs).with_suffix(".ipynb")
            put(path, nbformat.writes(notebook))


def extend(app, docname: str, content: list[str]) -> None:
    """Handle `source-read`: below the title, a link to the notebook of the page."""
    added = ""
    if (Path(app.srcdir) / NOTEBOOKS / f"{docname}.ipynb").exists():
        path = f"{'../' * docname.count('/')}{NOTEBOOKS}/{docname}.ipynb"
        added += f"\n{{download}}`Download as a notebook <{path}>`\n"
    content[0] = re.sub(r"(?m)^# .*\n", lambda title: title[0] + added, content[0], count=1)
    # A number in a table stays in one line with its error.
    content[0] = re.sub(
        r"(?m)^\|.*", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), content[0]
    )


def config() -> str:
    """Every field of a config: its flag, default, meaning and range."""
    text = "# Fields of a config\n\n"
    text += "A flag sets one field, as `--config.attention.coupling=pm`; a file sets them all.\n"
    text += (
        "These are the fields of image classification; the sections of another task are listed by\n"
    )
    text += "`performer-vit train --config=FILE --help`.\n"
    defaults, kind = configs.flatten(configs.Config()), configs.Config
    for name, section in {"": configs.TrainConfig, **configs.sections(kind)}.items():
        text += f"\n## {section.__name__}\n\n{(section.__doc__ or '').strip()}\n\n"
        text += "| field | default | meaning |\n|---|---|---|\n"
        for path, field in configs.fields(kind).items():
            if path.rpartition(".")[0] == name:
                shown = f"{field.metadata['help']} It {field.metadata['allowed']}."
                shown = shown.replace("|", "&#124;")
                text += f"| `config.{path}` | `{defaults[path]!r}` | {shown} |\n"
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
