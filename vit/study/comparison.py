"""Paired tests between settings that were trained with the same seeds, and their report.

Setting and baseline are compared seed by seed, by each measure of `TESTED`. Holm's correction
covers all tests of a report, and alpha spending the looks at a folder, so that the chance of any
false alarm is at most `statistics.LEVEL` however often seeds are added: look k has the level
LEVEL / (k (k + 1)), and these sum to LEVEL.
"""

import itertools
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from performer.choices import unknown
from vit import config as configs
from vit.reports import metrics
from vit.reports import report as reports
from vit.storage import files
from vit.study import harness, statistics
from vit.study.statistics import LEVEL, estimate

SOFTMAX = "softmax"
EFFECT = 0.008
"""Gain in accuracy of PM over ORF on ImageNet (Reid et al. 2025, Table 2)."""
RATE = "_per_second"
ERROR, UNIFORM = "attention error", "uniform attention"
TESTED = {"accuracy": 1, "loss": -1, ERROR: -1}
"""Measures that are tested, the first that all runs have first: 1 if more is better."""
LABELS = {"accuracy": "accuracy", "loss": "held-out loss"}
DIFFERENCES = "Differences with 95% intervals (not corrected), and a dot for each seed"
DOT = "difference, seed "


class Setting(NamedTuple):
    """A compared setting: a coupling, or "softmax", at a point of the grid."""

    coupling: str
    """Empty for a task without a section `attention`."""
    values: tuple[tuple[str, Any], ...] = ()
    """The other fields that are compared and that the setting reads:
    (("attention.num_features", 32), ...)."""

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
        values = (f"{name}={urllib.parse.quote(str(v), safe=' +')}" for name, v in self.values)
        return ",".join(filter(None, [urllib.parse.quote(self.coupling, safe="+"), *values]))

    def fits(self, baseline: "Setting") -> bool:
        """Return True if the fields that both read have the same values."""
        own = dict(self.values)
        return all(own.get(name, value) == value for name, value in baseline.values)


class Run(NamedTuple):
    """A run that has ended or diverged."""

    seed: int
    folder: Path
    log: list[metrics.Record]
    diverged: int | None = None
    """Last step in the log, if the run diverged after it."""


class Result(NamedTuple):
    """The runs of one setting."""

    setting: Setting
    runs: Sequence[Run]
    errors: Mapping[int, tuple[float, float]] = {}
    """Attention error of its features, and of uniform attention, on the queries and keys of the
    baseline's run of each seed."""

    @property
    def sound(self) -> list[Run]:
        """The runs that did not diverge."""
        return [run for run in self.runs if run.diverged is None]

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """Values of each measure by seed: of the last evaluation, of attention, of the speed."""
        last = {run.seed: run.log[-1] for run in self.sound}
        rate = next((n for run in self.sound for r in run.log for n in r if n.endswith(RATE)), "")
        rates = {
            run.seed: float(np.median([r[rate] for r in run.log if rate in r]))
            for run in self.sound
            if any(rate in r for r in run.log)
        }
        values = {
            "accuracy": {s: r["eval_accuracy"] for s, r in last.items() if "eval_accuracy" in r},
            "loss": {s: r["eval_loss"] for s, r in last.items() if "eval_loss" in r},
            ERROR: {seed: error for seed, (error, _) in self.errors.items()},
            UNIFORM: {seed: uniform for seed, (_, uniform) in self.errors.items()},
            "seconds": {seed: record["seconds"] for seed, record in last.items()},
            f"{rate.removesuffix(RATE)}/s": rates,
        }
        return {name: by_seed for name, by_seed in values.items() if by_seed}


class Comparison(NamedTuple):
    """A setting and its baseline, by one measure."""

    setting: Setting
    baseline: Setting
    measure: str
    differences: Mapping[int, float]
    """Setting minus baseline, for each seed that both have."""
    tests: int = 1
    """Number of tests of the report."""
    look: int = 1
    corrected: float = np.nan
    """p-value with Holm's correction over the tests of the report, and corrected for the look."""

    @property
    def difference(self) -> statistics.Difference:
        """The paired test of the differences."""
        values = list(self.differences.values())
        return statistics.paired(values, np.zeros(len(values)))

    @property
    def is_tested(self) -> bool:
        """True with two seeds or more, of different results."""
        return not math.isnan(self.corrected)

    @property
    def is_significant(self) -> bool:
        """True if the corrected p-value is below the level."""
        return self.corrected < LEVEL

    @property
    def detectable(self) -> float:
        """Smallest difference that these seeds detect with 80% power, in Holm's first step."""
        level = statistics.level_of_look(self.look) / self.tests
        return statistics.detectable(self.difference.deviation, self.difference.count, level)

    @property
    def needed(self) -> tuple[int, int, int]:
        """Seeds that detect `EFFECT` in the next look, in Holm's first step, and their interval."""
        level = statistics.level_of_look(self.look + 1) / self.tests
        deviation, count = self.difference.deviation, self.difference.count
        ends = statistics.deviation_interval(deviation, count)
        number, low, high = (
            statistics.seeds_needed(EFFECT, each, level) for each in (deviation, *ends)
        )
        return number, low, high


def baselines(chosen: Sequence[Setting], name: str) -> dict[Setting, list[Setting]]:
    """Return the settings that each setting is compared with; none for a baseline.

    A baseline has the coupling `name`, by default the first that is not softmax, and the same
    values of the fields that both read. With one coupling it is the first point of the grid.

    Raises:
        ValueError: for a coupling without runs, or without runs at some point.
    """
    couplings = dict.fromkeys(setting.coupling for setting in chosen)
    name = name or next((each for each in couplings if each != SOFTMAX), SOFTMAX)
    if name not in couplings:
        raise ValueError(unknown("--baseline", name, couplings))
    first = [setting for setting in chosen if setting.coupling == name]
    if len(couplings) == 1:
        return {chosen[0]: []} | {setting: [chosen[0]] for setting in chosen[1:]}
    paired = {s: [] if s in first else [b for b in first if s.fits(b)] for s in chosen}
    for setting, others in paired.items():
        if setting not in first and not others:
            raise ValueError(f"--baseline={name} has no run with {setting.point}")
    return paired


def compared(results: Sequence[Result], baseline: str, look: int = 1) -> list[Comparison]:
    """Test each setting against its baselines by each measure.

    Args:
        results: results of all settings.
        baseline: coupling that the others are compared with, as `baselines`.
        look: number of the look at the folder.
    """
    values, pairs = {result.setting: result.values for result in results}, []
    for setting, others in baselines(list(values), baseline).items():
        for other, measure in itertools.product(others, measures(results)):
            a, b = (values[each].get(measure, {}) for each in (setting, other))
            if measure != ERROR or (a and b):  # exact attention has no error
                differences = {seed: a[seed] - b[seed] for seed in a if seed in b}
                pairs.append(Comparison(setting, other, measure, differences))
    p_values = statistics.holm([each.difference.p_value for each in pairs])
    tests = int(np.sum(~np.isnan(p_values)))
    spent = LEVEL / statistics.level_of_look(look)
    return [
        each._replace(tests=tests, look=look, corrected=float(np.minimum(1, p * spent)))
        for each, p in zip(pairs, p_values, strict=True)
    ]


def measures(results: Sequence[Result]) -> list[str]:
    """Return the tested measures that the runs have; accuracy only if all have one."""
    values = [result.values for result in results if result.sound]
    everywhere = [name for name in ("accuracy", "loss") if all(name in each for each in values)]
    return everywhere + [ERROR] * any(ERROR in each for each in values)


def count_look(out: Path, results: Sequence[Result]) -> int:
    """Return the number of the look, which `looks.json` counts.

    A look is a report on seeds that no earlier report of the folder had. The same seeds again are
    the same look; one seed, which allows no test, is none.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "looks.json"
    seeds = sorted({run.seed for result in results for run in result.runs})
    looks = (files.read_json(path) or {"looks": []})["looks"]
    if len(seeds) < 2:
        return 1
    if seeds not in looks:
        looks = [*looks, seeds]
        files.write_json(path, {"looks": looks})
    return looks.index(seeds) + 1


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the result of all comparisons, a few sentences for each measure."""
    if not comparisons:
        return "One setting: nothing is compared."
    if not any(each.is_tested for each in comparisons):
        return (
            "No test is possible: that takes two seeds or more that a setting and the baseline both"
            " have, with differences that are not all equal."
        )
    names = dict.fromkeys(each.measure for each in comparisons)
    return " ".join(_verdict([x for x in comparisons if x.measure == name]) for name in names)


def _verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the result of the comparisons by one measure."""
    measure, total = comparisons[0].measure, len(comparisons)
    tested = [each for each in comparisons if each.is_tested]
    if not tested:
        return f"{measure.capitalize()}: no test is possible."
    counts = [each.difference.count for each in tested]
    over = f"over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds"
    significant = [each for each in tested if each.is_significant]
    text = f"{measure.capitalize()}: no significant difference {over}"
    text += f", in {total} comparison{'s' * (total > 1)}."
    if significant:
        text = f"{measure.capitalize()}: significant differences {over}: {len(significant)} of"
        text += f" {total}."
    several = len({each.baseline for each in comparisons}) > 1
    for word, sign in (("Better", 1), ("Worse", -1)):
        named = [
            each.setting.name + f" (than {each.baseline.name})" * several
            for each in significant
            if sign * TESTED[measure] * each.difference.mean > 0
        ]
        text += f" {word} than the baseline: {'; '.join(named)}." if named else ""
    if unseen := [each.detectable for each in tested if not each.is_significant]:
        ends = dict.fromkeys(f"{end:.2g}" for end in (min(unseen), max(unseen)))
        other = "other " * bool(significant)
        text += f" Smallest {other}difference that would have been detected: {' to '.join(ends)}."
    return text


def rows(results: Sequence[Result], comparisons: Sequence[Comparison]) -> list[harness.Row]:
    """Return numbers alone: a row for each measure of each setting, and each of its baselines."""
    table: list[harness.Row] = []
    by_case: dict[Any, list[Comparison]] = {}
    for each in comparisons:
        by_case.setdefault((each.setting, each.measure), []).append(each)
    seeds = sorted({run.seed for result in results for run in result.sound})
    for result in results:
        for measure, values in result.values.items():
            pair = statistics.mean_and_error(list(values.values()))
            row = {"setting": result.setting.name, "measure": measure, "seeds": len(values)}
            row |= dict(zip(("mean", "mean ±"), pair, strict=True))
            cases = by_case.get((result.setting, measure), [None])
            table += [row | _numbers(each) | _dots(each, seeds) for each in cases]
    return [{k: "" if v != v else v for k, v in row.items()} for row in table]  # NaN


NUMBERS = ("baseline", "difference", "low", "high", "corrected p", "detectable")
NEEDED = [f"seeds needed for {EFFECT:+.3f}{end}" for end in ("", ", low", ", high")]


def _numbers(comparison: Comparison | None) -> harness.Row:
    """Return the columns of a test; empty for a baseline, or a measure that is not tested."""
    row: harness.Row = dict.fromkeys((*NUMBERS, *NEEDED), "")
    if comparison and comparison.differences:
        d = comparison.difference
        row |= {"baseline": comparison.baseline.name, "difference": d.mean}
        row |= {"low": d.low, "high": d.high, "corrected p": comparison.corrected}
    if comparison and comparison.is_tested:
        row["detectable"] = comparison.detectable
        if comparison.measure == "accuracy":
            row |= dict(zip(NEEDED, comparison.needed, strict=True))
    return row


def _dots(comparison: Comparison | None, seeds: Sequence[int]) -> harness.Row:
    """Return the difference of each seed."""
    differences = comparison.differences if comparison else {}
    return {f"{DOT}{seed}": differences.get(seed, "") for seed in seeds}


def summary(results: Sequence[Result]) -> list[harness.Row]:
    """Return the table of the report: a row for each setting, means with standard errors."""
    names = dict.fromkeys(name for result in results for name in result.values)
    table = []
    for result in results:
        values, is_exact = result.values, result.setting.coupling == SOFTMAX
        row: harness.Row = {"setting": result.setting.name, "seeds": len(result.sound)}
        row |= {name: estimate(list(values.get(name, {}).values()) or [np.nan]) for name in names}
        row |= {name: "" for name in names if name not in values}
        table.append(row | ({ERROR: "exact"} if is_exact and ERROR in names else {}))
    return table


def tests(comparisons: Sequence[Comparison]) -> list[harness.Row]:
    """Return the table of the tests, a row for each."""
    table = []
    for each in comparisons:
        d, row = each.difference, {"setting": each.setting.name}
        row |= {"baseline": each.baseline.name, "measure": each.measure}
        row["difference"] = f"{d.mean:+.4f}" if d.count else ""
        row["95% interval"] = f"{d.low:+.4f} to {d.high:+.4f}" if each.is_tested else ""
        row["corrected p"] = f"{each.corrected:.2g}" if each.is_tested else ""
        row["detectable"] = f"{each.detectable:.2g}" if each.is_tested else ""
        row[NEEDED[0]] = ""
        if each.is_tested and each.measure == "accuracy":
            number, low, high = each.needed
            row[NEEDED[0]] = f"{number:,} ({low:,} to {high:,})"
        table.append(row)
    if not any(row[NEEDED[0]] for row in table):
        table = [{k: x for k, x in row.items() if k != NEEDED[0]} for row in table]
    return table


def curves(results: Sequence[Result], measure: str) -> list[harness.Row]:
    """Return means over seeds by epoch, at the steps that all sound runs of a setting have."""
    table = []
    for result in filter(lambda r: r.sound, results):
        logs = [{r["epoch"]: r for r in run.log} for run in result.sound]
        for epoch in sorted(set.intersection(*map(set, logs))):
            row: harness.Row = {"setting": result.setting.name, "epoch": epoch}
            for key in ("train_loss", f"eval_{measure}"):
                row |= {key: "", f"{key} ±": ""}
                if all(key in log[epoch] for log in logs):
                    pair = statistics.mean_and_error([log[epoch][key] for log in logs])
                    row |= zip((key, f"{key} ±"), pair, strict=True)
            table.append(row)
    return table


def seeds(results: Sequence[Result], out: Path) -> list[dict[str, Any]]:
    """Return the last record and the folder of each run."""
    names = ("train_loss", "eval_loss", "eval_accuracy", "eval_top5")
    return [
        {"coupling": result.setting.coupling, "point": result.setting.point, "seed": run.seed}
        | {name: (run.log or [{}])[-1].get(name, "") for name in names}
        | {"diverged_after_step": "" if run.diverged is None else run.diverged}
        | {"folder": os.path.relpath(run.folder, out)}
        for result in results
        for run in result.runs
    ]


def with_intervals(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the tested rows of the first measure, with half of their interval, 0 without one."""
    rows = [row for row in rows if row["difference"] != ""]
    rows = [row for row in rows if row["measure"] == rows[0]["measure"]]
    several = len({row["baseline"] for row in rows}) > 1
    return [
        row
        | {"95%": (row["high"] - row["low"]) / 2 if row["low"] != "" else 0.0}
        | {"setting": row["setting"] + f" − {row['baseline']}" * several}
        for row in rows
    ]


def draw_seeds(axis: Any, rows: list[harness.Row]) -> None:
    """Draw the zero line, and a dot for each seed next to its interval."""
    axis.axhline(0, color=harness.INK, linewidth=0.8)
    for i, row in enumerate(rows):
        dots = [x for name, x in row.items() if name.startswith(DOT) and x != ""]
        axis.plot([i + 0.15] * len(dots), dots, "o", color=harness.INK)


def figures(measure: str) -> harness.Figures:
    """Return the figures of a report, for its first measure."""
    return {
        "results": dict(
            change=with_intervals,
            x="{setting}",
            y="difference",
            error="95%",
            line="{setting}",
            finish=draw_seeds,
            ylabel=f"difference in {LABELS[measure]} to the baseline",
        ),
        "curves": dict(
            x="epoch",
            y={"train_loss": "training loss", f"eval_{measure}": LABELS[measure]},
            line="{setting}",
        ),
    }


FIGURES = figures("accuracy")


def write(results: Sequence[Result], baseline: str, config: configs.TrainConfig, out: Path) -> str:
    """Write report.md, results and curves (csv, png), seeds.csv and the look; return report.md.

    Args:
        results: results of all settings.
        baseline: argument of `baselines`.
        config: config of the first run.
        out: the folder.
    """
    look = count_look(out, results)
    comparisons, measure = compared(results, baseline, look), measures(results)[0]
    tested, drawn = rows(results, comparisons), figures(measure)
    table = reports.table(tested, out / "results", shown=summary(results))
    reports.table(curves(results, measure), out / "curves")
    reports.table(seeds(results, out), out / "seeds")
    if any(row["difference"] != "" for row in tested):
        harness.figure(out / "results", **drawn["results"])
    harness.figure(out / "curves", **drawn["curves"])
    diverged = "; ".join(
        f"{r.setting.name}, seed {run.seed}, after step {run.diverged}"
        for r in results
        for run in r.runs
        if run.diverged is not None
    )
    values = {f"config.{name}": repr(value) for name, value in configs.flatten(config).items()}
    lines = [
        f"# Comparison\n\n**{reports.plain(verdict(comparisons))}**\n\n{table}",
        f"Means ± standard errors over the seeds, on {reports.plain(repr(config.data.split))}.\n",
        *([_tested(comparisons)] if comparisons else []),
        *([f"Diverged, and left out: {reports.plain(diverged)}.\n"] if diverged else []),
        *([f"![{DIFFERENCES}](results.png)\n"] if comparisons else []),
        "![Learning curves with standard errors over the seeds](curves.png)\n",
        "Versions, hardware, and the config of the first run:\n",
        *(f"    {name} = {value}" for name, value in (reports.versions() | values).items()),
    ]
    text = "\n".join(lines) + "\n"
    files.write(out / "report.md", text)
    return text


def _tested(comparisons: Sequence[Comparison]) -> str:
    """Return the table of the tests and its explanation."""
    look, number = comparisons[0].look, comparisons[0].tests
    level = statistics.level_of_look(look)
    text = f"{reports.markdown(tests(comparisons))}\n"
    text += (
        f"Paired t-tests, seed by seed. A corrected p-value below {LEVEL} is significant: Holm's"
        f" correction covers all {number} tests, and look {look} at this folder has the level"
        f" {level:.2g}. Every report on other seeds is a look, and all looks together have the"
        f" level {LEVEL}. The intervals are not corrected. A difference is detectable if these"
        " tests find it with 80% power.\n"
    )
    if comparisons[0].measure == "accuracy":
        text += (
            f"\nThe seeds needed detect {EFFECT}, the gain of PM over ORF in Reid et al. 2025, with"
            " 80% power in the next look. Their range comes from the 95% interval of the standard"
            " deviation over the seeds.\n"
        )
    if any(each.measure == ERROR for each in comparisons):
        text += (
            "\nAttention errors are relative to exact attention, means over layers and heads. All"
            " features are measured on the queries and keys of the baseline's run of each seed."
            " Uniform attention is the mean of all values.\n"
        )
    return text
