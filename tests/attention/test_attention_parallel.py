"""Attention over 8 virtual devices: batch, heads and sequence split, equal to one device."""

import re
from collections import Counter
from functools import partial

import chex
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from performer.attention import stream
from performer.nnx import PerformerAttention, Statistics
from tests.support.attention_inputs import inputs, ours
from tests.support.tiers import tiers
from vit.run.dry_run import collectives

BY_TOKEN, BY_HEAD = PartitionSpec(None, "sequence"), PartitionSpec("data", None, "heads")
CASES = {
    # the mesh, the options, the exchanges of the forward pass
    "both ways": ({"sequence": 8}, {}, {"all_reduce": 2}),
    "causal": ({"sequence": 8}, dict(is_causal=True), {"all_gather": 3}),
    "batch and heads": ({"data": 2, "heads": 2}, dict(is_causal=True), {}),
}


@pytest.mark.parametrize("name", tiers(CASES, ["causal"]))
def test_split_over_devices(name, eight_devices):
    """Outputs and gradients are those of one device."""
    axes, options, exchanges = CASES[name]
    axis_name = "sequence" if "sequence" in axes else None
    *tokens, frequencies = inputs(t=32, frequency_heads=2)
    mask = np.random.default_rng(1).random((2, 1, 1, 32)) < 0.8

    def attend(query, key, value, frequencies, mask, axis_name=None):
        return ours(query, key, value, frequencies, mask=mask, axis_name=axis_name, **options)

    def run(function):
        def loss(*args):
            output = function(*args, mask)
            return jnp.sum(jnp.sin(output)), output

        gradient = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(gradient)(*tokens, frequencies)

    spec = BY_TOKEN if axis_name else BY_HEAD
    of_mask = PartitionSpec(None, None, None, "sequence") if axis_name else PartitionSpec("data")
    of_frequencies = PartitionSpec() if axis_name else PartitionSpec("heads")
    split = jax.shard_map(
        partial(attend, axis_name=axis_name),
        mesh=jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes)),
        in_specs=(spec, spec, spec, of_frequencies, of_mask),
        out_specs=spec,
    )
    (got, output), (want, expected) = run(split), run(attend)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) < 1e-5 * np.linalg.norm(y)
    text = jax.jit(split).lower(*tokens, frequencies, mask).as_text()
    assert Counter(re.findall(r"stablehlo\.(all_\w+|collective_\w+)", text)) == exchanges


def test_an_explicit_axis_over_the_tokens_needs_shard_map(eight_devices):
    """JAX's own error comes from the depth; a query may be split so."""
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        whole = jnp.ones((1, 8, 2, 8))
        split = {axis: jax.reshard(whole, PartitionSpec(*[None] * axis, "seq")) for axis in (1, 3)}
        attend = partial(ours, value=whole, frequencies=jnp.ones((4, 8)))
        for call in (attend, jax.jit(attend)):
            message = "the tokens of key are split over the axis 'seq' .* with axis_name='seq'"
            with pytest.raises(ValueError, match=message):
                call(whole, split[1])
        with pytest.raises(ValueError, match="head_dim of key is split over the axis 'seq'"):
            attend(split[3], split[3])
        assert jax.eval_shape(attend, split[1], whole).shape == whole.shape


def test_what_all_devices_have_leaves_as_one(eight_devices):
    """Without causality the state of a split sequence, and outputs of shared queries."""
    query, key, value, frequencies = inputs(t=3, s=16)

    def attend(*tokens, axis_name=None):
        return stream(*tokens, frequencies, is_causal=False, axis_name=axis_name)

    split = jax.shard_map(
        partial(attend, axis_name="sequence"),
        mesh=jax.make_mesh((8,), ("sequence",), (AxisType.Auto,)),
        in_specs=(PartitionSpec(), BY_TOKEN, BY_TOKEN),
        out_specs=PartitionSpec(),
    )
    tokens = query, key, value
    chex.assert_trees_all_close(split(*tokens), attend(*tokens), rtol=2e-5, atol=2e-5)


def within(jaxpr, around=()):
    """Name of each operation, and of the loops and branches around it."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, around
        deeper = (*around, name) if name in ("scan", "while", "cond") else around
        for inner in jex.jaxprs_in_params(equation.params):
            yield from within(inner, deeper)


@pytest.mark.parametrize("split_over", tiers(["batch", "sequence"], ["batch"]))
def test_gradients_of_shared_arrays_are_summed_once(split_over, eight_devices):
    """Not in a loop; nor in a branch that some devices do not take, where the others would wait.

    Keys of the second half are so long that only its rows are computed again by `robust`.
    """
    query, key, value, frequencies = inputs(b=2, t=300, n=2)
    axis_name = "i" if split_over == "sequence" else None
    long = np.mgrid[:2, :300][1] >= 150 if axis_name else np.mgrid[:2, :300][0] == 1
    factor = np.where(long, np.float32(16), np.float32(1))[..., None, None]
    tokens = query * factor, -key * factor, value
    log_weights = np.random.default_rng(1).normal(size=300).astype(np.float32)

    def attend(*args, axis_name=None):
        *tokens, frequencies, log_weights = args
        options = dict(is_causal=True, implementation="robust", keys=log_weights)
        return ours(*tokens, frequencies, axis_name=axis_name, **options)

    def gradient(function):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), argnums=(0, 1, 2, 3, 4))

    spec = PartitionSpec(None, "i") if axis_name else PartitionSpec("i")
    of_weights = PartitionSpec("i") if axis_name else PartitionSpec()
    split = jax.shard_map(
        partial(attend, axis_name=axis_name),
        mesh=jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(spec, spec, spec, PartitionSpec(), of_weights),
        out_specs=spec,
    )
    args = *tokens, frequencies, log_weights
    operations = list(within(jax.make_jaxpr(gradient(split))(*args).jaxpr))
    assert any("cond" in around for _, around in operations)
    sums = [around for name, around in operations if name.startswith(("psum", "all_", "reduce_sc"))]
    assert sums
    assert not any(sums)
    chex.assert_trees_all_close(
        jax.jit(gradient(split))(*args), jax.jit(gradient(attend))(*args), rtol=1e-3, atol=1e-4
    )


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_layer_splits_the_tokens_of_one_program(is_causal, eight_devices):
    """Over the mesh in context: m (v + 2) numbers cross for each head, whatever the length.

    Causal attention gathers those of all devices, also along the axis of the batch.
    """
    layer = PerformerAttention(8, 4, num_heads=2, split="seq", rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((2, 4), ("data", "seq"), (AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))

    def call(*tokens):
        output, pull = jax.vjp(partial(layer, is_causal=is_causal), *tokens)
        return output, pull(jnp.cos(output))

    exchanged = []
    with jax.set_mesh(mesh):
        for length in (64, 16):
            tokens = np.random.default_rng(1).normal(size=(3, 2, length, 2, 4)).astype(np.float32)
            x = jax.device_put(tuple(tokens), split)
            forward = jax.jit(partial(layer, is_causal=is_causal)).lower(*x).compile()
            exchanged.append(sum(size for _, size in collectives(forward.as_text()).values()))
        got = jax.jit(call)(*x)
    chex.assert_trees_all_close(got, jax.jit(call)(*tokens), rtol=2e-5, atol=2e-5)
    numbers = 2 * 8 * (4 + 2)
    assert exchanged == [4 * numbers * ((4 + 1) * 2 if is_causal else 1)] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_stay_where_they_are(is_causal, eight_devices):
    """Under `jit` with split inputs, data or tensor parallel: no exchange, split like the inputs.

    The mesh may also be explicit.
    """
    frequencies = inputs()[3]
    tokens = jax.random.normal(jax.random.key(0), (8, 300, 4, 8))

    def gradient(x):
        attend = partial(ours, frequencies=frequencies, is_causal=is_causal)
        return jax.vjp(lambda x: attend(x, x, x), x)[1](x)[0]

    want = jax.jit(gradient)(tokens)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    for spec in (PartitionSpec(("data", "model")), PartitionSpec("data", None, "model")):
        x = jax.device_put(tokens, NamedSharding(mesh, spec))
        program = jax.jit(gradient).lower(x).compile()
        exchanges = r"(?:all-gather|all-to-all|all-reduce|collective-permute)\("
        assert not re.findall(exchanges, program.as_text())
        got = program(x)
        assert got.sharding.is_equivalent_to(x.sharding, 4)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        got = jax.jit(gradient)(x)
        assert jax.typeof(got).sharding.spec == jax.typeof(x).sharding.spec
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_running_statistics(eight_devices):
    """Calibrated layers whose batch is split have the statistics of the whole batch."""
    mesh = jax.make_mesh((8,), ("batch",), (AxisType.Auto,))
    heads = jnp.arange(1.0, 3.0)[:, None] * jax.random.normal(jax.random.key(0), (16, 6, 2, 4))

    def measured(x):
        layer = PerformerAttention(8, 4, num_heads=2, calibration="full", rngs=nnx.Rngs(0))
        layer(x, x[..., ::-1], x)
        return nnx.to_pure_dict(nnx.state(layer, Statistics))

    want = jax.jit(measured)(heads)
    split = jax.device_put(heads, NamedSharding(mesh, PartitionSpec("batch")))
    chex.assert_trees_all_close(jax.jit(measured)(split), want, atol=1e-4)
