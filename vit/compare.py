"""Train couplings, or values of any flag, with several seeds, and test the differences.

    performer-vit compare --config=digits \\
        --couplings=softmax,orf,simrf,pnc,pm,pm-antithetic --seeds=8 --out=results/digits
    performer-vit compare --config=digits --couplings=orf,pm \\
        --grid config.attention.num_features=16,32,64 --seeds=4 --out=results/features

"softmax" stands for exact attention; it ignores the other fields of attention, and a grid over
these trains it once. A task without accuracy is compared by its loss and attention errors; one
without a section `attention` by --grid alone. All settings have the same seeds: seed s means the
same initial parameters, order of the data and dropout in each of them. The runs are trained one
after another, each as `vit.train` does on all devices, in `runs/SETTING/seedS`; programs are
compiled once for all seeds of a setting. The folder receives `report.md`, `results` and `curves`
(csv, png), `seeds.csv`, `looks.json`, `run.json` and the runs. The same command resumes a stopped
comparison; more seeds, couplings or values can be added. The level of the tests is spent over the
numbers of seeds at which a report was made (`vit.study.comparison`).

On several hosts each runs the same command with --distributed. When all runs are trained, the same
command on one host, without --distributed, writes the report.

    performer-vit compare --out=results/mine runs/orf0 runs/orf1 runs/pm0 runs/pm1

reports on finished runs of vit.train. It compares the fields in which their configs differ, except
the seed.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from flax import nnx

from performer.choices import unknown
from performer.couplings import DEFAULT
from vit import config as configs
from vit.config import arguments
from vit.reports import attention_report, metrics
from vit.run import devices, loop, runs
from vit.storage import buckets, files
from vit.study import comparison, launch
from vit.study.comparison import FIGURES as FIGURES
from vit.study.comparison import SOFTMAX, Result, Run, Setting
from vit.task import description_of, opened

IMAGES, DRAWS = 4, 4
"""Examples and draws of the attention errors."""
COUPLINGS, SEEDS = ("orf", "pm", DEFAULT), 5
"""Defaults of the command."""


def unread(config: configs.TrainConfig) -> set[str]:
    """Return the fields that a run of this config ignores: of random features, in softmax."""
    flat = configs.flatten(config)
    if flat.get("attention.kind") != SOFTMAX or flat["attention.blocks"]:
        return set()
    return {name for name in flat if name.startswith("attention.")} - {"attention.kind"}


def settings(
    config: configs.TrainConfig, couplings: Sequence[str] | None, grid: Mapping[str, Sequence[Any]]
) -> dict[Setting, configs.TrainConfig]:
    """Return the config of every coupling at every point of the grid.

    Points that differ in fields which a setting ignores are one setting.

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
        change: dict[str, Any] = {"attention.kind": SOFTMAX} if has_attention else {}
        if name not in (SOFTMAX, ""):
            change = {"attention.kind": "performer", "attention.coupling": name}
        ignored = unread(configs.with_values(config, change))
        values = {field: x for field, x in zip(grid, point, strict=True) if field not in ignored}
        setting = Setting(name, tuple(values.items()))
        chosen[setting] = configs.with_values(config, values | change)
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
        baseline: argument of `comparison.baselines`.

    Raises:
        ValueError: before anything is trained, for input that cannot be.
        SystemExit: by `loop.train` when a signal stops it; the same call resumes.
    """
    buckets.check_local(out, "--out=")
    if num_seeds < 1:
        raise ValueError(f"--seeds={num_seeds} must be at least 1")
    fields = parse_grid(grid, type(config))
    chosen = settings(config, couplings, fields)
    comparison.baselines(list(chosen), baseline)
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
        baseline: argument of `comparison.baselines`.

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
    ignored = list(map(unread, all_configs))
    fields = [
        name
        for name in flat[0]
        if name not in same
        and len({x[name] for x, y in zip(flat, ignored, strict=True) if name not in y}) > 1
    ]
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
        ignored = unread(config)
        setting = Setting(coupling, tuple((n, flat[n]) for n in fields if n not in ignored))
        seeds = by_setting.setdefault(setting, {})
        if config.seed in seeds:
            other = seeds[config.seed].folder
            raise ValueError(f"{folder} has the setting and the seed of {other}, {config.seed}")
        seeds[config.seed] = Run(config.seed, folder, log, diverged["step"] if diverged else None)
    results = [Result(setting, list(seeds.values())) for setting, seeds in by_setting.items()]
    results = with_errors(results, baseline)
    return comparison.write(results, baseline, configs.of_run(folders[0]), out)


def with_errors(results: Sequence[Result], baseline: str) -> list[Result]:
    """Measure the attention errors of all settings on the queries and keys of their baselines."""
    by_setting = {result.setting: result for result in results}
    errors: dict[Setting, dict[int, tuple[float, float]]] = {each: {} for each in by_setting}
    on: dict[Setting, list[Setting]] = {}
    for setting, others in comparison.baselines(list(by_setting), baseline).items():
        if setting.coupling not in (SOFTMAX, ""):
            on.setdefault((*others, setting)[0], []).append(setting)
    for other, measured in on.items():
        folders = {each: by_setting[each].runs[0].folder for each in measured}
        new = {setting: configs.of_run(folder) for setting, folder in folders.items()}
        for run in by_setting[other].sound:
            try:
                found = attention_errors(run, new)
            except ValueError as error:  # data that are gone, or features that are not positive
                print(f"{other.name}: attention errors are not measured: {error}")
                break
            for setting, pair in found.items():
                errors[setting][run.seed] = pair
    return [result._replace(errors=errors[result.setting]) for result in results]


def attention_errors(
    run: Run, new: Mapping[Setting, configs.TrainConfig]
) -> dict[Setting, tuple[float, float]]:
    """Measure features of these configs, and uniform attention, on a run's queries and keys.

    The frequencies are drawn by the seed of the run: differences between two couplings are
    independent over the seeds.
    """
    restored = runs.restore(run.folder)
    model, task = restored.model(), restored.task
    project = nnx.jit(task.projections)
    triples = project(model, restored.evaluation_examples(IMAGES))
    others = project(model, next(restored.training_examples(IMAGES)))
    options: Any = dict(draws=DRAWS, seed=run.seed, is_causal=task.is_causal)
    return {
        setting: attention_report.errors_on(triples, others, config, **options)
        for setting, config in new.items()
    }


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
