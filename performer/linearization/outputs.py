"""Outputs and times of a function before and after its attention is replaced."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from performer.linearization.timing import PASSES, Compiled, Time, compiled, race, with_gradient

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
    is_held_out: bool = False
    """True if nothing was fitted to the batch."""

    def __str__(self) -> str:
        """The numbers in words."""
        batch = "a held-out batch" if self.is_held_out else "the last batch"
        change = f"change by {self.relative:.2g} (relative, squared)"
        if np.isnan(self.same):
            return f"outputs of {batch} {change}"
        return (
            f"{self.same:.1%} of the rows of {batch} have the same largest entry (equal answers);"
            f" outputs {change}"
        )


class Whole(NamedTuple):
    """Times of a function on a device, before and after its attention is replaced."""

    before: Time
    after: Time
    what: str
    """Name of what is timed, of `timing.PASSES`."""
    device: str
    """Kind of the device, for example "cpu"."""

    @property
    def speed_up(self) -> float:
        """How many times as fast the new function is."""
        return self.before.seconds / self.after.seconds

    def __str__(self) -> str:
        """The numbers in words."""
        before, after = self.before, self.after
        passes = "forward pass" if self.what == "forward" else "forward and backward pass"
        device = self.device.upper() if self.device.islower() else self.device
        return (
            f"on this {device} ({passes} {1e3 * after.seconds:.3g} ms, before"
            f" {1e3 * before.seconds:.3g} ms; memory {after.memory / 2**20:.3g} MiB, before"
            f" {before.memory / 2**20:.3g} MiB)"
        )


class Ready(NamedTuple):
    """A function for some arguments: of its arrays, those that are no arrays are static."""

    function: Callable[..., list[jax.Array]]
    arrays: list[Any]
    program: Compiled

    def outputs(self) -> Outputs:
        """Compute the floating-point outputs."""
        return jax.device_get(self.program.call())

    def timed(self, what: str) -> Compiled:
        """The program to time."""
        if what == "forward":
            return self.program
        return compiled(with_gradient(self.function), self.arrays)


def ready(function: Callable[..., Any], arguments: Sequence[Any]) -> Ready:
    """Compile a function for these arguments."""
    leaves, tree = jax.tree.flatten(tuple(arguments))
    given = [hasattr(x, "shape") for x in leaves]

    def floating_outputs(*arrays):
        left = iter(arrays)
        both = [next(left) if is_array else x for x, is_array in zip(leaves, given, strict=True)]
        return [
            x.astype(jnp.float32)
            for x in map(jnp.asarray, jax.tree.leaves(function(*jax.tree.unflatten(tree, both))))
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]

    arrays = [x for x, is_array in zip(leaves, given, strict=True) if is_array]
    return Ready(floating_outputs, arrays, compiled(floating_outputs, arrays))


def prepared(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Ready, Outputs]:
    """Compile a function for these arguments, and compute its outputs."""
    program = ready(function, arguments)
    return program, program.outputs()


def compared(
    before: tuple[Ready, Outputs],
    function: Callable[..., Any],
    arguments: Sequence[Any],
    what: str | None,
) -> tuple["Change", Whole | None]:
    """Compare a new function with the given one: its outputs, and time and memory of a pass."""
    (old, outputs), (after, new_outputs) = before, prepared(function, arguments)
    difference = change(outputs, new_outputs)
    if what not in PASSES:
        return difference, None
    first, second = race(old.timed(what), after.timed(what), seconds=1.0)
    return difference, Whole(first, second, what, jax.devices()[0].device_kind)


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
