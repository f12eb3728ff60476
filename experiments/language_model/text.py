"""A text as a data set of windows of characters.

The last tenth is held out. A record is where a window begins: in training it is moved on by less
than a window, another way in each epoch; in evaluation windows stand side by side.
"""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit.data import Batch, Dataset, fingerprint

HELD_OUT = 0.1
"""Share of the text that is evaluated on."""


class Text(NamedTuple):
    """Characters as numbers."""

    numbers: Int[np.ndarray, " n"]
    characters: tuple[str, ...]
    """Characters of the numbers 0, 1, ..., sorted."""


def read(path: str = "") -> Text:
    """Read a text in UTF-8; without a path, the help topics that come with Python.

    Raises:
        ValueError: for a file that cannot be read as UTF-8.
    """
    if not path:
        topics = importlib.import_module("pydoc_data.topics").topics
        return numbered("\n\n".join(topics[name] for name in sorted(topics)))
    try:
        return numbered(Path(path).read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config.data.text={path!r} cannot be read as UTF-8: {error}") from error


def numbered(text: str) -> Text:
    """Number the characters of a text by their places among the distinct ones."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    kinds, numbers = np.unique(codes, return_inverse=True)
    return Text(numbers.astype(np.int32), tuple(map(chr, kinds)))


def encoded(text: str, characters: tuple[str, ...]) -> list[int]:
    """Return the numbers of a text in the characters of another.

    Raises:
        ValueError: for a character that is not among them.
    """
    places = {character: i for i, character in enumerate(characters)}
    if other := sorted(set(text) - set(places)):
        raise ValueError(f"the training text has no {''.join(other)!r}: leave it out")
    return [places[character] for character in text]


def dataset(text: Text, length: int) -> Dataset:
    """Return windows {"tokens": (length + 1,)}: inputs, and one character on the targets.

    Raises:
        ValueError: for a text that is too short.
    """
    numbers, n = text.numbers, len(text.numbers)
    end = n - round(HELD_OUT * n)
    training, held_out = range(0, end - 2 * length, length), range(end, n - length, length)
    if not (training and held_out):
        least = round((length + 0.5) / HELD_OUT) + 1  # their tenth is more than one window
        raise ValueError(
            f"the text has {n} characters: windows of {length} need at least {least}; give a longer"
            " config.data.text or a smaller config.data.length"
        )

    def window(start: int, rng: np.random.Generator | None, *_: Any) -> Batch:
        start += 0 if rng is None else int(rng.integers(length))
        return {"tokens": numbers[start : start + length + 1]}

    def blank(*_: Any) -> Batch:
        return {"tokens": np.zeros(length + 1, np.int32)}

    names, hashed = text.characters, fingerprint(lambda: [numbers])
    return Dataset(training, held_out, names, decode=window, blank=blank, fingerprint=hashed)
