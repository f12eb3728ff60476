"""Metrics: masked counts, the log `metrics.jsonl`, the progress bar and the learning curve."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
from jaxtyping import Array, Float, Integer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]


def counts(
    logits: Float[Array, "b classes"], labels: Integer[Array, " b"], mask: Float[Array, " b"]
) -> dict[str, Array]:
    """How many examples there are, and for how many the label is among the 1 or 5 likeliest.

    Examples with mask 0 count nowhere. Ties go against the label: a class counts as likelier
    than the label when its logit is at least as large.
    """
    rank = label_rank(logits, labels)
    top1, top5 = (jnp.sum((rank < k) * mask) for k in (1, 5))
    return {"top1": top1, "top5": top5, "examples": jnp.sum(mask)}


def label_rank(
    logits: Float[Array, "b classes"], labels: Integer[Array, " b"]
) -> Integer[Array, " b"]:
    """How many other classes are at least as likely as the label; all of them where it is NaN."""
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    return jnp.sum(~(logits < label_logit), axis=-1) - 1


def append(path: Path, record: Record) -> None:
    """Adds one line to the log."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def summary_writer() -> type:
    """tensorboardX's `SummaryWriter`.

    Raises:
        ValueError: when tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("--tensorboard needs tensorboardX: pip install tensorboardX") from error
    return SummaryWriter


@contextlib.contextmanager
def writer(log: Path, tensorboard: type | None = None) -> Iterator[Callable[[Record], None]]:
    """A function that adds a record to the log, and to TensorBoard's folder beside it.

    Args:
        log: the file.
        tensorboard: `summary_writer()`, or None for the log alone.
    """
    if tensorboard is None:
        yield partial(append, log)
        return

    def write(record: Record) -> None:
        append(log, record)
        for name, value in record.items():
            board.add_scalar(name, value, record["step"])

    purge = read(log)[-1]["step"] + 1 if read(log) else 0
    with tensorboard(str(log.parent / "tensorboard"), purge_step=purge) as board:
        yield write


def read(path: Path) -> list[Record]:
    """The records of a log, lines of the same step as one; a last line that was cut off is not."""
    records: dict[int, Record] = {}
    for line in _lines(path):
        records[line["step"]] = records.get(line["step"], {}) | line
    return list(records.values())


def keep_up_to(path: Path, step: int) -> list[Record]:
    """Drops the records after `step`, which a resumed run will write again; returns the others."""
    temporary = path.with_suffix(".tmp")
    kept = [json.dumps(line) + "\n" for line in _lines(path) if line["step"] <= step]
    temporary.write_text("".join(kept))
    temporary.replace(path)
    return read(path)


def _lines(path: Path) -> list[Record]:
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def progress_bar(shown: bool = True) -> Progress:
    """A bar with steps, loss, accuracy, images/s and the time left."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        disable=not shown,
    )


def plot_learning_curve(log: Path, png: Path) -> None:
    """Loss and accuracy against the step, for training and held-out images."""
    records = read(log)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        for split, marker in [("train", ""), ("eval", "o")]:
            points = [(r["step"], r[f"{split}_{name}"]) for r in records if f"{split}_{name}" in r]
            if points:
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=split)
        axis.set(xlabel="step", ylabel=name)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(png, dpi=120)
    plt.close(figure)


def status(record: Record) -> str:
    """What the progress bar says of a record."""
    mfu = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    bad = f"  {record['bad_records']} unreadable records" if record["bad_records"] else ""
    return (
        f"loss {record['train_loss']:.3f}  accuracy {record['train_accuracy']:.3f}"
        f"  {record['images_per_second']:,.0f} images/s{mfu}{bad}"
    )
