"""The report of a comparison: a verdict that follows the statistics, one table, one figure."""

import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common import provenance, statistics
from experiments.common.harness import band
from experiments.common.statistics import LEVEL, estimate
from vit import config as configs
from vit import files, metrics, report

EFFECT = 0.008
"""Gain in accuracy of PM over ORF on ImageNet (Reid et al. 2025, Table 2)."""
DROP = 0.22
"""Distance of the dots of the seeds from the interval of their mean, in rows."""
COMPARED = (
    *("difference to baseline", "95% interval", "corrected p"),
    f"seeds needed for {EFFECT:+.3f}",
)
"""Columns of a comparison."""
LINES = ("-", "--", ":", "-.")
"""Line styles of the points; couplings have colours."""


class Run(NamedTuple):
    """A run that has ended or diverged."""

    seed: int
    folder: Path
    log: list[metrics.Record]
    diverged: int | None = None
    """Last step in the log, if the run diverged after it."""


class Setting(NamedTuple):
    """A compared setting: a coupling, or "softmax", at a point of the grid."""

    coupling: str
    values: tuple[tuple[str, Any], ...] = ()
    """The other fields that are compared: (("attention.num_features", 32), ...)."""

    @property
    def point(self) -> str:
        """The values in words; empty where only couplings are compared."""
        return ", ".join(f"{name.split('.')[-1]}={value}" for name, value in self.values)

    @property
    def name(self) -> str:
        """Coupling and point, as in "pm, num_features=32"."""
        return ", ".join(filter(None, [self.coupling, self.point]))

    @property
    def folder(self) -> str:
        """Name of the folder of its runs; characters with a meaning in paths are quoted."""
        values = (f",{name}={urllib.parse.quote(str(v), safe=' +')}" for name, v in self.values)
        return urllib.parse.quote(self.coupling, safe="+") + "".join(values)


class Result(NamedTuple):
    """The runs of one setting."""

    setting: Setting
    runs: Sequence[Run]
    attention_errors: Sequence[float] = ()
    """One for each of the first runs: the mean over layers and heads."""
    uniform_errors: Sequence[float] = ()
    """The same for uniform attention (the mean of all values)."""

    @property
    def sound(self) -> list[Run]:
        """The runs that did not diverge."""
        return [run for run in self.runs if run.diverged is None]

    @property
    def accuracy(self) -> dict[int, float]:
        """Accuracy of the last evaluation of each sound run, by seed."""
        return {run.seed: run.log[-1]["eval_accuracy"] for run in self.sound}


class Comparison(NamedTuple):
    """A setting against the baseline at the same point."""

    result: Result
    baseline: Result
    difference: statistics.Difference
    corrected: float
    """p-value with Holm's correction over all comparisons of the report."""


def comparisons(results: Sequence[Result], baseline: str) -> list[Comparison]:
    """Each setting against the baseline of its point; with one coupling, the first point."""
    first = {r.setting.point: r for r in results if r.setting.coupling == baseline}
    if len({r.setting.coupling for r in results}) == 1:
        first = dict.fromkeys(first, results[0])
    pairs = [(r, first[r.setting.point]) for r in results if r is not first[r.setting.point]]
    differences = []
    for result, other in pairs:
        a, b = result.accuracy, other.accuracy
        both = [seed for seed in a if seed in b]
        differences.append(statistics.paired([a[s] for s in both], [b[s] for s in both]))
    corrected = statistics.holm([d.p_value for d in differences])
    return [
        Comparison(*pair, difference, p)
        for pair, difference, p in zip(pairs, differences, corrected, strict=True)
    ]


def verdict(compared: Sequence[Comparison]) -> str:
    """The result of all comparisons."""
    if not compared:
        return "One setting: nothing is compared."
    tested = [c for c in compared if not np.isnan(c.corrected)]
    if not tested:
        return "No test is possible: that takes two seeds or more, with different results."
    significant = [c for c in tested if c.corrected < LEVEL]
    counts = sorted({c.difference.count for c in tested})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    total = f"{len(compared)} comparison{'s' * (len(compared) != 1)}"
    if not significant:
        return f"No significant difference over {number} seeds, in {total}."
    better = [c.result.setting.name for c in significant if c.difference.mean > 0]
    worse = [c.result.setting.name for c in significant if c.difference.mean < 0]
    parts = [f"Significant differences over {number} seeds: {len(significant)} of {total}."]
    parts += [f"Better than the baseline: {'; '.join(better)}."] if better else []
    parts += [f"Worse than the baseline: {'; '.join(worse)}."] if worse else []
    return " ".join(parts)


def rows(results: Sequence[Result], compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The table, one row for each setting."""
    by_setting, table = {c.result.setting: c for c in compared}, []
    for result in results:
        logs = [run.log for run in result.sound]
        rates = [r["images_per_second"] for log in logs for r in log if "images_per_second" in r]
        errors = estimate(result.attention_errors) if result.attention_errors else ""
        row = {
            "setting": result.setting.name,
            "seeds": len(result.sound),
            "accuracy": estimate(list(result.accuracy.values())),
            **dict.fromkeys(COMPARED, ""),
            "attention error": "exact" if result.setting.coupling == "softmax" else errors,
            "of uniform attention": estimate(result.uniform_errors) if errors else "",
            "seconds, all seeds": f"{sum(log[-1]['seconds'] for log in logs):.0f}",
            "images/s": f"{np.median(rates or np.nan):,.0f}",
        }
        if found := by_setting.get(result.setting):
            d, tested = found.difference, not np.isnan(found.corrected)
            needed = str(statistics.seeds_needed(EFFECT, d.deviation)) if tested else ""
            interval = f"{d.low:+.4f} to {d.high:+.4f}"
            cells = f"{d.mean:+.4f}", interval, f"{found.corrected:.2g}", needed
            row |= dict(zip(COMPARED, cells, strict=True))
        else:
            row[COMPARED[0]] = "baseline"
        table.append(row)
    return table


def write(results: Sequence[Result], baseline: str, config: configs.Config, out: Path) -> str:
    """Writes report.md, comparison.png, results.csv and seeds.csv; returns report.md.

    Args:
        results: of all settings.
        baseline: the coupling that the others are compared with.
        config: of the first run.
        out: the folder.
    """
    compared = comparisons(results, baseline)
    table = report.table(rows(results, compared), out / "results")
    report.table(seeds(results, out), out / "seeds")
    _draw(results, compared, out / "comparison")
    point = "first" if len({r.setting.coupling for r in results}) == 1 else "same"
    diverged = [
        f"{r.setting.name}, seed {run.seed}, after step {run.diverged}"
        for r in results
        for run in r.runs
        if run.diverged is not None
    ]
    values = {f"config.{name}": repr(value) for name, value in configs.flatten(config).items()}
    lines = [
        f"# Comparison\n\n**{report.plain(verdict(compared))}**\n\n{table}",
        f"Accuracy on {report.plain(repr(config.data.eval_split))}: mean ± standard error."
        f" Differences are paired by seed, to {baseline!r} at the {point} point; p-values are those"
        " of paired t-tests with Holm's correction. The seeds needed give 80% power for the gain"
        f" of PM over ORF in Reid et al. 2025, by one such test at level {LEVEL}. Attention error:"
        " of the trained layers, relative to exact attention, mean over layers and heads of the"
        " first seeds; beside it that of uniform attention, the mean of all values. `seeds.csv`"
        " has the result and the folder of each run.\n",
        *([f"Diverged, and left out: {report.plain('; '.join(diverged))}.\n"] if diverged else []),
        "![Differences with 95% intervals (not corrected) and a dot for each seed; learning curves"
        " with standard errors over the seeds](comparison.png)\n",
        "Versions, hardware, and the config of the first run:\n",
        *(f"    {name} = {value}" for name, value in (provenance.machine() | values).items()),
    ]
    text = "\n".join(lines) + "\n"
    files.write(out / "report.md", text)
    return text


def seeds(results: Sequence[Result], out: Path) -> list[dict[str, Any]]:
    """The last record and the folder of each run."""
    names = ("train_loss", "eval_loss", "eval_accuracy", "eval_top5")
    return [
        {"coupling": result.setting.coupling, "point": result.setting.point, "seed": run.seed}
        | {name: (run.log or [{}])[-1].get(name, "") for name in names}
        | {"diverged_after_step": "" if run.diverged is None else run.diverged}
        | {"folder": os.path.relpath(run.folder, out)}
        for result in results
        for run in result.runs
    ]


def _draw(results: Sequence[Result], compared: Sequence[Comparison], path: Path) -> None:
    drawn, axes = report.figure(path, columns=2 + bool(compared))
    drawn.set_figheight(max(4.0, 1.2 + 0.5 * len(compared)))
    if compared:
        _differences(axes[0], compared)
    _curves(axes[-2:], results)
    report.save(drawn, path)


def _differences(axis: Any, compared: Sequence[Comparison]) -> None:
    for row, c in enumerate(compared):
        d, a, b = c.difference, c.result.accuracy, c.baseline.accuracy
        dots = [a[s] - b[s] for s in a if s in b]
        axis.plot(dots, [row + DROP] * d.count, "o", color="0.35", alpha=0.6, markersize=4)
        if not np.isnan(d.p_value):
            error = [[d.mean - d.low], [d.high - d.mean]]
            color = "C3" if c.corrected < LEVEL else "C0"
            axis.errorbar([d.mean], [row], xerr=error, fmt="o", color=color, capsize=4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(compared)), [report.literal(c.result.setting.name) for c in compared])
    axis.set_ylim(len(compared) - 0.5, -0.5)
    axis.set(xlabel="difference in accuracy to the baseline\n(red: corrected p < 0.05)")
    axis.grid(alpha=0.3, axis="x")


def _curves(axes: Sequence[Any], results: Sequence[Result]) -> None:
    """Training loss and accuracy by epoch, at the steps that all sound runs of a setting have."""
    couplings = list(dict.fromkeys(result.setting.coupling for result in results))
    points = list(dict.fromkeys(result.setting.point for result in results))
    for axis, key in zip(axes, ("train_loss", "eval_accuracy"), strict=True):
        for result in filter(lambda r: r.sound, results):
            logs = [{r["epoch"]: r[key] for r in run.log if key in r} for run in result.sound]
            epochs = sorted(set.intersection(*map(set, logs)))
            means = [statistics.mean_and_error([log[epoch] for log in logs]) for epoch in epochs]
            style = dict(
                color=f"C{couplings.index(result.setting.coupling)}",
                linestyle=LINES[points.index(result.setting.point) % len(LINES)],
                marker="o" if len(epochs) == 1 else "",  # a line of one point is invisible
            )
            band(axis, epochs, means, report.literal(result.setting.name), **style)
        axis.set(xlabel="epoch", ylabel=key.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="small")
