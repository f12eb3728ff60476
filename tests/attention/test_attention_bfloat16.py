"""Gradients of bfloat16 inputs, against float64, where products round what they multiply.

A CPU takes operands as they are, whatever algorithm a product names. So the programs are
interpreted here as a matrix unit runs them, with each operand rounded to bfloat16.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import dot_general_p

from performer.numerics import BFLOAT16
from tests.support.attention_inputs import ours

INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def as_on_a_matrix_unit(function, *args):
    """function(*args), every product that names `BFLOAT16` of rounded operands."""
    closed = jax.make_jaxpr(function)(*args)
    return jax.jit(partial(evaluated, closed.jaxpr))(closed.consts, *jax.tree.leaves(args))


def evaluated(jaxpr, consts, *args):
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        values = [x.val if hasattr(x, "val") else known[x] for x in equation.invars]
        params = dict(equation.params)
        inner = next((params[name] for name in INNER if name in params), None)
        if inner is not None:
            out = evaluated(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), *values)
        else:
            if equation.primitive is dot_general_p and params["precision"] == BFLOAT16:
                values = [jax.lax.reduce_precision(x, 8, 7) for x in values]
                params["precision"] = HIGHEST
            out = equation.primitive.bind(*values, **equation.primitive.get_bind_params(params))
        out = out if equation.primitive.multiple_results else [out]
        known |= dict(zip(equation.outvars, out, strict=True))
    return [x.val if hasattr(x, "val") else known[x] for x in jaxpr.outvars]


def plain(query, key, value, frequencies):
    """Pair by pair: softmax over the keys of log sum_j e^{w_j.q + w_j.k - |k|^2 / 2}, of v."""
    query, key = (x * x.shape[-1] ** -0.25 for x in (query, key))
    of_query = jnp.einsum("bthd,hmd->bhtm", query, frequencies)
    of_key = jnp.einsum("bthd,hmd->bhtm", key, frequencies)
    of_key -= jnp.sum(key**2, axis=-1).swapaxes(1, 2)[..., None] / 2
    pairs = jax.nn.logsumexp(of_query[:, :, :, None] + of_key[:, :, None], axis=-1)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(pairs, axis=-1), value)


def softmax(query, key, value):
    pairs = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(pairs, axis=-1), value)


def errors(query, key, value, frequencies, gradient):
    """Of the gradients of queries, keys and values; ours, and those of softmax attention."""
    tokens = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    gradient = jnp.asarray(gradient, jnp.bfloat16)
    root = query.shape[-1] ** -0.25
    given = (frequencies * root).astype(jnp.bfloat16).astype(np.float32) / np.float32(root)

    def gradients(function, tokens, gradient):
        return jax.vjp(function, *tokens)[1](gradient)

    def distance(function, exact):
        got = as_on_a_matrix_unit(partial(gradients, function), tokens, gradient)
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in (*tokens, gradient)]
            want = jax.jit(partial(gradients, exact))(wide[:3], wide[3])
        return [
            float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))
            for x, y in zip(got, map(np.asarray, want), strict=True)
        ]

    features = partial(ours, frequencies=jnp.asarray(given), implementation="blocked")
    with jax.enable_x64(True):
        wide = jnp.asarray(given, jnp.float64)
    return (
        distance(features, partial(plain, frequencies=wide)),
        distance(jax.nn.dot_product_attention, softmax),
    )


@pytest.mark.parametrize("mean", [0, 3])
def test_random_queries(mean):
    """At most 1.5 times softmax attention's own; with a mean of the values, less than these."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((4, 1, 100, 2, 64))
    tokens[2] += mean * rng.standard_normal((2, 64))
    ours, exact = errors(*tokens[:3], rng.standard_normal((2, 128, 64)), tokens[3])
    assert max(ours) < (1.5 if mean == 0 else 1.0) * max(exact)


@pytest.mark.parametrize("options", [dict(exact_keys=1, exact_rows=1), dict(exact_window=16)])
def test_single_numbers(options):
    """One token, head and feature: XLA on CPU has no bfloat16 product of single numbers."""
    one = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    output, pull = jax.vjp(lambda *x: ours(*x, one[0, 0], **options), one, one, one)
    np.testing.assert_array_equal(output, 1)
    np.testing.assert_array_equal(pull(output)[2], 1)


@pytest.mark.parametrize("heads", [1, 8])
def test_one_token(heads):
    """Products of XLA on CPU that fail in bfloat16: a sum that is one number, vectors of heads."""
    query, key, value = jnp.ones((3, 1, 1, heads, 64), jnp.bfloat16)
    attend = partial(ours, frequencies=jnp.ones((256, 64)))
    output, pull = jax.vjp(lambda *tokens: attend(*tokens), query, key, value)
    np.testing.assert_array_equal(output, value)
    np.testing.assert_array_equal(pull(output)[2], value)


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_under_strict_promotion(is_causal):
    """JAX cannot lower the gradient of a product of two bfloat16 operands there."""
    x, w = jnp.ones((1, 140, 2, 24), jnp.bfloat16), jnp.ones((40, 24))

    def loss(x):
        return jnp.sum(ours(x, x, x, w, is_causal=is_causal))

    with jax.numpy_dtype_promotion("strict"):
        assert jax.jit(jax.grad(loss))(x).dtype == jnp.bfloat16
