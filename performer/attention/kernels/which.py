"""Which kernels a call of `performer_attention` gets.

A program compiled for a TPU has the kernels of `tpu`, one for an NVIDIA GPU the kernels of `gpu`,
forward and backward; `run` has their derivatives.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import AxisType
from jaxtyping import Array, Float

from performer import features
from performer.attention import sizes
from performer.attention.maps import Arguments
from performer.attention.sizes import LANES, ROWS
from performer.attention.values import Estimate, Exact, Pairs, Plan, Tokens

NAMES = {"tpu": "TPU", "cuda": "GPU"}
MODULES = {"tpu": "performer.attention.kernels.tpu", "cuda": "performer.attention.kernels.gpu"}
"""Kernels by platform; they are slow to import."""
INTERPRET = ""
"""Platform whose kernels are interpreted, for tests without one: slow."""

LARGEST = 2**13
"""Largest product of num_features and head_dim, or the width of the value, on a GPU, after padding.
With 2^14 the programs compiled for an H100 spill up to 3.8 KB of registers of a thread, and some
exceed its shared memory."""
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


class Call(NamedTuple):
    """A call of `performer_attention`, as far as the choice of a kernel depends on it."""

    tokens: Tokens
    estimate: Estimate
    exact: Exact
    pairs: Pairs
    streams: bool
    """True with a state before or after it, or a sequence on several devices."""
    implementation: str | None


Noted = list[tuple[Call, str]]
"""Calls with abstract arrays, and how they are computed here."""
CALLS: ContextVar[Noted | None] = ContextVar("CALLS", default=None)


@contextmanager
def noted() -> Iterator[Noted]:
    """List the calls that are traced in this context."""
    token = CALLS.set(calls := [])
    try:
        yield calls
    finally:
        CALLS.reset(token)


def planned(plan: Plan, call: Call) -> Plan:
    """The plan, with a kernel if the call gets one; a warning if it names one and gets none."""
    here = sizes.platform()
    if (calls := CALLS.get()) is not None:
        calls.append((call, path(call, here)))
    if call.implementation not in (None, "pallas"):
        return plan
    reason = unsupported(call, here)
    if call.implementation is None:
        reason = not_default(call, here) or reason
    elif reason:
        warn(f"does not support {reason}: attention is computed without the kernel")
    elif here not in ("gpu", "tpu") and not INTERPRET:
        warn(f"is for programs compiled for a TPU or GPU: those for {here} have no kernel")
    return plan if reason else dataclasses.replace(plan, kernel=kernel_of(call, here))


def path(call: Call, platform: str) -> str:
    """How a call is computed on "cpu", "gpu" or "tpu", and why without a kernel, as text."""
    if call.implementation not in (None, "pallas"):
        return call.implementation
    reason = unsupported(call, platform)
    without = "robust" if call.exact.window and call.implementation is None else "blocked"
    if platform == "cpu":
        return f"{without}, no kernel for a CPU"
    if reason:
        return f"{without}, no kernel for {reason}"
    if call.implementation is None and (reason := not_default(call, platform)):
        return f"blocked, no kernel by default {reason}"
    return "kernel"


def kernel_of(call: Call, platform: str) -> Kernel:
    """The kernel of a call that has one; on a CPU the kernel for TPUs, to be exported."""
    on = kernels_for(platform)
    heads, block = (0, 0) if on == "cuda" else heads_and_block(call) or (0, 0)
    return Kernel(call.estimate.scale, call.pairs.is_causal, heads, block, on, bool(INTERPRET))


def kernels_for(platform: str) -> str:
    """Key of `MODULES`."""
    return INTERPRET or {"gpu": "cuda"}.get(platform, "tpu")


def not_default(call: Call, platform: str) -> str:
    """Why a call that names no implementation has no kernel, although it might have; or "".

    Kernels are the default where they were measured to be the fastest. Several devices must be
    known to share the batch, by the mesh in context or `jax.shard_map`: compilers do not shard a
    kernel, but gather its operands.
    """
    mesh, batch = jax.sharding.get_abstract_mesh(), call.tokens.query.shape[0]
    if platform != "gpu":
        return f"on a {platform.upper()}"
    if mesh.empty and jax.device_count() > 1:
        return f"on {jax.device_count()} devices without a mesh in context (jax.set_mesh)"
    if AxisType.Explicit in mesh.axis_types:
        return "on a mesh with axes of type Explicit"
    if not is_symbolic_dim(batch) and batch % sizes.devices():
        return f"for a batch of {batch} on {sizes.devices()} devices"
    if (dtype := call.tokens.query.dtype) != jnp.bfloat16 and not INTERPRET:
        return f"in {dtype}, which was not timed"
    if padded_sizes(call, "cuda") != given_sizes(call):
        return f"for {SIZES} = {given_sizes(call)}, of which powers of two were timed"
    return ""


SIZES = "(head_dim, width of value, num_features)"


def given_sizes(call: Call) -> tuple[int, int, int]:
    """head_dim, width of the value and number of features of a call."""
    tokens, estimate = call.tokens, call.estimate
    return tokens.query.shape[-1], tokens.value.shape[-1], estimate.frequencies.shape[-2]


def padded_sizes(call: Call, platform: str) -> tuple[int, ...]:
    """The same, as large as the kernels of "cuda" or "tpu" need them."""
    return tuple(padded_size(x, platform) for x in given_sizes(call))


def padded_size(size: int, platform: str) -> int:
    """The next power of two on a GPU, the next multiple of 16 on a TPU; at least 16."""
    return max(16, 1 << (size - 1).bit_length()) if platform == "cuda" else -(-size // 16) * 16


def unsupported(call: Call, platform: str) -> str:
    """What of the call the kernels of a platform do not support; or ""."""
    on = kernels_for(platform)
    tokens, estimate, exact, pairs, streams, _ = call
    shapes = (*estimate.frequencies.shape, *(size for x in tokens for size in x.shape))
    dtypes = [x.dtype.name for x in tokens]
    served = [{"bfloat16"}, {"float16"}] if on == "cuda" else [{"float32"}, {"bfloat16"}]
    if INTERPRET:
        served.append({"float32"})
    reasons = {
        "symbolic shapes": any(map(is_symbolic_dim, shapes)),
        "empty arrays": 0 in shapes,
        f"feature_map={estimate.feature_map}": estimate.feature_map != features.positive,
        "stabilizer='google'": estimate.stabilizer == "google",
        "segment_ids": pairs.segments is not None,
        str(exact): any(exact),
        "alibi_slopes or log_decay": pairs.log_decay is not None,
        "initial_state, return_state or axis_name": streams,
        f"query, key and value of dtypes {dtypes} on a {NAMES[on]}": set(dtypes) not in served,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return reason
    h, v, m = padded_sizes(call, on)
    if on == "cuda" and m * max(h, v) > LARGEST:
        return f"{SIZES} = {given_sizes(call)} on a GPU, of products above {LARGEST:,}"
    if on == "tpu" and heads_and_block(call) is None:
        return LARGE
    return ""


@cache
def warn(reason: str) -> None:
    """Warn once that there is no kernel, and why."""
    warnings.warn(f"implementation='pallas' {reason}", stacklevel=4)


def heads_and_block(call: Call) -> tuple[int, int] | None:
    """Key heads and tokens of a step of the kernels for TPU; None if no head fits."""
    (query, key, value), frequencies = call.tokens, call.estimate.frequencies
    t, s, n = query.shape[-3], key.shape[-3], query.shape[-2]
    h, v, m = padded_sizes(call, "tpu")
    k = n if frequencies.shape[:-2] == (n,) else key.shape[-2]
    size, longest = value.dtype.itemsize, -(-max(t, s) // LANES) * LANES

    def heads(kind: str, block: int) -> int:
        wide = 1.5 if v + ROWS > LANES else 1.0
        per_token = WIDTHS * size * (h + v) + FEATURES[kind][size // 4] * m * wide
        most = MEMORY // (per_token * block * (n // k))
        return max((x for x in range(1, k + 1) if k % x == 0 and x <= most), default=0)

    several = [block for block in (8 * LANES, 4 * LANES, 2 * LANES, LANES) if block < longest]
    choices = [("blocks", block) for block in several]
    if call.pairs.is_causal:
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
    """The output of `run.attention` alone."""
    from performer.attention.kernels import run

    return run.attention(x, lambda x: (ordinary(x), None), settings, log=False)[0]
