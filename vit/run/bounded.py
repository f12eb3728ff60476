"""Files of users: regular files of known formats."""

import io
import os
import stat
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
