"""Checks of arguments: names that are on a list, positive integers, counts that fit in int32."""

import difflib
import operator
from collections.abc import Collection
from typing import Any

LARGEST = 2**31 - 1
"""An int32."""


def unknown(what: str, name: str, choices: Collection[str], shown: str = "") -> str:
    """ "unknown coupling 'orff'; did you mean 'orf'? Choices: iid, orf, ...".

    Args:
        what: the kind of thing that was asked for.
        name: what was asked for.
        choices: what there is; at least one.
        shown: the list as the message gives it; all choices, separated by commas, if empty.
    """
    by_lower_case = {choice.lower(): choice for choice in choices}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0)[0]
    return (
        f"unknown {what} {name!r}; did you mean {by_lower_case[nearest]!r}?"
        f" Choices: {shown or ', '.join(choices)}"
    )


def positive_integer(what: str, value: Any) -> int:
    """The value as an int.

    Raises:
        ValueError: when it is none, or below 1: "what must be a positive integer, got ...".
    """
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be a positive integer, got {value!r}") from None
    if value < 1:
        raise ValueError(f"{what} must be a positive integer, got {value}")
    return value


def require_numbered(what: str, count: int) -> None:
    """Raises ValueError when there are more than int32 can number, naming `what` they are."""
    if count > LARGEST:
        raise ValueError(f"{count} {what} are more than int32 can number: at most {LARGEST}")
