"""Attention errors of a linearized model, by layer and head."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Report:
    """Result of `linearize`; its `str` is a table of layers, the worst heads and exact layers.

    Attributes:
        rows: a record for each layer and head that was measured: "path", "layer" (its number, in
            the order of calls), "head", "attention" ("linear", or "exact" if kept), the sizes "m"
            and "exact keys", and the numbers of `layers.head_errors`.
        left: path -> why its attention stayed as it was.
    """

    rows: list[dict[str, Any]]
    left: Mapping[str, str] = field(default_factory=dict)

    def worst(self, number: int = 5) -> list[dict[str, Any]]:
        """The rows with the largest attention errors."""
        return sorted(self.rows, key=lambda row: -row["attention error"])[:number]

    def layer_errors(self) -> dict[str, float]:
        """Path -> the mean attention error of its heads."""
        errors: dict[str, list[float]] = {}
        for row in self.rows:
            errors.setdefault(row["path"], []).append(row["attention error"])
        return {path: float(np.mean(x)) for path, x in errors.items()}

    def to_csv(self, path: Path | str) -> None:
        """Writes the rows, and below them what was left, with the reason as `attention`."""
        left = [{"path": name, "attention": reason} for name, reason in self.left.items()]
        names = list(self.rows[0] if self.rows else ("path", "attention"))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows([*self.rows, *left])

    def draw(self, axes: Any) -> Any:
        """A heat map of the attention errors, layers by heads, on axes of matplotlib.

        Returns:
            What `figure.colorbar` takes.
        """
        layers, heads = (1 + max(row[x] for row in self.rows) for x in ("layer", "head"))
        errors = np.full((layers, heads), np.nan)
        for row in self.rows:
            errors[row["layer"], row["head"]] = row["attention error"]
        image = axes.imshow(errors, vmin=0)
        axes.set(xlabel="head", ylabel="layer", title="relative attention error")
        axes.set_xticks(range(heads))
        axes.set_yticks(range(layers))
        return image

    def __str__(self) -> str:
        """The table."""
        lines = [f"{'layer':32} {'attention':9} {' '.join(COLUMNS.values())}"] if self.rows else []
        for path in self.layer_errors():
            rows = [row for row in self.rows if row["path"] == path]
            means = (f"{np.mean([r[x] for r in rows]):{len(y)}.3g}" for x, y in COLUMNS.items())
            lines.append(f"{path:32} {rows[0]['attention']:9} {' '.join(means)}")
        if self.rows:
            worst = (
                f"{r['path']} head {r['head']}: {r['attention error']:.3g}" for r in self.worst()
            )
            above = [row["attention error"] > row["uniform attention"] for row in self.rows]
            lines += ["worst heads: " + ", ".join(worst)]
            lines += [f"worse than uniform attention: {sum(above)} of {len(above)} heads"]
            if any(above):
                lines += [
                    "  raise num_features or refine_steps, or keep their layers exact (keep, where)"
                ]
                lines += ["  (an untrained model attends almost uniformly)"]
        lines += [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        return "\n".join(lines)


COLUMNS = {
    "m": "   m",
    "exact keys": "exact keys",
    "attention error": "    error",
    "uniform attention": "  uniform",
    "|q|^2": "   |q|^2",
    "|k|^2": "   |k|^2",
    "keys attended to": "keys attended to",
}
"""Numbers of the table, and the heads of their columns."""
