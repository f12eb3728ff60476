"""Training on arrays, from a notebook or a script.

import vit

model = vit.fit(images, labels, config="digits", workdir="runs/mine")
model.predict(others).labels
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from performer.choices import unknown
from vit import config as configs
from vit import use
from vit.config import bundled, recipe
from vit.data import Dataset
from vit.data.sources.source import holdout
from vit.run import loop

NAME = "arrays"
"""`config.data.name` of such a run."""


def fit(
    images: Any,
    labels: Any,
    *,
    workdir: str | os.PathLike,
    config: configs.Config | str | None = None,
    values: Mapping[str, Any] | None = None,
    evaluation: float | tuple[Any, Any] = 0.1,
) -> use.Trained:
    """Train on images and labels, as `vit.train` does; the same call resumes a stopped run.

    Args:
        images: n images, one array (n, height, width[, c]) or a sequence of arrays (height, width)
            or (height, width, 1 or 3) of any size, uint8.
        labels: n names or numbers of classes; their sorted values are the classes 0, 1, ...
        workdir: folder of the run; made if it does not exist.
        config: a `vit.config.Config`, the name of a bundled one, or None for one that is derived
            from the images and `values` by `vit.config.recipe.for_images`. Its data set is not
            read, and `data.num_workers` is 0: the arrays are in memory.
        values: fields with other values, as {"num_epochs": 3, "attention.coupling": "pm"}.
        evaluation: (images, labels) to evaluate on; or the share of the images that is held out,
            evenly over the classes, by the seed of the config.

    Returns:
        The result of `vit.load(workdir)`.

    Raises:
        ValueError: before anything is written, if images and labels do not fit, the config or a
            field is unknown, or the config cannot work; and as `vit.run.loop.train`.
    """
    records, class_names = examples(images, labels)
    channels = max(record["image"].shape[-1] for record in records)
    side = int(median(min(record["image"].shape[:2]) for record in records))
    given = {**(values or {}), "data.name": NAME, "data.dir": "", "data.num_workers": 0}
    for name in given:
        if name not in configs.TYPES:
            raise ValueError(unknown("field of the config", name, tuple(configs.TYPES)))
    if config is None:
        config = recipe.for_images(len(records), len(class_names), side, channels, given)
    else:
        config = bundled.config(config) if isinstance(config, str) else config
        config = config.overridden(given)
    if isinstance(evaluation, tuple):
        held_out, _ = examples(*evaluation, class_names)
    else:
        names = [class_names[record["label"]] for record in records]
        held = holdout(names, evaluation, config.seed)
        held_out = [record for record, out in zip(records, held, strict=True) if out]
        records = [record for record, out in zip(records, held, strict=True) if not out]
    dataset = Dataset(records, held_out, class_names, channels)
    loop.train(config, Path(workdir), dataset)
    return use.load(workdir)


def examples(
    images: Any, labels: Any, class_names: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return records {"image", "label"} with numbers for the labels, and the class names.

    Args:
        images: as `fit`.
        labels: as `fit`.
        class_names: existing names; the sorted labels if None.

    Raises:
        ValueError: if arrays are no images, the number of labels differs, or a label is not among
            the names.
    """
    images, labels = use.listed(images), np.asarray(labels)
    if labels.shape != (len(images),):
        raise ValueError(f"{len(images)} images need as many labels, got shape {labels.shape}")
    names = tuple(map(str, np.unique(labels))) if class_names is None else tuple(class_names)
    number = {name: i for i, name in enumerate(names)}
    others = sorted({str(label) for label in labels} - set(names))
    if others:
        raise ValueError(f"the labels {others[:5]} are not among those of training, {names[:20]}")
    return [
        {"image": use.checked(image), "label": number[str(label)]}
        for image, label in zip(images, labels, strict=True)
    ], names
