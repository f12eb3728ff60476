"""`performer.linearize` of the styles of public code in `tests.support.styles`."""

import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from performer.linearization.measure import program_of
from performer.linearization.program import left_in, named
from tests.support import styles
from tests.support.styles import EXACT, MEASURED, NONE, READ
from tests.support.tiers import tiers

CORE = [*READ[::12], *list(EXACT)[::12], *NONE[::4]]
CORE += [styles.diffusers_chunks, styles.transformers_head_mask, styles.sink_in_the_sum]


def name(form):
    return form.__name__


def arguments(form, seed=0):
    """Queries, keys and values, and what more the form has."""
    rng = np.random.default_rng(seed)
    tokens = [0.4 * rng.normal(size=(styles.B, styles.T, styles.N, styles.H)) for _ in range(3)]
    more = [x.default for x in inspect.signature(form).parameters.values()][3:]
    return [*(jnp.asarray(x, jnp.float32) for x in tokens), *map(jnp.asarray, more)]


@pytest.mark.parametrize("form", tiers([*READ, *EXACT, *NONE], CORE, name))
def test_none_is_left_in_silence(form):
    """Attention is found, or a reason is given; nothing is said of what is none."""
    program = program_of(form, arguments(form))[0]
    reasons = [each.reason for each in left_in(program)]
    if form in EXACT and form not in MEASURED:
        assert re.search(EXACT[form], "".join(reasons)), reasons
    else:
        assert bool(named(program)) == (form not in NONE)
        assert form in styles.PARTLY or not reasons, reasons


@pytest.mark.thorough
@pytest.mark.parametrize("form", sorted(MEASURED, key=name), ids=name)
def test_measured_reasons(form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=EXACT[form]):
            performer.measure(form, [arguments(form)])


def error(form, arguments, function):
    """Squared error relative to the form, over the numbers that are finite in it."""
    got, want = (
        np.concatenate([np.asarray(x, float).ravel() for x in jax.tree.leaves(f(*arguments))])
        for f in (function, form)
    )
    finite = np.isfinite(want)
    return np.sum((got - want)[finite] ** 2) / np.sum(want[finite] ** 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", READ, ids=name)
def test_the_error_falls_as_1_over_m(form):
    """With all keys exact it is the function; then errors of 4,096 features and of 16 are compared.

    1 / m is a 256th; an eighth is asked, since a few draws of four heads have heavy tails.
    """
    batch = arguments(form)
    measured, errors = performer.measure(form, [batch]), []
    sizes = (
        dict(num_features=4, exact=Exact(1000, keys=1000)),
        *(dict(num_features=m, exact=Exact(0), calibration="none") for m in (16, 4096)),
    )
    for each in sizes:
        new, _ = performer.linearize(form, [], measured=measured, time=None, **each)
        errors.append(error(form, arguments(form, 5), new))
    assert errors[0] < 1e-9
    assert errors[2] < errors[1] / 8
