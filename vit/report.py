"""Tables as csv and markdown, figures as png: what every experiment writes."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator


def table(rows: Sequence[Mapping[str, Any]], path: Path, text: str = "") -> str:
    """Writes `path`.csv and `path`.md, and returns the markdown; numbers to four digits.

    The text, what the table says, stands below it in the markdown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    lines = [names, ["---"] * len(names), *([_text(row[name]) for name in names] for row in rows)]
    markdown = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    if text:
        markdown += f"\n{text}\n"
    path.with_suffix(".md").write_text(markdown)
    return markdown


def figure(path: Path, columns: int = 1) -> tuple[Any, Any]:
    """A figure with `columns` axes side by side; `save` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return plt.subplots(1, columns, figsize=(1 + 4.5 * columns, 4), layout="constrained")


def log_log(axis: Any, sizes: Sequence[float]) -> None:
    """Logarithmic axes with a tick at each size and at plain decimals."""
    axis.set(xscale="log", yscale="log", xlabel="m")
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend()


def save(drawn: Any, path: Path) -> None:
    """Writes the figure to `path`.png."""
    drawn.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(drawn)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
