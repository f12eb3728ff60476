"""Files of users: regular files of known formats."""

import gzip
import io
import math
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""Image formats; some other formats of Pillow start programs (PostScript)."""


def regular(path: Path) -> BinaryIO:
    """Open a regular file; raise OSError for others: a FIFO waits, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, "rb")


def content(path: Path) -> bytes:
    """Return the bytes of a regular file; raise OSError for others."""
    with regular(path) as file:
        return file.read()


def image(encoded: bytes) -> Image.Image:
    """Open an image of one of the `FORMATS`; its pixels are not decoded yet.

    Grey values of 16 bits become their higher 8 bits; Pillow's own conversion clips them.

    Raises:
        OSError, SyntaxError, ...: errors of Pillow for broken files, or for more than 178,956,970
            pixels (DecompressionBombError).
    """
    try:
        opened = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise OSError(f"it is none of {', '.join(FORMATS)}") from None
    if opened.mode.startswith("I"):
        return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    return opened


def check_npz(path: Path) -> None:
    """Raise ValueError unless the file is a regular zip archive."""
    try:
        with regular(path) as file, zipfile.ZipFile(file):
            pass
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an .npz file: {error}") from error


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, then the values.

    Raises:
        ValueError: when the file has another format, or is damaged or empty.
    """
    try:
        with regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            read = stream.read()
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
