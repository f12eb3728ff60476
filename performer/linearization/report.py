"""Attention errors of a linearized model, by layer and head."""

import csv
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from performer.attention.values import NOT_EXACT, Exact
from performer.linearization.outputs import Change, Whole
from performer.linearization.timing import MARGIN

LOSSES = (
    (0.1, "up to 0.1 lost little: up to 2% of accuracy, 0.1 nats of a language model"),
    (0.3, "0.1 to 0.3 lost 2 to 6% of accuracy, 0.1 to 0.3 nats of a language model"),
    (math.inf, "0.5 lost much: 18% of accuracy, 0.7 nats of a language model"),
)
"""Losses of ten models by the mean attention error (docs, "Linearised models of others")."""
SAME = 0.85
"""Share of rows with the same largest entry below which linearize warns (docs, "Results")."""
SENSITIVE = (
    "If these are logits, the model is sensitive to its attention and loses more: lower the"
    " tolerance, or refine (refine_steps=300)"
)


class Recipe(NamedTuple):
    """Sizes of the attention that replaces a layer."""

    num_features: int
    """0 for the exact pairs alone."""
    exact: Exact = NOT_EXACT

    def cost(self, is_causal: bool) -> int:
        """Return the operations of a query in exact keys; a feature costs as much as two.

        The same on all devices, and no time: `costs` has coefficients for each platform.
        """
        window, first, keys, rows = self.exact
        chunks = 2 if is_causal else 3
        return 2 * self.num_features + chunks * window + first + keys + rows

    def contains(self, other: "Recipe") -> bool:
        """True if no size is smaller than the other's."""
        mine, others = ((x.num_features, *x.exact) for x in (self, other))
        return all(x >= y for x, y in zip(mine, others, strict=True))

    def __str__(self) -> str:
        """The sizes that are not 0, for example m = 32, Exact(keys=16)."""
        return f"m = {self.num_features}" + f", {self.exact}" * any(self.exact)


@dataclass(frozen=True)
class Report:
    """Result of `linearize`; its `str` is a table of layers, a verdict and what stays exact.

    Attributes:
        rows: a record for each layer and head that was measured: "path", "layer" (its number, in
            the order of calls), "head", "attention" ("linear", or "exact" if kept), the sizes "m",
            "window", "first", "exact keys" and "exact rows", their "cost" by operations, in exact
            keys for each query (of exact attention: the number of keys), the number of "keys", the
            numbers of `layers.head_errors`, and where time was measured "exact, ms",
            "replacement, ms" and "speed-up" of the layer's attention. A layer that stays exact has
            the sizes, errors and times of the best recipe that was tried.
        left: path -> why its attention stayed as it was.
        remarks: what the user should know about layers, one sentence each.
        tolerance: largest attention error of a layer that is replaced.
        change: how far the outputs of the last batch are from those before; None if no layer was
            replaced.
        whole: times and memory of the whole function for the last batch, before and after; None if
            they were not measured.
    """

    rows: list[dict[str, Any]]
    left: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    tolerance: float = math.inf
    change: Change | None = None
    whole: Whole | None = None

    def worst(self, number: int = 5) -> list[dict[str, Any]]:
        """The replaced heads with the largest attention errors."""
        return sorted(self.linear, key=lambda row: -row["attention error"])[:number]

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Sizes of the layers that were replaced, by path: `recipes` of another `linearize`."""
        names = "window", "first", "exact keys", "exact rows"
        return {
            row["path"]: Recipe(row["m"], Exact(*(row[name] for name in names)))
            for row in self.linear
        }

    @property
    def linear(self) -> list[dict[str, Any]]:
        """The rows of layers that were replaced."""
        return [row for row in self.rows if row["attention"] == "linear"]

    def verdict(self) -> str:
        """Lines to decide by: equal answers, what to expect and to do, speed and memory."""
        if not self.linear:
            text = "no layer was replaced: the function is the one that was given"
            return "\n".join([text, *self._slower()])
        error, lines = self.mean_error, []
        if self.change is not None:
            lines.append(str(self.change) + f". {SENSITIVE}" * self.is_sensitive)
        losses = next((text for limit, text in LOSSES if error <= limit), LOSSES[-1][1])
        text = f"mean error {error:.2g}: of ten models those with {losses}"
        if not error <= LOSSES[0][0]:
            text += "; refine (refine_steps=300), add exact keys, or leave out the sizes"
        return "\n".join([*lines, text, *self._speed(), *self._slower()])

    def _speed(self) -> list[str]:
        """Speed-up of the whole function; without times the layers that cost more."""
        keys = sorted({row["keys"] for row in self.linear})
        lengths = f"{' and '.join(map(str, keys))} tokens"
        if self.whole is not None:
            text = f"{self.whole.speed_up:.2g} times as fast at {lengths} {self.whole}"
            return [text + ": keep softmax attention there" * (self.whole.speed_up < 1)]
        costs = {row["path"]: (row["cost"], row["keys"]) for row in self.linear}
        slow = [path for path, (cost, keys) in costs.items() if cost >= keys]
        if not slow:
            return []
        return [
            f"at {lengths} {len(slow)} of {len(costs)} replaced layers cost more operations than"
            " exact attention"
        ]

    def _slower(self) -> list[str]:
        """Lengths at which exact attention is faster, and layers stay exact for it."""
        exact = [row for row in self.rows if row["attention"] == "exact"]
        slow = [row for row in exact if row.get("speed-up", math.inf) < MARGIN]
        best: dict[int, float] = {}
        for row in slow:
            best[row["keys"]] = max(row["speed-up"], best.get(row["keys"], 0.0))
        return [
            f"at {keys} tokens the fastest replacement of a layer's attention would be {x:.2g}"
            " times as fast as softmax attention: keep softmax there"
            for keys, x in best.items()
        ]

    @property
    def is_sensitive(self) -> bool:
        """True if many outputs changed, although the attention error is small."""
        small = self.linear and self.mean_error <= LOSSES[0][0]
        return bool(small and self.change is not None and self.change.same < SAME)

    @property
    def mean_error(self) -> float:
        """Mean attention error of the replaced layers."""
        return float(np.mean([row["attention error"] for row in self.linear]))

    def warn(self) -> None:
        """Warn of the remarks, and of other answers though the attention is near enough."""
        remarks = list(self.remarks)
        if self.is_sensitive and self.tolerance < math.inf:
            remarks.append(f"{self.change}. {SENSITIVE}")
        if remarks:
            warnings.warn("\n".join(["linearize:", *remarks]), stacklevel=3)

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
        shown = {x: y for x, y in COLUMNS.items() if all(x in row for row in self.rows)}
        shown = {x: y for x, y in shown.items() if x not in ANY or any(r[x] for r in self.rows)}
        for name in COUNTS if "speed-up" in shown else ():
            shown.pop(name)
        if not any(row["window"] for row in self.rows):
            shown.pop("exact pairs alone", None)
        width = max([5, *(len(row["path"]) for row in self.rows)])
        kinds = {row["path"]: _kind(row) for row in self.rows}
        kind_width = max([9, *map(len, kinds.values())])
        lines = [f"{'layer':{width}} {'attention':{kind_width}} {' '.join(shown.values())}"]
        for path in self.layer_errors():
            rows = [row for row in self.rows if row["path"] == path]
            numbers = {x: float(np.mean([row[x] for row in rows])) for x in shown}
            means = (f"{_text(numbers[x]):>{len(head)}}" for x, head in shown.items())
            lines.append(f"{path:{width}} {kinds[path]:{kind_width}} {' '.join(means)}")
        lines = lines if self.rows else []
        if self.linear:
            worst = (
                f"{r['path']} head {r['head']}: {r['attention error']:.3g}" for r in self.worst()
            )
            lines += ["worst heads: " + ", ".join(worst)]
            above = [row["attention error"] > row["uniform attention"] for row in self.linear]
            if any(above):
                lines += [f"worse than uniform attention: {sum(above)} of {len(above)} heads"]
                lines += ["  (an untrained model attends almost uniformly)"]
        lines += [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        lines += [*self.remarks, self.verdict()] if self.rows else []
        return "\n".join(lines)


def _kind(row: Mapping[str, Any]) -> str:
    """Attention of a layer: a window without features is a sliding window, of blocks."""
    if row["attention"] == "linear" and row["m"] == 0:
        return "sliding window"
    return row["attention"]


def _text(number: float) -> str:
    """Three digits, more for large counts, and a dash for no number."""
    if math.isnan(number):
        return "-"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


COLUMNS = {
    "m": "   m",
    "window": "window",
    "exact keys": "exact keys",
    "exact rows": "exact rows",
    "cost": "cost",
    "keys": "keys",
    "exact, ms": "exact, ms",
    "replacement, ms": "replacement, ms",
    "speed-up": "speed-up",
    "attention error": "error",
    "standard error": "    ±",
    "exact pairs alone": "window alone",
    "uniform attention": "uniform",
    "|q|^2": "|q|^2",
    "|k|^2": "|k|^2",
    "keys attended to": "keys attended to",
}
"""Numbers of the table, and the heads of their columns."""
COUNTS = ("cost", "keys")
"""Columns that times replace."""
ANY = ("window", "exact keys", "exact rows")
"""Columns that are left out where all are 0."""
