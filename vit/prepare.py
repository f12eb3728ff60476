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
Nor is it when the run is stopped, or the disk full; what SIGKILL leaves, `OUT/NAME/incomplete.*`,
the next run removes. Nothing is read that would wait (a FIFO), or unpack to more than memory holds.
"""

import contextlib
import fcntl
import gzip
import io
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from absl import app, flags, logging
from PIL import Image, ImageOps
from tensorflow_datasets.core import registered

from vit import bounded
from vit.arguments import parse_flags
from vit.bounded import read_idx

VERSION = "1.0.0"
_SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_SUFFIXES = {".jpg", ".jpeg", ".png"}
_TRAIN_TAR, _VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_DEVKIT_TAR = "ILSVRC2012_devkit_t12.tar.gz"
DEVKIT_LARGEST = 2**22
"""Bytes of a file of the devkit; the largest that is read has some 300,000."""


class Example(NamedTuple):
    """A raw example: a name that says where it came from, its bytes, its class."""

    name: str
    read: Callable[[], bytes]
    """Raises what it likes for a file that is none, or too large."""
    label: str


class Source(NamedTuple):
    """What a folder holds: class names in order, and for each split its examples."""

    class_names: list[str]
    channels: int
    splits: dict[str, Callable[[], Iterator[Example]]]


class TooManyBadFilesError(ValueError):
    """More files than the limit could not be read as images."""


class ArchiveError(ValueError, tarfile.TarError):
    """An archive that cannot be read."""


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
            taken or being prepared by another process, or too many bad files.
        OSError: when it cannot be written; nothing stays then.
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
    skipped: list[str] = []

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        written = 0
        for number, example in enumerate(opened.splits[split]()):
            try:
                image = encode(example.read(), opened.channels)
            except Exception as error:  # PIL raises many kinds for broken files
                skipped.append(example.name)
                print(f"skipped {example.name}: {error}", file=sys.stderr)
                if len(skipped) > max_bad_files:
                    raise TooManyBadFilesError(
                        f"more than --max_bad_files={max_bad_files} files are no readable images;"
                        f" the last one was {example.name}: {error}"
                    ) from error
                continue
            yield f"{number:09d}", {"image": image, "label": example.label}
            written += 1
        if not written:
            raise ValueError(f"{source} has no readable image for the split {split!r}")

    target.parent.mkdir(parents=True, exist_ok=True)
    with _removed_if_empty(target.parent, out), _held(target.parent):
        builder = _builder(name, opened, examples, out)
        with tempfile.TemporaryDirectory() as downloads:  # made though nothing is downloaded
            try:
                builder.download_and_prepare(download_dir=downloads)  # renamed when whole
            except RuntimeError as error:  # array_record's, as on a full disk
                raise OSError(f"{target} cannot be written: {error}") from error
    return {s: info.num_examples for s, info in builder.info.splits.items()} | {
        "skipped": len(skipped)
    }


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keeps other runs out of the folder, and removes what killed ones left there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in folder.glob(f"incomplete.*_{VERSION}"):
            print(f"{leftover} is left from a run that was killed: removed", file=sys.stderr)
            shutil.rmtree(leftover)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"{folder} is being written by another process; wait for it, or take another --name or"
            " --out"
        ) from error
    except OSError as error:  # a file system that does not lock: whose the leftovers are is unknown
        print(f"{folder} cannot be locked ({error}): nothing is removed", file=sys.stderr)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_if_empty(*folders: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in folders:
                folder.rmdir()
        raise


def encode(image: bytes, channels: int) -> bytes:
    """The bytes of a whole, upright grey or RGB image as JPEG or PNG: the same ones if they are.

    Raises:
        OSError, SyntaxError, ...: what PIL raises when the bytes are no image or a truncated one.
    """
    with bounded.image(image) as opened:
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
                yield Example(f"{path}[{number}]", partial(_png, image), str(label))

        splits[split] = examples
    return Source([str(label) for label in range(max(labels) + 1)], 1, splits)


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


# --- class folders


def _class_folders(source: Path) -> Source:
    there = [name for name in _SPLITS if (source / name).is_dir()]
    folders = {_SPLITS[name]: source / name for name in there}
    if "train" not in folders:
        raise ValueError(f"{source} has no folder train/")
    if len(folders) < len(there):
        raise ValueError(f"{source} has both val/ and validation/: rename or remove one")
    class_names = {
        split: {f.name for f in folder.iterdir() if f.is_dir()} for split, folder in folders.items()
    }
    for folder in folders.values():
        if not any(path.suffix.lower() in _SUFFIXES for path in folder.glob("*/*")):
            raise ValueError(f"{folder} holds no <class>/*.jpg, *.jpeg or *.png")
    for split, names in class_names.items():
        for name in names:
            _check_class_name(folders[split] / name)
        unknown = sorted(names - class_names["train"])
        if unknown:
            raise ValueError(f"{folders[split]} has classes that train/ has not: {unknown[:5]}")

    def examples(folder: Path) -> Iterator[Example]:
        for path in sorted(folder.glob("*/*")):
            if path.suffix.lower() in _SUFFIXES:
                yield Example(str(path), partial(bounded.content, path), path.parent.name)

    splits = {split: lambda folder=folder: examples(folder) for split, folder in folders.items()}
    return Source(sorted(class_names["train"]), 3, splits)


def _check_class_name(folder: Path) -> None:
    """The names are kept as the lines of a text file, from which outer blanks are taken off."""
    name = folder.name
    if name.splitlines() != [name.strip()] or not name.isprintable():
        raise ValueError(
            f"the class folder {str(folder)!r} has a line break, an outer blank or an unprintable"
            " character in its name: rename it"
        )


# --- ILSVRC2012


def _ilsvrc2012(source: Path) -> Source:
    for name in (_TRAIN_TAR, _VAL_TAR, _DEVKIT_TAR):
        if not (source / name).exists():
            raise ValueError(
                f"{source} lacks {name}; ILSVRC2012 needs its train, val and devkit tars"
            )
        with _archive(source / name):  # hours before its turn comes
            pass
    labels = _validation_labels(source / _DEVKIT_TAR)
    classes = set(labels)

    def train() -> Iterator[Example]:
        with _archive(source / _TRAIN_TAR) as outer:
            for member in _members(outer):  # one tar for each class, named n01440764.tar
                wnid = Path(member.name).stem
                if wnid not in classes or not member.isreg():
                    raise ValueError(
                        f"{source / _TRAIN_TAR} holds {member.name}, which is no archive of one of"
                        f" the {len(classes)} classes in {_DEVKIT_TAR}"
                    )
                with _tar(member.name, outer.extractfile(member)) as inner:
                    for image in _members(inner):
                        yield Example(
                            f"{member.name}/{image.name}", partial(_read, inner, image), wnid
                        )

    def validation() -> Iterator[Example]:
        with _archive(source / _VAL_TAR) as tar:
            for image in _members(tar):  # ILSVRC2012_val_00000001.JPEG
                number = re.search(r"_([0-9]{1,9})$", Path(image.name).stem)
                if number and 1 <= int(number[1]) <= len(labels):
                    label, read = labels[int(number[1]) - 1], partial(_read, tar, image)
                else:
                    label, read = "", partial(_no_number, len(labels))
                yield Example(image.name, read, label)

    return Source(sorted(classes), 3, {"train": train, "validation": validation})


def _no_number(count: int) -> bytes:
    raise ValueError(f"the name does not end in a number from 1 to {count}, as labels have")


def _validation_labels(devkit: Path) -> list[str]:
    """The wnid of each validation image, in their order: the devkit's numbers through its table."""
    from scipy.io import loadmat

    wanted = ("meta.mat", "ILSVRC2012_validation_ground_truth.txt")
    with _archive(devkit) as tar:
        files = {
            Path(member.name).name: _read(tar, member, DEVKIT_LARGEST)
            for member in _members(tar)
            if Path(member.name).name in wanted
        }
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"{devkit} lacks {', '.join(missing)}")
    table, truth = (files[name] for name in wanted)
    try:
        synsets = loadmat(io.BytesIO(table), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    except Exception as error:  # SciPy raises many kinds for broken files
        raise ValueError(f"meta.mat in {devkit} cannot be read: {error}") from error
    labels = []
    for line, text in enumerate(truth.split(), 1):
        if not text.isdigit() or int(text) not in wnids:
            raise ValueError(
                f"line {line} of {wanted[1]} in {devkit} is {text.decode(errors='replace')!r}, the"
                " number of no class in meta.mat"
            )
        labels.append(wnids[int(text)])
    return labels


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    """The archive of a file, open; errors as of `_tar`."""
    try:
        file = bounded.regular(path)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error
    with (
        file,
        _tar(str(path), gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file) as tar,
    ):
        yield tar


@contextlib.contextmanager
def _tar(name: str, file: Any) -> Iterator[tarfile.TarFile]:
    """An open archive; what is wrong with it becomes an `ArchiveError` that names it."""
    try:
        with tarfile.open(fileobj=bounded.Reader(file), mode="r:") as tar:  # pyright: ignore
            yield tar
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ArchiveError(f"{name} cannot be read: {error}") from error


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All that are no folders.

    Raises:
        tarfile.ReadError: when the archive does not end as archives do, with a block of zeros:
            tarfile takes a damaged header for the end.
    """
    for member in tar:
        if not member.isdir():
            yield member
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset:,}")


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo, most: int = bounded.LARGEST) -> bytes:
    """The bytes of a member."""
    if not member.isreg():
        raise ValueError(f"{member.name} is a link or a device, not a file")
    if member.size > most:
        raise ValueError(f"{member.name}: {member.size:,} bytes are more than {most:,}")
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


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
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    name = name or _default_name(Path(_SOURCE.value))
    print(", ".join(f"{count} {split}" for split, count in counts.items()))
    print(f"train on it with --config.data.name={name} --config.data.dir={out}")


if __name__ == "__main__":
    _SOURCE = flags.DEFINE_string("source", None, "folder with the raw images", required=True)
    _OUT = flags.DEFINE_string("out", None, "folder of TFDS data sets", required=True)
    _NAME = flags.DEFINE_string("name", "", "of the data set; the source folder's if not given")
    _MAX_BAD_FILES = flags.DEFINE_integer("max_bad_files", 10, "unreadable files tolerated", 0)
    app.run(main, flags_parser=parse_flags)
