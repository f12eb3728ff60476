"""Several processes of a run: exchange of texts, and checks that they were started alike."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def agree(value: bool) -> bool:
    """Return the value of process 0."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def gathered(text: str) -> list[str]:
    """Return the text of every process; all of them must call this."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(errors="replace"), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(content)))
    padded = np.pad(content, (0, 1 + int(lengths.max()) - len(content)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def failures(reason: str) -> list[str]:
    """Return the reasons of all processes that failed; "" stands for success."""
    one = jax.process_count() == 1
    reasons = enumerate(gathered(reason))
    return [text if one else f"process {number}: {text}" for number, text in reasons if text]


def check_same(values: dict[str, Any]) -> None:
    """Raise ValueError in all processes unless they have the same values (of JSON types)."""
    first, *others = map(json.loads, gathered(json.dumps(values)))
    different = [
        f"process {number}, with {name}: {other.get(name)!r:.200}, and process 0 with {name}:"
        f" {value!r:.200}"
        for number, other in enumerate(others, 1)
        for name, value in first.items()
        if other.get(name) != value
    ]
    if different:
        raise ValueError(
            "the processes were not started with the same command, data or packages:\n  "
            + "\n  ".join(different)
        )
