"""Exported with sizes that are symbols, attention is what it is called directly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from performer import calibration, performer_attention
from performer.attention import _sizes
from tests.attention_inputs import close, inputs


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Chunks of 4 tokens, of 8 but on a CPU; blocks of 12 tokens, more for a small batch."""
    monkeypatch.setattr(_sizes, "CHUNK", {"cpu": 4, "other": 8})
    monkeypatch.setattr(_sizes, "BLOCK_ROWS", {"cpu": 100, "other": 200})


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
CROSS = ("b, t, ...", "b, s, ...", "b, s, ...", "...")
SIZES = [(1, 1), (3, 50)]


def causal(query, key, value, frequencies, lengths):
    return performer_attention(
        query, key, value, frequencies, is_causal=True, key_value_seq_lengths=lengths
    )


@pytest.fixture(scope="module")
def causal_program():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sizes, "CHUNK", {"cpu": 4})
        patch.setattr(_sizes, "BLOCK_ROWS", {"cpu": 100})
        return exported(causal, (*inputs(), jnp.ones(2, int)), (*SELF, "b"))


@pytest.mark.parametrize(("b", "t"), SIZES)
def test_causal_with_lengths_of_any_batch_and_length(causal_program, b, t):
    lengths = jnp.arange(1, b + 1) * t // b
    given = *inputs(b=b, t=t), lengths
    close(causal_program.call(*given), causal(*given))


def test_later_keys_change_nothing_bit_for_bit(causal_program):
    query, key, value, frequencies = inputs(b=2, t=30)
    lengths = jnp.full(2, 30)
    changed = (x.at[:, 17:].mul(-3) for x in (key, value))
    before = causal_program.call(query, key, value, frequencies, lengths)
    after = causal_program.call(query, *changed, frequencies, lengths)
    np.testing.assert_array_equal(before[:, :17], after[:, :17])
    assert np.all(before[:, 17:] != after[:, 17:])


def test_cross_attention_with_two_lengths_and_a_mask_in_bfloat16():
    def cross(query, key, value, frequencies, mask):
        return performer_attention(query, key, value, frequencies, mask=mask)

    def given(b, t, s):
        tokens = (x.astype(jnp.bfloat16) for x in inputs(b=b, t=t, s=s)[:3])
        mask = np.random.default_rng(t).random((b, 1, 1, s)) < 0.7
        return *tokens, inputs()[3], jnp.asarray(mask)

    program = exported(cross, given(2, 7, 9), (*CROSS, "b, 1, 1, s"))
    for sizes in [(1, 1, 1), (3, 50, 20)]:
        got = program.call(*given(*sizes))
        assert got.dtype == jnp.bfloat16
        close(got.astype(np.float32), cross(*given(*sizes)).astype(np.float32), 1e-2)


def test_causal_cross_attention_with_a_calibration():
    """More queries than keys, and fewer: either length is a symbol."""
    fitted = calibration.calibrate(*inputs(t=40)[:2])

    def calibrated(*given):
        return performer_attention(*given, calibration=fitted, is_causal=True)

    program = exported(calibrated, inputs(s=9), CROSS)
    for t, s in [(1, 5), (21, 6)]:
        given = inputs(t=t, s=s)
        close(program.call(*given), calibrated(*given))


def test_a_batch_alone_may_be_symbolic():
    """As an image model has it: blocks follow the batch, and the length is a number."""
    program = exported(performer_attention, inputs(t=33), ("b, ...",) * 3 + ("...",))
    for number in (3, 40):
        given = inputs(b=number, t=33)
        close(program.call(*given), performer_attention(*given))


def test_sizes_are_those_of_the_platform_that_runs_it():
    """The mask within a chunk is 4 x 4 on a CPU, 8 x 8 elsewhere, whatever this machine is."""

    def masks(*platforms):
        names = ("b, ...",) * 3 + ("...", "b")
        program = exported(causal, (*inputs(t=33, k=4), jnp.ones(2, int)), names, platforms)
        return set(re.findall(r"tensor<(4|8)x\1xi1>", program.mlir_module()))

    assert masks("cpu") == {"4"}
    assert masks("tpu") == {"8"}
    assert masks("cpu", "cuda") == {"4", "8"}


@pytest.mark.slow  # its program is large
def test_packed_sequences():
    def packed(*given):
        return performer_attention(*given[:4], segment_ids=given[4])

    def given(b, t):
        ids = np.random.default_rng(t).integers(0, 3, (b, t))
        return *inputs(b=b, t=t), jnp.asarray(ids, jnp.int32)

    program = exported(packed, given(2, 7), (*SELF, "b, t"))
    for b, t in SIZES:
        close(program.call(*given(b, t)), packed(*given(b, t)))


def test_blocks_are_those_of_the_mesh_in_context(monkeypatch):
    """Of a program that is compiled for devices that are not there."""
    platforms, chosen = [], _sizes.chunk_and_block

    def sizes(platform, *arguments):
        platforms.append(platform)
        return chosen(platform, *arguments)

    monkeypatch.setattr(_sizes, "chunk_and_block", sizes)
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=None, platform="tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        jax.eval_shape(performer_attention, *inputs())
    jax.eval_shape(performer_attention, *inputs())
    assert platforms == ["tpu", "cpu"]


def test_rows_are_those_of_a_device(monkeypatch):
    """A batch over eight devices has the blocks of an eighth; on a TPU none while features fit."""

    monkeypatch.setattr(_sizes, "BLOCK_ROWS", {"cpu": 4096})
    m = inputs()[3].shape[-2]

    def sizes(devices, platform, b, kind=AxisType.Auto):
        device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
        mesh = AbstractMesh((devices,), ("data",), (kind,), abstract_device=device)
        with use_abstract_mesh(mesh):
            return _sizes.chunk_and_block(_sizes.platform(), b * 4, m, sweeping=False)

    assert sizes(1, "cpu", 8)[1] == 4096 // 32
    assert sizes(8, "cpu", 64) == sizes(1, "cpu", 8) != sizes(1, "cpu", 64)
    assert sizes(8, "cpu", 8, AxisType.Manual) == sizes(1, "cpu", 8)
    assert sizes(8, "tpu", 512)[1] * 64 * 4 * m * 4 == pytest.approx(_sizes.BLOCK_BYTES, rel=1e-3)
