"""Output that does not fail when its reader has gone.

In `vit.train ... | tee log`, Ctrl-C ends `tee` before the run has saved its last checkpoint;
`without_broken_pipe` discards output that cannot be written any more.
"""

import errno
import io
import sys
from typing import Any


class DiscardingFile(io.FileIO):
    """Pipe or terminal that discards output after its reader has gone."""

    is_broken = False

    def write(self, content: Any) -> int:
        """Write the content, or discard it without a reader."""
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.is_broken = True
            return len(content)


def without_broken_pipe(stream: Any) -> Any:
    """Return standard output or error as a stream that does not fail without its reader.

    Other streams (of a notebook, captured ones) are returned as they are. Invalid UTF-8 is escaped.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    file = io.BufferedWriter(DiscardingFile(stream.fileno(), "w", closefd=False))
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line)


def is_broken() -> bool:
    """Return True if the reader of standard output has gone."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, DiscardingFile) and raw.is_broken
