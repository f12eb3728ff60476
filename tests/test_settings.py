"""Every public function under JAX's settings: 64 bits, strict dtypes, ranks that must agree.

`jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` refuse to promote, and
change nothing else. Under jax_enable_x64 draws keep their bits, and what is computed has the dtype
of its points. Tracing shows who is refused, and the dtypes; the slow tier compares all values.
"""

from contextlib import ExitStack, contextmanager
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from public_functions import ROWS, inputs, public_functions

from performer import couplings, performer_attention

TRACED = [n for n, row in ROWS.items() if not row.host and row.kind != "numpy"]


@contextmanager
def strict(x64=False):
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(x64))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


def dtypes(name, dtype):
    """Of what a row returns, which is traced and not computed."""
    return [x.dtype for x in jax.make_jaxpr(lambda: ROWS[name].call(inputs(dtype)))().out_avals]


def test_every_public_function_has_a_row():
    assert not set(public_functions()) - {name.split("[")[0] for name in ROWS}


@pytest.mark.parametrize("name", TRACED)
def test_dtypes(name):
    kind = ROWS[name].kind
    with strict():
        wanted = dtypes(name, jnp.float32)
    widened = [np.float64 if x == np.float32 else x for x in wanted]
    with strict(x64=True):
        found = dtypes(name, jnp.float32)
        if name.startswith("graphs."):  # series and walks take the default dtype
            assert found in (wanted, widened)
            return
        assert found == wanted
        if kind == "computes":
            assert dtypes(name, jnp.float64) == widened


def test_draws_have_the_same_bits():
    """Those of all couplings."""
    draw = lambda: [couplings.get(n)(jax.random.key(1), 5, 3) for n in couplings.COUPLINGS]  # noqa: E731
    wanted = jax.jit(draw)()
    with strict(x64=True):
        chex.assert_trees_all_equal(jax.jit(draw)(), wanted)


@pytest.mark.parametrize("options", [{}, dict(is_causal=True)], ids=str)
def test_attention_in_64_bits(options):
    """README's first example, where query, key and value are then float64 and the draw float32."""
    with strict(x64=True):
        frequencies = couplings.get("pm-antithetic")(jax.random.key(0), 8, 4)
        args = [jax.random.normal(jax.random.key(i), (2, 7, 2, 4)) for i in (1, 2, 3)]
        out = performer_attention(*args, frequencies, **options)
        assert (frequencies.dtype, out.dtype) == (jnp.float32, jnp.float64)
        allowed = np.tril(np.ones((1, 7, 7), bool)) if options else None
        want = oracles.kernel_attention(*args, frequencies, allowed=allowed)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)


def test_rows_that_are_formed_again_are_so_in_64_bits():
    """`robust`, at a norm where the rows of the default are lost."""
    rng = np.random.default_rng(0)
    query, value = rng.standard_normal((2, 1, 70, 2, 4))
    query *= 60 * 2**0.5 / np.linalg.norm(query, axis=-1, keepdims=True)
    frequencies = rng.standard_normal((12, 4), np.float32)
    allowed = np.tril(np.ones((1, 70, 70), bool))
    want = oracles.kernel_attention(query, -query, value, frequencies, allowed=allowed)
    with strict(x64=True):
        args = [jnp.asarray(x) for x in (query, -query, value, frequencies)]
        lost, got = (
            performer_attention(*args, is_causal=True, implementation=name)
            for name in (None, "robust")
        )
    assert np.abs(lost - want).max() > 1
    np.testing.assert_allclose(got, want, rtol=4e-8, atol=4e-8)  # e^-BESIDE of `sweep`


def run(row, dtype):
    """The leaves, as NumPy arrays."""
    call = partial(row.call, inputs(dtype))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(call() if row.host else jax.jit(call)())]


def close(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        size = np.abs(want[np.isfinite(want)]).max(initial=1.0)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ROWS if not n.startswith("graphs.")])
def test_values(name):
    row = ROWS[name]
    wanted = run(row, jnp.float32)
    if row.host:
        with strict():
            chex.assert_trees_all_equal(run(row, jnp.float32), wanted)
    with strict(x64=True):
        found = run(row, jnp.float32)
        if row.kind == "draws":
            chex.assert_trees_all_equal(found, wanted)
            return
        close(found, wanted)
        if row.kind == "computes":
            close(run(row, jnp.float64), wanted)
