"""ILSVRC2012 as its tar files: they are read, never unpacked.

ILSVRC2012_img_train.tar holds one tar for each class, ILSVRC2012_img_val.tar the images of
evaluation in the order of the labels in ILSVRC2012_devkit_t12.tar.gz.
"""

import contextlib
import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vit import bounded
from vit.sources.source import Example, Source

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT_TAR = "ILSVRC2012_devkit_t12.tar.gz"
DEVKIT_LARGEST = 2**22
"""Bytes of a file of the devkit; the largest that is read has some 300,000."""


class ArchiveError(ValueError, tarfile.TarError):
    """An archive that cannot be read."""


def found(folder: Path) -> bool:
    """Whether one of the two large archives lies there."""
    return (folder / TRAIN_TAR).exists() or (folder / VAL_TAR).exists()


def read(source: Path) -> Source:
    """The classes by their wnids, the splits train and validation.

    Raises:
        ValueError: when an archive is missing or damaged.
    """
    for name in (TRAIN_TAR, VAL_TAR, DEVKIT_TAR):
        if not (source / name).exists():
            raise ValueError(
                f"{source} lacks {name}; ILSVRC2012 needs its train, val and devkit tars"
            )
        with _archive(source / name):  # hours before its turn comes
            pass
    labels = _validation_labels(source / DEVKIT_TAR)
    classes = set(labels)

    def train() -> Iterator[Example]:
        with _archive(source / TRAIN_TAR) as outer:
            for member in _members(outer):  # one tar for each class, named n01440764.tar
                wnid = Path(member.name).stem
                if wnid not in classes or not member.isreg():
                    raise ValueError(
                        f"{source / TRAIN_TAR} holds {member.name}, which is no archive of one of"
                        f" the {len(classes)} classes in {DEVKIT_TAR}"
                    )
                with _tar(member.name, outer.extractfile(member)) as inner:
                    for image in _members(inner):
                        yield Example(
                            f"{member.name}/{image.name}", partial(_read, inner, image), wnid
                        )

    def validation() -> Iterator[Example]:
        with _archive(source / VAL_TAR) as tar:
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
