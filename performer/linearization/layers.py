"""Measured layers, their calibration, draws and errors: shared by all fronts of `linearize`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from performer import calibration as calibrations
from performer import couplings
from performer.analysis import by_cost
from performer.attention.values import NOT_EXACT, Exact
from performer.linearization.report import Report
from performer.refinement import (
    START,
    Far,
    Linear,
    Sample,
    calibrated_far,
    parted,
    performer_estimate,
    refine_far,
    softmax_attention,
    transfer,
)
from performer.typing import Coupling

EXAMPLES = 8
"""Examples of the first batch whose queries and keys are kept to measure errors on."""


class Layer(NamedTuple):
    """One layer of attention, as measured."""

    path: str
    moments: calibrations.Moments
    sample: Sample
    """Queries and keys of a few examples."""
    kind: str
    """Kind of its masks, one of `measure.KINDS`."""
    scale: Float[Array, " n"]
    slopes: Float[Array, " n"] | None
    """Slopes of ALiBi's bias, if there is one."""
    masked: bool
    """True if it is called with masks, or is causal."""
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


class Measured(NamedTuple):
    """Layers in the order of their calls, and path -> reason for those that stay exact."""

    layers: list[Layer]
    left: dict[str, str]


@dataclass(frozen=True)
class Options:
    """Attention that replaces softmax, by the keywords of `performer.linearize`."""

    coupling: str | Coupling = couplings.DEFAULT
    num_features: int | None = None
    calibration: str = "full"
    refine_steps: int = 0
    keep: int = 0
    tolerance: float | None = None
    seed: int = 0
    exact: Exact = NOT_EXACT

    def sizes(self, head_dim: int) -> list[tuple[int, int]]:
        """Numbers of features and of exact keys to try for a layer, the cheapest first."""
        most, keys = self.num_features or 2 * head_dim, self.exact.keys
        if self.tolerance is None:
            return [(most, keys)]
        even = [most] + [most >> i for i in (1, 2, 3) if most % 2 ** (i + 1) == 0]
        return by_cost(even, keys)

    @classmethod
    def of(cls, batches: Any, **keywords: Any) -> "Options":
        """Check the keywords, and the batches.

        Raises:
            ValueError: for invalid ones.
        """
        given = {name: keywords.pop(f"exact_{name}", 0) for name in Exact._fields}
        own = cls(**keywords, exact=(exact := Exact(**given)))
        calibrations.parts(own.calibration, own.coupling)
        counts = dict(refine_steps=own.refine_steps, keep=own.keep) | exact.options
        for name, count in counts.items():
            if count < 0:
                raise ValueError(f"{name} must not be negative, got {count}")
        if own.tolerance is not None and not own.tolerance > 0:
            raise ValueError(f"tolerance must be positive, such as 0.1, got {own.tolerance}")
        if exact.first and not exact.window:
            raise ValueError(f"exact_first={exact.first} requires exact_window > 0")
        if hasattr(batches, "shape"):
            raise ValueError(
                "batches must be a list of batches, and this is one array of shape"
                f" {batches.shape}: pass [x]"
            )
        if (own.refine_steps or own.tolerance) and iter(batches) is batches:
            name = "refine_steps" if own.refine_steps else "tolerance"
            raise ValueError(
                f"{name} reads the batches once for each layer, and these can be read only once:"
                " pass a list of them"
            )
        return own


def replacements(
    measured: Measured, examples: Callable[[Layer], Sample], options: Options
) -> tuple[dict[int, Linear], Report]:
    """Attention of the layers that do not stay exact, by number, and the report of all."""
    layers, drawn = measured.layers, draw(measured.layers, examples, options)
    largest: dict[int, float] = {}  # error of a layer of each place
    for layer, (_, errors) in zip(layers, drawn, strict=True):
        largest[layer.place] = max(mean(errors), largest.get(layer.place, 0.0))
    limit = math.inf if options.tolerance is None else options.tolerance
    ordered = sorted(largest, key=lambda x: -largest[x])
    kept = [x for i, x in enumerate(ordered) if i < options.keep or largest[x] > limit]
    new = {i: linear for i, (linear, _) in enumerate(drawn) if layers[i].place not in kept}
    rows = []
    for i, (layer, (linear, errors)) in enumerate(zip(layers, drawn, strict=True)):
        row = {"path": layer.path, "layer": i, "head": 0}
        row |= {"attention": "linear" if i in new else "exact"}
        row |= {"m": linear.frequencies.shape[-2], "exact keys": linear.exact.keys}
        heads = zip(*(x.tolist() for x in errors.values()), strict=True)
        for head, numbers in enumerate(heads):
            rows.append(row | {"head": head} | dict(zip(errors, numbers, strict=True)))
    return new, Report(rows, measured.left)


Drawn = tuple[Linear, dict[str, Float[Array, " n"]]]
"""Attention of a layer, and its `head_errors`."""


def draw(layers: list[Layer], examples: Callable[[Layer], Sample], options: Options) -> list[Drawn]:
    """Attention for each layer: drawn, calibrated, and refined on all its `examples`.

    With a tolerance the layers of a place have the cheapest sizes that meet it on all examples, or
    else the largest. If features of far keys are learned, too, the way with the lower error on
    held-out examples serves all layers.
    """
    keys = jax.random.split(jax.random.key(options.seed), len(layers))
    limit = math.inf if options.tolerance is None else options.tolerance
    ways: dict[int, list[Drawn]] = {}
    gains: dict[int, float] = {}
    for place in dict.fromkeys(layer.place for layer in layers):
        numbers = [i for i, layer in enumerate(layers) if layer.place == place]
        own, read = [layers[i] for i in numbers], examples
        if options.tolerance is not None:
            own = [layer._replace(sample=examples(layer)) for layer in own]
            read = attrgetter("sample")
        for sizes in options.sizes(own[0].sample.key.shape[-1]):
            for i, layer in zip(numbers, own, strict=True):
                found, gains[i] = draw_layer(keys[i], layer, read, options, *sizes)
                ways[i] = [(x, head_errors(layer.sample, x, layer.is_causal)) for x in found]
            if all(mean(ways[i][0][1]) <= limit for i in numbers):
                break
    best = -1 if sum(gains.values()) > 0 else 0
    return [ways[i][best] for i in range(len(layers))]


def draw_layer(
    key: PRNGKeyArray,
    layer: Layer,
    examples: Callable[[Layer], Sample],
    options: Options,
    m: int,
    exact_keys: int,
) -> tuple[list[Linear], float]:
    """Attention of one layer; beside a window that is refined a second way, and what it gains.

    Frequencies move, or all parameters of `Far` do.
    """
    coupling, calibration, steps = options.coupling, options.calibration, options.refine_steps
    exact, fitted = options.exact._replace(keys=exact_keys), None
    heads, head_dim = layer.sample.key.shape[-2:]
    if layer.sample.query.shape[1] != layer.sample.key.shape[1]:
        exact = exact._replace(window=0, first=0)
    if layer.kind != "of keys" or layer.slopes is not None:
        exact = exact._replace(keys=0, rows=0)
    if calibrations.parts(calibration):
        moments = layer.moments.astype(jnp.float32)
        fitted = calibrations.fit(moments, calibration, coupling, exact.is_mixed)
    w = couplings.draw(key, coupling, m, head_dim, heads)
    linear = Linear(w, fitted, exact=exact)
    if not steps:
        return [linear], 0.0
    sample = examples(layer)
    how: Any = dict(steps=steps, is_causal=layer.is_causal)
    linear = replace(linear, frequencies=transfer(performer_estimate, w, linear, sample, **how))
    if not exact.window:
        return [linear], 0.0
    kind: Any = dict(method=calibration, coupling=coupling, is_causal=layer.is_causal)
    start, fitted = calibrated_far(w, exact, sample, **kind)
    best = refine_far(Far.of(START * start.of_key), fitted, exact, sample, **how)
    far = Linear(best.of_key, None, best.of_query, best.weights, exact)
    unseen = parted(sample)[1]
    before, after = (mean(head_errors(unseen, x, layer.is_causal)) for x in (linear, far))
    return [linear, far], before - after


def mean(errors: dict[str, Float[Array, " n"]]) -> float:
    """Attention error of a layer, mean over heads."""
    return float(jnp.mean(errors["attention error"]))


@partial(jax.jit, static_argnames="is_causal")
def head_errors(
    sample: Sample, attention: Linear, is_causal: bool = False
) -> dict[str, Float[Array, " n"]]:
    """Return name -> a number for each head of one layer: sums and means over what exists.

    "attention error" is |A^ - A|^2 / |A|^2, and "uniform attention" the same of a mean over all
    keys. "|q|^2" and "|k|^2" are means after the factor sqrt(scale) each, and "keys attended to" is
    e to the mean entropy of a row of A. Matrices of one example exist at a time.
    """
    groups = sample.query.shape[2] // sample.key.shape[2]

    def squared_lengths(x, exists):
        lengths = jnp.where(exists[..., None], jnp.sum(x**2, axis=-1), 0)
        return jnp.sum(lengths, (0, 1)), jnp.sum(exists, dtype=x.dtype) * x.shape[-1] ** 0.5

    def fractions(example):
        own = jax.tree.map(lambda x: x[None], example)
        exact, pairs = softmax_attention(own, is_causal), own.pairs(is_causal)
        seen = pairs.astype(exact.dtype)
        uniform = seen / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)
        estimate = performer_estimate(attention.frequencies, attention, own, is_causal)
        entropy = -jnp.sum(exact * jnp.log(jnp.where(exact > 0, exact, 1)), (0, 2, 3))
        differences = (jnp.where(pairs, x - exact, 0) for x in (estimate, uniform))
        error, of_uniform = (jnp.sum(x**2, (0, 2, 3)) for x in differences)
        size = jnp.sum(exact**2, (0, 2, 3))
        lengths, count = squared_lengths(own.key, own.keys)
        return {
            "attention error": (error, size),
            "uniform attention": (of_uniform, size),
            "|q|^2": squared_lengths(own.query, own.queries),
            "|k|^2": (jnp.repeat(lengths, groups), count),
            "keys attended to": (entropy, jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)),
        }

    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(fractions, sample))
    numbers = {name: above / below for name, (above, below) in sums.items()}
    return numbers | {"keys attended to": jnp.exp(numbers["keys attended to"])}
