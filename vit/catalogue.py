"""Data sets by name: scikit-learn's digits, and those of TFDS in a folder."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from performer.choices import unknown
from vit import config, machine
from vit.cli import command
from vit.examples import Dataset
from vit.sources import forms


def load(data: config.Data) -> Dataset:
    """Opens the data set that the config names; nothing is decoded yet.

    Raises:
        ValueError: when the name, the directory or a split is unknown, with the choices; when the
            data set is damaged, or none of labelled grey or RGB images; or when the training split
            is smaller than one batch, or the evaluation split empty.
    """
    if not data.name:
        raise ValueError(
            "config.data.name='' must name a data set: without one a run of vit.pretrained serves"
            " prediction alone; make one with --config=CONFIG, on data, of the same weights"
        )
    dataset = _digits(data) if data.name == "digits" else _from_tfds(data)
    check(dataset, data, f" of {data.name!r}")
    return dataset


def check(dataset: Dataset, data: config.Data, name: str = "") -> None:
    """Raises ValueError when training has less than a batch, or evaluation nothing."""
    if not len(dataset.evaluation):
        raise ValueError(f"config.data.eval_split={data.eval_split!r}{name} is empty")
    if len(dataset.train) < data.batch_size:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is larger than the training split"
            f" {data.train_split!r}{name} with {len(dataset.train)} records"
        )


def _digits(data: config.Data) -> Dataset:
    """scikit-learn's digits: 1,797 images of 8 x 8, one in five held out, the same ones always."""
    for field, value, only in [
        ("train_split", data.train_split, "train"),
        ("eval_split", data.eval_split, "test"),
        ("dir", data.dir, ""),
    ]:
        if value != only:
            raise ValueError(
                f"config.data.{field}={value!r}: of 'digits', which comes with scikit-learn, it is"
                f" always {only!r}"
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
    from tensorflow_datasets.core import read_only_builder

    _check_named(data)
    try:
        builder = read_only_builder.builder_from_files(data.name, data_dir=data.dir)
        features: Any = builder.info.features
        class_names, channels = tuple(features["label"].names), features["image"].shape[-1]
    except Exception as error:  # what is written there may be anything
        raise ValueError(
            f"the description of {data.name!r} in config.data.dir={data.dir!r} cannot be read, or"
            f" it has no image and label: {type(error).__name__}: {error}"
        ) from error
    if not class_names or channels not in (1, 3):
        raise ValueError(
            f"{data.name!r} has {len(class_names)} classes and {channels} channels: images of 1"
            " or 3 channels with a class are needed"
        )
    sources, files = [], 0
    for field, split in [("train_split", data.train_split), ("eval_split", data.eval_split)]:
        for name in (part.split("[")[0] for part in split.split("+")):
            if name not in builder.info.splits:
                raise ValueError(
                    f"config.data.{field}={split!r} is no split of {data.name!r};"
                    f" choices: {', '.join(builder.info.splits)}"
                )
            files += len(builder.info.splits[name].filepaths)
            machine.allow_open_files(files)
            _check_shards(builder.info.splits[name])
        open_split: Any = builder.as_data_source
        try:
            sources.append(open_split(split, decoders={"image": tfds.decode.SkipDecoding()}))
            len(sources[-1])
        except Exception as error:  # TFDS raises many kinds for what stands in brackets
            raise ValueError(
                f"config.data.{field}={split!r} is no part of {data.name!r}, as 'train[:500]' or"
                f" 'train[90%:]' would be: {str(error).splitlines()[-1]}"
            ) from error
    train, evaluation = sources
    return Dataset(train, evaluation, class_names, channels)


def splits(data: config.Data) -> dict[str, int]:
    """The splits of a TFDS data set, and how many records they have.

    Raises:
        ValueError: when there is no such data set.
    """
    from tensorflow_datasets.core import read_only_builder

    _check_named(data)
    builder = read_only_builder.builder_from_files(data.name, data_dir=data.dir)
    return {name: split.num_examples for name, split in builder.info.splits.items()}


def _check_named(data: config.Data) -> None:
    """Raises ValueError when the folder has no data set of that name; it says what it has."""
    root, given = epath.Path(data.dir), f"config.data.dir={data.dir!r}"
    names = _names(root) if data.dir else []
    if data.name in names:
        return
    if data.dir and not root.exists():
        raise ValueError(f"{given} does not exist")
    for folder in (root / data.name, root) if data.dir else ():
        if words := _raw(folder):
            prepare = command("prepare", source=folder, out="data")
            raise ValueError(
                f"{folder} holds raw pictures ({words}): make a data set of them by {prepare}"
            )
    if any(_versions(root.parent, f"{root.name}/")):
        raise ValueError(
            f"{given} is a data set itself: give --config.data.dir={root.parent}"
            f" --config.data.name={root.name}"
        )
    if data.dir and not names:
        prepare = command("prepare", source="FOLDER", out=data.dir)
        raise ValueError(f"{given} holds no data set; one is made of pictures by {prepare}")
    raise ValueError(
        f"{unknown('config.data.name', data.name, ['digits', *names])} (in {given};"
        " vit.prepare makes a data set of raw pictures)"
    )


def _names(root: epath.Path) -> list[str]:
    """Of the data sets in a folder: name, or name/config."""
    versions = [*_versions(root, "*/"), *_versions(root, "*/*/")]
    return sorted({str(v.parent.relative_to(root)) for v in versions})


def _versions(root: epath.Path, below: str) -> list[epath.Path]:
    infos = root.glob(f"{below}*/dataset_info.json")
    return [f.parent for f in infos if re.fullmatch(r"\d+\.\d+\.\d+", f.parent.name)]


def _raw(folder: epath.Path) -> str:
    """In which form the folder holds raw pictures; empty where it holds none."""
    try:
        found = forms.form(Path(folder)) if folder.is_dir() else None
    except (OSError, ValueError) as error:
        return str(error)
    return found.words if found else ""


def _check_shards(split: Any) -> None:
    """Raises ValueError for a file that holds more or fewer records than its data set says."""
    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

    def count(path: Any) -> int:
        try:
            reader = array_record_module.ArrayRecordReader(os.fspath(path))
            records = reader.num_records()
            reader.close()
        except Exception as error:  # array_record's own kinds
            raise ValueError(f"{path} is no whole array_record file: {error}") from error
        return records

    with ThreadPoolExecutor(16) as pool:
        counts = pool.map(count, split.filepaths)
        for path, announced, held in zip(split.filepaths, split.shard_lengths, counts, strict=True):
            if announced != held:
                raise ValueError(
                    f"{path} holds {held} records, but the data set's dataset_info.json says"
                    f" {announced}: it is damaged, or of another version"
                )
