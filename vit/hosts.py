"""Several processes of one run: what each of them says, and what they must agree on to begin."""

import difflib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit import files

PATIENCE = 60.0
"""Seconds after which what another host wrote must be seen: NFS looks again after 30 to 60."""


def agree(value: bool) -> bool:
    """What process 0 says."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def gathered(text: str) -> list[str]:
    """What each process says; all must ask."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(content)))
    padded = np.pad(content, (0, 1 + int(lengths.max()) - len(content)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def failures(reason: str) -> list[str]:
    """What went wrong, of all processes: nothing where every one of them says nothing."""
    one = jax.process_count() == 1
    return [
        said if one else f"process {number}: {said}"
        for number, said in enumerate(gathered(reason))
        if said
    ]


def check_same(values: dict[str, Any]) -> None:
    """Looks whether all processes were started with the same values.

    Args:
        values: by name; JSON can hold them.

    Raises:
        ValueError: in all of them, with each value that differs from that of process 0.
    """
    lines = [f"{name}: {json.dumps(value)[:200]}" for name, value in sorted(values.items())]
    first, *others = gathered("\n".join(lines))
    different = [
        f"process {number}, with {', '.join(_added(first, said))}, and process 0 with"
        f" {', '.join(_added(said, first))}"
        for number, said in enumerate(others, 1)
        if said != first
    ]
    if different:
        raise ValueError(
            "the processes were not started with the same command, data or packages:\n  "
            + "\n  ".join(different)
        )


def _added(before: str, after: str) -> Sequence[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in lines if line.startswith("+ ")]


def check_same_folder(workdir: Path) -> None:
    """Looks whether all processes see the folder of process 0: it leaves a word there.

    Raises:
        ValueError: in all of them, saying which do not.
    """
    if jax.process_count() == 1:
        return
    path, word = workdir / "hosts", os.urandom(8).hex()
    lead = jax.process_index() == 0
    if lead:
        files.write(path, word)
    word = gathered(word)[0]
    deadline = time.monotonic() + PATIENCE
    while not (seen := path.exists() and files.read(path) == word) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = failures("" if seen else f"{workdir.resolve()}")
    if lead:
        path.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"not all processes see the folder of the run that process 0 has, {workdir}: give all"
            " of them one on a file system that they share. Another one have\n  "
            + "\n  ".join(blind)
        )
