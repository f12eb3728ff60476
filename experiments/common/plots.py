"""How the figures of experiments are drawn: a grid of panels, a line with its band."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit import report


def panels(out: Path, count: int, columns: int = 4) -> tuple[Any, Any]:
    """A figure with so many axes, by rows, and these axes; `report.save` writes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = min(count, columns)
    rows = -(-count // columns)
    drawn, axes = report.subplots(
        rows, columns, figsize=(4 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return drawn, axes.flat[:count]


def band(axis: Any, x: Sequence[float], estimates: Any, label: str, **style: Any) -> None:
    """A line of means with a band of their errors, as (mean, error) for each x."""
    means, errors = np.asarray(estimates, float).T
    style = dict(marker="o", markersize=3) | style
    (line,) = axis.plot(x, means, label=label, **style)
    axis.fill_between(
        x, means - errors, means + errors, color=line.get_color(), alpha=0.2, linewidth=0
    )
