"""Classes of a data set, a run or a file of weights: their names, in the order of the labels.

Classes without names have the placeholders "0", "1", ..., "n - 1", in any order: the name is then
the number of the class.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Match = Literal["name", "number"]
"""How classes of two sides are matched."""
_WHOLE = re.compile(r"[+]?(-?)0*([0-9]+)(\.0*)?")


def placeholders(number: int) -> tuple[str, ...]:
    """Return the names of classes without names."""
    return tuple(map(str, range(number)))


def word(label: Any) -> str:
    """Return the name of a class: a whole number without zeros around it, text in NFC.

    >>> word("01"), word(1.0), word(b"cat"), word("1.5")
    ('1', '1', 'cat', '1.5')
    """
    text = label.decode() if isinstance(label, bytes) else str(label)
    if number := _WHOLE.fullmatch(text):
        return number[2] if int(number[2]) == 0 else number[1] + number[2]
    return unicodedata.normalize("NFC", text)


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once: numbers by their size, then words.

    >>> in_order(["b", "10", "9", "b"])
    ['9', '10', 'b']
    """

    def key(name: str) -> tuple[bool, int, str, str]:
        digits = name.lstrip("0") if name.isdecimal() else ""
        return not name.isdecimal(), len(digits), digits, name

    return sorted(set(names), key=key)


def matched(ours: Sequence[str], theirs: Sequence[str], match: Match = "name") -> list[int]:
    """Return our label of each of their classes.

    Args:
        ours: names of the run.
        theirs: names of the data, all or some of ours.
        match: "name", compared as `word`; or "number", the position of a class. Both sides then
            have equally many, and names 0 to n - 1 in another order are positions.

    Raises:
        ValueError: if a class of the data is none of the run, or several classes have its name.

    >>> matched(["cat", "dog", "eel"], ["eel", "cat"])
    [2, 0]
    >>> matched(["cat", "dog", "eel"], ["0", "2", "1"], "number")
    [0, 2, 1]
    """
    if list(ours) == list(theirs):
        return list(range(len(ours)))
    ours, theirs = list(map(word, ours)), list(map(word, theirs))
    numbers = list(placeholders(len(ours)))
    if match == "number":
        if len(ours) != len(theirs):
            raise ValueError(
                f"--match=number: the data have {len(theirs)} classes, the run {len(ours)}"
            )
        ours, theirs = (x if {*x} == {*numbers} else numbers for x in (ours, theirs))
    if foreign := [name for name in theirs if name not in {*ours}]:
        unnamed = len(ours) == len(theirs) and {*numbers} in ({*ours}, {*theirs})
        hint = "; --match=number takes them in the order of their labels" * unnamed
        raise ValueError(
            f"{len(foreign)} of the {len(theirs)} classes of the data are none of the {len(ours)}"
            f" of the run: {', '.join(foreign[:5])}; the run's begin with {', '.join(ours[:5])}"
            f"{hint}"
        )
    index = {name: label for label, name in enumerate(ours)}
    if len(index) < len(ours) or len(set(theirs)) < len(theirs):
        raise ValueError("several classes have the same name, so they cannot be matched by name")
    return [index[name] for name in theirs]
