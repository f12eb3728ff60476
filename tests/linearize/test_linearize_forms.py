"""`performer.linearize` of the forms of attention in `tests.support.forms`."""

import math
import warnings

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

import performer
from performer import Exact
from tests.support import forms
from tests.support.forms import ALONG_FACTORS, EXACT, MORE, READ
from tests.support.tiers import tiers

ALL = dict(exact=Exact(1000, keys=1000), num_features=4)
"""All keys are exact: the new function is the old one."""
TOKENS = 4096


def name(form):
    return form.__name__


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arguments(form, seed=0):
    """Queries, keys and values, and what more the form has."""
    arrays = [normal(seed + i, shape) for i, shape in enumerate(forms.heads())]
    more = (ALONG_FACTORS | MORE).get(form)
    return arrays if more is None else [*arrays, jnp.asarray(more)]


def rows(form):
    """Queries that exist: with segments, 0 is padding."""
    more = ALONG_FACTORS.get(form)
    exist = more is not None and more.dtype in (bool, int)
    return np.asarray(more) > 0 if exist else np.ones((forms.B, forms.T), bool)


CORE = [forms.padding_causal, forms.segments_causal, forms.divided_late_causal, forms.one_more]
CORE += [
    forms.mask_of_exponentials,
    forms.relevance_causal,
    forms.column_of_ones_causal,
    forms.grid_by_hand,
]


@pytest.mark.parametrize("form", tiers([*ALONG_FACTORS, *READ], CORE, name))
def test_a_form_that_is_read_equals_the_function(form):
    new, report = performer.linearize(form, [arguments(form)], **ALL)
    assert not report.left
    got, want = jax.jit(lambda *x: (new(*x), form(*x)))(*arguments(form, 5))
    if got.shape[:2] == rows(form).shape:
        got, want = got[rows(form)], want[rows(form)]
    np.testing.assert_allclose(got, want, atol=1e-5)


STRICT = [forms.positions, forms.segments, forms.padding_causal]


@pytest.mark.thorough
@pytest.mark.parametrize("form", STRICT, ids=name)
def test_forms_with_64_bits_and_strict_promotion(form):
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(True), strict[0], strict[1]:
        new, _ = performer.linearize(form, [arguments(form)], **ALL)
        got, want = (f(*arguments(form, 5)) for f in (new, form))
        np.testing.assert_allclose(got[rows(form)], want[rows(form)], atol=1e-5)


@pytest.mark.parametrize("form", tiers(EXACT, list(EXACT), name))
def test_a_form_that_stays_exact_has_a_true_reason(form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=EXACT[form]):
            performer.measure(form, [arguments(form)])


def shapes(jaxpr):
    """Shapes of all arrays that a program computes."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars)
        for inner in jex.jaxprs_in_params(equation.params):
            yield from shapes(getattr(inner, "jaxpr", inner))


OTHERS = [
    forms.one_more,
    forms.masked_exponentials,
    forms.layers_in_a_scan,
    forms.divided_late_causal,
    forms.base_two_causal,
    forms.cosine,
    forms.column_of_ones_causal,
    forms.grid,
    forms.grid_by_hand,
]


LINEAR = [forms.padding_causal, forms.grid_by_hand]


@pytest.mark.parametrize("form", tiers([*ALONG_FACTORS, *OTHERS], LINEAR, name))
def test_no_array_over_pairs(form):
    """The new function is linear in the length: masks, biases and scales are read as factors."""
    new, _ = performer.linearize(form, [arguments(form)], num_features=4, exact=Exact(0))
    heads = [jax.ShapeDtypeStruct(x, jnp.float32) for x in forms.heads(TOKENS, b=1)]
    more = ALONG_FACTORS.get(form)
    if more is not None:
        shape = (1, TOKENS) if more.ndim == 2 else more.shape
        heads.append(jax.ShapeDtypeStruct(shape, more.dtype))
    traced = jax.make_jaxpr(new)(*heads)
    assert not [x for x in shapes(traced.jaxpr) if math.prod(x) >= TOKENS**2]


def falling(q, k, v, slope):
    """ALiBi whose slopes may have any sign."""
    t = q.shape[1]
    return forms.attend(q, k, v, forms.tri(t), -slope[:, None, None] * forms.distance(t))


def kept(q, k, v, pairs):
    """A factor of each pair on the exponentials."""
    e = jnp.exp(forms.scores(q, k)) * pairs[:, None]
    return forms.output(e / jnp.sum(e, axis=-1, keepdims=True), v)


OTHER_KINDS = {
    kept: (np.repeat(forms.VALID[:, None], forms.T, axis=1).astype(np.float32), np.float32(0.5)),
    forms.padding_times_number: (forms.VALID.astype(np.float32), np.float32(0.5)),
    falling: (forms.SLOPES, np.float32(-1)),
}
"""Form -> its last argument, and a factor with which it is no mask or bias that is supported."""


@pytest.mark.parametrize("form", tiers(OTHER_KINDS, list(OTHER_KINDS), name))
def test_an_argument_of_another_kind_gives_nan(form):
    (more, factor), tokens = OTHER_KINDS[form], [normal(i, x) for i, x in enumerate(forms.heads())]
    new, _ = performer.linearize(form, [(*tokens, more)], **ALL)
    compiled = jax.jit(new)
    assert jnp.isfinite(compiled(*tokens, more)).all()
    assert jnp.isnan(compiled(*tokens, more * factor)).all()


def added(q, k, v, numbers):
    """Numbers of the keys, which are a mask if they are 0 or below -9000."""
    return forms.attend(q, k, v, bias=numbers[:, None, None])


MASK = np.where(forms.VALID, 0, -1e9).astype(np.float32)
NUMBERS = np.linspace(-2, 2, forms.B * forms.T, dtype=np.float32).reshape(forms.B, forms.T)


def test_numbers_of_keys_are_a_bias_if_those_of_the_batches_were():
    """A bias may be a mask, but a mask is no bias: then the output is NaN."""
    tokens = [normal(i, x) for i, x in enumerate(forms.heads())]
    batches = [(*tokens, MASK), (*tokens, NUMBERS)]
    biased, _ = performer.linearize(added, batches, **ALL)
    masked, _ = performer.linearize(added, batches[:1], **ALL)
    for numbers in (MASK, NUMBERS, MASK + NUMBERS):
        np.testing.assert_allclose(biased(*tokens, numbers), added(*tokens, numbers), atol=1e-5)
    assert jnp.isfinite(masked(*tokens, MASK)).all()
    assert jnp.isnan(masked(*tokens, NUMBERS)).all()
    assert jnp.isnan(biased(*tokens, np.where(NUMBERS < 0, np.nan, NUMBERS))).any()


def derivatives(form, numbers):
    """Derivatives by the numbers of the keys, of the new function and of the given one."""
    batch = [*(normal(i, x) for i, x in enumerate(forms.heads())), numbers]
    new, _ = performer.linearize(form, [batch], **ALL)
    return (jax.grad(lambda x, f=f: jnp.sum(f(*batch[:3], x) ** 2)) for f in (new, form))


def test_a_bias_of_keys_has_a_derivative():
    got, want = derivatives(added, NUMBERS)
    np.testing.assert_allclose(got(NUMBERS), want(NUMBERS), atol=1e-4)


def test_a_factor_of_keys_has_a_derivative_where_it_is_not_zero():
    numbers = np.abs(NUMBERS)
    got, want = derivatives(forms.weights_of_keys, numbers)
    np.testing.assert_allclose(got(numbers), want(numbers), atol=1e-4)
    assert jnp.isnan(got(jnp.asarray(numbers).at[0, 3].set(0))[0, 3])


def test_the_error_is_of_attention_with_the_bias_of_keys():
    """Attention is easy where the bias leaves one key: its row is 1 there."""
    batch = [*(normal(i, x) for i, x in enumerate(forms.heads())), NUMBERS]
    errors = []
    for number in (1, 100):
        _, report = performer.linearize(
            added, [(*batch[:3], number * NUMBERS)], num_features=4, time=None
        )
        errors.append(max(row["attention error"] for row in report.rows))
    assert errors[1] < 1e-3 < errors[0]
