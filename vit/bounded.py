"""Files of users, opened with care: what they may be, and how much memory they may ask for.

A header can announce anything, and a few bytes can unpack to many: sizes are read first, and what
goes beyond the limits here is refused before memory is asked for.
"""

import gzip
import io
import math
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""All that bytes are taken for: of Pillow's other formats some start programs (PostScript)."""

LARGEST = 2**28
"""Bytes of an encoded image, or of a member of an archive."""

RATIO, ALWAYS = 100, 2**24
"""A compressed file may unpack to so many times its bytes, and to 16 MiB in any case. Numbers and
photographs hardly reach 10; deflate's limit, which takes a file made for it, is 1,032."""


def regular(path: Path) -> BinaryIO:
    """The file, open; never waits.

    Raises:
        OSError: when there is none, or it is no regular file: a FIFO waits for its writer for ever,
            a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, "rb")


def content(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: as `regular`, or when they are more than `LARGEST`.
    """
    with regular(path) as file:
        return Reader(file).read(size(file))


def size(file: BinaryIO) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def unpacked(size: int) -> int:
    """To how many bytes a compressed file of that size may unpack."""
    return max(ALWAYS, RATIO * size)


class Reader:
    """A file of which nobody reads more than `LARGEST` bytes at once, whatever a header says."""

    def __init__(self, file: Any):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or OSError."""
        if not 0 <= size <= LARGEST:
            raise OSError(f"{size:,} bytes at once are more than {LARGEST:,}")
        return self._file.read(size)


def image(encoded: bytes) -> Image.Image:
    """An image of one of the `FORMATS`; its pixels are not decoded yet, unless they have 16 bits.

    Grey values of 16 bits become their higher 8 bits; Pillow's own conversion clips them at 255.

    Raises:
        OSError, SyntaxError, ...: what PIL raises when the bytes are none, or announce more than
            178,956,970 pixels (DecompressionBombError).
    """
    try:
        opened = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise OSError(f"it is none of {', '.join(FORMATS)}") from None
    if opened.mode.startswith("I"):
        return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    return opened


def check_npz(path: Path) -> None:
    """Looks through an .npz file, before NumPy makes room for what its headers announce.

    Raises:
        ValueError: when it cannot be read, would unpack to more than `unpacked` allows, or holds an
            array that is larger than its bytes.
    """
    name = ""
    try:
        with regular(path) as file, zipfile.ZipFile(file) as archive:
            total, most = sum(e.file_size for e in archive.infolist()), unpacked(size(file))
            if total > most:
                raise ValueError(f"it would unpack to {total:,} bytes; at most {most:,} are read")
            for entry in archive.infolist():
                name = f"{entry.filename.removesuffix('.npy')} in "
                with archive.open(entry) as array:
                    announced = _announced(array)
                if announced > entry.file_size:
                    raise ValueError(
                        f"it announces {announced:,} bytes, but has {entry.file_size:,}"
                    )
    except Exception as error:  # zipfile and NumPy raise many kinds for broken files
        raise ValueError(f"{name}{path} cannot be read as an .npz file: {error}") from error


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the values.

    Raises:
        ValueError: when it is none, damaged or empty, or announces more values than
            `unpacked` allows; before there is memory for them.
    """
    try:
        with regular(path) as file:
            most = unpacked(size(file))
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            header = stream.read(4 + 4 * num_dimensions)
            sizes = np.frombuffer(header[4:], ">u4").tolist() if len(header) % 4 == 0 else []
            if header[:4] != bytes([0, 0, 8, num_dimensions]) or len(sizes) < num_dimensions:
                raise ValueError(f"{path} is no IDX file of {num_dimensions} dimensions of bytes")
            count = math.prod(sizes)
            if not 0 < count <= most:
                raise ValueError(
                    f"{path} cannot be read: its header announces {count:,} values; a file of its"
                    f" size may have 1 to {most:,}"
                )
            values = stream.read(count + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(values) != count:
        follow = f"{len(values)} follow" if len(values) < count else "more follow"
        raise ValueError(f"{path} is damaged: its header announces {count} values, {follow}")
    return np.frombuffer(values, np.uint8).reshape(sizes)


def _announced(array: Any) -> int:
    """Bytes of an array, by the header of its .npy file."""
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(array)
    if version not in readers:
        raise ValueError(f"arrays of version {version} are not read")
    shape, _, dtype = readers[version](array)
    return math.prod(shape) * dtype.itemsize
