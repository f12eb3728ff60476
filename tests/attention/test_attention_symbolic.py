"""Exported with sizes that are symbols, attention is what it is called directly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from performer.attention import sizes
from tests.support.attention_inputs import close, inputs, ours
from tests.support.tiers import tiers


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Chunks of 4 tokens, of 8 but on a CPU; blocks of 12 tokens, more for a small batch."""
    monkeypatch.setattr(sizes, "CHUNK", {"cpu": 4, "other": 8})
    monkeypatch.setattr(sizes, "BLOCK_ROWS", {"cpu": 100, "other": 200})


def exported(function, example, names, platforms=("cpu", "tpu", "cuda")):
    """By way of bytes; `names` are the axes of each argument, as in "b, t, 4, 8"."""
    scope = export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(export.symbolic_shape(axes, scope=scope, like=x.shape), x.dtype)
        for x, axes in zip(example, names, strict=True)
    ]
    program = export.export(jax.jit(function), platforms=platforms)(*shapes)
    return export.deserialize(program.serialize())


SELF = ("b, t, ...", "b, t, ...", "b, t, ...", "...")


def causal(query, key, value, frequencies, lengths):
    return ours(query, key, value, frequencies, is_causal=True, key_value_seq_lengths=lengths)


def with_lengths(b=2, t=7):
    return *inputs(b=b, t=t), jnp.arange(1, b + 1) * t // b


PROGRAMS = {
    # the function, its arguments of given sizes, their axes, the sizes
    "causal, lengths": (causal, with_lengths, (*SELF, "b"), [(1, 1), (3, 50)]),
}


@pytest.mark.parametrize("name", tiers(PROGRAMS, 0))
def test_exported_attention_is_attention(name):
    function, arguments, axes, sizes = PROGRAMS[name]
    program = exported(function, arguments(), axes)
    for size in sizes:
        given = arguments(*size)
        got, want = program.call(*given), function(*given)
        assert got.dtype == want.dtype
        tolerance = 1e-2 if got.dtype == jnp.bfloat16 else 1e-5
        close(got.astype(np.float32), want.astype(np.float32), tolerance)
    if function is causal:  # later keys change nothing, bit for bit
        query, key, value, frequencies, lengths = arguments(2, 30)
        lengths = jnp.full(2, 30)
        changed = (x.at[:, 17:].mul(-3) for x in (key, value))
        before = program.call(query, key, value, frequencies, lengths)
        after = program.call(query, *changed, frequencies, lengths)
        np.testing.assert_array_equal(before[:, :17], after[:, :17])
        assert np.all(before[:, 17:] != after[:, 17:])


def test_sizes_are_those_of_the_platform_that_runs_it():
    """The mask within a chunk is 4 x 4 on a CPU, 8 x 8 elsewhere, whatever this machine is."""

    def masks(*platforms):
        names = ("b, ...",) * 3 + ("...", "b")
        program = exported(causal, (*inputs(t=32, k=4), jnp.ones(2, int)), names, platforms)
        return set(re.findall(r"tensor<(4|8)x\1xi1>", program.mlir_module()))

    assert masks("cpu") == {"4"}
    assert masks("tpu") == {"8"}
    assert masks("cpu", "cuda") == {"4", "8"}
