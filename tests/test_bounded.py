"""Files of users: regular files, and images of 16 bits."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from vit import config, prepare
from vit.data import evaluated_pixels
from vit.run import bounded


def test_regular_files_only(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    os.mkfifo(tmp_path / "fifo")
    assert bounded.content(tmp_path / "file") == b"abc"
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match=f"{path} is no regular file"):
            bounded.regular(tmp_path / path)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no regular file"):
            bounded.content(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_values_of_16_bits_keep_their_shades(channels):
    """Pillow's own conversion makes them black and white, in training and in `vit.prepare`."""
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    buffer = io.BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 257).save(buffer, "PNG")
    seen = evaluated_pixels(buffer.getvalue(), config.Data(image_size=16), channels)
    np.testing.assert_array_equal(seen, np.repeat(grey[..., None], channels, axis=-1))
    written = prepare.encode(buffer.getvalue(), channels)
    with Image.open(io.BytesIO(written)) as opened:
        assert opened.mode == "L"
        np.testing.assert_array_equal(np.asarray(opened), grey)
