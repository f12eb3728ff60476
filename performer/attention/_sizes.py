"""Numbers of tokens that are computed at once: chunks and blocks, of sizes that may be symbolic.

A size of `jax.export.symbolic_shape` stands for every number from 1: no comparison of it is decided
while a function is traced. The formulas therefore have the largest and the smallest of two sizes as
JAX writes them, and an exported program chooses, once it is called, what a direct call would.
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
"""Tokens x batch x heads whose features exist at a time, by platform. Measured on two cores."""
BLOCK_BYTES = 2**29
"""On the other platforms float32 features of a call take so much, and only what takes more is cut
into blocks: a thirty-second of the 16 GiB that the smallest devices have. A forward and backward
pass without blocks needs the features once (measured by what the compiler for TPU v5e allots).

In a sweep, which holds twice the features, both are half as many.
"""

LANES = 128
"""Tokens beside each other in a register of a TPU."""
ROWS = 16
"""Rows that its kernels have below the values, for ones or the parts of a number: a whole tile."""


def platform() -> str:
    """Platform of the mesh in context, as of programs compiled elsewhere; else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def devices() -> int:
    """Devices of the mesh in context, over whose axes batch and heads are taken to be split.

    Inside `jax.shard_map` they are split already, as they are on the axes that it has taken.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != AxisType.Manual)


def chunk_and_block(
    platform: str, batch_and_heads: Size, num_features: Size, sweeping: bool
) -> tuple[Size, Size]:
    """Tokens of a causal chunk, and those whose features exist at a time, on a platform.

    They change the result by no more than rounding.
    """
    most = BLOCK_ROWS.get(platform, BLOCK_BYTES // 4 // max_dim(num_features, 1))
    rows = most // (2 if sweeping else 1)
    chunk = CHUNK.get(platform, 128)
    # The backward pass keeps one state, m (v + 2) numbers, for every block: no more than the values
    # themselves if a block has at least m tokens.
    least = max_dim(chunk, num_features)
    return chunk, max_dim(least, rows // max_dim(batch_and_heads // devices(), 1))


def blocks(length: Size, block: Size, multiple: Size = 1) -> tuple[Size, Size]:
    """Number and length of equal blocks, at most `block` long, each a multiple of `multiple`.

    A few more blocks are taken where they need no padding, which costs copies and a mask; not where
    a size is symbolic.
    """
    count = max_dim(1, -(-length // block))
    if not any(map(is_symbolic_dim, (length, block, multiple))):
        even = (more for more in range(count, 2 * count) if length % (more * multiple) == 0)
        count = next(even, count)
    return count, -(-length // (count * multiple)) * multiple


__all__ = ["LANES", "ROWS", "blocks", "chunk_and_block", "max_dim", "min_dim"]
