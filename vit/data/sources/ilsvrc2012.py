"""ILSVRC2012 as its tar files, which are read, never unpacked.

ILSVRC2012_img_train.tar holds one tar for each class, ILSVRC2012_img_val.tar the images of
evaluation. Their classes, in order, come with tensorflow_datasets.
"""

import contextlib
import importlib.resources
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vit.data.sources.source import Example, Source, reading
from vit.data.sources.words import Words

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def has_archives(folder: Path) -> bool:
    """Detect one of the two archives."""
    return (folder / TRAIN_TAR).exists() or (folder / VAL_TAR).exists()


def read(source: Path, _: Words) -> Source:
    """Read the classes by their wnids, the splits train and validation.

    Raises:
        ValueError: if an archive is missing or damaged, or holds other files.
    """
    with _tar(source / TRAIN_TAR), _tar(source / VAL_TAR):  # hours before their turn comes
        folder = importlib.resources.files("tensorflow_datasets") / "datasets" / "imagenet2012"
        classes = (folder / "labels.txt").read_text().split()
        words = (folder / "validation_labels.txt").read_text().split()
    labels = {f"ILSVRC2012_val_{number:08d}.JPEG": wnid for number, wnid in enumerate(words, 1)}

    def train() -> Iterator[Example]:
        with _tar(source / TRAIN_TAR) as outer:
            for member in _members(outer):  # one tar for each class, named n01440764.tar
                wnid = classes[classes.index(Path(member.name).stem)]
                inside = f"{member.name} in {source / TRAIN_TAR}"
                with _tar(inside, outer.extractfile(member)) as inner:
                    for image in _members(inner):
                        name = f"{member.name}/{image.name}"
                        yield Example(name, partial(_content, inner, image), wnid)

    def validation() -> Iterator[Example]:
        with _tar(source / VAL_TAR) as tar:
            for image in _members(tar):
                label = labels[Path(image.name).name]
                yield Example(image.name, partial(_content, tar, image), label)

    files = [source / TRAIN_TAR, source / VAL_TAR]
    return Source(3, {"train": train, "validation": validation}, files, classes)


@contextlib.contextmanager
def _tar(path: Path | str, file: Any = None) -> Iterator[tarfile.TarFile]:
    """Open an archive, of a path or in another one."""
    errors = (tarfile.TarError, LookupError, ValueError)  # the latter for other names
    with reading(path, "", *errors), tarfile.open(path, "r:", file) as tar:
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
