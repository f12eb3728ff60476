"""Couplings, or values of any field of a config, over several seeds: `experiments.compare` runs it.

The runs are those of `vit.train`, one after another; their folders lie in `runs/SETTING/seedS`.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.training import report
from experiments.training.report import Setting
from performer.choices import unknown
from vit import attention_report, checkpoint, data, files, loop, metrics, runs
from vit import config as configs

SOFTMAX = "softmax"
IMAGES, DRAWS, MEASURED = 4, 4, 3
"""Attention errors are measured on so many images, over so many draws, in so many runs."""


def settings(
    config: configs.Config, couplings: Sequence[str], grid: Mapping[str, Sequence[Any]]
) -> dict[Setting, configs.Config]:
    """The config of every coupling at every point of the grid.

    Raises:
        ValueError: for couplings that are given twice, or none.
    """
    if len(set(couplings)) < len(couplings) or not couplings:
        raise ValueError(f"--couplings={','.join(couplings)}: name each once, and at least one")
    chosen = {}
    for point in itertools.product(*grid.values()):
        values = tuple(zip(grid, point, strict=True))
        for name in couplings:
            change = {"attention.kind": SOFTMAX}
            if name != SOFTMAX:
                change = {"attention.kind": "performer", "attention.coupling": name}
            chosen[Setting(name, values)] = configs.with_values(config, dict(values) | change)
    return chosen


def parse_grid(texts: Sequence[str], config: configs.Config) -> dict[str, list[Any]]:
    """["config.attention.num_features=16,32"] -> {"attention.num_features": [16, 32]}.

    Raises:
        ValueError: for a field that is none or is compared already, or values of another type.
    """
    grid: dict[str, list[Any]] = {}
    flat = configs.flatten(config)
    for text in texts:
        name, _, values = text.partition("=")
        field = name.removeprefix("config.")
        if not name.startswith("config.") or field not in flat:
            raise ValueError(unknown("--grid", name, [f"config.{field}" for field in flat]))
        if field in grid or field in ("seed", "attention.kind", "attention.coupling"):
            raise ValueError(f"--grid {name}: give each field once; seeds and couplings have flags")
        grid[field] = [configs.parse(field, value, flat[field]) for value in values.split(",")]
    return grid


def chosen_baseline(chosen: Sequence[Setting], name: str) -> str:
    """The coupling that the others are compared with: by default the first that is not softmax.

    Raises:
        ValueError: when there is no such coupling, or not at every point.
    """
    couplings = list(dict.fromkeys(setting.coupling for setting in chosen))
    name = name or next((each for each in couplings if each != SOFTMAX), couplings[0])
    if name not in couplings:
        raise ValueError(unknown("--baseline", name, couplings))
    there = {setting.point for setting in chosen if setting.coupling == name}
    missing = sorted({setting.point for setting in chosen} - there)
    if missing:
        raise ValueError(f"--baseline={name} has no run with {missing[0] or 'the other values'}")
    return name


def compare(
    config: configs.Config,
    out: Path,
    *,
    couplings: Sequence[str],
    num_seeds: int,
    grid: Sequence[str] = (),
    baseline: str = "",
) -> str:
    """Trains what has not been trained, and writes the report; returns it as markdown.

    On several hosts all train, and no report is written: that takes the same call on one host.

    Args:
        config: of all runs, but for what is compared.
        out: folder.
        couplings: names, or "softmax".
        num_seeds: of each setting: config.seed, config.seed + 1, ...
        grid: as `--grid`.
        baseline: the coupling that the others are compared with at each point; if empty the first
            of them that is not softmax. With one coupling the first point of the grid.

    Raises:
        ValueError: before anything is trained, for input that cannot be.
        SystemExit: as `loop.train`, when a signal stops it; the same call resumes.
    """
    checkpoint.check_path(out)
    if num_seeds < 1:
        raise ValueError(f"--seeds={num_seeds} must be at least 1")
    chosen = settings(config, couplings, parse_grid(grid, config))
    baseline = chosen_baseline(list(chosen), baseline)
    planned = {
        setting: {
            out / "runs" / setting.folder / f"seed{seed}": dataclasses.replace(each, seed=seed)
            for seed in range(config.seed, config.seed + num_seeds)
        }
        for setting, each in chosen.items()
    }
    for each in planned.values():
        for folder, new in each.items():
            _check(folder, new)
        runs.rate(new, data.load(new.data))
    for setting, each in planned.items():
        for number, (folder, new) in enumerate(each.items(), 1):
            if jax.process_index() == 0:
                print(f"{setting.name}: run {number} of {num_seeds}")
            _train(new, folder)
    if jax.process_count() > 1:
        return "All is trained: the same command on one host, without --distributed, reports.\n"
    return _report({setting: list(each) for setting, each in planned.items()}, out, baseline)


def of_runs(folders: Sequence[Path], out: Path, baseline: str = "") -> str:
    """Reports on finished runs of `vit.train`; returns the report as markdown.

    Args:
        folders: of the runs; the fields in which their configs differ, beside the seed, are
            compared.
        out: folder of the report.
        baseline: as `compare`.

    Raises:
        ValueError: for a folder without a run, a run that has not ended, two of the same setting
            and seed, or a baseline that is missing at a point.
    """
    flat = [configs.flatten(configs.of_run(folder)) for folder in folders]
    same = {"seed", "attention.kind", "attention.coupling", *configs.PLACEMENT}
    names = [n for n in flat[0] if n not in same and len({each[n] for each in flat}) > 1]
    by_setting: dict[Setting, list[Path]] = {}
    for folder, each in zip(folders, flat, strict=True):
        softmax = each["attention.kind"] == SOFTMAX
        coupling = SOFTMAX if softmax else each["attention.coupling"]
        setting = Setting(coupling, tuple((name, each[name]) for name in names))
        by_setting.setdefault(setting, []).append(folder)
    return _report(by_setting, out, chosen_baseline(list(by_setting), baseline))


def _check(folder: Path, config: configs.Config) -> None:
    """Raises ValueError for an invalid config, or when the folder holds another run."""
    configs.validate(config)
    if (folder / "config.json").exists():
        different = configs.differences(configs.of_run(folder), config)
        if different:
            raise ValueError(
                f"{folder} holds a run with another config; take another --out:\n  "
                + "\n  ".join(different)
            )


def _train(config: configs.Config, folder: Path) -> None:
    """Trains to the end; a run that diverges is noted, and not trained again."""
    if files.noted(folder / "diverged.json"):
        return
    try:
        loop.train(config, folder)
    except FloatingPointError as error:
        print(f"{folder}: {error}")
        if jax.process_index() == 0:
            last = runs.last_step(folder / "metrics.jsonl")
            files.note(folder / "diverged.json", {"step": last})


def _read(folders: Sequence[Path]) -> list[report.Run]:
    """The runs of one setting.

    Raises:
        ValueError: for one that has not ended, or has the seed of another.
    """
    found: dict[int, report.Run] = {}
    for folder in folders:
        config, log = configs.of_run(folder), metrics.read(folder / "metrics.jsonl")
        diverged = files.noted(folder / "diverged.json")
        if not diverged and not _ended(config, log):
            raise ValueError(f"{folder} has not ended; the command that began it resumes it")
        if config.seed in found:
            other = found[config.seed].folder
            raise ValueError(f"{folder} has the setting and the seed of {other}, {config.seed}")
        step = diverged["step"] if diverged else None
        found[config.seed] = report.Run(config.seed, folder, log, step)
    return list(found.values())


def _ended(config: configs.Config, log: Sequence[metrics.Record]) -> bool:
    """Return true if the log has the last step of the run, evaluated."""
    if not log or "eval_loss" not in log[-1]:
        return False
    last = log[-1]
    return last["step"] == round(config.num_epochs * last["step"] / last["epoch"])


def _report(folders: Mapping[Setting, Sequence[Path]], out: Path, baseline: str) -> str:
    """Reads the runs, measures their attention and writes the report."""
    found = {setting: _read(each) for setting, each in folders.items()}
    results = []
    for setting, each in found.items():
        measured = []
        try:
            if setting.coupling != SOFTMAX:
                sound = [run.folder for run in each if run.diverged is None]
                measured = [_attention_errors(folder) for folder in sound[:MEASURED]]
        except ValueError as error:  # finished runs may have outlived their data
            print(f"{setting.name}: attention errors are not measured: {error}")
        errors = ([pair[i] for pair in measured] for i in (0, 1))
        results.append(report.Result(setting, each, *errors))
    first = next(iter(folders.values()))[0]
    return report.write(results, baseline, configs.of_run(first), out)


def _attention_errors(folder: Path) -> tuple[float, float]:
    """Attention errors of a run and of uniform attention, means over layers and heads."""
    run = runs.restore(folder)
    rows = attention_report.rows(
        run.task,
        run.model(),
        runs.evaluation_examples(run.dataset, run.config, IMAGES),
        coupling=run.config.attention.coupling,
        num_features=run.config.attention.num_features,
        draws=DRAWS,
    )
    error, uniform = (
        statistics.fmean(row[name] for row in rows)
        for name in ("attention error", "uniform attention")
    )
    return error, uniform
