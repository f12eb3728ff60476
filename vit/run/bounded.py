"""Files of users: regular files of known formats, and limits on what they unpack to."""

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
"""Formats that are read: some of Pillow's others start programs (PostScript)."""

LARGEST = 2**28
"""Bytes of an encoded image, or of a member of an archive."""

RATIO, ALWAYS = 100, 2**24
"""Times its bytes to which a compressed file may unpack, and bytes in any case. Numbers and
photographs hardly reach 10; deflate's limit is 1,032."""


def regular(path: Path) -> BinaryIO:
    """Open a regular file; OSError for others: a FIFO waits, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, "rb")


def content(path: Path) -> bytes:
    """Return the bytes of a file; OSError as `regular`, or when they are more than `LARGEST`."""
    with regular(path) as file:
        return Reader(file).read(size(file))


def size(file: BinaryIO) -> int:
    """Return the number of bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def unpacked(size: int) -> int:
    """Return the number of bytes to which a compressed file of that size may unpack."""
    return max(ALWAYS, RATIO * size)


class Reader:
    """File of which at most `LARGEST` bytes are read at once, whatever a header announces."""

    def __init__(self, file: Any):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Return so many bytes; OSError for more than `LARGEST`."""
        if not 0 <= size <= LARGEST:
            raise OSError(f"{size:,} bytes at once are more than {LARGEST:,}")
        return self._file.read(size)


def image(encoded: bytes) -> Image.Image:
    """Return an image of one of the `FORMATS`; its pixels are not decoded yet.

    Those of 16 bits are: grey values become their higher 8 bits, which Pillow's conversion clips.

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
    """Raise ValueError for an .npz file that cannot be read, or unpacks to more than `unpacked`."""
    try:
        with regular(path) as file, zipfile.ZipFile(file) as archive:
            total, most = sum(e.file_size for e in archive.infolist()), unpacked(size(file))
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an .npz file: {error}") from error
    if total > most:
        raise ValueError(
            f"{path} cannot be read as an .npz file: it would unpack to {total:,} bytes; at most"
            f" {most:,} are read"
        )


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the values.

    Raises:
        ValueError: when it is none, damaged or empty, or would unpack to more than `unpacked`.
    """
    try:
        with regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            read = stream.read(unpacked(size(file)))
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    start = 4 + 4 * num_dimensions
    if len(read) < start or read[:4] != bytes([0, 0, 8, num_dimensions]):
        raise ValueError(f"{path} is no IDX file of {num_dimensions} dimensions of bytes")
    sizes = np.frombuffer(read[4:start], ">u4").tolist()
    if not 0 < math.prod(sizes) == len(read) - start:
        raise ValueError(
            f"{path} is damaged: its header announces {math.prod(sizes):,} values,"
            f" {len(read) - start:,} follow"
        )
    return np.frombuffer(read, np.uint8, offset=start).reshape(sizes)
