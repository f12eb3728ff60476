"""Parameters of one test in both tiers."""

import pytest


def tiers(values, core, ids=str):
    """Parameters, of which those that are not in `core` are in the second tier.

    Args:
        values: of the parameter, or tuples of the parameters.
        core: a collection of them, or how many of the first.
        ids: a function that names a value.
    """
    values = list(values)
    core = values[:core] if isinstance(core, int) else core
    return [
        pytest.param(
            *(x if isinstance(x, tuple) else (x,)),
            id=ids(x),
            marks=[] if any(x is y or x == y for y in core) else [pytest.mark.thorough],
        )
        for x in values
    ]
