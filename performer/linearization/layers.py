"""Measured layers, and the attention error of each head: shared by all fronts of `linearize`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer.attention.values import Exact, Features
from performer.calibration import Moments
from performer.linearization.outputs import Outputs, Ready
from performer.linearization.program import Named
from performer.refinement import Sample, estimate, row_squares, softmax_attention


class Layer(NamedTuple):
    """One layer of attention, as measured."""

    path: str
    moments: Moments
    """Over the pairs of all examples but those held out."""
    held_out: Sample
    """Queries and keys of a few examples that nothing is fitted to."""
    fitted: Sample
    """Queries and keys of a few examples that the moments contain."""
    kind: str
    """Kind of its masks, one of `measure.KINDS`."""
    scale: Float[Array, " n"]
    slopes: Float[Array, " n"] | None
    """Slopes of ALiBi's bias, if there is one."""
    has_key_bias: bool
    """True if numbers of each key are added to the scores; samples have them."""
    masked: bool
    """True if it is called with masks."""
    padded: bool
    """True if no query sees some of the keys."""
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Places that it is called at, and steps of the scans around each."""

    @property
    def place(self) -> int:
        """Number of its first place; layers in a scan have one place."""
        return self.calls[0][0]

    @property
    def is_causal(self) -> bool:
        """True if queries see no later key."""
        return "causal" in self.kind

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.held_out.key.shape[-1]

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.held_out.query.shape[1], self.held_out.key.shape[1]

    def supported(self, exact: Exact) -> Exact:
        """The exact pairs that this layer can have: a window, or keys and rows, or none."""
        if self.lengths[0] != self.lengths[1]:
            exact = exact._replace(window=0, first=0)
        if self.kind != "of keys" or self.slopes is not None:
            exact = exact._replace(keys=0, rows=0)
        return exact


class Measured(NamedTuple):
    """Result of `measure`, for `linearize`."""

    layers: list[Layer]
    """In the order of their calls."""
    left: dict[str, str]
    """Path -> why a layer stays exact."""
    places: list[Named]
    """Attention in the program, with its names and lines."""
    arguments: tuple[Any, ...]
    """The last batch."""
    before: Callable[[], tuple[Ready, Outputs]]
    """The function for it, compiled once, and its outputs."""
    is_held_out: bool = False
    """True if nothing is fitted to it."""


HeadErrors = dict[str, Float[Array, " n"]]
"""Name -> a number for each head."""


def mean(errors: HeadErrors, name: str = "attention error") -> float:
    """Return the mean over heads."""
    return float(jnp.mean(errors[name]))


@partial(jax.jit, static_argnames="is_causal")
def head_errors(sample: Sample, attention: Features, is_causal: bool = False) -> HeadErrors:
    """Return name -> a number for each head of one layer: sums and means over what exists.

    "attention error" is |A^ - A|^2 / |A|^2, "standard error" the error of its mean over heads, over
    the examples. Three are the same error of other rows or estimates: "first row" of the first
    query, "exact pairs alone" of a window without features (NaN if there is none), and "uniform
    attention" of a mean over all keys. "|q|^2" and "|k|^2" are means after the factor sqrt(scale)
    each, and "keys attended to" is e to the mean entropy of a row of A. Matrices of one example
    exist at a time.
    """
    groups, window = sample.query.shape[2] // sample.key.shape[2], attention.exact.window > 0
    alone = Features(None, exact=attention.exact._replace(keys=0))

    def squared_lengths(x, exists):
        lengths = jnp.where(exists[..., None], jnp.sum(x**2, axis=-1), 0)
        return jnp.sum(lengths, (0, 1)), jnp.sum(exists, dtype=x.dtype) * x.shape[-1] ** 0.5

    def fractions(example):
        one = jax.tree.map(lambda x: x[None], example)
        exact, pairs = softmax_attention(one, is_causal), one.pairs(is_causal)
        allowed = pairs.astype(exact.dtype)
        uniform = allowed / jnp.maximum(jnp.sum(allowed, axis=-1, keepdims=True), 1)
        estimated = estimate(attention, one, is_causal)
        near = estimate(alone, one, is_causal) if window else uniform * jnp.nan
        entropy = -jnp.sum(exact * jnp.log(jnp.where(exact > 0, exact, 1)), (0, 2, 3))
        changes = (estimated - exact, near - exact, uniform - exact, exact)
        rows = [row_squares(x, pairs)[0] for x in changes]  # (n, t) each
        error, near_error, uniform_error, size = (jnp.sum(x, axis=1) for x in rows)
        first = rows[0][:, 0], rows[-1][:, 0]
        lengths, count = squared_lengths(one.key, one.keys)
        return {
            "attention error": (error, size),
            "first row": first,
            "exact pairs alone": (near_error, size),
            "uniform attention": (uniform_error, size),
            "|q|^2": squared_lengths(one.query, one.queries),
            "|k|^2": (jnp.repeat(lengths, groups), count),
            "keys attended to": (entropy, jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)),
        }

    by_example = jax.lax.map(fractions, sample)
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), by_example)
    numbers = {name: above / below for name, (above, below) in sums.items()}
    # The standard error of a ratio of sums, from what each example adds to it.
    error, size = by_example["attention error"]
    excess = error - numbers["attention error"][None] * size  # (b, n)
    added = jnp.mean(excess / jnp.sum(size, axis=0, keepdims=True), axis=1)
    count = len(added)
    spread = jnp.sqrt(jnp.sum(added**2) * (count / (count - 1) if count > 1 else jnp.nan))
    numbers["standard error"] = jnp.full_like(numbers["attention error"], spread)
    return numbers | {"keys attended to": jnp.exp(numbers["keys attended to"])}
