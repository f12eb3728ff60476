"""Which kernels a call of `performer_attention` gets.

A program compiled for a TPU has the kernels of `tpu`, one for an NVIDIA GPU the kernels of `gpu`,
forward and backward; `run` has their derivatives.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import AxisType

from performer import features
from performer.attention import sizes
from performer.attention.sizes import LANES, ROWS
from performer.attention.values import Call, Plan

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


Noted = list[tuple[Call, str]]
"""Calls, and how they are computed here."""
CALLS: ContextVar[Noted | None] = ContextVar("CALLS", default=None)


@contextmanager
def noted() -> Iterator[Noted]:
    """List the calls that a program makes while it is traced in this context."""
    token = CALLS.set(calls := [])
    try:
        yield calls
    finally:
        CALLS.reset(token)


def planned(call: Call, platform: str) -> Plan:
    """How to compute a call on a platform; a warning if it names the kernels and gets none."""
    if (calls := CALLS.get()) is not None:
        calls.append((call, path(call, platform)))
    # With a window what is left to the features is small: a lost row would be wrong for no gain.
    by_default = call.implementation is None
    robust = call.implementation == "robust" or (by_default and call.exact.window > 0)
    plan = Plan(call.scale, call.absolute, call.residual, call.axis_name, robust=robust)
    if call.implementation not in (None, "pallas"):
        return plan
    reason = unsupported(call, platform)
    if by_default:
        reason = not_default(call, platform) or reason
    elif reason:
        warn(f"does not support {reason}: attention is computed without the kernel")
    elif platform not in ("gpu", "tpu") and not INTERPRET:
        warn(f"is for programs compiled for a TPU or GPU: those for {platform} have no kernel")
    return plan if reason else dataclasses.replace(plan, kernel=kernel_of(call, platform))


def path(call: Call, platform: str) -> str:
    """How a call is computed on "cpu", "gpu" or "tpu", and why without a kernel, as text."""
    how, by_position = _path(call, platform), call.is_causal or call.packed or call.decayed
    if by_position and call.feature_map.estimates_softmax and not how.startswith("robust"):
        return how + "; rows of too large norms are NaN, 'robust' computes them"
    return how


def _path(call: Call, platform: str) -> str:
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
    return Kernel(call.scale, call.is_causal, heads, block, on, bool(INTERPRET))


def kernels_for(platform: str) -> str:
    """Key of `MODULES`."""
    return INTERPRET or {"gpu": "cuda"}.get(platform, "tpu")


def not_default(call: Call, platform: str) -> str:
    """Why a call that names no implementation has no kernel, although it might have; or "".

    Kernels are the default where they were measured to be the fastest. Several devices must be
    known to share the batch, by the mesh in context or `jax.shard_map`: compilers do not shard a
    kernel, but gather its operands.
    """
    mesh, batch = jax.sharding.get_abstract_mesh(), call.batch
    if platform != "gpu":
        return f"on a {platform.upper()}"
    if mesh.empty and jax.device_count() > 1:
        return f"on {jax.device_count()} devices without a mesh in context (jax.set_mesh)"
    if AxisType.Explicit in mesh.axis_types:
        return "on a mesh with axes of type Explicit"
    if not is_symbolic_dim(batch) and batch % sizes.devices():
        return f"for a batch of {batch} on {sizes.devices()} devices"
    if (dtype := call.dtypes[0]) != "bfloat16" and not INTERPRET:
        return f"in {dtype}, which was not timed"
    more = {
        str(call.exact): any(call.exact),
        "states": call.streams,
        "axis_name": call.axis_name is not None,
        "return_residual=True": call.residual,
    }
    if untimed := [name for name, holds in more.items() if holds]:
        return f"with {untimed[0]}, which was not timed"
    if padded_sizes(call, "cuda") != given_sizes(call):
        return f"for {SIZES} = {given_sizes(call)}, of which powers of two were timed"
    return ""


SIZES = "(head_dim, width of value, num_features)"


def given_sizes(call: Call) -> tuple[int, int, int]:
    """head_dim, width of the value and number of features of a call."""
    return call.h, call.v, call.m


def padded_sizes(call: Call, platform: str) -> tuple[int, ...]:
    """The same, as large as the kernels of "cuda" or "tpu" need them."""
    return tuple(padded_size(x, platform) for x in given_sizes(call))


def padded_size(size: int, platform: str) -> int:
    """The next power of two on a GPU, the next multiple of 16 on a TPU; at least 16."""
    return max(16, 1 << (size - 1).bit_length()) if platform == "cuda" else -(-size // 16) * 16


def unsupported(call: Call, platform: str) -> str:
    """What of the call the kernels of a platform do not support; or ""."""
    on = kernels_for(platform)
    sizes_of_call = call[:8]
    dtypes = list(call.dtypes)
    served = [{"bfloat16"}, {"float16"}] if on == "cuda" else [{"float32"}, {"bfloat16"}]
    if INTERPRET:
        served.append({"float32"})
    reasons = {
        "symbolic shapes": any(map(is_symbolic_dim, sizes_of_call)),
        "features without frequencies": call.m == 0,
        "empty arrays": 0 in sizes_of_call,
        f"feature_map={call.feature_map}": call.feature_map != features.positive,
        "segment_ids": call.packed,
        str(call.exact): call.exact.window > 0,
        "a decay": call.decayed,
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
    t, s, n = call.t, call.s, call.n
    h, v, m = padded_sizes(call, "tpu")
    k = n if call.per_query_head else call.k
    size, longest = jnp.dtype(call.dtypes[2]).itemsize, -(-max(t, s) // LANES) * LANES

    def heads(kind: str, block: int) -> int:
        wide = 1.5 if v + ROWS > LANES else 1.0
        per_token = WIDTHS * size * (h + v) + FEATURES[kind][size // 4] * m * wide
        most = MEMORY // (per_token * block * (n // k))
        return max((x for x in range(1, k + 1) if k % x == 0 and x <= most), default=0)

    several = [block for block in (8 * LANES, 4 * LANES, 2 * LANES, LANES) if block < longest]
    choices: list[tuple[str, Any]] = [("blocks", block) for block in several]
    if call.is_causal:
        choices = [("causal", LANES)]
    elif longest <= 8 * LANES:
        choices = [("one block", longest), *choices]
    sized = [(heads(*choice), choice[1]) for choice in choices]
    # Two heads at least, if possible: while one waits, the other computes.
    pairs = [x for x in sized if x[0] * (n // k) >= min(2, n)]
    return next((x for x in [*pairs, *sized] if x[0]), None)
