"""ILSVRC2012 as its tar files, which are read, never unpacked.

ILSVRC2012_img_train.tar holds one tar for each class, ILSVRC2012_img_val.tar the images of
evaluation. Their classes, in order, come with tensorflow_datasets.
"""

import contextlib
import importlib.resources
import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vit.data.sources.source import Example, Source, reading

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def found(folder: Path) -> bool:
    """Detect one of the two archives."""
    return (folder / TRAIN_TAR).exists() or (folder / VAL_TAR).exists()


def read(source: Path, _: str = "") -> Source | None:
    """Read the classes by their wnids, the splits train and validation.

    Raises:
        ValueError: if an archive is missing or damaged.
    """
    if not found(source):
        return None
    for name in (TRAIN_TAR, VAL_TAR):
        if not (source / name).exists():
            raise ValueError(f"{source} lacks {name}; ILSVRC2012 needs its train and val tars")
    with _tar(source / TRAIN_TAR), _tar(source / VAL_TAR):  # hours before their turn comes
        classes, labels = _words("labels.txt"), _words("validation_labels.txt")

    def train() -> Iterator[Example]:
        with _tar(source / TRAIN_TAR) as outer:
            for member in _members(outer):  # one tar for each class, named n01440764.tar
                wnid = Path(member.name).stem
                if wnid not in classes:
                    raise ValueError(
                        f"{source / TRAIN_TAR} holds {member.name}, which is no archive of one of"
                        f" the {len(classes)} classes"
                    )
                inside = f"{member.name} in {source / TRAIN_TAR}"
                with _tar(inside, outer.extractfile(member)) as inner:
                    for image in _members(inner):
                        name = f"{member.name}/{image.name}"
                        yield Example(name, partial(_content, inner, image), wnid)

    def validation() -> Iterator[Example]:
        with _tar(source / VAL_TAR) as tar:
            for image in _members(tar):  # ILSVRC2012_val_00000001.JPEG
                number = re.search(r"_([0-9]{1,9})$", Path(image.name).stem)
                place = int(number[1]) if number else 0
                if 1 <= place <= len(labels):
                    yield Example(image.name, partial(_content, tar, image), labels[place - 1])
                else:
                    yield Example(image.name, partial(_no_number, len(labels)), "")

    return Source(classes, 3, {"train": train, "validation": validation})


def _no_number(count: int) -> bytes:
    raise ValueError(f"the name does not end in a number from 1 to {count}, as labels have")


def _words(name: str) -> list[str]:
    """Return the wnids in a file of tensorflow_datasets."""
    folder = importlib.resources.files("tensorflow_datasets") / "datasets" / "imagenet2012"
    return folder.joinpath(name).read_text().split()


@contextlib.contextmanager
def _tar(path: Path | str, file: Any = None) -> Iterator[tarfile.TarFile]:
    """Open an archive, of a path or in another one."""
    with reading(path, "", tarfile.TarError), tarfile.open(path, "r:", file) as tar:
        yield tar


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield all members that are no folders.

    Raises:
        tarfile.ReadError: if the archive does not end with a block of zeros: tarfile takes a
            damaged header for the end.
    """
    for member in tar:
        if not member.isdir():
            yield member
    assert tar.fileobj
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset:,}")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: Any = tar.extractfile(member)
    return file.read()
