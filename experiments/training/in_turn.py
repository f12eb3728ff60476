"""Runs of `vit.train` as the seeds of a setting: trained one after another, or found finished.

Each has all devices, of all hosts where there are several. It is what a comparison takes where a
seed does not fit on one device beside others, as `experiments.training.ensemble` has them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from vit import config as configs
from vit import files, loop, metrics, use
from vit.model import ViT


class Finished(NamedTuple):
    """What a report reads of an `ensemble.Ensemble`, of runs that lie in folders of their own."""

    seeds: tuple[int, ...]
    records: list[metrics.Record]
    """Of the steps that all logs have: lists over the seeds."""
    diverged: list[int | None]
    folders: tuple[Path, ...]
    temporary_mib: float = float("nan")

    def model(self, place: int) -> ViT:
        """The model of the seed at that place, in evaluation mode."""
        return use.load(self.folders[place]).model


def train(config: configs.Config, seeds: Sequence[int], folder: Path) -> Finished:
    """Trains what has not been trained; a seed that diverges is noted, and the others go on.

    Raises:
        ValueError: as `loop.train`.
        SystemExit: as `loop.train`, when a signal stops it; the same call goes on.
    """
    folders = [folder / f"seed{seed}" for seed in seeds]
    for seed, workdir in zip(seeds, folders, strict=True):
        if files.noted(workdir / "diverged.json"):
            continue
        try:
            loop.train(dataclasses.replace(config, seed=seed), workdir)
        except FloatingPointError as error:
            print(f"{workdir}: {error}")
            if jax.process_index() == 0:
                last = max((r["step"] for r in metrics.read(workdir / "metrics.jsonl")), default=0)
                files.note(workdir / "diverged.json", {"step": last})
    return read(folders)


def read(folders: Iterable[Path]) -> Finished:
    """Finished runs of one setting, or such as have diverged.

    Raises:
        ValueError: for one that is no run, has not ended, or has the seed of another.
    """
    found = {}
    for folder in folders:
        config, records = configs.of_run(folder), metrics.read(folder / "metrics.jsonl")
        noted = files.noted(folder / "diverged.json")
        if not noted and not ended(config, records):
            raise ValueError(f"{folder} has not ended; the command that began it goes on with it")
        if config.seed in found:
            raise ValueError(f"{folder} has the seed of {found[config.seed][0]}, {config.seed}")
        found[config.seed] = folder, records, noted["step"] if noted else None
    places, logs, diverged = zip(*found.values(), strict=True)
    return Finished(tuple(found), merged(logs, diverged), list(diverged), places)


def ended(config: configs.Config, records: Sequence[metrics.Record]) -> bool:
    """Whether the log of a run has its last step, evaluated."""
    if not records or "eval_loss" not in records[-1]:
        return False
    last = records[-1]
    return last["step"] == round(config.num_epochs * last["step"] / last["epoch"])


def merged(
    logs: Sequence[Sequence[metrics.Record]], diverged: Sequence[int | None]
) -> list[metrics.Record]:
    """One record for each step that the logs of all sound runs have: lists over the runs."""
    sound = [log for log, step in zip(logs, diverged, strict=True) if step is None] or list(logs)
    by_step = [{record["step"]: record for record in log} for log in logs]
    steps = sorted(set.intersection(*({record["step"] for record in log} for log in sound)))
    records = []
    for step in steps:
        row = [each.get(step, {}) for each in by_step]
        there = [record for record in row if record]
        names = [n for n in there[0] if n.startswith(("train_", "eval_", "gradient_"))]
        records.append(
            {"step": step, "epoch": there[0]["epoch"]}
            | {name: [record.get(name, float("nan")) for record in row] for name in names}
            | {"seconds": sum(record.get("seconds", 0.0) for record in row)}
            | {"images_per_second": float(np.nanmean([r["images_per_second"] for r in there]))}
        )
    return records
