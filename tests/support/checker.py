"""The type checker of the tests: beartype, where an int is also a float (PEP 484).

It writes the checks of a function when the function is first called: most are not, in a given
process.
"""

import functools

from beartype import BeartypeConf, beartype

_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    checking = None

    @functools.wraps(function)
    def first_checked(*args, **kwargs):
        nonlocal checking
        if checking is None:
            checking = _checked(function)
        return checking(*args, **kwargs)

    return first_checked
