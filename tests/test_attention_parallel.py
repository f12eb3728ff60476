"""Attention over 8 virtual devices: batch, heads and sequence split, equal to one device."""

import re
from collections import Counter
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from performer import performer_attention
from performer.nnx import PerformerAttention, Statistics


def test_eight_devices_give_the_numbers_of_one(eight_devices, capsys):
    """Every line that `compare_all` prints is one comparison."""
    compare_all()
    assert capsys.readouterr().out.splitlines() == [
        "sequence, bidirectional: equal; all_reduce 2",
        "batch and heads, bidirectional: equal",
        "sequence, causal: equal; all_gather 3",
        "batch and heads, causal: equal",
        "sequence, relu: equal; all_reduce 2",
        "sequence, log-weights, bidirectional: equal; all_reduce 2",
        "sequence, log-weights, causal: equal; all_gather 3",
        "sequence, one token on each device, causal: equal; all_gather 3",
        "jit, batch split, bidirectional: split like the inputs; 0 exchanges",
        "jit, batch and heads split, bidirectional: split like the inputs; 0 exchanges",
        "explicit mesh, bidirectional: split like the inputs",
        "jit, batch split, causal: split like the inputs; 0 exchanges",
        "jit, batch and heads split, causal: split like the inputs; 0 exchanges",
        "explicit mesh, causal: split like the inputs",
        "running statistics, shard_map: equal",
        "running statistics, jit: equal",
    ]


def compare_all():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, 48, 4, 8), (2, 48, 2, 8), (2, 48, 2, 5)]
    query, key, value = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes))  # noqa: B905
    frequencies = jax.random.normal(keys[3], (2, 12, 8))
    mask = jax.random.bernoulli(keys[4], 0.8, (2, 1, 1, 48))
    of_one_device = {}

    log_weights = jnp.where(mask, 3 * jax.random.normal(keys[4], mask.shape), -jnp.inf)

    def compare(name, axes, specs, tokens=48, of_keys=mask, **options):
        mesh = jax.make_mesh(axes[1], axes[0], (AxisType.Auto,) * len(axes[0]))
        inputs = [*(x[:, :tokens] for x in (query, key, value)), frequencies, of_keys[..., :tokens]]
        axis_name = "sequence" if "sequence" in axes[0] else None

        def attend(q, k, v, w, of_keys, axis_name=None):
            which = dict(mask=of_keys) if of_keys.dtype == bool else {}
            which = which or dict(key_log_weights=of_keys[:, 0, 0])
            return performer_attention(q, k, v, w, axis_name=axis_name, **which, **options)

        split = jax.jit(
            jax.shard_map(
                partial(attend, axis_name=axis_name),
                mesh=mesh,
                in_specs=specs,
                out_specs=specs[0],
            )
        )

        def run(f):  # outputs and gradients by one program
            def loss(*args):
                out = f(*args, inputs[4])
                return jnp.sum(jnp.sin(out)), out

            gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
            return gradient(*inputs[:4])

        case = (tokens, of_keys.dtype, *options.items())
        if case not in of_one_device:
            of_one_device[case] = run(attend)
        (mine, out), (want, one) = run(split), of_one_device[case]
        np.testing.assert_allclose(out, one, rtol=2e-5, atol=2e-5)
        for a, b in zip(mine, want, strict=True):
            assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b), name
        text = split.lower(*inputs).as_text()
        counts = Counter(re.findall(r"stablehlo\.(all_\w+|collective_\w+)", text))
        print(f"{name}: equal", *(f"{k} {n}" for k, n in counts.items()), sep="; ")

    spec = PartitionSpec
    sequence = (("sequence",), (8,))
    by_token = (*[spec(None, "sequence")] * 3, spec(), spec(None, None, None, "sequence"))
    both = (("data", "heads"), (2, 2))
    by_head = (*[spec("data", None, "heads")] * 3, spec("heads"), spec("data"))
    for is_causal, name in [(False, "bidirectional"), (True, "causal")]:
        compare(f"sequence, {name}", sequence, by_token, is_causal=is_causal)
        compare(f"batch and heads, {name}", both, by_head, is_causal=is_causal)
    compare("sequence, relu", sequence, by_token, feature_map="relu")
    for is_causal, name in [(False, "bidirectional"), (True, "causal")]:
        name = f"sequence, log-weights, {name}"
        compare(name, sequence, by_token, of_keys=log_weights, is_causal=is_causal)
    compare(
        "sequence, one token on each device, causal", sequence, by_token, tokens=8, is_causal=True
    )
    # Under jit with split inputs, data or tensor parallel, tokens stay where they are.
    tokens = jax.random.normal(keys[0], (8, 300, 4, 8))
    for is_causal, name in [(False, "bidirectional"), (True, "causal")]:

        def gradient(x, is_causal=is_causal):
            attend = partial(performer_attention, frequencies=frequencies[0], is_causal=is_causal)
            return jax.vjp(lambda x: attend(x, x, x), x)[1](x)[0]

        want = jax.jit(gradient)(tokens)
        mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
        for split, parts in [
            ("batch", spec(("data", "model"))),
            ("batch and heads", spec("data", None, "model")),
        ]:
            x = jax.device_put(tokens, NamedSharding(mesh, parts))
            program = jax.jit(gradient).lower(x).compile()
            exchanges = re.findall(
                r"(?:all-gather|all-to-all|all-reduce|collective-permute)\(", program.as_text()
            )
            got = program(x)
            assert got.sharding.is_equivalent_to(x.sharding, 4)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            print(f"jit, {split} split, {name}: split like the inputs; {len(exchanges)} exchanges")
        mesh = jax.make_mesh((8,), ("data",))
        with jax.set_mesh(mesh):
            x = jax.device_put(tokens, NamedSharding(mesh, spec("data")))
            got = jax.jit(gradient)(x)
            assert jax.typeof(got).sharding.spec == jax.typeof(x).sharding.spec
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        print(f"explicit mesh, {name}: split like the inputs")

    running_statistics()


def running_statistics():
    """Calibrated layers whose batch is split have the statistics of the whole batch."""
    mesh = jax.make_mesh((8,), ("batch",), (AxisType.Auto,))
    heads = jnp.arange(1.0, 3.0)[:, None] * jax.random.normal(jax.random.key(0), (16, 6, 2, 4))

    def measured(x, axis_name=None):
        layer = PerformerAttention(
            8, 4, num_heads=2, calibration="full", axis_name=axis_name, rngs=nnx.Rngs(0)
        )
        layer(x, x[..., ::-1], x)
        return nnx.to_pure_dict(nnx.state(layer, Statistics))

    want = jax.jit(measured)(heads)
    mapped = jax.shard_map(
        partial(measured, axis_name="batch"),
        mesh=mesh,
        in_specs=PartitionSpec("batch"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    chex.assert_trees_all_close(jax.jit(mapped)(heads), want, atol=1e-4)
    print("running statistics, shard_map: equal")
    split = jax.device_put(heads, NamedSharding(mesh, PartitionSpec("batch")))
    chex.assert_trees_all_close(jax.jit(measured)(split), want, atol=1e-4)
    print("running statistics, jit: equal")
