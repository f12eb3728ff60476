"""Numbers of tokens that are computed at once: chunks and blocks. Sizes may be symbolic.

A size of `jax.export.symbolic_shape` cannot be compared while a function is traced. The formulas
therefore use JAX's `max_dim` and `min_dim`: an exported program chooses the sizes of a direct call.
"""

import math

import jax
from jax.core import max_dim, min_dim
from jax.export import is_symbolic_dim
from jax.sharding import AxisType

from performer.typing import Size

CHUNK = {"cpu": 64}
"""Tokens of a causal chunk, by platform; 128 on the others."""
BLOCK_ROWS = {"cpu": 4096}
"""Tokens x batch x heads of a block, by platform; half in a sweep. Measured on two cores."""
HEADS = {"cpu": 2**18}
"""Features of the heads that are computed at a time, by platform; on the others all.

If the features of one head fit, heads are computed one group after another. Otherwise all heads are
computed together, in blocks of tokens, which need a state of each other if causal. With 12 heads of
64 and m = 128, groups take 0.6 of the time for 8 x 197 causal tokens forward, and 0.8 for 1,024
bidirectional ones. Windows of 16 to 128 take 0.5 to 0.9, and 0.9 to 1.0 with gradients, with as
many features, fewer or none (two cores)."""
SHORT = 256
"""Largest number of tokens in one block on a CPU, whatever batch and heads, except in a sweep.

Blocks copy their tokens: 8 x 197 tokens, 12 heads of 64 and m = 64 take 0.57 of the time in one
block, and less memory (forward and backward, two cores). Features that are no wider than tokens are
therefore always in one block: 8 x 577 tokens, 12 heads of 64 and m = 16 take 0.43 of the time and
30 instead of 68 MiB (forward; 0.72 and 44 instead of 110 MiB with the backward pass)."""
BLOCK_BYTES = 2**29
"""Bytes of float32 features of a block on the other platforms, half as many in a sweep.

It is a thirty-second of the 16 GiB of the smallest devices. A forward and backward pass without
blocks needs the features once (measured by the compiler for TPU v5e)."""

AT_ONCE = 2**28
"""Most bytes of the features of all tokens if heavy keys are chosen by them: else blocks compute
them twice."""

LANES = 128
"""Tokens in a row of a TPU register."""
ROWS = 16
"""Rows below the values in its kernels, for ones or the parts of a number: a whole tile."""


def platform() -> str:
    """Platform of the mesh in context, or the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def devices() -> int:
    """Devices of the mesh in context, over which batch and heads are assumed to be sharded.

    Axes of `jax.shard_map` do not count: its arrays are shards already.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != AxisType.Manual)


def heads_at_once(platform: str, rows: Size, heads: Size, widths: tuple[Size, Size]) -> Size:
    """Heads that are computed at a time on a platform, a divisor of their number.

    `rows` are the tokens of a head, times the batch; `widths` the number of features and head_dim.
    Groups do not pay for features that are no wider than tokens, if there is no window.
    """
    num_features, head_dim = widths
    is_symbolic = any(map(is_symbolic_dim, (rows, heads, *widths)))
    if platform not in HEADS or devices() > 1 or is_symbolic or num_features <= head_dim:
        return heads
    most = HEADS[platform] // num_features
    if rows * heads <= BLOCK_ROWS[platform] or rows > most:
        return heads
    return max(x for x in range(1, heads + 1) if heads % x == 0 and x * rows <= most)


def chunk_and_block(
    platform: str, length: Size, batch_and_heads: Size, widths: tuple[Size, Size], sweeping: bool
) -> tuple[Size, Size]:
    """Tokens of a causal chunk and of a block, on a platform. They change only rounding.

    `widths` are the number of features and head_dim.
    """
    num_features, head_dim = widths
    most = BLOCK_ROWS.get(platform, BLOCK_BYTES // 4 // max_dim(num_features, 1))
    rows = most // (2 if sweeping else 1)
    chunk = CHUNK.get(platform, 128)
    # The backward pass keeps a state, m (v + 2) numbers, for each block: no more than the values if
    # a block has at least m tokens.
    least = max_dim(chunk, num_features)
    block = max_dim(least, rows // max_dim(batch_and_heads // devices(), 1))
    if platform == "cpu" and not sweeping:
        is_short = min_dim(SHORT // max_dim(length, 1), 1)  # 1 or 0; lengths may be symbols
        once = length if num_features <= head_dim else is_short * SHORT
        block = max_dim(block, once)
    return chunk, block


def blocks(length: Size, block: Size, multiple: Size = 1) -> tuple[Size, Size]:
    """Number and length of equal blocks, at most `block` long, each a multiple of `multiple`.

    A few more blocks are preferred if they need no padding, unless a size is symbolic.
    """
    count = max_dim(1, -(-length // block))
    if not any(map(is_symbolic_dim, (length, block, multiple))):
        even = (more for more in range(count, 2 * count) if length % (more * multiple) == 0)
        count = next(even, count)
    return count, -(-length // (count * multiple)) * multiple
