"""Turns raw images into a TFDS data set in array_record form, without tensorflow.

    python -m vit.prepare --source=DIR --out=DIR [--name=NAME] [--max_bad_files=N]

The source is one of three, told apart by what lies in it:

    IDX files     train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (MNIST and its family),
                  each plain or as .gz
    class folders train/<class>/*.jpg|jpeg|png, and val/ or test/ alike
    ILSVRC2012    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz;
                  the archives are read, never unpacked

Then `--config.data.name=NAME --config.data.dir=OUT` trains on it, with the splits "train" and
"test" or "validation". A JPEG or PNG goes in as it is; another format, another colour model than
grey or RGB, or a rotation noted in EXIF is converted. A file that is no image, or a truncated one,
is named and left out; more than `max_bad_files` of them are an error, and nothing is written then.
Nor is it when the run is stopped; only after SIGKILL a folder `OUT/NAME/incomplete.*` stays.
"""

import contextlib
import gzip
import io
import re
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from absl import app, flags, logging
from PIL import Image, ImageOps
from tensorflow_datasets.core import registered

VERSION = "1.0.0"
_SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_SUFFIXES = {".jpg", ".jpeg", ".png"}
_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_DEVKIT_TAR = "ILSVRC2012_devkit_t12.tar.gz"


class Example(NamedTuple):
    """A raw example: a name that says where it came from, its bytes, its class."""

    name: str
    image: bytes
    label: str


class Source(NamedTuple):
    """What a folder holds: class names in order, and for each split its examples."""

    class_names: list[str]
    channels: int
    splits: dict[str, Callable[[], Iterator[Example]]]


class TooManyBadFilesError(ValueError):
    """More files than the limit could not be read as images."""


def prepare(source: Path, out: Path, name: str = "", max_bad_files: int = 10) -> dict[str, int]:
    """Writes the data set `out/name/1.0.0`.

    Args:
        source: folder with raw images, in one of the three forms above.
        out: folder of TFDS data sets; made if it does not exist.
        name: of the data set, lower case letters, digits and underscores; the folder's if empty,
            "imagenet2012" for ILSVRC2012.
        max_bad_files: how many unreadable files are tolerated.

    Returns:
        The number of examples of each split, and under "skipped" the number of files left out.

    Raises:
        ValueError: for a folder in none of the three forms, inconsistent files, a name that is
            taken, or too many bad files.
    """
    opened = _open(source)
    name = name or _default_name(source)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"--name={name!r} must be lower case letters, digits and underscores, a letter first"
        )
    target = out / name / VERSION
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or take another --name or --out")
    for leftover in target.parent.glob("incomplete.*"):
        print(f"{leftover} is left from a run that was killed, or still runs", file=sys.stderr)
    skipped: list[str] = []

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, example in enumerate(opened.splits[split]()):
            try:
                image = encode(example.image, opened.channels)
            except Exception as error:  # PIL raises many kinds for broken files
                skipped.append(example.name)
                print(f"skipped {example.name}: {error}", file=sys.stderr)
                if len(skipped) > max_bad_files:
                    raise TooManyBadFilesError(
                        f"more than --max_bad_files={max_bad_files} files are no readable images;"
                        f" the last one was {example.name}"
                    ) from error
                continue
            yield f"{number:09d}", {"image": image, "label": example.label}

    builder = _builder(name, opened, examples, out)
    with tempfile.TemporaryDirectory() as downloads:  # TFDS makes one though nothing is downloaded
        try:
            builder.download_and_prepare(download_dir=downloads)  # renamed into place when whole
        except BaseException:
            with contextlib.suppress(OSError):  # leave no empty folders behind
                target.parent.rmdir()
                out.rmdir()
            raise
    return {s: info.num_examples for s, info in builder.info.splits.items()} | {
        "skipped": len(skipped)
    }


def encode(image: bytes, channels: int) -> bytes:
    """The bytes of a whole, upright grey or RGB image as JPEG or PNG: the same ones if they are.

    Raises:
        OSError, SyntaxError, ...: what PIL raises when the bytes are no image or a truncated one.
    """
    with Image.open(io.BytesIO(image)) as opened:
        opened.load()
        kind = "JPEG" if opened.format == "JPEG" else "PNG"
        modes = ("L",) if channels == 1 else ("L", "RGB")
        upright = opened.getexif().get(0x0112) not in range(2, 9)  # the EXIF tag "Orientation"
        if opened.format == kind and opened.mode in modes and upright:
            return image
        converted = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
    buffer = io.BytesIO()
    converted.save(buffer, kind, quality=95)
    return buffer.getvalue()


def _open(source: Path) -> Source:
    if not source.is_dir():
        raise ValueError(f"--source={source} is no folder")
    if (source / _TRAIN_TAR).exists() or (source / _VAL_TAR).exists():
        return _ilsvrc2012(source)
    if list(source.glob("*-images-idx3-ubyte*")):
        return _idx(source)
    if [name for name in _SPLITS if (source / name).is_dir()]:
        return _class_folders(source)
    raise ValueError(
        f"--source={source} holds neither IDX files (*-images-idx3-ubyte), nor class folders"
        f" (train/<class>/*.jpg), nor {_TRAIN_TAR}"
    )


def _default_name(source: Path) -> str:
    if (source / _TRAIN_TAR).exists() or (source / _VAL_TAR).exists():
        return "imagenet2012"
    return re.sub(r"[^a-z0-9]+", "_", source.resolve().name.lower()).strip("_")


# --- IDX files


def _idx(source: Path) -> Source:
    splits = {}
    labels: set[int] = set()
    for path in sorted(source.glob("*-images-idx3-ubyte*")):
        prefix = path.name.split("-images-idx3-ubyte")[0]
        split = "train" if prefix.endswith("train") else "test"
        label_paths = sorted(source.glob(f"{prefix}-labels-idx1-ubyte*"))
        if not label_paths:
            raise ValueError(f"{path} has no labels beside it ({prefix}-labels-idx1-ubyte)")
        if split in splits:
            raise ValueError(f"{source} holds two files for the split {split!r}: one is {path}")
        images, classes = read_idx(path, 3), read_idx(label_paths[0], 1)
        if len(images) != len(classes):
            raise ValueError(
                f"{path} has {len(images)} images, {label_paths[0]} {len(classes)} labels"
            )
        labels |= set(classes.tolist())

        def examples(
            path: Path = path, images: np.ndarray = images, classes: np.ndarray = classes
        ) -> Iterator[Example]:
            for number, (image, label) in enumerate(zip(images, classes, strict=True)):
                buffer = io.BytesIO()
                Image.fromarray(image).save(buffer, "PNG")
                yield Example(f"{path}[{number}]", buffer.getvalue(), str(label))

        splits[split] = examples
    return Source([str(label) for label in range(max(labels) + 1)], 1, splits)


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    start = 4 + 4 * num_dimensions
    if content[:4] != bytes([0, 0, 8, num_dimensions]) or len(content) < start:
        raise ValueError(f"{path} is no IDX file of {num_dimensions} dimensions of bytes")
    shape = np.frombuffer(content, ">u4", num_dimensions, offset=4).astype(int)
    if len(content) - start != shape.prod():
        raise ValueError(
            f"{path} is damaged: its header announces {shape.prod()} values,"
            f" {len(content) - start} follow"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


# --- class folders


def _class_folders(source: Path) -> Source:
    folders = {_SPLITS[name]: source / name for name in _SPLITS if (source / name).is_dir()}
    if "train" not in folders:
        raise ValueError(f"{source} has no folder train/")
    class_names = {
        split: {f.name for f in folder.iterdir() if f.is_dir()} for split, folder in folders.items()
    }
    for folder in folders.values():
        if not any(path.suffix.lower() in _SUFFIXES for path in folder.glob("*/*")):
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
    for split, names in class_names.items():
        unknown = sorted(names - class_names["train"])
        if unknown:
            raise ValueError(f"{folders[split]} has classes that train/ has not: {unknown[:5]}")

    def examples(folder: Path) -> Iterator[Example]:
        for path in sorted(folder.glob("*/*")):
            if path.suffix.lower() in _SUFFIXES:
                yield Example(str(path), path.read_bytes(), path.parent.name)

    splits = {split: lambda folder=folder: examples(folder) for split, folder in folders.items()}
    return Source(sorted(class_names["train"]), 3, splits)


# --- ILSVRC2012


def _ilsvrc2012(source: Path) -> Source:
    for name in (_TRAIN_TAR, _VAL_TAR, _DEVKIT_TAR):
        if not (source / name).exists():
            raise ValueError(
                f"{source} lacks {name}; ILSVRC2012 needs its train, val and devkit tars"
            )
    labels = _validation_labels(source / _DEVKIT_TAR)

    def train() -> Iterator[Example]:
        with _tar(source / _TRAIN_TAR) as outer:
            for member in outer:  # one tar for each class, named n01440764.tar
                with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                    for name, image in _files(inner):
                        yield Example(f"{member.name}/{name}", image, Path(member.name).stem)

    def validation() -> Iterator[Example]:
        with _tar(source / _VAL_TAR) as tar:
            for name, image in _files(tar):  # ILSVRC2012_val_00000001.JPEG
                number = int(Path(name).stem.split("_")[-1])
                yield Example(name, image, labels[number - 1])

    return Source(sorted(set(labels)), 3, {"train": train, "validation": validation})


def _validation_labels(devkit: Path) -> list[str]:
    """The wnid of each validation image, in their order: the devkit's numbers through its table."""
    from scipy.io import loadmat

    with _tar(devkit) as tar:
        files = {Path(name).name: content for name, content in _files(tar)}
    synsets = loadmat(io.BytesIO(files["meta.mat"]), squeeze_me=True)["synsets"]
    wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    truth = files["ILSVRC2012_validation_ground_truth.txt"]
    return [wnids[int(line)] for line in truth.split()]


@contextlib.contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    """An open archive; what is wrong with it becomes a ValueError that names it."""
    try:
        with tarfile.open(path) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        file = tar.extractfile(member)
        if file is not None:
            yield member.name, file.read()


# --- TFDS


def _builder(
    name: str,
    source: Source,
    examples: Callable[[str], Iterator[tuple[str, dict[str, Any]]]],
    out: Path,
) -> tfds.core.GeneratorBasedBuilder:
    def info(self: tfds.core.GeneratorBasedBuilder) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(None, None, source.channels)),
                "label": tfds.features.ClassLabel(names=source.class_names),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def splits(self: tfds.core.GeneratorBasedBuilder, _: Any) -> dict[str, Any]:
        return {split: examples(split) for split in source.splits}

    with registered.skip_registration():
        builder = type(
            name,
            (tfds.core.GeneratorBasedBuilder,),
            {
                "name": name,
                "VERSION": tfds.core.Version(VERSION),
                "_info": info,
                "_split_generators": splits,
                "_generate_examples": lambda self: None,  # abstract, but splits() does its work
            },
        )
    return builder(data_dir=out, file_format=tfds.core.FileFormat.ARRAY_RECORD)


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # cleans up, as Ctrl-C does
    out, name = Path(_OUT.value), _NAME.value
    try:
        counts = prepare(Path(_SOURCE.value), out, name, _MAX_BAD_FILES.value)
    except ValueError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    name = name or _default_name(Path(_SOURCE.value))
    print(", ".join(f"{count} {split}" for split, count in counts.items()))
    print(f"train on it with --config.data.name={name} --config.data.dir={out}")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "folder with the raw images", required=True)
    _OUT = flags.DEFINE_string("out", None, "folder of TFDS data sets", required=True)
    _NAME = flags.DEFINE_string("name", "", "of the data set; the source folder's if not given")
    _MAX_BAD_FILES = flags.DEFINE_integer("max_bad_files", 10, "unreadable files tolerated", 0)
    app.run(main)
