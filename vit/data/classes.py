"""Classes of a data set, a run or a file of weights: their names, in the order of the labels.

Classes without names have the placeholders "0", "1", ..., "n - 1", in any order: the name is then
the number of the class.
"""

from collections.abc import Iterable, Sequence


def placeholders(number: int) -> tuple[str, ...]:
    """Return the names of classes without names."""
    return tuple(map(str, range(number)))


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once: numbers by their size, then words.

    >>> in_order(["b", "10", "9", "b"])
    ['9', '10', 'b']
    """

    def key(name: str) -> tuple[bool, int, str, str]:
        digits = name.lstrip("0") if name.isdecimal() else ""
        return not name.isdecimal(), len(digits), digits, name

    return sorted(set(names), key=key)


def matched(ours: Sequence[str], theirs: Sequence[str]) -> list[int]:
    """Return our label of each of their classes: by name, or by number if one side has no names.

    Numbers other than 0 to n - 1 are names.

    Args:
        ours: names of the run.
        theirs: names of the data, all or some of ours; or as many, if one side has placeholders.

    Raises:
        ValueError: if a class of the data is none of the run, or several classes have its name.

    >>> matched(["cat", "dog", "eel"], ["eel", "cat"])
    [2, 0]
    >>> matched(["cat", "dog", "eel"], ["0", "2", "1"])
    [0, 2, 1]
    """
    if list(ours) == list(theirs):
        return list(range(len(ours)))
    numbers = placeholders(len(theirs))
    if len(ours) == len(theirs) and set(ours) != set(theirs):
        if set(theirs) == set(numbers) and not _other_numbers(ours):
            ours = numbers
        elif set(ours) == set(numbers) and not _other_numbers(theirs):
            theirs = numbers
    if foreign := [name for name in theirs if name not in set(ours)]:
        raise ValueError(
            f"{len(foreign)} of the {len(theirs)} classes of the data are none of the {len(ours)}"
            f" of the run: {', '.join(foreign[:5])}; the run's begin with {', '.join(ours[:5])}"
        )
    index = {name: label for label, name in enumerate(ours)}
    if len(index) < len(ours) or len(set(theirs)) < len(theirs):
        raise ValueError("several classes have the same name, so they cannot be matched by name")
    return [index[name] for name in theirs]


def _other_numbers(names: Sequence[str]) -> bool:
    """Detect numbers other than 0 to n - 1: they are names, and 1 to n do not stand for these."""
    return all(map(str.isdecimal, names)) and {*map(int, names)} != {*range(len(names))}
