"""Outputs of a function before and after its attention is replaced."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Outputs = Sequence[np.ndarray]
"""The arrays of floating-point numbers in the result of a function."""


class Remembered:
    """Batches, and the last one that was read."""

    last: Any = None

    def __init__(self, batches: Iterable[Any]):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        for batch in self.batches:
            self.last = batch
            yield batch


class Change(NamedTuple):
    """How far outputs are from those before."""

    relative: float
    """|y' - y|^2 / |y|^2, sums over all outputs."""
    same: float
    """Share of rows whose largest entry is the same, of all outputs with more than one entry in
    the last axis: equal answers of a classifier, equal next tokens. NaN if there are none."""

    def __str__(self) -> str:
        """The numbers in words."""
        text = f"the outputs of the last batch change by {self.relative:.2g} (relative, squared)"
        if np.isnan(self.same):
            return text
        return text + f"; {self.same:.1%} of the rows have the same largest entry"


def outputs_of(function: Callable[..., Any], arguments: Sequence[Any]) -> Outputs:
    """Return the outputs for these arguments; those that are no arrays are static."""
    leaves, tree = jax.tree.flatten(tuple(arguments))
    given = [hasattr(x, "shape") for x in leaves]

    @jax.jit
    def floating_outputs(arrays):
        left = iter(arrays)
        both = [next(left) if is_array else x for x, is_array in zip(leaves, given, strict=True)]
        return [
            x.astype(jnp.float32)
            for x in map(jnp.asarray, jax.tree.leaves(function(*jax.tree.unflatten(tree, both))))
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]

    return jax.device_get(
        floating_outputs([x for x, is_array in zip(leaves, given, strict=True) if is_array])
    )


def change(before: Outputs, after: Outputs) -> Change:
    """Compare the outputs of two functions for the same arguments."""
    pairs = [(x.astype(np.float64), y) for x, y in zip(before, after, strict=True)]
    apart = sum(np.sum((y - x) ** 2) for x, y in pairs)
    size = sum(np.sum(x**2) for x, _ in pairs)
    rows = [
        (np.argmax(x, axis=-1) == np.argmax(y, axis=-1)).ravel()
        for x, y in pairs
        if x.ndim and x.shape[-1] > 1
    ]
    same = float(np.mean(np.concatenate(rows))) if rows else float("nan")
    return Change(float(apart / max(size, 1e-30)), same)
