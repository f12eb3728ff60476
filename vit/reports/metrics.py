"""Metrics: the log `metrics.jsonl` and the learning curve."""

import contextlib
import json
import math
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vit.reports import report
from vit.storage import files

Record = dict[str, Any]
SHARES = "eval_accuracy", "eval_top5"
"""Measures that are shares of the examples."""


def last(path: Path) -> Record:
    """Return the last record of the log of a run that has ended.

    Raises:
        ValueError: if it lacks what the end of a run writes.
    """
    record = (read(path) or [{}])[-1]
    if missing := {"epoch", "seconds", "eval_loss", "eval_examples"} - record.keys():
        raise ValueError(
            f"the last line of {path} lacks {', '.join(sorted(missing))}: the log was changed or"
            " removed. Restore it; vit.evaluate evaluates the run without it"
        )
    return record


def append(path: Path, record: Record) -> None:
    """Add one line to the log."""
    files.append(path, json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """Return the records of a log, one for each step; damaged lines are left out."""
    return _merged(_lines(path))


def best(log: Path, steps: Container[int]) -> int | None:
    """Return the step of the best evaluation among these; None if there was no evaluation.

    By eval_accuracy, or by eval_loss if the task has no accuracy; the first of equals.
    """
    evaluated = [
        (-record.get("eval_accuracy", 0.0), record["eval_loss"], record["step"])
        for record in read(log)
        if record["step"] in steps and isinstance(record.get("eval_loss"), float)
    ]
    return min(evaluated)[-1] if evaluated else None


def keep_up_to(path: Path, step: int) -> list[Record]:
    """Drop damaged lines and the records after `step`, which a resumed run will write again."""
    kept = [line for line in _lines(path) if line["step"] <= step]
    files.write(path, "".join(json.dumps(line) + "\n" for line in kept))
    last = kept[-1]["step"] if kept else 0
    if last < step:
        print(f"{path} ends at step {last}, the checkpoint is of step {step}: records are missing")
    return _merged(kept)


def _merged(lines: list[Record]) -> list[Record]:
    records: dict[int, Record] = {}
    for line in lines:
        records.setdefault(line["step"], {}).update(line)
    return list(records.values())


def _lines(path: Path) -> list[Record]:
    """Return the readable lines; a kill may have cut one off."""
    records = []
    for line in files.read(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = files.parse_json(line)
            is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
            records += [record] * is_record
    return records


def plot_learning_curve(log: Path, png: Path) -> None:
    """Plot each metric against the step, for training and held-out examples."""
    records = read(log)
    names = _loss_first({name for record in records for name in record})
    if not names:  # the log of a finished run was removed
        return
    with report.style():
        drawn, axes = report.figure(png, columns=len(names))
        for axis, name in zip(np.atleast_1d(axes), names, strict=True):
            for split, marker in [("train", ""), ("eval", "o")]:
                key = f"{split}_{name}"
                if points := [(r["step"], r[key]) for r in records if key in r]:
                    axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=split)
            axis.set(xlabel="step", ylabel=name)
            axis.legend()
        report.save(drawn, png)


def _loss_first(names: Iterable[str]) -> list[str]:
    """Return the names of the training metrics, without the prefix "train_"."""
    training = [name.removeprefix("train_") for name in names if name.startswith("train_")]
    return sorted(training, key=lambda name: (name != "loss", name))


def results(record: Record) -> str:
    """Return the results of an evaluation: "accuracy 0.9722, top5 1.0000, loss 0.1100"."""
    values = {k.removeprefix("eval_"): x for k, x in record.items() if k.startswith("eval_")}
    shown = [name for name, x in values.items() if isinstance(x, float) and name != "loss"]
    return ", ".join(f"{name} {values[name]:.4f}" for name in (*shown, "loss"))


def evaluation(record: Record) -> str:
    """Return an evaluation, a line for each number; shares of examples with standard errors."""
    lines, count = [], record.get("eval_examples")
    for name, value in record.items():
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        if count and name in SHARES:
            text += f" ± {math.sqrt(value * (1 - value) / count):.2g}"
        lines.append(f"{name:14} {text}")
    return "\n".join(lines)


def status(record: Record, rate: str, waiting: float = 0.0) -> str:
    """Return a record of the log as the line that a run prints.

    Args:
        record: record of the log.
        rate: name of its throughput.
        waiting: share of the time without a batch; shown from a tenth on.
    """
    mfu = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    values = [f"{name} {record[f'train_{name}']:.3f}" for name in _loss_first(record)]
    noun = rate.removesuffix("_per_second")
    waits = f"  waiting for data {waiting:.0%}" if waiting > 0.1 else ""
    return f"{'  '.join(values)}  {record[rate]:,.0f} {noun}/s{waits}{mfu}"
