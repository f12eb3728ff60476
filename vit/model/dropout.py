"""Dropout with masks that do not depend on the number of devices."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Dropout(nnx.Dropout):
    """`nnx.Dropout`; inside `jax.shard_map` it uses its rows of the mask of the whole batch.

    Attributes:
        axis_name: axes of the mesh over which the first axis of the inputs is split, in order;
            None outside `jax.shard_map`.
    """

    axis_name: tuple[str, ...] | None = None

    def __call__(self, inputs: Float[Array, "*b n"], **options: Any) -> Float[Array, "*b n"]:
        """Return the inputs, each 0 with probability `rate` and otherwise divided by 1 - rate."""
        if self.axis_name is None or self.rate == 0.0 or self.deterministic:
            return super().__call__(inputs, **options)
        rows, rngs = len(inputs), cast(Callable[[], Array], self.rngs)
        shape = [1 if i in self.broadcast_dims else n for i, n in enumerate(inputs.shape)]
        shape[0] = rows * jax.lax.axis_size(self.axis_name)
        mask = jax.random.bernoulli(rngs(), 1 - self.rate, shape)
        start = rows * jax.lax.axis_index(self.axis_name)
        kept = jax.lax.dynamic_slice_in_dim(mask, start, rows)
        return jnp.where(kept, inputs / (1 - self.rate), jnp.zeros_like(inputs))
