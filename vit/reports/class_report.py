"""Accuracy of each class, and the confusion matrix.

`performer-vit evaluate --workdir=RUN --report=classes` writes into the folder of the run

    classes.csv, classes.md    for each class: index, name, images, top-1 and top-5 accuracy
    confusion.csv              images by true class (rows) and predicted class (columns)

Examples with mask 0, the padding of the last batch, are not counted. Ties count against the label,
as in `vit.model.classification.counts`: an image is right if no other logit is at least as large
(or NaN), so the diagonal of the confusion matrix is top-1.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from vit import config as configs
from vit.data import Batch
from vit.model import classification
from vit.model.classification import label_rank
from vit.reports import report
from vit.run import runs


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


def tally(model: Any, batches: Iterable[Batch], num_classes: int) -> Tally:
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


def write(counted: Tally, names: Sequence[str], folder: Path) -> str:
    """Write `classes.csv`, `classes.md` and `confusion.csv`; accuracies are NaN without images.

    Returns:
        Overall accuracies and the classes with the lowest top-1 accuracy, as text.
    """
    (confusion, top5), images = counted, counted.confusion.sum(axis=1)
    right = np.diag(confusion)
    tops = {"top-1": right, "top-5": top5} if len(names) > 5 else {"top-1": right}
    with np.errstate(invalid="ignore"):
        columns = [x.tolist() for x in (images, *(count / images for count in tops.values()))]
    head = ("class", "name", "images", *tops)
    rows = list(zip(range(len(names)), names, *columns, strict=True))
    report.table([dict(zip(head, row, strict=True)) for row in rows], folder / "classes")
    lines = ([name, *counts] for name, counts in zip(names, confusion.tolist(), strict=True))
    report.write_csv(folder / "confusion.csv", [["true \\ predicted", *names], *lines])
    shown = [f"{name} {count.sum() / images.sum():.4f}" for name, count in tops.items()]
    text = (
        f"{', '.join(shown)} of {images.sum()} images; the classes with the lowest top-1 accuracy:"
    )
    wrong = confusion - np.diag(right)
    worst = sorted((row for row in rows if row[2]), key=lambda row: row[3])
    for number, name, count, *shares in worst[:10]:
        taken_for = f"; most often taken for {names[int(np.argmax(wrong[number]))]}"
        shown_shares = ", ".join(f"{top} {x:.4f}" for top, x in zip(tops, shares, strict=True))
        text += f"\n  {number:5d} {name}: {shown_shares} of {count}"
        text += taken_for * bool(wrong[number].any())
    return text


def report_classes(workdir: Path, step: int | str | None = None) -> str:
    """Write the files for a run into its folder; return the text of `write`.

    Raises:
        ValueError: as `runs.restore`, or for a run of another task.
    """
    classification.check_images(workdir, configs.of_run(workdir))
    run = runs.restore(workdir, step=step)
    counted = tally(run.model(), run.eval_batches(), run.dataset.num_classes)
    return write(counted, run.dataset.class_names, workdir)
