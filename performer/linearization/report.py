"""Attention errors of a linearized model, by layer and head."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer.attention.calibration import Calibration
from performer.attention.refinement import Sample, performer_estimate, softmax_attention, squared
from performer.typing import NO_WINDOW, Window


@partial(jax.jit, static_argnames=("is_causal", "window"))
def head_errors(
    sample: Sample,
    frequencies: Float[Array, "k m h"],
    calibration: Calibration | None,
    is_causal: bool = False,
    window: Window = NO_WINDOW,
) -> dict[str, Float[Array, " n"]]:
    """Return name -> a number for each head of one layer; sums and means over what exists.

    "attention error" is |A^ - A|^2 / |A|^2, "uniform attention" the same of a mean over all keys;
    "|q|^2" and "|k|^2" are means after the factor sqrt(scale) each, and "keys attended to" is e to
    the mean entropy of a row of A.
    """
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    estimate = performer_estimate(frequencies, calibration, sample, is_causal, **window._asdict())
    entropy = -jnp.sum(exact * jnp.log(jnp.where(exact > 0, exact, 1)), axis=-1)
    rows = jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)
    groups = sample.query.shape[2] // sample.key.shape[2]

    def squared_length(x, exists):
        lengths = jnp.where(exists[..., None], jnp.sum(x**2, axis=-1), 0)
        return jnp.sum(lengths, (0, 1)) / jnp.sum(exists, dtype=x.dtype) / x.shape[-1] ** 0.5

    return {
        "attention error": squared(estimate, exact, pairs),
        "uniform attention": uniform_error(sample, is_causal),
        "|q|^2": squared_length(sample.query, sample.queries),
        "|k|^2": jnp.repeat(squared_length(sample.key, sample.keys), groups),
        "keys attended to": jnp.exp(jnp.sum(entropy, (0, 2)) / rows),
    }


def uniform_error(sample: Sample, is_causal: bool = False) -> Float[Array, " n"]:
    """`squared` of the mean over all keys that a query sees."""
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    seen = pairs.astype(exact.dtype)
    uniform = seen / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)
    return squared(uniform, exact, pairs)


@dataclass(frozen=True)
class Report:
    """Result of `linearize`; its `str` is a table of layers, the worst heads and exact layers.

    Attributes:
        rows: a record for each layer and head that was measured: "path", "layer" (its number, in
            the order of calls), "head", "attention" ("linear", or "exact" if kept), and what
            `head_errors` says.
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
        lines += [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        return "\n".join(lines)


COLUMNS = {
    "attention error": "    error",
    "uniform attention": "  uniform",
    "|q|^2": "   |q|^2",
    "|k|^2": "   |k|^2",
    "keys attended to": "keys attended to",
}
"""Numbers of the table, and the heads of their columns."""


def rows_of(
    number: int, path: str, attention: str, errors: Mapping[str, Float[Array, " n"]]
) -> list[dict[str, Any]]:
    """The records of one layer."""
    heads = zip(*(np.asarray(x).tolist() for x in errors.values()), strict=True)
    return [
        {"path": path, "layer": number, "head": head, "attention": attention}
        | dict(zip(errors, numbers, strict=True))
        for head, numbers in enumerate(heads)
    ]
