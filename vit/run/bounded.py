"""Files of users: regular files of known formats, and limits on what they unpack to."""

import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""Formats that are read: some of Pillow's others start programs (PostScript)."""

LARGEST = 2**28
"""Bytes of an encoded image, or of a member of an archive."""


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
