"""Tables as csv and markdown, figures as png, and the record of the command that made them."""

import csv
import datetime
import io
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from PIL import Image

from vit.config import cli
from vit.storage import files, machine

PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "scipy")

INK = "#767676"
"""Text, axes and baselines: contrast 4.5 on white and 4.1 on the dark pages of the site."""
STYLE: Any = {
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{"axes.labelcolor": INK, "axes.edgecolor": INK, "axes.grid": True, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3},
    **{"grid.color": INK, "grid.linewidth": 0.5, "lines.linewidth": 1.3, "lines.markersize": 3.5},
    **{"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 9},
    **{"figure.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.frameon": False},
    **{"savefig.dpi": 160, "savefig.transparent": True, "text.parse_math": False},
}
"""The style of all figures. The background is transparent: pages are light or dark."""
PALETTE = (
    *("#3d85c6", "#e07b12", "#2f9e5b", "#9a6fd0", "#d95fa8", "#dc4a3d", "#a0673a", "#98971a"),
    "#18a0a8",
)


def table(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    text: str = "",
    shown: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Write `path`.csv and `path`.md, numbers to four digits, and return the markdown.

    Args:
        rows: lines of the csv, with the same names.
        path: path without a suffix.
        text: conclusion below the table of the markdown.
        shown: lines of the table of the markdown; by default the lines of the csv.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    write_csv(path.with_suffix(".csv"), [names, *([row[name] for name in names] for row in rows)])
    lines = markdown(rows if shown is None else shown)
    if text:
        lines += f"\n{text}\n"
    files.write(path.with_suffix(".md"), lines)
    return lines


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows with the same names."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_text(row[name]) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(map(plain, line))} |\n" for line in lines)


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write the lines, numbers to seven digits: as many as float32 has."""
    content = io.StringIO(newline="")
    shown = ([f"{x:.7g}" if isinstance(x, float) else x for x in line] for line in lines)
    csv.writer(content).writerows(shown)
    files.write(path, content.getvalue())


def plain(text: str) -> str:
    """Return markdown that shows the text, on one line of a table: no HTML, links or emphasis.

    Underscores and single brackets have no meaning in markdown, and stay readable.
    """
    text = re.sub(r"[\\|*`]", r"\\\g<0>", " ".join(text.splitlines()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("](", r"]\(")


def style() -> Any:
    """Return a context in which figures are drawn in `STYLE`."""
    import matplotlib  # 0.7 s, which commands without a figure save

    colors = ", ".join(map(repr, PALETTE))
    return matplotlib.rc_context(STYLE | {"axes.prop_cycle": f"cycler('color', [{colors}])"})


def figure(path: Path, columns: int = 1) -> tuple[Any, Any]:
    """Return figure and axes, as pyplot without its global state; `save` writes it."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = Figure(figsize=(5.5 if columns == 1 else 7.4, 3.2), layout="constrained")
    return drawn, drawn.subplots(1, columns)


def save(drawn: Any, path: Path) -> None:
    """Write `path`.png with 256 colours, a third of the bytes."""
    content, small = io.BytesIO(), io.BytesIO()
    drawn.savefig(content, format="png")
    image = Image.open(content).quantize(256, method=Image.Quantize.FASTOCTREE)
    image.save(small, format="png", optimize=True)
    files.write(path.with_suffix(".png"), small.getvalue())


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def versions() -> dict[str, str]:
    """Return versions, devices and host of this process."""
    return {package: metadata.version(package) for package in PACKAGES} | {
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "host": f"{platform.machine()}, {machine.cores()} cores",
    }


def record(out: Path, seconds: float) -> None:
    """Add the command to out/run.json; other commands that wrote to `out` stay.

    A folder without tables gets none. Of several processes the first one writes.
    """
    if jax.process_index() or not any(out.glob("*.csv")):
        return
    made = {
        "command": cli.typed(),
        "date": datetime.date.today().isoformat(),
        "minutes": str(round(seconds / 60, 1)),
    }
    path = out / "run.json"
    before = files.parse_json(path.read_bytes()) if path.exists() else []
    others = [each for each in before if each["command"] != made["command"]]
    files.write(path, json.dumps([*others, made | versions()], indent=2) + "\n")
