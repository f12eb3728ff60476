"""Tables as csv and markdown, figures as png."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.run import files


def table(rows: Sequence[Mapping[str, Any]], path: Path, text: str = "") -> str:
    """Write `path`.csv and `path`.md, numbers to four digits, and return the markdown.

    The markdown has the text, as a conclusion, below the table.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    write_csv(path.with_suffix(".csv"), [names, *([row[name] for name in names] for row in rows)])
    lines = [names, ["---"] * len(names), *([_text(row[name]) for name in names] for row in rows)]
    markdown = "".join(f"| {' | '.join(map(plain, line))} |\n" for line in lines)
    if text:
        markdown += f"\n{text}\n"
    files.write(path.with_suffix(".md"), markdown)
    return markdown


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write the lines."""
    content = io.StringIO(newline="")
    csv.writer(content).writerows(lines)
    files.write(path, content.getvalue())


def plain(text: str) -> str:
    """Return markdown that shows the text, on one line of a table: no HTML, links or emphasis.

    Underscores and single brackets have no meaning in markdown, and stay readable.
    """
    text = re.sub(r"[\\|*`]", r"\\\g<0>", " ".join(text.splitlines()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("](", r"]\(")


def literal(text: str) -> str:
    """Escape dollars, which begin formulas in a figure."""
    return text.replace("$", r"\$")


def figure(
    path: Path, columns: int = 1, rows: int = 1, *, size: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Return figure and axes, as pyplot without its global state; `save` writes it."""
    from matplotlib.figure import Figure  # 0.7 s, which commands without a figure save

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = Figure(figsize=size or (1 + 4.5 * columns, 4), layout="constrained")
    return drawn, drawn.subplots(rows, columns, **options)


def log_sizes(axis: Any, sizes: Sequence[float]) -> None:
    """Make the axis of m logarithmic, with a tick at each size."""
    axis.set(xscale="log", xlabel="m")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()


def log_log(axis: Any, sizes: Sequence[float]) -> None:
    """Make both axes logarithmic, with a tick at each size and at plain decimals."""
    from matplotlib.ticker import LogLocator

    axis.set(yscale="log")
    log_sizes(axis, sizes)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend()


def save(drawn: Any, path: Path) -> None:
    """Write the figure to `path`.png."""
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=120)
    files.write(path.with_suffix(".png"), content.getvalue())


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
