"""Accuracy of each class, and the confusion matrix.

`python -m vit.evaluate --workdir=RUN --report=classes` writes into the folder of the run

    classes.csv, classes.md    for each class: index, name, images, top-1 and top-5 accuracy
    confusion.csv              images by true class (rows) and predicted class (columns)

Examples with mask 0, the padding of the last batch, are not counted. Ties count against the label,
as in `vit.model.classification.counts`: an image is right if no other logit is at least as large
(or NaN), so the diagonal of the confusion matrix is top-1.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from vit.data import Batch
from vit.model import ViT
from vit.model.classification import label_rank
from vit.reports import metrics, report


class Tally(NamedTuple):
    """Counts over all examples."""

    confusion: np.ndarray
    """(classes, classes) int64: true class, predicted class."""
    top5: np.ndarray
    """(classes,) int64: images whose label is among the five likeliest."""


def outcomes(
    logits: Float[Array, "b classes"], labels: Integer[Array, " b"]
) -> tuple[Integer[Array, " b"], Integer[Array, " b"]]:
    """Return the predicted class, and the number of other classes at least as likely."""
    rank = label_rank(logits, labels)
    is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
    # NaN counts as likeliest; -inf stays above the label, which cannot be the other class
    others = jnp.nan_to_num(logits, nan=jnp.inf, neginf=jnp.finfo(logits.dtype).min)
    other = jnp.argmax(jnp.where(is_label, -jnp.inf, others), axis=-1)
    return jnp.where(rank == 0, labels, other), rank


def tally(model: ViT, batches: Iterable[Batch], num_classes: int) -> Tally:
    """Count the unmasked examples.

    Args:
        model: in evaluation mode.
        batches: image, label, mask, as from `vit.data.eval_batches`.
        num_classes: width of the logits.
    """
    step = nnx.jit(lambda model, images, labels: outcomes(model(images)[0], labels))
    confusion = np.zeros((num_classes, num_classes), np.int64)
    top5 = np.zeros(num_classes, np.int64)
    for batch in batches:
        images, labels = jnp.asarray(batch["image"]), jnp.asarray(batch["label"])
        predicted, rank = jax.device_get(step(model, images, labels))
        real = np.asarray(batch["mask"]) > 0
        label = np.asarray(labels)[real]
        np.add.at(confusion, (label, predicted[real]), 1)
        np.add.at(top5, label, rank[real] < 5)
    return Tally(confusion, top5)


def rows(counted: Tally, names: Sequence[str]) -> list[metrics.Record]:
    """Return one record for each class; accuracies are NaN for a class without images."""
    images = counted.confusion.sum(axis=1)
    with np.errstate(invalid="ignore"):
        top1, top5 = np.diag(counted.confusion) / images, counted.top5 / images
    columns = range(len(names)), names, images.tolist(), top1.tolist(), top5.tolist()
    head = ("class", "name", "images", "top-1", "top-5")
    return [dict(zip(head, row, strict=True)) for row in zip(*columns, strict=True)]


def write(counted: Tally, names: Sequence[str], folder: Path) -> list[metrics.Record]:
    """Write `classes.csv`, `classes.md` and `confusion.csv`; return the rows of the first."""
    records = rows(counted, names)
    report.table(records, folder / "classes")
    lines = zip(names, counted.confusion.tolist(), strict=True)
    report.write_csv(
        folder / "confusion.csv",
        [["true \\ predicted", *names], *([name, *counts] for name, counts in lines)],
    )
    return records


def summary(counted: Tally, records: Sequence[metrics.Record], worst: int = 10) -> str:
    """Return overall accuracies and the classes with the lowest top-1 accuracy, as text."""
    images = counted.confusion.sum()
    lines = [
        f"top-1 {np.trace(counted.confusion) / images:.4f},"
        f" top-5 {counted.top5.sum() / images:.4f} of {images} images;"
        " the classes with the lowest top-1 accuracy:"
    ]
    wrong = counted.confusion - np.diag(np.diag(counted.confusion))
    for r in sorted((r for r in records if r["images"]), key=lambda r: r["top-1"])[:worst]:
        row = wrong[r["class"]]
        taken_for = f"; most often taken for {records[int(np.argmax(row))]['name']}"
        lines.append(
            f"  {r['class']:5d} {r['name']}: top-1 {r['top-1']:.4f}, top-5 {r['top-5']:.4f}"
            f" of {r['images']}{taken_for * bool(row.any())}"
        )
    return "\n".join(lines)
