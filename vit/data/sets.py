"""Data sets by name: scikit-learn's digits, and those of TFDS in a folder."""

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from performer.choices import unknown
from vit import config
from vit.config.cli import command
from vit.data.records import Dataset, fingerprint
from vit.data.sources import forms
from vit.storage import buckets

ARRAYS = "arrays"
"""Name of the data set of `vit.fit`, which is in no folder."""

ASKED = 16
"""Files whose sizes are requested at once."""


def load(data: config.Data) -> Dataset:
    """Open the data set that the config names, without decoding anything.

    Raises:
        ValueError: if the name, the directory or a split is unknown (the message lists the
            choices), the data set is damaged or not one of labelled grey or RGB images, the
            training split is smaller than one batch, or the evaluation split is empty.
    """
    if not data.name:
        raise ValueError(
            "config.data.name='' must name a data set: a run of vit.pretrained without data only"
            " predicts; make one of the same weights with --config=CONFIG"
        )
    if data.name == ARRAYS and not data.dir:
        raise ValueError(
            f"config.data.name={ARRAYS!r}: this run was trained by vit.fit on arrays, which its"
            " folder does not hold. The same call of vit.fit resumes it. vit.load, vit.predict and"
            " vit.export work without them, and vit.evaluate --name=NAME --data_dir=DIR evaluates"
            " on a prepared data set"
        )
    dataset = _digits(data) if data.name == "digits" else _from_tfds(data)
    check(dataset, data, f" of {data.name!r}")
    return dataset


KNOWN = {
    "digits": (1_437, 360, 10, 1),
    "fashion_mnist": (60_000, 10_000, 10, 1),
    "imagenet2012": (1_281_167, 50_000, 1_000, 3),
    "imagenette": (9_469, 3_925, 10, 3),
    "places365": (1_803_460, 36_500, 365, 3),
    "inaturalist2021": (2_686_843, 100_000, 10_000, 3),
}
"""Public data sets: training and evaluation examples, classes, channels."""


def sized(data: config.Data, size: Sequence[int] = (), is_absent: bool = False) -> Dataset | None:
    """Return a data set of known size without examples; None to open the one of the config.

    It is opened if its folder exists and neither a size is given nor `is_absent` true.

    Args:
        data: section of the config.
        size: numbers of training examples, evaluation examples, classes and channels.
        is_absent: True to open nothing.

    Raises:
        ValueError: when the size is not known.
    """
    folder = buckets.path(data.dir) / data.name
    is_there = data.name == "digits" or folder.exists()
    if not is_absent and not size and (is_there or data.name not in KNOWN):
        return None
    if not size and data.name not in KNOWN:
        raise ValueError(
            f"the size of config.data.name={data.name!r} is not known (known are"
            f" {', '.join(KNOWN)}): give --data_size=TRAIN,EVALUATION,CLASSES,CHANNELS"
        )
    train, evaluation, classes, channels = size if size else KNOWN[data.name]
    names = tuple(map(str, range(classes)))
    return Dataset(range(train), range(evaluation), names, channels)


def check(dataset: Dataset, data: config.Batches, name: str = "") -> None:
    """Raise ValueError if training has less than a batch, or evaluation nothing."""
    if not len(dataset.evaluation):
        raise ValueError(f"the evaluation split {data.split!r}{name} is empty")
    if len(dataset.train) < data.batch_size:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is larger than the training split{name} with"
            f" {len(dataset.train)} records"
        )


def check_apart(dataset: Dataset) -> None:
    """Raise ValueError if training and evaluation have records in common."""
    if dataset.shared:
        raise ValueError(dataset.shared)


def splits(data: config.Data) -> dict[str, int]:
    """Return the number of records of each split of a TFDS data set.

    Raises:
        ValueError: if the data set does not exist.
    """
    builder = _builder(data)
    return {name: split.num_examples for name, split in builder.info.splits.items()}


def _digits(data: config.Data) -> Dataset:
    """Return scikit-learn's digits: 1,797 images of 8 x 8, always the same fifth held out."""
    for field, only in {"train_split": "train", "eval_split": "test", "dir": ""}.items():
        if getattr(data, field) != only:
            raise ValueError(
                f"config.data.{field}={getattr(data, field)!r} must be {only!r} for 'digits', which"
                " comes with scikit-learn"
            )
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    records = [{"image": i, "label": label} for i, label in zip(images, labels, strict=True)]
    train, evaluation = train_test_split(records, test_size=0.2, random_state=0, stratify=labels)
    return Dataset(list(train), list(evaluation), tuple(map(str, range(10))), channels=1)


def _from_tfds(data: config.Data) -> Dataset:
    import tensorflow_datasets as tfds

    builder = _builder(data)
    try:
        features, known = builder.info.features, builder.info.splits
        class_names, channels = tuple(features["label"].names), features["image"].shape[-1]
        if not class_names or channels not in (1, 3):
            raise ValueError(f"{len(class_names)} classes, {channels} channels")
    except Exception as error:  # dataset_info.json may hold anything
        raise _unreadable(data, error) from error
    sources = []
    for field, split in [("train_split", data.train_split), ("eval_split", data.eval_split)]:
        try:
            source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
            len(source)
        except Exception as error:  # TFDS raises many kinds for what stands in brackets
            known_name = split.partition("[")[0] in known  # TFDS says what is wrong in brackets
            reason = f" ({str(error).splitlines()[-1]})" if known_name else ""
            raise ValueError(
                f"config.data.{field}={split!r} is no split of {data.name!r}, or part of one, as"
                f" 'train[:500]' or 'train[90%:]'; choices: {', '.join(known)}{reason}"
            ) from error
        sources.append(source)
    folder = epath.Path(builder.data_path)
    files = fingerprint(lambda: _files(folder))
    read = (known[x].file_instructions for x in (data.train_split, data.eval_split))
    number = _shared(*read)
    evaluate = command("evaluate", workdir="RUN", split=data.eval_split)
    shared = (
        f"config.data.train_split={data.train_split!r} and config.data.eval_split"
        f"={data.eval_split!r} have {number} records in common: measured would be what was"
        " memorised. Take parts that do not overlap, such as train[:90%] and train[90%:]. A trained"
        f" run is evaluated on its training examples by {evaluate}"
    )
    return Dataset(
        *sources,
        class_names=class_names,
        channels=channels,
        fingerprint=files,
        shared=shared * (number > 0),
    )


def _shared(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Return the number of records in both lists of TFDS's parts of files."""
    parts: dict[str, list[Any]] = {}
    for part in first:
        parts.setdefault(part.filename, []).append(part)
    ends = ((a, b) for b in second for a in parts.get(b.filename, ()))
    return sum(max(0, min(a.skip + a.take, b.skip + b.take) - max(a.skip, b.skip)) for a, b in ends)


def _files(folder: epath.Path) -> Iterator[Any]:
    """Yield the names and sizes of the files of a data set, and what its description holds."""
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    with ThreadPoolExecutor(ASKED) as pool:  # a bucket has many files, and answers late
        stats = list(pool.map(lambda path: path.stat(), paths))
    for path, stat in zip(paths, stats, strict=True):
        yield f"{path.name} {0 if stat.is_directory else stat.length}"
        if path.suffix in (".json", ".txt"):
            yield path.read_bytes()


def _builder(data: config.Data) -> Any:
    """Return TFDS's builder of the data set; its folder is read, not code that has its name.

    Raises:
        ValueError: if the folder has no data set of that name (the message lists those that it
            has), or its description cannot be read.
    """
    from tensorflow_datasets.core import read_only_builder

    root = epath.Path(buckets.path(data.dir))
    folders = _folders(root) if data.dir else {}
    if data.name in folders:
        try:
            return read_only_builder.builder_from_directory(folders[data.name])
        except Exception as error:  # the files may hold anything
            raise _unreadable(data, error) from error
    for folder in (root / data.name, *([root] * (not folders))) if data.dir else ():
        if forms.is_raw(Path(folder)):
            prepare = command("prepare", source=folder, out="data")
            raise ValueError(f"{folder} holds raw pictures: make a data set of them by {prepare}")
    prepare = command("prepare", source="FOLDER", out=data.dir or "data")
    names = unknown("config.data.name", data.name, ["digits", *folders])
    raise ValueError(
        f"{names} (those in config.data.dir={data.dir!r}; make a data set of pictures by {prepare})"
    )


def _unreadable(data: config.Data, error: Exception) -> ValueError:
    return ValueError(
        f"the description of {data.name!r} in config.data.dir={data.dir!r} cannot be read, or is"
        f" not of images of 1 or 3 channels with a label: {type(error).__name__}: {error}"
    )


def _folders(root: epath.Path) -> dict[str, epath.Path]:
    """Return the newest version of each data set in a folder by name, or name/config."""
    literal = epath.Path(glob.escape(str(root)))  # epath takes the folder for a pattern
    infos = [*literal.glob("*/*/dataset_info.json"), *literal.glob("*/*/*/dataset_info.json")]
    versions = [f.parent for f in infos if re.fullmatch(r"\d+\.\d+\.\d+", f.parent.name)]
    versions.sort(key=lambda folder: tuple(map(int, folder.name.split("."))))
    newest = {str(version.parent.relative_to(root)): version for version in versions}
    return dict(sorted(newest.items()))
