"""Parameters of one test in both tiers."""

import pytest


def tiers(values, core, ids=None):
    """Parameters, of which those that are not in `core` are in the second tier.

    Args:
        values: of the parameter, or tuples of the parameters.
        core: a collection of them, or how many of the first.
        ids: a function that names a value, or none for its parts as texts.
    """

    def parts(x):
        return x if isinstance(x, tuple) else (x,)

    values = list(values)
    core = values[:core] if isinstance(core, int) else core
    return [
        pytest.param(
            *parts(x),
            id=ids(x) if ids else "-".join(map(str, parts(x))),
            marks=[] if any(x is y or x == y for y in core) else [pytest.mark.thorough],
        )
        for x in values
    ]
