"""Metrics: masked counts, the log `metrics.jsonl`, the progress bar and the learning curve."""

import json
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
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    rank = jnp.sum(~(logits < label_logit), axis=-1) - 1  # NaN ranks last
    top1, top5 = (jnp.sum((rank < k) * mask) for k in (1, 5))
    return {"top1": top1, "top5": top5, "examples": jnp.sum(mask)}


def append(path: Path, record: Record) -> None:
    """Adds one line to the log."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """The records of a log; a last line that was cut off in writing is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def keep_up_to(path: Path, step: int) -> None:
    """Drops the records after `step`, which a resumed run will write again."""
    kept = [record for record in read(path) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    temporary.replace(path)


def progress_bar() -> Progress:
    """A bar with steps, loss, accuracy, images/s and the time left."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
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
    return (
        f"loss {record['train_loss']:.3f}  accuracy {record['train_accuracy']:.3f}"
        f"  {record['images_per_second']:,.0f} images/s"
    )
