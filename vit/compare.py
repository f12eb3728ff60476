"""Train couplings, or values of any flag, with several seeds, and test the differences.

    performer-vit compare --config=digits \\
        --couplings=softmax,orf,simrf,pnc,pm,pm-antithetic --seeds=8 --out=results/digits
    performer-vit compare --config=digits --couplings=orf,pm \\
        --grid config.attention.num_features=16,32,64 --seeds=4 --out=results/features

"softmax" stands for exact attention. A task without accuracy is compared by its loss, of which
less is better; one without a section `attention` by --grid alone. All settings have the same seeds:
seed s means the same initial parameters, order of the data and dropout in each of them. The runs
are trained one after another, each as `vit.train` does on all devices, in `runs/SETTING/seedS`;
programs are compiled once for all seeds of a setting. The folder receives `report.md`, `results`
and `curves` (csv, png), `seeds.csv`, `run.json` and the runs. The same command resumes a stopped
comparison; more seeds, couplings or values can be added.

On several hosts each runs the same command with --distributed. When all runs are trained, the same
command on one host, without --distributed, writes the report.

    performer-vit compare --out=results/mine runs/orf0 runs/orf1 runs/pm0 runs/pm1

reports on finished runs of vit.train. It compares the fields in which their configs differ, except
the seed.
"""

import dataclasses
import itertools
import os
import statistics as means
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from performer.choices import unknown
from performer.couplings import DEFAULT
from vit import config as configs
from vit.config import arguments
from vit.reports import attention_report, metrics
from vit.reports import report as reports
from vit.run import devices, loop, runs
from vit.storage import buckets, files
from vit.study import harness, launch, statistics
from vit.study.statistics import LEVEL, estimate
from vit.task import description_of, opened

SOFTMAX = "softmax"
IMAGES, DRAWS, MEASURED = 4, 4, 3
"""Images, draws and runs of the attention errors."""
EFFECT = 0.008
"""Gain in accuracy of PM over ORF on ImageNet (Reid et al. 2025, Table 2)."""
RATE = "_per_second"
COUPLINGS, SEEDS = ("orf", "pm", DEFAULT), 5
"""Defaults of the command."""
DIFFERENCES = "Differences with 95% intervals (not corrected), and a dot for each seed"


def beside_baseline(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the compared rows with half of their interval, 0 without one."""
    compared = [row for row in rows if row["difference to baseline"] != "baseline"]
    texts = [row["95% interval"] or "0 to 0" for row in compared]
    ends = [[float(end) for end in text.split(" to ")] for text in texts]
    return [row | {"95%": (b - a) / 2} for row, (a, b) in zip(compared, ends, strict=True)]


def seeds_beside(axis: Any, rows: list[harness.Row]) -> None:
    """Draw the zero line, and a dot for each seed next to its interval."""
    axis.axhline(0, color=harness.INK, linewidth=0.8)
    for i, row in enumerate(rows):
        dots = [float(x) for x in str(row.get("of seeds", "")).split()]
        axis.plot([i + 0.15] * len(dots), dots, "o", color=harness.INK)


def figures(measure: str) -> harness.Figures:
    """Return the figures of a report, for its measure."""
    curves = {"train_loss": "training loss", f"eval_{measure}": LABELS[measure]}
    return {
        "results": dict(
            change=beside_baseline,
            x="{setting}",
            y="difference to baseline",
            error="95%",
            line="{setting}",
            finish=seeds_beside,
            ylabel=f"difference in {LABELS[measure]} to the baseline",
        ),
        "curves": dict(x="epoch", y=curves, line="{setting}"),
    }


LABELS = {"accuracy": "accuracy", "loss": "held-out loss"}
"""Measures: the accuracy of a task that has one, else the loss, of which less is better."""
FIGURES = figures("accuracy")


class Setting(NamedTuple):
    """A compared setting: a coupling, or "softmax", at a point of the grid."""

    coupling: str
    """Empty for a task without a section `attention`."""
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
        values = (f"{name}={urllib.parse.quote(str(v), safe=' +')}" for name, v in self.values)
        return ",".join(filter(None, [urllib.parse.quote(self.coupling, safe="+"), *values]))


class Run(NamedTuple):
    """A run that has ended or diverged."""

    seed: int
    folder: Path
    log: list[metrics.Record]
    diverged: int | None = None
    """Last step in the log, if the run diverged after it."""


class Result(NamedTuple):
    """The runs of one setting, with those of the baseline of the same seeds."""

    setting: Setting
    runs: Sequence[Run]
    measure: str = "accuracy"
    """Key of `LABELS`."""
    attention_errors: Sequence[tuple[float, float]] = ()
    """Attention errors of the first runs, means over layers and heads; and of uniform attention."""
    baseline: Setting | None = None
    """None for the baseline itself."""
    differences: Sequence[float] = ()
    """Measure minus the measure of the baseline, of each seed that both have."""
    corrected: float = np.nan
    """p-value with Holm's correction over all comparisons of the report."""

    @property
    def sound(self) -> list[Run]:
        """The runs that did not diverge."""
        return [run for run in self.runs if run.diverged is None]

    @property
    def measured(self) -> dict[int, float]:
        """Measure of the last evaluation of each sound run, by seed."""
        return {run.seed: run.log[-1][f"eval_{self.measure}"] for run in self.sound}

    @property
    def difference(self) -> statistics.Difference:
        """The paired test of `differences`."""
        return statistics.paired(self.differences, np.zeros(len(self.differences)))


def settings(
    config: configs.TrainConfig, couplings: Sequence[str] | None, grid: Mapping[str, Sequence[Any]]
) -> dict[Setting, configs.TrainConfig]:
    """Return the config of every coupling at every point of the grid.

    Raises:
        ValueError: for couplings that are given twice, or none; or given for a task without a
            section `attention`, which has only the points of the grid.
    """
    has_attention = "attention" in configs.sections(type(config))
    if not has_attention and (couplings or not grid):
        raise ValueError(
            f"the task {config.task!r} has no section attention, so no --couplings: give --grid"
        )
    couplings = couplings if couplings is not None else COUPLINGS if has_attention else ("",)
    if len(set(couplings)) < len(couplings) or not couplings:
        raise ValueError(f"--couplings={','.join(couplings)}: name each once, and at least one")
    chosen = {}
    for point, name in itertools.product(itertools.product(*grid.values()), couplings):
        setting = Setting(name, tuple(zip(grid, point, strict=True)))
        change = {"attention.kind": SOFTMAX} if has_attention else {}
        if name not in (SOFTMAX, ""):
            change = {"attention.kind": "performer", "attention.coupling": name}
        chosen[setting] = configs.with_values(config, dict(setting.values) | change)
    return chosen


def parse_grid(
    texts: Sequence[str], kind: type[configs.TrainConfig] = configs.Config
) -> dict[str, list[Any]]:
    """Parse ["config.attention.num_features=16,32"]: {"attention.num_features": [16, 32]}.

    Args:
        texts: values of --grid.
        kind: class of the config.

    Raises:
        ValueError: for a field that is none or is compared already, or values of another type.
    """
    grid: dict[str, list[Any]] = {}
    types = configs.flag_types(kind)
    for text in texts:
        name, _, values = text.partition("=")
        field = name.removeprefix("config.")
        if not name.startswith("config.") or field not in types:
            raise ValueError(unknown("--grid", name, [f"config.{x}" for x in types]))
        if field in grid or field in ("seed", "attention.kind", "attention.coupling"):
            raise ValueError(f"--grid {name}: give each field once; seeds and couplings have flags")
        try:
            grid[field] = list(map(arguments.Parser(types[field]).parse, values.split(",")))
        except ValueError:
            raise ValueError(f"--grid {text}: {configs.allowed(field, kind)}") from None
    return grid


def chosen_baseline(chosen: Sequence[Setting], name: str) -> str:
    """Return the baseline: by default the first coupling that is not softmax.

    Raises:
        ValueError: for a coupling without runs, or without runs at some point.
    """
    points: dict[str, set[str]] = {}
    for setting in chosen:
        points.setdefault(setting.coupling, set()).add(setting.point)
    name = name or next((each for each in points if each != SOFTMAX), SOFTMAX)
    if name not in points:
        raise ValueError(unknown("--baseline", name, points))
    if missing := sorted(set().union(*points.values()) - points[name]):
        raise ValueError(f"--baseline={name} has no run with {missing[0] or 'the other values'}")
    return name


def compare(
    config: configs.TrainConfig,
    out: Path,
    *,
    couplings: Sequence[str] | None,
    num_seeds: int,
    grid: Sequence[str] = (),
    baseline: str = "",
) -> str:
    """Train the missing runs and write the report; return it as markdown.

    On several hosts all train, and no report is written: that takes the same call on one host.

    Args:
        config: config of all runs, except for the compared fields.
        out: folder of the report and the runs.
        couplings: names, or "softmax"; None for `COUPLINGS`, or for a task without a section
            `attention` for none.
        num_seeds: seeds of each setting: config.seed, config.seed + 1, ...
        grid: argument of `parse_grid`.
        baseline: argument of `chosen_baseline`; with one coupling, the first point of the grid.

    Raises:
        ValueError: before anything is trained, for input that cannot be.
        SystemExit: by `loop.train` when a signal stops it; the same call resumes.
    """
    buckets.check_local(out, "--out=")
    if num_seeds < 1:
        raise ValueError(f"--seeds={num_seeds} must be at least 1")
    fields = parse_grid(grid, type(config))
    chosen = settings(config, couplings, fields)
    chosen_baseline(list(chosen), baseline)
    planned = {
        out / "runs" / setting.folder / f"seed{seed}": dataclasses.replace(each, seed=seed)
        for setting, each in chosen.items()
        for seed in range(config.seed, config.seed + num_seeds)
    }
    for folder, new in planned.items():
        configs.validate(new)
        there = (folder / "config.json").exists()
        if there and (different := configs.differences(configs.of_run(folder), new)):
            raise ValueError(
                f"{folder} holds a run with another config; take another --out:\n  "
                + "\n  ".join(different)
            )
    for each in chosen.values():
        _ = runs.Run(each, *opened(each), devices.mesh(each)).rate  # raises what cannot be
    lead = jax.process_index() == 0
    for number, (folder, new) in enumerate(planned.items(), 1):
        if files.read_json(folder / "diverged.json"):
            continue
        if lead:
            print(f"run {number} of {len(planned)}: {folder}")
        try:
            loop.train(new, folder)
        except FloatingPointError as error:
            print(f"{folder}: {error}")
            if lead:
                step = runs.last_step(folder / "metrics.jsonl")
                files.write_json(folder / "diverged.json", {"step": step})
    if jax.process_count() > 1:
        return "All is trained: the same command on one host, without --distributed, reports.\n"
    return _report(list(planned), list(fields), out, baseline)


def of_runs(folders: Sequence[Path], out: Path, baseline: str = "") -> str:
    """Report on finished runs of `vit.train`; return the report as markdown.

    Args:
        folders: folders of the runs. The fields in which their configs differ are compared.
        out: folder of the report.
        baseline: argument of `chosen_baseline`.

    Raises:
        ValueError: for a folder without a run, a run that has not ended, two of the same setting
            and seed, two of the same seed on other examples, or a baseline that is missing at a
            point.
    """
    all_configs = [configs.of_run(folder) for folder in folders]
    if len(tasks := dict.fromkeys(each.task for each in all_configs)) > 1:
        raise ValueError(f"runs of one task are compared, not of {', '.join(map(repr, tasks))}")
    flat = list(map(configs.flatten, all_configs))
    same = {"seed", "attention.kind", "attention.coupling"}
    same |= configs.placement(type(all_configs[0]))
    fields = [n for n in flat[0] if n not in same and len({each[n] for each in flat}) > 1]
    return _report(folders, fields, out, baseline)


def _report(folders: Sequence[Path], fields: Sequence[str], out: Path, baseline: str) -> str:
    """Read the runs, measure their attention and write the report."""
    by_setting: dict[Setting, dict[int, Run]] = {}
    by_seed: dict[int, tuple[Path, str]] = {}
    has_data_fields = any(name.startswith("data.") for name in fields)
    for folder in folders:
        config, log = configs.of_run(folder), metrics.read(folder / "metrics.jsonl")
        data_of_run = description_of(folder, config).get("fingerprint of the data", "")
        other, its_data = by_seed.setdefault(config.seed, (folder, data_of_run))
        if not has_data_fields and data_of_run and its_data and data_of_run != its_data:
            raise ValueError(
                f"{folder} and {other} have the same seed but other examples (by the fingerprints"
                " in task.json): compare runs on the same data set"
            )
        flat, diverged = configs.flatten(config), files.read_json(folder / "diverged.json")
        last = log[-1] if log else {}
        epoch = last.get("epoch")
        at_end = epoch and last["step"] == round(config.num_epochs * last["step"] / epoch)
        if not diverged and not (at_end and "eval_loss" in last):
            raise ValueError(f"{folder} has not ended; the command that began it resumes it")
        kind, coupling = (flat.get(f"attention.{name}", "") for name in ("kind", "coupling"))
        coupling = SOFTMAX if kind == SOFTMAX else coupling
        setting = Setting(coupling, tuple((name, flat[name]) for name in fields))
        seeds = by_setting.setdefault(setting, {})
        if config.seed in seeds:
            other = seeds[config.seed].folder
            raise ValueError(f"{folder} has the setting and the seed of {other}, {config.seed}")
        seeds[config.seed] = Run(config.seed, folder, log, diverged["step"] if diverged else None)
    baseline = chosen_baseline(list(by_setting), baseline)
    results = [Result(setting, list(seeds.values())) for setting, seeds in by_setting.items()]
    last = [run.log[-1] for result in results for run in result.sound]
    measure = "accuracy" if all("eval_accuracy" in record for record in last) else "loss"
    results = [each._replace(measure=measure) for each in results]
    results = [each._replace(attention_errors=_attention_errors(each)) for each in results]
    return write(results, baseline, configs.of_run(folders[0]), out)


def _attention_errors(result: Result) -> list[tuple[float, float]]:
    """Measure the attention errors of the first runs and of uniform attention."""
    names, errors = ("attention error", "uniform attention"), []
    has_features = result.setting.coupling not in (SOFTMAX, "")
    for each in result.sound[:MEASURED] if has_features else ():
        try:
            run = runs.restore(each.folder)
            attention = run.config.attention
            options: Any = dict(
                coupling=attention.coupling, num_features=attention.num_features, draws=DRAWS
            )
            examples = run.evaluation_examples(IMAGES)
            rows = attention_report.rows(run.task, run.model(), examples, **options)
        except ValueError as error:  # data that are gone, or features that are not positive
            print(f"{result.setting.name}: attention errors are not measured: {error}")
            return []
        error, uniform = (means.fmean(row[name] for row in rows) for name in names)
        errors.append((error, uniform))
    return errors


def compared(results: Sequence[Result], baseline: str) -> list[Result]:
    """Pair each setting with the baseline of its point; with one coupling, of the first point."""
    first = {r.setting.point: r for r in results if r.setting.coupling == baseline}
    if len({r.setting.coupling for r in results}) == 1:
        first = dict.fromkeys(first, results[0])
    paired = []
    for result in results:
        other = first[result.setting.point]
        if result is not other:
            a, b = result.measured, other.measured
            differences = [a[seed] - b[seed] for seed in a if seed in b]
            result = result._replace(baseline=other.setting, differences=differences)
        paired.append(result)
    corrected = statistics.holm([result.difference.p_value for result in paired])
    return [result._replace(corrected=p) for result, p in zip(paired, corrected, strict=True)]


def verdict(results: Sequence[Result]) -> str:
    """Return the result of all comparisons."""
    total = sum(r.baseline is not None for r in results)
    if not total:
        return "One setting: nothing is compared."
    tested = [r for r in results if not np.isnan(r.corrected)]
    if not tested:
        return (
            "No test is possible: that takes two seeds or more that a setting and the baseline both"
            " have, with differences that are not all equal."
        )
    number = " to ".join(
        str(end) for end in dict.fromkeys(f(len(r.differences) for r in tested) for f in (min, max))
    )
    comparisons = f"{total} comparison{'s' * (total > 1)}"
    significant = [r for r in tested if r.corrected < LEVEL]
    if not significant:
        return f"No significant difference over {number} seeds, in {comparisons}."
    text = f"Significant differences over {number} seeds: {len(significant)} of {comparisons}."
    for word, sign in (("Better", 1), ("Worse", -1)):
        sign *= -1 if significant[0].measure == "loss" else 1
        names = [r.setting.name for r in significant if sign * r.difference.mean > 0]
        text += f" {word} than the baseline: {'; '.join(names)}." if names else ""
    return text


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the table, one row for each setting."""
    table, measure = [], results[0].measure
    names = {name for result in results for run in result.sound for r in run.log for name in r}
    rate_names = sorted(name for name in names if name.endswith(RATE))
    noun = rate_names[0].removesuffix(RATE) if rate_names else "examples"
    for result in results:
        logs = [run.log for run in result.sound]
        rates = [x for log in logs for r in log for name, x in r.items() if name in rate_names]
        d, against = result.difference, result.baseline is not None
        tested = against and not np.isnan(d.p_value)  # two seeds or more, of different results
        difference = f"{d.mean:+.4f}" if d.count else ""  # a seed that both have
        needed = {}
        if measure == "accuracy":
            number = "" if np.isnan(d.p_value) else statistics.seeds_needed(EFFECT, d.deviation)
            needed = {f"seeds needed for {EFFECT:+.3f}": str(number)}
        exact = "exact" if result.setting.coupling == SOFTMAX else ""
        errors = [estimate(each) for each in zip(*result.attention_errors, strict=True)]
        error, uniform = errors or (exact, "")
        table.append(
            {
                "setting": result.setting.name,
                "seeds": len(result.sound),
                measure: estimate(list(result.measured.values())),
                "difference to baseline": "baseline" if not against else difference,
                "95% interval": f"{d.low:+.4f} to {d.high:+.4f}" if tested else "",
                "of seeds": " ".join(f"{x:+.4f}" for x in result.differences),
                "corrected p": f"{result.corrected:.2g}" if tested else "",
                **needed,
                "attention error": error,
                "of uniform attention": uniform,
                "seconds, all seeds": f"{sum(log[-1]['seconds'] for log in logs):.0f}",
                f"{noun}/s": f"{np.median(rates or np.nan):,.0f}",
            }
        )
    return table


def curves(results: Sequence[Result]) -> list[harness.Row]:
    """Return means over seeds by epoch, at the steps that all sound runs of a setting have."""
    table = []
    for result in filter(lambda r: r.sound, results):
        logs = [{r["epoch"]: r for r in run.log} for run in result.sound]
        for epoch in sorted(set.intersection(*map(set, logs))):
            row: harness.Row = {"setting": result.setting.name, "epoch": epoch}
            for key in ("train_loss", f"eval_{result.measure}"):
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


def write(results: Sequence[Result], baseline: str, config: configs.TrainConfig, out: Path) -> str:
    """Write report.md, results and curves (csv, png) and seeds.csv; return report.md.

    Args:
        results: results of all settings.
        baseline: the coupling that the others are compared with.
        config: config of the first run.
        out: the folder.
    """
    results, measure = compared(results, baseline), results[0].measure
    drawn = figures(measure)
    tables = {"results": rows(results), "curves": curves(results), "seeds": seeds(results, out)}
    table, *_ = [reports.table(lines, out / name) for name, lines in tables.items()]
    if any(result.baseline for result in results):
        named: Any = {"ylabel": f"difference in {LABELS[measure]} to {baseline or 'the first'}"}
        harness.figure(out / "results", **drawn["results"] | named)
    harness.figure(out / "curves", **drawn["curves"])
    point = "first" if len({r.setting.coupling for r in results}) == 1 else "same"
    against = f"{baseline!r} at the {point} point" if baseline else "the first point"
    diverged = "; ".join(
        f"{r.setting.name}, seed {run.seed}, after step {run.diverged}"
        for r in results
        for run in r.runs
        if run.diverged is not None
    )
    values = {f"config.{name}": repr(value) for name, value in configs.flatten(config).items()}
    lines = [
        f"# Comparison\n\n**{reports.plain(verdict(results))}**\n\n{table}",
        f"{measure.capitalize()} on {reports.plain(repr(config.data.split))}: mean ± standard"
        f" error. Differences are paired by seed, to {against};"
        " p-values come from paired t-tests with Holm's correction."
        + f" The seeds needed give 80% power for the gain of PM over ORF in Reid et al. 2025, by"
        f" one such test at level {LEVEL}." * (measure == "accuracy") + " Attention error:"
        " of the trained layers, relative to exact attention, mean over layers and heads of the"
        " first seeds; next to it the error of uniform attention, the mean of all values."
        " `seeds.csv` has the result and the folder of each run.\n",
        *([f"Diverged, and left out: {reports.plain(diverged)}.\n"] if diverged else []),
        *([f"![{DIFFERENCES}](results.png)\n"] if any(r.baseline for r in results) else []),
        "![Learning curves with standard errors over the seeds](curves.png)\n",
        "Versions, hardware, and the config of the first run:\n",
        *(f"    {name} = {value}" for name, value in (reports.versions() | values).items()),
    ]
    text = "\n".join(lines) + "\n"
    files.write(out / "report.md", text)
    return text


def main(
    *runs: Path,
    config: configs.TrainConfig | None = None,
    task: str = "",
    out: Path = Path("results/compare"),
    couplings: Sequence[str] | None = None,
    seeds: int = SEEDS,
    grid: list[str] = [],  # noqa: B006
    baseline: str = "",
    hosts: devices.Hosts = devices.ALONE,
) -> None:
    """Run the command.

    Args:
        runs: folders of finished runs to report on; trains nothing.
        out: folder of the report and the runs.
        couplings: names, or "softmax"; by default orf, pm and pm-antithetic.
        seeds: number of seeds of each setting.
        grid: config.FIELD=VALUE,VALUE; may be repeated.
        baseline: coupling that the others are compared with.
    """
    logging.set_verbosity(logging.FATAL)
    configs.use(task)
    devices.join(hosts)
    if (config is None) == (not runs):
        raise ValueError("give --config=... to train runs, or the folders of finished ones")
    if runs and (couplings, seeds, grid) != (None, SEEDS, []):
        raise ValueError(
            "--couplings, --seeds and --grid choose the runs to train: for a report on finished"
            " runs give their folders alone"
        )
    if config is None:
        text = of_runs(runs, out, baseline)
    else:
        options: Any = dict(couplings=couplings, num_seeds=seeds, grid=grid, baseline=baseline)
        text = compare(config, out, **options)
    shown = text.partition("\n![")[0]  # the figures, versions and config are in the report
    print(shown)
    if (out / "report.md").exists():
        print(f"The report is {out / 'report.md'}. {''.join(shown.split('**')[1:2])}")


if __name__ == "__main__":
    launch.run(main)
