"""Reassessed labels of ImageNet's validation pictures (ReaL; Beyer et al. 2020).

`real.json` of google-research/reassessed-imagenet is a list of 50,000 lists: all classes that are
right for ILSVRC2012_val_00000001.JPEG, for ..._00000002.JPEG, and so on, by their number in the
order of the 1,000 wnids. An empty one says that none of them is: that picture does not count.
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
    """The lists of the file.

    Raises:
        ValueError: when it holds something else.
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
    """The data set, whose examples have the right classes as "real" (classes,) bool besides.

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
            f"has the file_name {name!r}, and ReaL labels are of"
            f" ILSVRC2012_val_00000001.JPEG to ..._{count:08d}.JPEG: take the validation split of"
            " ILSVRC2012, as vit.prepare writes it now or TFDS does"
        )
    return int(found[1]) - 1


def count(model: ViT, batch: Batch) -> Sums:
    """For how many of the unmasked examples the likeliest class is a right one."""
    logits, _ = model(batch["image"])
    right = jnp.take_along_axis(batch["real"], jnp.argmax(logits, axis=-1)[:, None], axis=-1)
    return {"real": jnp.sum(right[:, 0] * batch["mask"])}


def results(totals: Any) -> dict[str, Any]:
    """Their share: real_accuracy."""
    return {"real_accuracy": totals["real"] / totals["examples"]}
