"""No public function multiplies float32 numbers in less than float32.

GPUs and TPUs take TF32 or bfloat16 for products unless they are told otherwise: three digits. Every
row of `public_functions` is traced, and its program searched; those that look at values are run,
and what they multiply is overheard.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.extend.core.primitives import dot_general_p
from public_functions import ROWS, inputs

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
HOST = [n for n, row in ROWS.items() if row.host and (row.kind != "numpy" or "analysis" in n)]


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_known():
    """A program that is known is not traced again; what a test here traces is searched or heard."""
    jax.clear_caches()


def is_rounded(operands, precision):
    return any(x.dtype == np.float32 for x in operands) and precision != HIGHEST


def rounded_products(jaxpr):
    """Where in `performer` they are; those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive is dot_general_p and is_rounded(
            (x.aval for x in equation.invars), equation.params["precision"]
        ):
            frames = equation.source_info.traceback.frames
            places = [f"{x.file_name}:{x.line_num}" for x in frames]
            yield next((x for x in places if "/performer/" in x), "elsewhere")
        for inner in jaxprs_in_params(equation.params):
            yield from rounded_products(inner)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if not row.host])
def test_products_of_programs(name):
    program = jax.make_jaxpr(lambda: ROWS[name].call(inputs(jnp.float32)))()
    assert not set(rounded_products(program.jaxpr))


@pytest.mark.parametrize("name", HOST)
def test_products_at_work(name, monkeypatch):
    heard, bind = [], dot_general_p.bind

    def overheard(*operands, **params):
        heard.append(is_rounded(operands, params["precision"]))
        return bind(*operands, **params)

    monkeypatch.setattr(dot_general_p, "bind", overheard)
    ROWS[name].call(inputs(jnp.float32))
    assert not any(heard)


def test_a_product_of_the_default_precision_is_found():
    program = jax.make_jaxpr(jax.jit(lambda x: jax.lax.map(lambda y: y @ x, x)))(jnp.ones((2, 2)))
    assert list(rounded_products(program.jaxpr)) == ["elsewhere"]
