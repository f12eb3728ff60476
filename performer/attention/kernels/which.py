"""Which kernels a call of `performer_attention` gets, and their derivative.

A program compiled for a TPU has the kernels of `tpu`, one for an NVIDIA GPU the kernels of `gpu`,
forward and backward. A traced function may be compiled for another platform than the one of this
process: `jax.lax.platform_dependent` chooses, inside one `jax.custom_vjp`.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import AxisType
from jaxtyping import Array, Float

from performer import features
from performer.attention import sizes
from performer.attention.maps import Arguments
from performer.attention.sizes import LANES, ROWS
from performer.attention.state import varying
from performer.attention.values import Estimate, Exact, Pairs, Plan, Tokens

MODULES = {"tpu": "performer.attention.kernels.tpu", "cuda": "performer.attention.kernels.gpu"}
"""Kernels by platform; they are slow to import."""
INTERPRET = ""
"""Platform whose kernels are interpreted, for tests without one: slow."""

LARGEST = 2**13
"""Largest product of num_features and head_dim, or the width of the value, on a GPU: shared memory
of an A100."""
MEMORY = 15 * 2**20
"""Bytes of the core's memory for a step of a kernel; the compiler allows 16 MiB."""
LARGE = "a head_dim, width of value and num_features so large together"
WIDTHS, FEATURES = 10, {"one block": (13, 50), "blocks": (8, 14), "causal": (44, 105)}
"""Memory for each token and query head: WIDTHS (h + v) elements, and FEATURES bytes for each
feature, with elements of two and of four bytes; half more if (z, s) is wider than a register.
Reported by the compiler for TPU v5e for the backward passes, rounded up."""


class Operands(NamedTuple):
    """Arrays of a kernel, or gradients, blocks or references of them; None for none."""

    query: Any = None
    key: Any = None
    value: Any = None
    w_query: Any = None
    w_key: Any = None
    feature_bias: Any = None
    log_weights: Any = None


class Kernel(NamedTuple):
    """Static options of the kernels."""

    scale: float
    is_causal: bool
    heads: int
    """Key heads of a block, on a TPU."""
    block: int
    """Tokens of a block, on a TPU."""
    platform: str
    """"tpu" or "cuda"."""
    interpret: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Requested gradients, other than of queries, keys and values."""

    w_query: bool = False
    w_key: bool = False
    feature_bias: bool = False
    log_weights: bool = False


def with_kernels(
    tokens: Tokens, estimate: Estimate, exact: Exact, pairs: Pairs, streams: bool, plan: Plan
) -> Plan:
    """The plan with the kernels if they support the call; else unchanged, with a warning."""
    kernel, reason = choose(tokens, estimate, exact, pairs, streams or plan.axis_name is not None)
    if kernel is None:
        warn(f"does not support {reason}: attention is computed without the kernel")
        return plan
    here = sizes.platform()
    if here not in ("tpu", "gpu") and not INTERPRET:
        warn(f"is for programs compiled for a TPU or GPU: those for {here} have no kernel")
    return dataclasses.replace(plan, kernel=kernel)


def by_default(
    tokens: Tokens, estimate: Estimate, exact: Exact, pairs: Pairs, streams: bool, plan: Plan
) -> Plan:
    """The plan with the kernels on a GPU, where they were faster for all calls that they support.

    Several devices must be known to share the batch, by the mesh in context or `jax.shard_map`:
    compilers do not shard a kernel, but gather its operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shared = jax.device_count() == 1 if mesh.empty else AxisType.Explicit not in mesh.axis_types
    if sizes.platform() != "gpu" or not shared or is_symbolic_dim(tokens.query.shape[0]):
        return plan
    if tokens.query.shape[0] % sizes.devices():
        return plan
    kernel, _ = choose(tokens, estimate, exact, pairs, streams or plan.axis_name is not None)
    return dataclasses.replace(plan, kernel=kernel)


def choose(
    tokens: Tokens, estimate: Estimate, exact: Exact, pairs: Pairs, streams: bool
) -> tuple[Kernel | None, str | None]:
    """The kernel of a call, or None and the reason why there is none."""
    reason = _refused(tokens, estimate, exact, pairs, streams)
    platform = INTERPRET or {"gpu": "cuda"}.get(sizes.platform(), "tpu")
    steps = heads_and_block(tokens, estimate, pairs.is_causal) if reason is None else None
    if reason is None and platform == "cuda":
        steps, reason = (0, 0), None if fits_gpu(tokens, estimate) else ON_GPU
    if reason is not None or steps is None:
        return None, reason or LARGE
    return Kernel(estimate.scale, pairs.is_causal, *steps, platform, bool(INTERPRET)), None


ON_GPU = (
    "this call on a GPU, where it takes bfloat16, with head_dim, width of value and num_features"
    " powers of two, of products up to 8,192"
)


def fits_gpu(tokens: Tokens, estimate: Estimate) -> bool:
    """True if the kernels for GPU support these dtypes and sizes."""
    widths = tokens.query.shape[-1], tokens.value.shape[-1]
    m, dtype = estimate.frequencies.shape[-2], tokens.query.dtype
    powers = all(x & (x - 1) == 0 for x in (*widths, m))
    return powers and m * max(widths) <= LARGEST and (dtype == jnp.bfloat16 or INTERPRET == "cuda")


def _refused(
    tokens: Tokens, estimate: Estimate, exact: Exact, pairs: Pairs, streams: bool
) -> str | None:
    """Reason why the kernels do not support the call; None if they do."""
    shapes = (*estimate.frequencies.shape, *(size for x in tokens for size in x.shape))
    widths = tokens.query.shape[-1], tokens.value.shape[-1], estimate.frequencies.shape[-2]
    dtypes = [x.dtype.name for x in tokens]
    reasons = {
        "symbolic shapes": any(map(is_symbolic_dim, shapes)),
        "empty arrays": 0 in shapes,
        f"feature_map={estimate.feature_map}": estimate.feature_map != features.positive,
        "stabilizer='google'": estimate.stabilizer == "google",
        "segment_ids": pairs.segments is not None,
        str(exact): any(exact),
        "alibi_slopes or log_decay": pairs.log_decay is not None,
        "initial_state, return_state or axis_name": streams,
        f"query, key and value of dtypes {dtypes}": set(dtypes) not in ({"float32"}, {"bfloat16"}),
        f"(head_dim, width of value, num_features) = {widths}, not multiples of 16": any(
            x % 16 for x in widths
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@cache
def warn(what: str) -> None:
    """Warn once that there is no kernel, and why."""
    warnings.warn(f"implementation='pallas' {what}", stacklevel=4)


def heads_and_block(tokens: Tokens, estimate: Estimate, is_causal: bool) -> tuple[int, int] | None:
    """Key heads and tokens of a step of the kernels; None if no head fits."""
    (query, key, value), frequencies = tokens, estimate.frequencies
    (t, n, h), s, (v, m) = query.shape[-3:], key.shape[-3], (value.shape[-1], frequencies.shape[-2])
    k = n if frequencies.shape[:-2] == (n,) else key.shape[-2]
    size, longest = value.dtype.itemsize, -(-max(t, s) // LANES) * LANES

    def heads(kind: str, block: int) -> int:
        wide = 1.5 if v + ROWS > LANES else 1.0
        per_token = WIDTHS * size * (h + v) + FEATURES[kind][size // 4] * m * wide
        most = MEMORY // (per_token * block * (n // k))
        return max((x for x in range(1, k + 1) if k % x == 0 and x <= most), default=0)

    several = [block for block in (8 * LANES, 4 * LANES, 2 * LANES, LANES) if block < longest]
    choices = [("blocks", block) for block in several]
    if is_causal:
        choices = [("causal", LANES)]
    elif longest <= 8 * LANES:
        choices = [("one block", longest), *choices]
    sized = [(heads(*choice), choice[1]) for choice in choices]
    # Two heads at least, if possible: while one waits, the other computes.
    pairs = [x for x in sized if x[0] * (n // k) >= min(2, n)]
    return next((x for x in [*pairs, *sized] if x[0]), None)


def attention(
    x: Arguments, ordinary: Callable[[Arguments], Array], settings: Kernel
) -> Float[Array, "b t n v"]:
    """Attention by the kernels on their platforms, by `ordinary` elsewhere.

    Compilers do not shard kernels: each device of the mesh in context has a part of the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Auto)
    if not axes or sizes.devices() == 1 or x.query.shape[0] % sizes.devices():
        return _here(x, ordinary, settings)
    split, whole = jax.P(axes), jax.P()
    run = jax.shard_map(
        lambda x: _here(x, ordinary, settings),
        in_specs=(Arguments(*cast(Any, (split, split, whole, whole, whole))),),
        out_specs=split,
        check_vma=not settings.interpret,
    )
    return run(x)


def _here(x: Arguments, ordinary: Callable[[Arguments], Array], settings: Kernel) -> Array:
    """Attention on one device."""
    kernels: Any = import_module(MODULES[settings.platform])
    x = varying(x)

    def by_platform(kernel: Callable, otherwise: Callable, *args):
        if settings.interpret:
            return kernel(*args)
        return jax.lax.platform_dependent(*args, **{settings.platform: kernel}, default=otherwise)

    @jax.custom_vjp
    def run(x):
        return by_platform(lambda x: kernels.forward(x, settings, False)[0], ordinary, x)

    def forward(primals):
        x, perturbed = (
            jax.tree.map(lambda p, name=name: getattr(p, name), primals)
            for name in ("value", "perturbed")
        )
        kernel = partial(kernels.forward, settings=settings, residuals=True)

        def otherwise(x):
            _, rest = jax.eval_shape(kernel, x)
            zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), rest)
            return ordinary(x), varying(zeros, x)

        output, rest = by_platform(kernel, otherwise, x)
        asked = (*perturbed[2:], perturbed.keys.log_weights)
        return output, (x, rest, Wanted(*map(bool, asked)))

    def backward(saved, gradient):
        x, rest, wanted = saved
        kernel = partial(kernels.backward, settings=settings, wanted=wanted)

        def otherwise(x, rest, gradient):
            return jax.vjp(ordinary, x)[1](gradient)[0]

        if settings.platform == "cuda" and wanted != Wanted():  # its kernels have no others
            kernel = otherwise
        return (by_platform(kernel, otherwise, x, rest, gradient),)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(x)
