"""The kernels for TPU and GPU: interpreted, against float64, and lowered.

A training step with them is compiled for TPUs in `test_dry_run.py`.

The kernels for TPU have not run on one.
"""

import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from performer import Exact, Features, calibration
from performer.attention import explain, sizes
from performer.attention.kernels import gpu, parts, which
from tests.support import attention_inputs
from tests.support.attention_inputs import close, far_apart, oracle, ours
from tests.support.tiers import tiers

PALLAS = "pallas"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(which, "INTERPRET", "tpu")


@pytest.fixture
def two_blocks(monkeypatch):
    """Blocks of 128 tokens and one head, for which short sequences are long."""
    monkeypatch.setattr(which, "heads_and_block", lambda *_: (1, 128))


def inputs(t, s, k=2, heads=True, dtype=np.float32, **sizes):
    sizes = dict(h=16, v=32, m=32) | sizes
    *tokens, frequencies = attention_inputs.inputs(
        t=t, s=s, k=k, frequency_heads=k if heads else None, **sizes
    )
    return *(x.astype(dtype) for x in tokens), frequencies


def gradients(function, *args, gradient):
    output, pull = jax.vjp(function, *args)
    return output, pull(gradient.astype(output.dtype))


def distance(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_values_against_the_oracle(platform, monkeypatch):
    """Grouped heads, masked keys, weights of the features; sizes that are no block's."""
    monkeypatch.setattr(which, "INTERPRET", platform)
    args, rng = inputs(20, 30, h=12, v=24, m=20), np.random.default_rng(1)
    log_weights = rng.standard_normal((2, 30, 2)).astype(np.float32)
    options = dict(keys=log_weights, weights=jnp.arange(20.0))
    mask = rng.random((2, 30)) < 0.8
    got = ours(*args, mask=mask[:, None, None], implementation=PALLAS, **options)
    want = oracle(*args, mask=mask[:, None, None], **options)
    close(got, want)
    args = inputs(140, 140, n=2, m=16, b=1)  # two chunks, the second short
    want = oracle(*args, is_causal=True)
    close(ours(*args, is_causal=True, implementation=PALLAS), want)


TOLERANCE = {np.float32: 3e-6, jnp.bfloat16: 3e-2}  # of two that both round to bfloat16; seen: 9e-3


@pytest.mark.parametrize(
    ("is_causal", "dtype"), tiers(itertools.product([True, False], [np.float32, jnp.bfloat16]), 0)
)
def test_gradients(is_causal, dtype, two_blocks):
    """Gradients of all that may have one, over two blocks or three chunks, calibration included.

    NaN where no key is stays there; without any key outputs and gradients are 0.
    """
    t, s = (300, 300) if is_causal else (150, 200)
    query, key, value, frequencies = inputs(t, s, n=2, k=1, m=16, v=16, b=3, dtype=dtype)
    fitted = calibration.calibrate(query, key, method="shift+scale+proposal")
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.random((1, 16)), jnp.float32)
    log_weights = jnp.asarray(rng.standard_normal((3, s)), jnp.float32)
    lengths = jnp.array([s, 131, 0])
    absent = (jnp.arange(s) >= lengths[:, None])[..., None, None]
    key, value = (jnp.where(absent, jnp.nan, x) for x in (key, value))

    def function(*args, **options):
        query, key, value, frequencies, fitted, weights, log_weights = args
        return ours(
            *(query, key, value, frequencies),
            calibration=fitted,
            weights=weights,
            keys=log_weights,
            key_value_seq_lengths=lengths,
            is_causal=is_causal,
            **options,
        )

    args = (query, key, value, frequencies, fitted, weights, log_weights)
    gradient = jnp.asarray(rng.standard_normal((3, t, 2, 16)), dtype)
    kernel = partial(function, implementation=PALLAS)
    got = gradients(kernel, *args, gradient=gradient)
    assert not np.any(got[0][2])
    want = gradients(function, *args, gradient=gradient)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(x, y) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("is_causal", "spans", "dtype"),
    tiers(
        [
            (True, 3, jnp.bfloat16),
            (False, 3, jnp.bfloat16),
            (True, 1, np.float32),
            (True, 3, np.float32),
            (False, 1, np.float32),
            (False, 3, np.float32),
        ],
        2,
    ),
)
def test_gradients_on_a_gpu(is_causal, spans, dtype, monkeypatch):
    """Gradients of all that may have one, in programs for all tokens or for spans.

    Sizes are no block's; two query heads share a key head; keys may be absent.
    """
    monkeypatch.setattr(which, "INTERPRET", "cuda")
    monkeypatch.setattr(gpu, "PROGRAMS", 4 * spans)
    monkeypatch.setattr(gpu, "STEPS", 1)
    t, s = (150, 150) if is_causal else (140, 150)
    *tokens, frequencies = inputs(t, s, n=2, k=1, m=12, v=8, h=12, dtype=dtype)
    lengths, rng = jnp.array([s, 77]), np.random.default_rng(3)
    fitted = calibration.calibrate(*tokens[:2], method="shift+scale+proposal")
    weights = jnp.asarray(rng.random((1, 12)), jnp.float32)
    log_weights = jnp.asarray(rng.standard_normal((2, s)), jnp.float32)
    gradient = jnp.asarray(rng.standard_normal((2, t, 2, 8)), dtype)

    def function(query, key, value, frequencies, fitted, weights, log_weights, **options):
        options |= dict(key_value_seq_lengths=lengths, is_causal=is_causal, weights=weights)
        options |= dict(calibration=fitted, keys=log_weights)
        return ours(query, key, value, frequencies, **options)

    args = *tokens, frequencies, fitted, weights, log_weights
    got = gradients(partial(function, implementation=PALLAS), *args, gradient=gradient)
    want = gradients(function, *args, gradient=gradient)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(x, y) < TOLERANCE[dtype]


def test_gradients_of_long_keys_on_a_gpu(monkeypatch):
    """Keys of norm 200: exponents of 2e4 have few digits, but the weights of a query sum to 1.

    With these weights as they come from the forward pass, a distance is 1.2e-3; the largest right
    one is 2.9e-4 on each kind of processor, of exponents that XLA rounds too.
    """
    monkeypatch.setattr(which, "INTERPRET", "cuda")
    *tokens, frequencies = inputs(150, 150, n=2, m=64, h=32)
    query, key = (200 * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in tokens[:2])
    args = query, key, tokens[2], frequencies
    gradient = jnp.ones((*query.shape[:3], tokens[2].shape[-1]))
    got = gradients(partial(ours, implementation=PALLAS), *args, gradient=gradient)
    want = gradients(ours, *args, gradient=gradient)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(x, y) < 6e-4


@pytest.mark.parametrize("is_causal", [True, False])
def test_float16_on_a_gpu(is_causal, monkeypatch):
    """Outputs and gradients as near to float64 as rounding the results; sums exceed float16."""
    monkeypatch.setattr(which, "INTERPRET", "cuda")
    query, key, value, frequencies = inputs(100, 100, n=2, k=1, m=16, v=16)
    wide = query, key * 0.1, value * 2000
    tokens = [x.astype(jnp.float16) for x in wide]
    gradient = jnp.asarray(np.random.default_rng(3).standard_normal((2, 100, 2, 16)), jnp.float16)

    def function(*tokens, **options):
        return ours(*tokens, frequencies, is_causal=is_causal, **options)

    got = gradients(partial(function, implementation=PALLAS), *tokens, gradient=gradient)
    want = gradients(function, *(x.astype(np.float32) for x in tokens), gradient=gradient)
    assert jax.tree.leaves(got)[0].dtype == jnp.float16
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert distance(x, y) < 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lost_rows_are_those_without_the_kernel(platform, monkeypatch):
    """Long keys, opposite to their queries, after longer ones: `sweep` says which rows are NaN."""
    monkeypatch.setattr(which, "INTERPRET", platform)
    monkeypatch.setattr(sizes, "chunk_and_block", lambda *_: (128, 256))
    query, key, value, frequencies = (
        jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 0 if x.ndim == 4 else 4), (0, -x.shape[-1] % 16)])
        for x in far_apart(40.0, t=150)
    )
    key = key.at[:, :128].multiply(1.5)
    args, options = (query, key, value, frequencies), dict(is_causal=True)
    options["return_residual"] = True
    (got, log), (want, wanted_log) = (
        ours(*args, implementation=x, **options) for x in (PALLAS, None)
    )
    lost = np.isnan(want)
    for residual in (log, wanted_log):
        np.testing.assert_array_equal(np.isnan(residual), lost.any(axis=-1))
    np.testing.assert_array_equal(np.isnan(got), lost)
    assert 0 < lost.mean() < 1
    close(np.where(lost, 0, got), np.where(lost, 0, want), 1e-4)


@pytest.mark.parametrize(
    ("named", "options"),
    tiers(
        [
            ("feature_map", dict(feature_map="relu")),
            ("segment_ids", dict(segment_ids=np.zeros((2, 20), np.int32))),
            ("a decay", dict(slopes=np.ones(4))),
            ("float16", dict(dtype=np.float16)),
            ("so large", dict(m=4096, h=256, v=256, is_causal=True)),
        ],
        2,
        lambda x: x[0],
    ),
)
def test_unsupported_calls_are_computed_without_it(named, options):
    """With one warning."""
    which.warn.cache_clear()
    sizes = {name: options.pop(name) for name in ("dtype", "m", "h", "v") if name in options}
    args = inputs(20, 20, b=2, **sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, _ = (ours(*args, implementation=PALLAS, **options) for _ in range(2))
    assert [named in str(w.message) for w in caught] == [True]
    jax.tree.map(np.testing.assert_array_equal, got, ours(*args, **options))


def test_other_platforms_compute_without_it(monkeypatch):
    """On a CPU, with gradients and a warning."""
    monkeypatch.setattr(which, "INTERPRET", "")
    which.warn.cache_clear()
    args = inputs(20, 20)
    loss = lambda *x, **options: jnp.sum(ours(*x, **options) ** 2)  # noqa: E731
    with pytest.warns(
        UserWarning, match="'pallas' is for programs compiled for a TPU or GPU: those"
    ):
        got = jax.grad(loss, (0, 1, 2, 3))(*args, implementation=PALLAS)
    for x, y in zip(got, jax.grad(loss, (0, 1, 2, 3))(*args), strict=True):
        close(x, y, 1e-6)


@pytest.mark.parametrize(
    ("devices", "shape", "axis_type", "options", "has_kernel"),
    [
        (1, (), None, {}, True),
        (1, (), None, {"is_causal": True}, True),
        (1, (), None, {"implementation": "blocked"}, False),
        (1, (), None, {"exact_rows": 1}, False),
        (8, (), None, {}, False),  # the compiler would gather the batch
        (8, (2,), AxisType.Auto, {}, True),
        (8, (4,), AxisType.Auto, {}, False),  # 2 sequences
        (8, (2,), AxisType.Explicit, {}, False),
    ],
)
def test_on_a_gpu_the_kernels_are_the_default(
    devices, shape, axis_type, options, has_kernel, monkeypatch
):
    """Where they support the call, and devices are known to share the batch; without a warning."""
    monkeypatch.setattr(which, "INTERPRET", "cuda")
    monkeypatch.setattr(sizes, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(parts, "rows", lambda x, *_: (kernel(x), None, None))

    def kernel(x):
        used.append(x)
        return x.query

    jax.clear_caches()  # a traced call would not ask for its kernel again
    used, args = [], inputs(20, 20, n=2, h=32, v=32)
    names = ("data",)[: len(shape)]
    axis_types = (axis_type,)[: len(shape)]
    mesh = jax.sharding.AbstractMesh(shape, names, axis_types=axis_types)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(partial(ours, **options), *args)
    assert bool(used) == has_kernel


def test_explain(monkeypatch):
    """The table of paths; nothing is computed, and nothing warned of."""
    monkeypatch.setattr(which, "INTERPRET", "")
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def paths(dtype=jnp.bfloat16, h=64, m=128, exact=Exact(), **options):  # noqa: B008
        x = jax.ShapeDtypeStruct((2, 30, 4, h), dtype)
        w = jax.ShapeDtypeStruct((m, h), jnp.float32)
        lines = explain(x, x, x, Features(w, exact=exact), **options)
        return [line.split(": ", 1)[1] for line in lines.splitlines()]

    none, kernel = "blocked, no kernel", "kernel"
    segments = np.zeros((2, 30), int)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default = [f"{none} for a CPU", kernel, f"{none} by default on a TPU"]
        note = "; rows of too large norms are NaN, 'robust' computes them"
        assert paths() == default
        assert paths(is_causal=True) == [line + note for line in default]
        assert paths(is_causal=True, implementation="robust") == ["robust"] * 3
        assert paths(implementation=PALLAS) == [f"{none} for a CPU", kernel, kernel]
        assert paths(implementation="robust") == ["robust"] * 3
        packed = f"{none} for segment_ids"
        assert paths(segment_ids=segments, implementation=PALLAS)[1:] == [packed + note] * 2
        assert paths(exact=Exact(4))[1] == "robust, no kernel for Exact(window=4)"
        assert paths(streams=True)[1] == f"{none} by default with states, which was not timed"
        assert paths(np.float16)[1] == f"{none} by default in float16, which was not timed"
        assert "(64, 64, 100), of which powers of two were timed" in paths(m=100)[1]
        assert "(80, 80, 128) on a GPU, of products above 8,192" in paths(h=80)[1]
    assert "cpu (here): " in explain(*inputs(20, 20))


def test_elsewhere_the_kernels_are_not_the_default():
    text = str(jax.make_jaxpr(ours)(*inputs(20, 20)))
    assert "pallas" not in text


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:implementation='pallas'")
@pytest.mark.parametrize(("is_causal", "dtype"), [(False, np.float32), (True, jnp.bfloat16)])
def test_lowers_for_tpu(is_causal, dtype, monkeypatch):
    """Without one: a program with one kernel each way and no exponential of XLA's."""
    monkeypatch.setattr(which, "INTERPRET", "")
    shape = jax.ShapeDtypeStruct((2, 200, 4, 64), dtype)
    args = shape, shape, shape, jax.ShapeDtypeStruct((4, 128, 64), jnp.float32)

    def loss(*args):
        output = ours(*args, is_causal=is_causal, implementation=PALLAS)
        return jnp.sum(output.astype(jnp.float32) ** 2)

    function = jax.jit(jax.grad(loss, (0, 1, 2)))
    for platform, kernels in [("tpu", 2), ("cpu", 0)]:
        text = jax.export.export(function, platforms=[platform])(*args).mlir_module()
        assert text.count("@tpu_custom_call") == kernels
        assert ("stablehlo.exponential" in text) == (kernels == 0)


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [False, True])
def test_lowers_for_gpu(is_causal, monkeypatch):
    """Without one: a kernel each way at least, for any width; in float32 none, and a warning."""
    monkeypatch.setattr(which, "INTERPRET", "")
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def lowered(dtype, h=64):
        shape = jax.ShapeDtypeStruct((2, 200, 4, h), dtype)
        args = shape, shape, shape, jax.ShapeDtypeStruct((4, 100, h), jnp.float32)

        def loss(*args):
            output = ours(*args, is_causal=is_causal, implementation=PALLAS)
            return jnp.sum(output.astype(jnp.float32) ** 2)

        with jax.sharding.use_abstract_mesh(mesh):
            trace = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*args)
            return trace.lower(lowering_platforms=("cuda",)).as_text()

    bfloat16 = lowered(jnp.bfloat16)
    assert bfloat16.count("xla.gpu.triton") >= 2
    assert "ex2.approx" in bfloat16
    assert "__nv_expf" not in bfloat16  # nine instructions
    assert lowered(jnp.float16, h=40).count("xla.gpu.triton") >= 2
    which.warn.cache_clear()
    with pytest.warns(UserWarning, match="'float32', 'float32'. on a GPU"):
        assert "triton" not in lowered(jnp.float32)


def test_exponentials_of_a_gpu(monkeypatch):
    """By two instructions, of which a CPU has none, each a power or a logarithm to base 2."""
    instructions = {"ex2": jnp.exp2, "lg2": jnp.log2}
    monkeypatch.setattr(gpu, "approximate", lambda name, x: instructions[name](x))
    on, x = gpu.Span(8, 8, interpret=False), jnp.array([-jnp.inf, -80.0, -3.0, 0.0])
    np.testing.assert_allclose(on.exp(x), np.exp(np.float64(x)), rtol=2e-5)
    np.testing.assert_allclose(on.log(jnp.exp(x[2:])), x[2:], rtol=1e-6)


@pytest.mark.thorough
def test_each_device_has_its_part_of_the_batch(eight_devices):
    """Under plain jit, the mesh in context; with lengths, and gradients of shared frequencies."""
    query, key, value, frequencies = inputs(20, 20, n=2, b=8)
    lengths = jnp.arange(13, 21)

    def gradients_of(*args, implementation=None):
        function = partial(ours, key_value_seq_lengths=lengths, implementation=implementation)
        return jax.grad(lambda *x: jnp.sum(function(*x) ** 2), argnums=(0, 1, 2, 3))(*args)

    want = gradients_of(query, key, value, frequencies)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    tokens = jax.device_put((query, key, value), split)
    with jax.set_mesh(mesh):
        program = jax.jit(partial(gradients_of, implementation=PALLAS))
        got = program(*tokens, jax.device_put(frequencies, NamedSharding(mesh, PartitionSpec())))
        text = program.lower(*tokens, frequencies).compile().as_text()
    assert "all-gather" not in text
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < 1e-5
