"""Measured layers, their calibration, draws and errors: shared by all fronts of `linearize`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import calibration as calibrations
from performer.attention.refinement import (
    START,
    Far,
    Linear,
    Sample,
    calibrated_far,
    parted,
    performer_estimate,
    refine_far,
    softmax_attention,
    squared,
    transfer,
)
from performer.linearization.report import Report, rows_of
from performer.typing import NO_WINDOW, Coupling, Window

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
    seed: int = 0
    window: Window = NO_WINDOW

    @classmethod
    def of(cls, batches: Any, **keywords: Any) -> "Options":
        """Check the keywords, with exact pairs by the names of `Window`, and the batches.

        Raises:
            ValueError: for invalid ones.
        """
        window = Window(**{x: keywords.pop(x) for x in Window._fields if x in keywords})
        own = cls(**keywords, window=window)
        calibrations.parts(own.calibration, own.coupling)
        counts = dict(refine_steps=own.refine_steps, keep=own.keep) | window._asdict()
        for name, count in counts.items():
            if count < 0:
                raise ValueError(f"{name} must not be negative, got {count}")
        if window.exact_first and not window.exact_window:
            raise ValueError(f"{window}: first keys go with an exact_window; give that one, too")
        if hasattr(batches, "shape"):
            raise ValueError(
                "batches must be a list of batches, and this is one array of shape"
                f" {batches.shape}: pass [x]"
            )
        if own.refine_steps and iter(batches) is batches:
            raise ValueError(
                "refine_steps reads the batches once for each layer, and these can be read only"
                " once: pass a list of them"
            )
        return own


def replacements(
    measured: Measured, examples: Callable[[Layer], Sample], options: Options
) -> tuple[dict[int, Linear], Report]:
    """Attention of the layers that do not stay exact, by number, and the report of all."""
    layers, drawn = measured.layers, draw(measured.layers, examples, options)
    errors = list(map(errors_of, layers, drawn))
    places = [layer.calls[0][0] for layer in layers]  # a scan is one place of several layers
    kept = list(dict.fromkeys(places[i] for i in worst(errors)))[: options.keep]
    exact = {i for i, place in enumerate(places) if place in kept}
    new = {i: linear for i, linear in enumerate(drawn) if i not in exact}
    return new, report_of(measured, errors, exact)


def draw(
    layers: list[Layer], examples: Callable[[Layer], Sample], options: Options
) -> list[Linear]:
    """Attention for each layer: drawn, calibrated, and refined on all its `examples`.

    Beside a window there are two ways to refine: the frequencies move, or all parameters of `Far`
    do. The way with the lower error on held-out examples serves all layers.
    """
    coupling, m, calibration, steps, _, seed, window = vars(options).values()
    drawn, learned, gain = [], [], 0.0
    for key, layer in zip(jax.random.split(jax.random.key(seed), len(layers)), layers, strict=True):
        heads, head_dim = layer.sample.key.shape[-2:]
        itself = layer.sample.query.shape[1] == layer.sample.key.shape[1]
        own, fitted = window if itself else window._replace(exact_window=0, exact_first=0), None
        if layer.kind != "of keys" or layer.slopes is not None:
            own = own._replace(exact_keys=0)
        if calibrations.parts(calibration):
            fitted = calibrations.fit(layer.moments.astype(jnp.float32), calibration, coupling)
        w = couplings.draw(key, coupling, m or 2 * head_dim, head_dim, heads)
        linear = far = Linear(w, fitted, window=own)
        if steps:
            sample = examples(layer)
            how: Any = dict(steps=steps, is_causal=layer.is_causal)
            moved = transfer(performer_estimate, w, linear, sample, **how)
            linear = far = replace(linear, frequencies=moved)
            if own.exact_window:
                kind: Any = dict(method=calibration, coupling=coupling, is_causal=layer.is_causal)
                start, fitted = calibrated_far(w, own, sample, **kind)
                start = Far.of(START * start.of_key)
                best = refine_far(start, fitted, own, sample, **how)
                far = Linear(best.of_key, None, best.of_query, best.weights, own)
                unseen = layer._replace(sample=parted(sample)[1])
                errors = (jnp.mean(errors_of(unseen, x)["attention error"]) for x in (linear, far))
                gain += float(next(errors) - next(errors))
        drawn.append(linear)
        learned.append(far)
    return learned if gain > 0 else drawn


def worst(errors: list[dict[str, Array]]) -> list[int]:
    """Return the numbers of the layers, those with the largest errors first."""
    means = [float(jnp.mean(own["attention error"])) for own in errors]
    return sorted(range(len(means)), key=lambda i: -means[i])


def errors_of(layer: Layer, attention: Linear) -> dict[str, Float[Array, " n"]]:
    """Errors of attention on the examples of the layer, as `head_errors` returns them."""
    return head_errors(layer.sample, attention, layer.is_causal)


@partial(jax.jit, static_argnames="is_causal")
def head_errors(
    sample: Sample, attention: Linear, is_causal: bool = False
) -> dict[str, Float[Array, " n"]]:
    """Return name -> a number for each head of one layer: sums and means over what exists.

    "attention error" is |A^ - A|^2 / |A|^2, and "uniform attention" the same of a mean over all
    keys. "|q|^2" and "|k|^2" are means after the factor sqrt(scale) each, and "keys attended to" is
    e to the mean entropy of a row of A.
    """
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    estimate = performer_estimate(attention.frequencies, attention, sample, is_causal)
    entropy = -jnp.sum(exact * jnp.log(jnp.where(exact > 0, exact, 1)), axis=-1)
    rows = jnp.sum(jnp.any(pairs, axis=-1), dtype=exact.dtype)
    groups = sample.query.shape[2] // sample.key.shape[2]

    def squared_length(x, exists):
        lengths = jnp.where(exists[..., None], jnp.sum(x**2, axis=-1), 0)
        return jnp.sum(lengths, (0, 1)) / jnp.sum(exists, dtype=x.dtype) / x.shape[-1] ** 0.5

    return {
        "attention error": squared(estimate, exact, pairs),
        "uniform attention": uniform_error(sample, is_causal),
        "|q|^2": squared_length(sample.query, sample.queries),
        "|k|^2": jnp.repeat(squared_length(sample.key, sample.keys), groups),
        "keys attended to": jnp.exp(jnp.sum(entropy, (0, 2)) / rows),
    }


def uniform_error(sample: Sample, is_causal: bool = False) -> Float[Array, " n"]:
    """Error `squared` of the mean over all keys that a query sees."""
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    seen = pairs.astype(exact.dtype)
    uniform = seen / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)
    return squared(uniform, exact, pairs)


def report_of(measured: Measured, errors: list[dict[str, Array]], kept: set[int]) -> Report:
    """Report of all layers, from their `errors_of`."""
    rows = []
    for number, (layer, own) in enumerate(zip(measured.layers, errors, strict=True)):
        rows += rows_of(number, layer.path, "exact" if number in kept else "linear", own)
    return Report(rows, measured.left)
