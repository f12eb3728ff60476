"""Times of attention on the device at hand: exact, as a program computes it, and replaced.

Layers of one shape share a `Table`, which is kept for the process. Its programs are compiled with
random arrays of the shapes and dtypes of the measured batches, and called in turn with exact
attention; the best call counts. A program computes attention `REPEATS` times, one after another, as
a model of several layers does: the first time it also gets its memory from the system, which took
half of the time at 577 tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from performer.attention import Bias, Features, performer_attention
from performer.linearization.program import Alone, Named

PASSES = ("forward", "train")
"""Passes to time: the forward pass, or forward and backward pass."""
MARGIN = 1.05
"""A recipe counts as faster than exact attention if exact attention takes so many times as long:
best times of equal programs differ by some percent."""
REPEATS = 3
SECONDS = 0.25
"""Time for the calls of one comparison, after `ROUNDS`."""
ROUNDS, MOST = 2, 20
"""Fewest calls of each program, and the most."""
LONG = 0.1
"""Seconds of exact attention from which it is not called again with each recipe."""
TINY = 1e-30


class Time(NamedTuple):
    """The best call of a program, and its memory."""

    seconds: float
    memory: int
    """Bytes in addition to arguments and results."""


class Compiled(NamedTuple):
    """A compiled program with its arguments."""

    program: Callable[..., Any]
    arguments: Sequence[Any]
    memory: int

    def call(self) -> Any:
        """Run the program, and wait for it."""
        return jax.block_until_ready(self.program(*self.arguments))


def compiled(function: Callable[..., Any], arguments: Sequence[Any]) -> Compiled:
    """Trace and compile a function for these arrays."""
    leaves, tree = jax.tree.flatten(tuple(arguments))
    flat = jax.jit(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)))
    program = flat.lower(*leaves).compile()
    analysis: Any = program.memory_analysis()
    memory = 0 if analysis is None else analysis.temp_size_in_bytes
    return Compiled(program, leaves, memory)


def race(*programs: Compiled, seconds: float = SECONDS) -> list[Time]:
    """Call the programs in turn, and return the best time of each."""
    best, start = [float("inf")] * len(programs), time.perf_counter()
    for program in programs:
        program.call()
    for number in range(MOST):
        for i, program in enumerate(programs):
            before = time.perf_counter()
            program.call()
            best[i] = min(best[i], time.perf_counter() - before)
        if number + 1 >= ROUNDS and time.perf_counter() - start > seconds:
            break
    return [Time(x, program.memory) for x, program in zip(best, programs, strict=True)]


@dataclass
class Table:
    """Times of attention of one shape: exact, and by recipes as they are asked for."""

    exact: Time
    program: Compiled
    """Exact attention, without its arguments."""
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes of its arguments."""
    operands: tuple[jax.ShapeDtypeStruct, ...]
    """Queries (b, t, n, h), keys (b, s, k, h) and values (b, s, k, v)."""
    kinds: tuple[Any, ...]
    """First arguments of `_replaced`."""
    times: dict[Any, Time] = field(default_factory=dict)

    def time(self, features: Features) -> Time:
        """Time of attention by these features, relative to exact attention at the same moment."""
        leaves, tree = jax.tree.flatten(features)
        key = tree, tuple((x.shape, x.dtype.name) for x in leaves)
        if key not in self.times:
            self.times[key] = self._timed(features)
        return self.times[key]

    def _timed(self, features: Features) -> Time:
        function = partial(_replaced, *self.kinds)
        new = compiled(repeated(function), [features, *map(filled, self.operands)])
        if self.exact.seconds > LONG:
            return once(race(new)[0])
        old = self.program._replace(arguments=[*map(filled, self.shapes)])
        exact, linear = map(once, race(old, new))
        return linear._replace(seconds=linear.seconds / exact.seconds * self.exact.seconds)


TABLES: dict[Any, Table] = {}
"""The tables of this process, by all that times depend on."""


def table(
    named: Named,
    what: str,
    *,
    kind: str = "of keys",
    masked: bool = False,
    slopes: bool = False,
    key_bias: bool = False,
) -> Table:
    """Return the table of a place.

    Args:
        named: the place.
        what: "forward" or "train".
        kind: kind of its masks, of `masks.KINDS`.
        masked: true if it has masks.
        slopes: true if it has slopes of ALiBi.
        key_bias: true if numbers of each key are added to the scores.
    """
    alone, is_trained = Alone.of(named.program, named.place), what == "train"
    kinds = kind, masked, slopes, key_bias, is_trained
    key = *alone.text(), kinds, jax.devices()[0].device_kind
    if key not in TABLES:
        function = with_gradient(alone.attend) if is_trained else alone.attend
        program = compiled(repeated(function), [*map(filled, alone.shapes)])
        operands = jax.eval_shape(lambda *x: alone.values(x).operands(alone.place), *alone.shapes)
        exact, program = once(race(program)[0]), program._replace(arguments=())
        TABLES[key] = Table(exact, program, alone.shapes, operands, kinds)
    return TABLES[key]


def _replaced(
    kind: str,
    is_masked: bool,
    has_slopes: bool,
    has_key_bias: bool,
    is_trained: bool,
    features: Features,
    query: Array,
    key: Array,
    value: Array,
) -> Any:
    """Attention by features, with arguments of the kinds that a layer has."""
    b, s = key.shape[:2]
    options: Any = dict(is_causal="causal" in kind)
    if is_masked:
        options["mask"] = jnp.isfinite(key[:, :, 0, 0])[:, None, None]
    if "segments" in kind:
        options["segment_ids"] = jnp.zeros((b, s), jnp.int32)
    options["bias"] = Bias(
        key[..., 0] if has_key_bias else None, -jnp.ones(query.shape[2]) / s if has_slopes else None
    )
    attend = partial(performer_attention, features=features, **options)
    return (with_gradient(attend) if is_trained else attend)(query, key, value)


def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute the function `REPEATS` times; nothing can be computed before or left out."""

    def loop(*arguments: Any) -> Any:
        def step(_: Any, output: Any) -> Any:
            nothing = TINY * jnp.minimum(jax.tree.leaves(output)[0].ravel()[0], 0)

            def moved(x: Array) -> Array:
                floating = jnp.issubdtype(x.dtype, jnp.floating)
                return x + nothing.astype(x.dtype) if floating else x

            return function(*jax.tree.map(moved, arguments))

        shapes = jax.eval_shape(function, *arguments)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, REPEATS, step, start)

    return loop


def once(time: Time) -> Time:
    """The time of one repetition."""
    return time._replace(seconds=time.seconds / REPEATS)


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward pass: derivatives with respect to all floating-point arrays."""

    def both(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_moving(*some: Array) -> Any:
            every = dict(enumerate(leaves)) | dict(zip(moving, some, strict=True))
            return function(*jax.tree.unflatten(tree, every.values()))

        output, backward = jax.vjp(of_moving, *(leaves[i] for i in moving))
        return output, backward(output)

    return both


def filled(shape: jax.ShapeDtypeStruct) -> Array:
    """Random numbers of a shape and dtype, repeated; 0 for integers, True for booleans."""
    if jnp.issubdtype(shape.dtype, jnp.floating):
        numbers = np.random.default_rng(0).standard_normal(4099, np.float32)
        return jnp.asarray(np.resize(numbers, shape.shape)).astype(shape.dtype)
    return jnp.full(shape.shape, shape.dtype == bool, shape.dtype)
