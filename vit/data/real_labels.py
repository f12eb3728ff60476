"""Reassessed labels of ImageNet's validation pictures (ReaL; Beyer et al. 2020).

`real.json` of google-research/reassessed-imagenet is a list of 50,000 lists: all right classes of
ILSVRC2012_val_00000001.JPEG, ..._00000002.JPEG, and so on, by their number in the order of the
1,000 wnids. Pictures with an empty list are not counted.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit.data import Batch, Dataset, WrongLabelError
from vit.model import ViT
from vit.run import files
from vit.task import Sums

Labels = Sequence[Sequence[int]]


def read(path: Path, num_classes: int) -> Labels:
    """Return the lists of the file.

    Raises:
        ValueError: if it has another content.
    """
    try:
        labels = json.loads(files.read(path))
        if not labels or not {i for each in labels for i in each} <= {*range(num_classes)}:
            raise ValueError("another class")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold a list of lists of classes, each from 0 to {num_classes - 1}: the"
            f" real.json of google-research/reassessed-imagenet ({error})"
        ) from error
    return labels


def with_labels(dataset: Dataset, labels: Labels) -> Dataset:
    """Return the data set with "real" (classes,) bool in each example: its right classes.

    Reading a record that is no validation picture of ILSVRC2012 raises ValueError.
    """

    def row(right: Sequence[int]) -> dict[str, np.ndarray]:
        return {"real": np.isin(np.arange(dataset.num_classes), right)}

    def decode(record: Any, *others: Any) -> Batch:
        return dataset.decode(record, *others) | row(labels[_place(record, len(labels))])

    def blank(*arguments: Any) -> Batch:
        return dataset.blank(*arguments) | row(())

    return dataset._replace(decode=decode, blank=blank)


def _place(record: Any, count: int) -> int:
    name = record.get("file_name", b"")
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    found = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
    if not found or not 1 <= int(found[1]) <= count:
        raise WrongLabelError(
            f"has the file_name {name!r}, and ReaL labels are of ILSVRC2012_val_00000001.JPEG to"
            f" ..._{count:08d}.JPEG: use the validation split of ILSVRC2012 of vit.prepare or TFDS"
        )
    return int(found[1]) - 1


def count(model: ViT, batch: Batch) -> Sums:
    """Count the unmasked examples whose likeliest class is a right one."""
    logits, _ = model(batch["image"])
    right = jnp.take_along_axis(batch["real"], jnp.argmax(logits, axis=-1)[:, None], axis=-1)
    return {"real": jnp.sum(right[:, 0] * batch["mask"])}


def results(totals: Any) -> dict[str, Any]:
    """Return the share of right examples: real_accuracy."""
    return {"real_accuracy": totals["real"] / totals["examples"]}
