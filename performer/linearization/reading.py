"""A place in the terms of `performer_attention`, from its factors, in linear time.

Factors that are written in the code are computed while the program is traced: masks and slopes at
some queries, since they may be of another kind at another length. A local window of 16 tokens is
causal at 12. Factors that depend on arguments are arrays along the queries or along the keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from performer.linearization.factors import Factors, Index, Part, Term, evaluate
from performer.linearization.layout import Unfit
from performer.linearization.masks import NO_SLOPE, alibi_slopes, fits, flat
from performer.linearization.program import MASKED, Place, Values
from performer.typing import float32_or_wider

QUERIES = 16
"""Queries at which constants are read, evenly spaced, and those next to the first and the last."""


class Reading(NamedTuple):
    """Scale, mask and bias of a place."""

    scale: Float[Array, "..."]
    """Along the queries: (b, n, t, 1), axes of length 1 not broadcast."""
    key_scale: Float[Array, "..."] | None
    """Along the keys: (b, n, 1, s)."""
    constant_scale: Float[np.ndarray, "..."] | None
    """The scale if arguments have no part in it."""
    keys: Bool[Array, "b s"]
    """Keys that exist."""
    segments: Int[Array, "b t"] | None
    slopes: Float[Array, " n"] | None
    """Slopes of ALiBi if arguments have a part in them."""
    agrees: dict[str, bool]
    """Name -> whether what is written in the code is of the kind that was asked for."""
    valid: Bool[Array, ""] | None
    """Whether the arguments are; None if they have no part in it."""
    sinks: Float[Array, "b n"] | None
    """Logits of no key, several as one."""
    key_bias: Float[Array, "b heads 1 s"] | None
    """Numbers of each key that are added to the scores; None if they are not read."""

    def scaled(self, query: Array, key: Array) -> tuple[Array, Array, Array]:
        """Queries (b, t, n, h) and keys (b, s, k, h) for scale 1 / sqrt(h).

        The third result is true if the scale of each key is the same for all query heads of a key
        head.
        """
        scale = jnp.swapaxes(self.scale.reshape(self.scale.shape or (1, 1, 1, 1)), 1, 2)
        query = (query.astype(float32_or_wider(query)) * scale * query.shape[-1] ** 0.5).astype(
            query.dtype
        )
        if self.key_scale is None:
            return query, key, jnp.array(True)
        factor, same = of_key_heads(self.key_scale, key.shape[2])
        key = (key.astype(float32_or_wider(key)) * factor[..., None]).astype(key.dtype)
        return query, key, same


def of_key_heads(x: Float[Array, "b heads 1 s"], heads: int) -> tuple[Array, Array]:
    """Numbers of each key as (b, s, k), and true if the query heads of a key head have the same."""
    b, n, _, s = x.shape
    x = x.reshape(b, heads if n > 1 else 1, -1, s)
    return jnp.swapaxes(x[:, :, 0], 1, 2), jnp.all(x == x[:, :, :1])


def computed(function: Callable[..., Any], *arrays: Array) -> Any:
    """Call a function of arrays, while tracing if all are constants, which XLA folds slowly."""
    if any(isinstance(x, Tracer) for x in arrays):
        return function(*arrays)
    with jax.ensure_compile_time_eval():
        return function(*arrays)


def read(
    values: Values,
    place: Place,
    kind: str,
    slopes: Float[np.ndarray, " n"] | None,
    has_key_bias: bool = False,
) -> Reading:
    """Read a place.

    Args:
        values: of its program.
        place: where.
        kind: of its masks, one of `masks.KINDS`.
        slopes: of ALiBi, compared with those that are written in the code; None to take these.
        has_key_bias: true if numbers of the keys that are added to the scores are a bias. Without
            it numbers from arguments must be a mask, and numbers in the code a mask or ALiBi.

    Raises:
        Unfit: if linear time does not suffice.
    """
    reader = _Reader(values, place, kind, has_key_bias, Factors.of(values.program, place))
    keys, segments = reader.mask()
    constant = reader.constant_scale()
    alibi = reader.slopes(slopes)
    key_bias = reader.key_bias()
    facts = constant, keys, segments, alibi, reader.agrees, reader.valid(), reader.sinks()
    return Reading(*reader.scales(), *facts, key_bias)


@dataclass
class _Reader:
    """Arrays of the factors of a place, as (b, n, t, s) with axes of length 1."""

    values: Values
    place: Place
    kind: str
    has_key_bias: bool
    factors: Factors
    checks: list[Array] = field(default_factory=list)
    """What must be true of the arguments."""
    agrees: dict[str, bool] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[Any, Any]:
        """Numbers of queries and keys."""
        return self.place.layout.lengths

    @property
    def fixed(self) -> tuple[int, int]:
        """Numbers of queries and keys, where what is written in the code is compared.

        Raises:
            ValueError: if they are symbolic.
        """
        for size in self.lengths:
            if is_symbolic_dim(size):
                raise ValueError(
                    f"{self.place.line}: its mask or bias is compared with the measured one at each"
                    f" length, and the length {size} is symbolic: export a program for each length"
                )
        return self.lengths

    @property
    def is_written(self) -> bool:
        """True if the code has a mask or bias over pairs, or must have one."""
        masks = [x for x in self.masks_over_pairs() if not x.part.tree.varies]
        return bool(masks or self.factors.constants or self.factors.zeros or "causal" in self.kind)

    @property
    def rows(self) -> np.ndarray:
        """The queries at which constants are read."""
        t, _ = self.fixed
        even = np.linspace(0, t - 1, min(t, QUERIES)).astype(int)
        return np.unique([*even, min(1, t - 1), max(t - 2, 0)])

    def valid(self) -> Array | None:
        """True if all checks are; None if there are none."""
        return jnp.all(jnp.stack(self.checks)) if self.checks else None

    # Arrays

    def array(self, part: Part, index: Index = lambda x: x) -> Array:
        """A part as (b, n, t, s), or less where `index` takes some; constants are computed now."""
        layout = self.place.layout
        if part.tree.varies:
            return layout.thin(evaluate(part.tree, self.values.read, index), part.axes)
        return layout.thin(jnp.asarray(self.factors.constant(part, index)), part.axes)

    def at(self, part: Part, rows: np.ndarray | None) -> Array:
        """A part at some queries, all if None."""
        time = self.place.layout.time
        if rows is None or not part.along(time):
            return self.array(part)
        axes = [i for i, axis in enumerate(part.axes) if not {*time}.isdisjoint(axis)]
        if len(time) > 1 or len(part.axes[axes[0]]) > 1:  # heads in one axis with the queries
            return self.array(part)[:, :, rows]
        return self.array(part, lambda x: x if x.shape[axes[0]] == 1 else x.take(rows, axes[0]))

    def product(self, factors: Sequence[tuple[str, Part | None]], start: Any = 1.0) -> Any:
        """Start times the factors."""
        for name, part in factors:
            if part is None:
                start = -start if name == "neg" else jnp.log(start.astype(float32_or_wider(start)))
            else:
                x = self.array(part)
                x = x.astype(float32_or_wider(x))
                start = start * x if name == "mul" else start / x
        return start

    # Scale

    def constant_scale(self) -> np.ndarray | None:
        """The scale if it is written in the code."""
        scales = self.factors.scales
        if any(part.tree.varies for _, part in scales if part is not None):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(self.product(scales))

    def scales(self) -> tuple[Array, Array | None]:
        """Scale along the queries and along the keys."""
        keys = self.place.layout.keys
        of_keys = [x for x in self.factors.scales if x[1] is not None and x[1].along(keys)]
        others = [x for x in self.factors.scales if x not in of_keys]
        key_scale = self.product(of_keys) if of_keys else None
        return jnp.asarray(self.product(others)), key_scale

    def sinks(self) -> Array | None:
        """Logits of no key: the logarithm of the sum of their exponentials."""
        logits = []
        for part, is_log in self.place.sinks:
            x = self.array(part)
            x = x.astype(float32_or_wider(x))
            x = x * self.place.base if is_log else jnp.log(x)
            logits.append(jax.nn.logsumexp(x, axis=-1)[:, :, 0])
        layout = self.place.layout
        shape = layout.batch_size, layout.head_count
        return jnp.broadcast_to(reduce(jnp.logaddexp, logits), shape) if logits else None

    # Mask

    def mask(self) -> tuple[Array, Array | None]:
        """Keys (b, s) and segments (b, t)."""
        for part in self.factors.units:
            x = self.array(part)
            self.checks.append(jnp.all((x == 0) | (x == 1)))
        self.checks += [jnp.all(self.array(part) > 0) for part in self.factors.positive]
        keys, segments = self.keys(), None
        given = self.factors.given or any(x.part.tree.varies for x in self.masks_over_pairs())
        if given or ("segments" in self.kind and not self.equal()):
            keys, segments = computed(self.dense, self.pairs(), keys)
        else:
            keys, segments = keys & self.constant_keys(), self.compared(keys)
        self.checks.append(jnp.all(keys == keys[:, :1]))
        batch, (t, s) = self.place.layout.batch_size, self.lengths
        keys = jnp.broadcast_to(keys[:, 0, 0], (batch, s))
        return keys, None if segments is None else jnp.broadcast_to(segments, (batch, t))

    def masks_over_pairs(self) -> list:
        """Masks that are arrays over pairs."""
        return [x for x in self.factors.masks if self.factors.over_pairs(x.part)]

    def equal(self) -> bool:
        """True if segments are compared."""
        return any(x.name == "eq" for x in self.factors.pairings)

    def keys(self) -> Array:
        """Keys that exist by masks along the keys, (b, n, 1, s), or (1, 1, 1, 1) if all do."""
        layout = self.place.layout
        with jax.ensure_compile_time_eval():
            keys = jnp.ones((1, 1, 1, 1), bool)
        for part, when in self.factors.masks:
            if self.factors.over_pairs(part):
                continue
            if part.along(layout.keys):
                keys &= self.array(part).astype(bool) == when
            elif not part.along(layout.time):  # of queries it drops out, of heads it does not
                self.checks.append(jnp.all(self.array(part).astype(bool) == when))
        for term in self.factors.of_keys if self.has_key_bias else self.factors.keys:
            keys &= self.unmasked(term)[0] if self.has_key_bias else self.seen(term)
        return keys

    def unmasked(self, term: Term) -> tuple[Array, Array]:
        """Pairs that a term does not mask, and the numbers that it adds to the scores."""
        x = self.product(term.factors, self.array(term.part))
        return ~(x <= MASKED), x  # NaN masks nothing: it must not be lost

    def seen(self, term: Term) -> Array:
        """Pairs that a term does not mask; all others must be one number."""
        seen, x = self.unmasked(term)
        high = jnp.max(jnp.where(seen, x, -jnp.inf), axis=-1)
        low = jnp.min(jnp.where(seen, x, jnp.inf), axis=-1)
        self.checks.append(jnp.all((high - low <= 1e-3) | (high < low)))
        return seen

    def constants(self, rows: np.ndarray | None) -> Array:
        """Pairs that masks written in the code leave visible, at some queries."""
        t, s = self.fixed
        with jax.ensure_compile_time_eval():
            visible = jnp.ones((1, 1, t if rows is None else len(rows), s), bool)
            for part, when in self.masks_over_pairs():
                if not part.tree.varies:
                    visible = visible & (self.at(part, rows).astype(bool) == when)
            for term in self.factors.constants:
                if not term.varies:
                    x = self.product(term.factors, self.at(term.part, rows))
                    visible = visible & (x > MASKED)
        return visible

    def constant_keys(self) -> Array:
        """Keys of masks that are written in the code, (b, 1, 1, s), compared at some queries."""
        if not self.is_written:
            self.agrees["mask"] = True
            with jax.ensure_compile_time_eval():
                return jnp.ones((1, 1, 1, 1), bool)
        t, s = self.fixed
        ordered = any(x.name == "ge" for x in self.factors.pairings)
        with jax.ensure_compile_time_eval():
            visible = self.constants(self.rows)
            one = visible[:, 0]
            keys = jnp.any(one, axis=1)
            expected = jnp.broadcast_to(keys[:, None], one.shape)
            if "causal" in self.kind and not ordered:
                keys = one[:, -1] | self.diagonal()  # the last query may be padding
                causal = jnp.asarray(np.arange(s)[None] <= self.rows[:, None])
                expected = keys[:, None] & causal[None]
            same = (one == expected) | ~jnp.any(one, axis=-1, keepdims=True)
            agrees = jnp.all(same) & jnp.all(visible == visible[:, :1])
            for part in self.factors.zeros:
                agrees &= ~jnp.any(visible & (self.at(part, self.rows) == 0))
            self.agrees["mask"] = bool(agrees) and ("causal" not in self.kind or t == s)
        return keys[:, None, None]

    def diagonal(self) -> Array:
        """Keys that the query of their position sees by masks in the code, (b, s)."""
        (t, s), layout = self.lengths, self.place.layout
        seen = jnp.ones((1, s), bool)
        if t != s:
            return ~seen
        if len(layout.time) > 1:
            return seen
        for part, when in self.masks_over_pairs():
            time, keys = (
                next(i for i, axis in enumerate(part.axes) if x[0] in axis)
                for x in (layout.time, layout.keys)
            )
            if part.tree.varies or max(len(part.axes[i]) for i in (time, keys)) > 1:
                continue

            def index(x: Array, time: int = time, keys: int = keys) -> Array:
                if x.shape[time] > 1 and x.shape[keys] > 1:
                    diagonal = jnp.diagonal(x, 0, time, keys)
                    return jnp.expand_dims(jnp.moveaxis(diagonal, -1, keys - (time < keys)), time)
                return jnp.swapaxes(x, time, keys) if x.shape[time] > 1 else x

            seen = seen & (self.array(part, index)[:, 0, 0].astype(bool) == when)
        return seen

    def pairs(self) -> Array:
        """Pairs that are visible, where arguments or the code have a number for each."""
        visible = self.constants(None)
        for part, when in self.masks_over_pairs():
            if part.tree.varies:
                visible = visible & (self.array(part).astype(bool) == when)
        for term in self.factors.given:
            visible = visible & self.seen(term)
        for name, *both in self.factors.pairings:
            query, key = map(self.array, both)
            visible = visible & (query == key if name == "eq" else query >= key)
        return visible

    def dense(self, visible: Array, keys: Array) -> tuple[Array, Array | None]:
        """Keys (b, n, 1, s) and segments (b, t) of a mask over pairs and one of keys."""
        (t, s), visible = self.lengths, visible & keys
        visible = jnp.broadcast_to(visible, (*visible.shape[:2], t, s))
        self.checks += [jnp.all(visible == visible[:, :1]), fits(visible[:, 0], self.kind)]
        segments = jnp.argmax(visible[:, 0], axis=-1) if "segments" in self.kind else None
        return jnp.any(visible, axis=2, keepdims=True), segments

    def compared(self, keys: Array) -> Array | None:
        """Segments (b, t), and checks of what queries and existing keys are compared by."""
        keys, segments = keys[:, 0, 0], None
        for name, *both in self.factors.pairings:
            query, key = (self.array(x) for x in both)
            self.checks += [jnp.all(x == x[:, :1]) for x in (query, key)]
            query, key = query[:, 0, :, 0], key[:, 0, 0]
            if name == "ge":
                self.checks.append(self.in_order(query, key, keys))
            elif "segments" not in self.kind:  # a single one
                shape = jnp.broadcast_shapes(key.shape, keys.shape)
                key, keys = jnp.broadcast_to(key, shape), jnp.broadcast_to(keys, shape)
                first = jnp.take_along_axis(key, jnp.argmax(keys, axis=1)[:, None], axis=1)
                exist = keys if query.shape[1] == key.shape[1] else jnp.ones((1, 1), bool)
                self.checks.append(jnp.all((query == first) | ~exist))
                self.checks.append(jnp.all((key == first) | ~keys))
            elif segments is not None:
                raise Unfit("its mask compares two numbers of each query and key")
            else:
                segments = query.astype(jnp.int32)
                same = segments.astype(query.dtype) == query
                if self.lengths[0] != self.lengths[1]:
                    raise Unfit("its mask compares segments of queries and of other keys")
                self.checks += [jnp.all(same), jnp.all((query == key) | ~keys)]
        return segments

    def in_order(self, query: Array, key: Array, keys: Array) -> Array:
        """True if positions make a causal mask: none is before, and each later one is larger."""
        shape = jnp.broadcast_shapes(key.shape, keys.shape)
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        key, keys = jnp.broadcast_to(key, shape), jnp.broadcast_to(keys, shape)
        if "causal" not in self.kind:
            return jnp.min(query) >= jnp.max(jnp.where(keys, key, -jnp.inf))
        before = jax.lax.cummax(jnp.where(keys, key, -jnp.inf), axis=1)
        later = jax.lax.cummin(jnp.where(keys, key, jnp.inf), axis=1, reverse=True)
        later = jnp.pad(later[:, 1:], ((0, 0), (0, 1)), constant_values=jnp.inf)
        return jnp.all((query >= before) & (query < later) | ~keys)  # padding is no query

    # Bias

    def key_bias(self) -> Array | None:
        """Numbers of each key, (b, 1 or n, 1, s); 0 for a key that they mask."""
        if not self.has_key_bias:
            return None
        both = [self.unmasked(term) for term in self.factors.of_keys]
        total = sum((jnp.where(seen, x, 0) for seen, x in both), jnp.zeros((1, 1, 1, 1)))
        b, (_, s) = self.place.layout.batch_size, self.lengths
        return jnp.broadcast_to(total, (b, *total.shape[1:3], s))

    def slopes(self, slopes: np.ndarray | None) -> Array | None:
        """Slopes that arguments have a part in; compares those written in the code."""
        if not (self.is_written or np.any(slopes)):
            self.agrees["bias"] = True
            return None
        distance = np.abs(self.rows[:, None] - np.arange(self.lengths[1])[None])
        with jax.ensure_compile_time_eval():
            visible = self.constants(self.rows)
            fixed: Any = jnp.zeros((1, 1, len(self.rows), self.lengths[1]))
            terms = self.factors.constants
            if self.has_key_bias:
                terms = [x for x in terms if x.part.along(self.place.layout.time)]
            for term in terms:
                if not term.varies:
                    fixed = fixed + self.product(term.factors, self.at(term.part, self.rows))
            varying = [x for x in terms if x.varies]
            if slopes is not None and not varying:
                level, seen = self.joined(fixed, visible, len(slopes))
                self.agrees["bias"] = bool(
                    flat(level, seen, *(jnp.asarray(x, level.dtype) for x in (slopes, distance)))
                )
                return None
            parts = [fixed, *(self.at(x.part, self.rows) for x in varying)]
            found = [alibi_slopes(*self.joined(x, visible), self.queries()) for x in parts]
            self.agrees["bias"] = all(bool(is_alibi) for _, is_alibi in found)
        if not varying:
            return None
        total = found[0][0]
        for term, (slope, _) in zip(varying, found[1:], strict=True):
            factor = self.product(term.factors)
            self.checks.append(jnp.all(factor == factor[:1]))
            total = total + slope * factor[0, :, 0, 0]
        self.checks.append(jnp.all(total >= -NO_SLOPE))  # others have no linear attention
        return jnp.broadcast_to(total, (self.place.layout.head_count,))

    def queries(self) -> tuple[int, ...] | None:
        """The queries, if they have slopes."""
        return tuple(self.rows.tolist()) if self.lengths[0] == self.lengths[1] else None

    @staticmethod
    def joined(bias: Any, visible: Array, heads: int = 1) -> tuple[Array, Array]:
        """Bias and mask of one shape."""
        shape = jnp.broadcast_shapes(np.shape(bias), visible.shape, (1, heads, 1, 1))
        bias = jnp.asarray(bias).astype(jnp.float32)
        return jnp.broadcast_to(bias, shape), jnp.broadcast_to(visible, shape)
