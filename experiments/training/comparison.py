"""Couplings, or values of any field of a config, over several seeds: `experiments.compare` runs
it."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import statistics
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.training import ensemble, in_turn, report
from performer.choices import unknown
from vit import attention_report, checkpoint, data, files, metrics, runs, safety
from vit import config as configs

SOFTMAX = "softmax"
IMAGES, DRAWS, MEASURED = 4, 4, 3
"""Attention errors: on so many images, over so many draws, of so many seeds."""
LONGEST = 200
"""Characters of a folder's name before it is shortened."""


class Setting(NamedTuple):
    """One point of the grid."""

    coupling: str
    values: tuple[tuple[str, Any], ...]
    """The other fields that are compared: (("attention.num_features", 32), ...)."""
    config: Any
    """Of its runs; None where it only names them."""

    @property
    def point(self) -> str:
        """The values in words; empty where only couplings are compared."""
        return ", ".join(f"{name.split('.')[-1]}={value}" for name, value in self.values)

    @property
    def name(self) -> str:
        """Coupling and point."""
        return f"{self.coupling}, {self.point}" if self.values else self.coupling

    @property
    def folder(self) -> str:
        """Where its runs lie: characters that mean something in a path are written as %2F."""
        parts = [self.coupling, *(f"{n}={v}" for n, v in self.values)]
        name = urllib.parse.quote("_".join(parts), safe=" ,=+")
        if len(name) <= LONGEST:
            return name
        return f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def settings(
    config: configs.Config, couplings: Sequence[str], grid: dict[str, list[Any]]
) -> list[Setting]:
    """Every coupling at every point of the grid, all of them valid.

    Raises:
        ValueError: for a coupling, field or value that cannot be; the message names it.
    """
    repeated = sorted({name for name in couplings if couplings.count(name) > 1})
    if repeated or not couplings:
        raise ValueError(f"--couplings={','.join(couplings)}: name each once, and at least one")
    chosen = []
    for point in itertools.product(*grid.values()):
        values = tuple(zip(grid, point, strict=True))
        for name in couplings:
            change = {"attention.kind": SOFTMAX}
            if name != SOFTMAX:
                change = {"attention.kind": "performer", "attention.coupling": name}
            new = configs.with_values(config, dict(values) | change)
            configs.validate(new)
            chosen.append(Setting(name, values, new))
    folders = [setting.folder for setting in chosen]
    shared = sorted({folder for folder in folders if folders.count(folder) > 1})
    if shared:
        raise ValueError(f"--grid: several settings would share the folder {shared[0]!r}")
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
        repeated = [value for value in grid[field] if grid[field].count(value) > 1]
        if repeated:
            raise ValueError(f"--grid {text}: {repeated[0]!r} is there more than once")
    return grid


def claim(out: Path, grid: dict[str, Any]) -> None:
    """Notes in `out` what is compared.

    Raises:
        ValueError: when it holds another comparison; the message names what differs.
    """
    path = out / "grid.json"
    if path.exists():
        try:
            old = dict(json.loads(files.read(path)))
            if "config" in old:  # of a version that had fewer fields
                old["config"] = dataclasses.asdict(configs.from_dict(old["config"]))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, which says what is compared, is damaged ({error}); bring it back, or take"
                " another --out"
            ) from error
        different = [k for k in grid if old.get(k) != json.loads(json.dumps(grid[k]))]
        if different:
            lines = [f"{k}: {old.get(k)!r} -> {grid[k]!r}" for k in different]
            raise ValueError(
                f"{out} holds another comparison; take another --out:\n  " + "\n  ".join(lines)
            )
        return
    if out.exists() and {p.name for p in out.iterdir()} - {"lock", "grid.json.tmp", "grid.tmp"}:
        raise ValueError(f"{out} is not empty and holds no comparison; take another --out")
    files.write(path, json.dumps(grid, indent=2) + "\n")


def compare(
    config: configs.Config,
    out: Path,
    *,
    couplings: Sequence[str],
    num_seeds: int,
    grid: Sequence[str] = (),
    baseline: str = "",
    one_by_one: bool = False,
) -> str:
    """Trains what has not been trained, and writes the report; returns it as markdown.

    Args:
        config: of all runs, but for what is compared.
        out: folder.
        couplings: names, or "softmax".
        num_seeds: of each setting: config.seed, config.seed + 1, ...
        grid: as `--grid`.
        baseline: the coupling that the others are compared with at each point; if empty the first
            of them that is not softmax. With one coupling the first point of the grid.
        one_by_one: the seeds in turn, each on all devices; on several hosts no report is written.

    Raises:
        ValueError: before anything is trained, for input that cannot be.
    """
    checkpoint.check_path(out)
    if num_seeds < 1:
        raise ValueError(f"--seeds={num_seeds} must be at least 1")
    all_settings = settings(config, couplings, parse_grid(grid, config))
    baseline = baseline or next((name for name in couplings if name != SOFTMAX), couplings[0])
    if baseline not in couplings:
        raise ValueError(unknown("--baseline", baseline, couplings))
    totals = []
    for setting in all_settings:
        dataset = data.load(setting.config.data)
        runs.rate(setting.config, dataset)
        totals.append(runs.length(setting.config, dataset)[1])
    seeds = [config.seed + i for i in range(num_seeds)]
    configs.validate(dataclasses.replace(config, seed=seeds[-1]))
    contents = {
        "config": dataclasses.asdict(config),
        "couplings": list(couplings),
        "seeds": seeds,
        "grid": list(grid),
        "baseline": baseline,
    }
    if one_by_one:
        return _in_turn(all_settings, seeds, contents, out)
    with safety.exclusive(out), metrics.progress_bar() as bar:
        claim(out, contents)
        progress, done, results = bar.add_task("compare", total=sum(totals), status=""), 0, []
        for setting, num_steps in zip(all_settings, totals, strict=True):

            def advance(
                step: int, record: metrics.Record, done: int = done, name: str = setting.name
            ) -> None:
                rate = f"  {record['images_per_second']:,.0f} images/s" if record else ""
                bar.update(progress, completed=done + step, status=name + rate)

            folder = out / "runs" / setting.folder
            trained = ensemble.train(setting.config, seeds, folder, advance=advance)
            named = setting.coupling, setting.point, setting.config, trained
            errors = _attention_errors(setting, trained, folder)
            place = str(folder.relative_to(out))
            results.append(report.Result(*named, *errors, place))
            done += num_steps
            bar.update(progress, completed=done)
        return report.write(results, contents, out)


def _in_turn(
    all_settings: Sequence[Setting], seeds: Sequence[int], contents: dict[str, Any], out: Path
) -> str:
    """`compare`, one run of `vit.train` after another."""
    lead, alone = jax.process_index() == 0, jax.process_count() == 1
    with safety.exclusive(out) if lead else contextlib.nullcontext():
        if lead:
            claim(out, contents)
        folders = [out / "runs" / setting.folder for setting in all_settings]
        trained = [
            in_turn.train(setting.config, seeds, folder)
            for setting, folder in zip(all_settings, folders, strict=True)
        ]
        if not alone:
            return "All is trained: the same command on one host, without --distributed, reports.\n"
        results = [
            _result(setting, of, folder, str(folder.relative_to(out)))
            for setting, of, folder in zip(all_settings, trained, folders, strict=True)
        ]
        return report.write(results, contents, out)


def of_runs(folders: Sequence[Path], out: Path, baseline: str = "") -> str:
    """Reports on finished runs of `vit.train`; returns the report as markdown.

    Args:
        folders: of the runs; what differs in their configs, beside the seed, is compared.
        out: folder of the report.
        baseline: as `compare`.

    Raises:
        ValueError: for a run that is none, has not ended, or is one too many; or when the baseline
            has no run that another one could be compared with.
    """
    by_setting: dict[Setting, list[Path]] = {}
    for folder, setting in zip(folders, _settings_of(folders), strict=True):
        by_setting.setdefault(setting, []).append(folder)
    trained = [in_turn.read(each) for each in by_setting.values()]
    couplings = list(dict.fromkeys(setting.coupling for setting in by_setting))
    baseline = baseline or next((name for name in couplings if name != SOFTMAX), couplings[0])
    points = {setting.point for setting in by_setting}
    have = {setting.point for setting in by_setting if setting.coupling == baseline}
    if len(couplings) > 1 and points - have:
        raise ValueError(
            f"--baseline={baseline} has no run with {', '.join(sorted(points - have)) or 'these'}"
        )
    contents = {
        "config": dataclasses.asdict(configs.of_run(folders[0])),
        "couplings": couplings,
        "seeds": sorted({seed for each in trained for seed in each.seeds}),
        "grid": [],
        "runs": [str(folder) for folder in folders],
        "baseline": baseline,
    }
    with safety.exclusive(out):
        claim(out, contents)
        results = [
            _result(
                Setting(setting.coupling, setting.values, configs.of_run(each.folders[0])),
                each,
                out / "attention" / setting.folder,
                os.path.relpath(each.folders[0], out),
            )
            for setting, each in zip(by_setting, trained, strict=True)
        ]
        return report.write(results, contents, out)


def _settings_of(folders: Sequence[Path]) -> list[Setting]:
    """Of each run the coupling, and the other values in which the runs differ; without a config."""
    flat = [configs.flatten(configs.of_run(folder)) for folder in folders]
    same = {"seed", "attention.kind", "attention.coupling", *configs.PLACEMENT}
    names = [n for n in flat[0] if n not in same and len({each[n] for each in flat}) > 1]
    return [
        Setting(
            SOFTMAX if each["attention.kind"] == SOFTMAX else each["attention.coupling"],
            tuple((name, each[name]) for name in names),
            None,
        )
        for each in flat
    ]


def _result(setting: Setting, trained: in_turn.Finished, notes: Path, place: str) -> report.Result:
    notes.mkdir(parents=True, exist_ok=True)
    try:
        errors = _attention_errors(setting, trained, notes)
    except ValueError as error:  # finished runs may have outlived their data
        print(f"{setting.name}: attention errors are not measured: {error}")
        errors = [], []
    named = setting.coupling, setting.point, setting.config, trained
    return report.Result(*named, *errors, place)


def _attention_errors(
    setting: Setting, trained: ensemble.Ensemble | in_turn.Finished, folder: Path
) -> tuple[list[float], list[float]]:
    """Relative attention error of each of the first seeds, and that of uniform attention.

    Means over layers and heads.
    """
    if setting.coupling == SOFTMAX:
        return [], []
    path = folder / "attention_errors.json"
    noted = files.noted(path)
    if noted and "uniform" in noted:
        return noted["errors"], noted["uniform"]
    dataset, task = runs.subject(setting.config)
    images = runs.evaluation_examples(dataset, setting.config, IMAGES)
    found = {"errors": [], "uniform": []}
    for place in _sound(trained, MEASURED):
        rows = attention_report.rows(
            task,
            trained.model(place),
            images,
            coupling=setting.coupling,
            num_features=setting.config.attention.num_features,
            draws=DRAWS,
        )
        for name, column in [("errors", "attention error"), ("uniform", "uniform attention")]:
            found[name].append(statistics.fmean(row[column] for row in rows))
    files.note(path, found)
    return found["errors"], found["uniform"]


def _sound(trained: ensemble.Ensemble | in_turn.Finished, number: int) -> Iterator[int]:
    sound = (place for place, step in enumerate(trained.diverged) if step is None)
    return itertools.islice(sound, number)
