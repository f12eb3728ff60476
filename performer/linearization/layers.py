"""Measured layers, their calibration, draws and errors: shared by all fronts of `linearize`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import attention_weights
from performer.attention import calibration as calibrations
from performer.attention.calibration import Calibration
from performer.attention.refinement import (
    LEARNED,
    START,
    Far,
    Sample,
    calibrated_far,
    parted,
    refine_far,
    softmax_attention,
    squared,
    transfer,
)
from performer.linearization.report import Report, rows_of
from performer.typing import NO_WINDOW, Coupling, Window

EXAMPLES = 8
"""Examples of the first batch whose queries and keys are kept to measure errors on."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Linear:
    """Random-feature attention in the place of one layer."""

    frequencies: Float[Array, "*l k m h"]
    calibration: Calibration | None = None
    query_frequencies: Float[Array, "*l k m h"] | None = None
    """With `weights`, learned features (`performer.refinement.refine_far`)."""
    weights: Float[Array, "*l k m"] | None = None
    window: Window = field(default=NO_WINDOW, metadata={"static": True})

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `performer_attention`."""
        own = {name: x for name, x in vars(self).items() if name != "window" and x is not None}
        learned = {} if self.weights is None else {"feature_map": LEARNED}
        return own | learned | self.window._asdict()


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


def check(
    batches: Any,
    coupling: str | Coupling,
    calibration: str,
    refine_steps: int,
    keep: int,
    window: Window = NO_WINDOW,
) -> None:
    """Raise ValueError for invalid arguments of `linearize`."""
    calibrations.parts(calibration, coupling)
    counts = dict(refine_steps=refine_steps, keep=keep) | window._asdict()
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} must not be negative, got {count}")
    if window.exact_first and not window.exact_window:
        raise ValueError(f"{window}: first keys go with an exact_window; give that one, too")
    if hasattr(batches, "shape"):
        raise ValueError(
            f"batches must be a list of batches, and this is one array of shape {batches.shape}:"
            " pass [x]"
        )
    if refine_steps and iter(batches) is batches:
        raise ValueError(
            "refine_steps reads the batches once for each layer, and these can be read only once:"
            " pass a list of them"
        )


def draw(
    layers: list[Layer],
    examples: Callable[[Layer], Sample],
    *,
    coupling: str | Coupling,
    num_features: int | None,
    calibration: str,
    refine_steps: int,
    seed: int,
    window: Window = NO_WINDOW,
) -> list[Linear]:
    """Attention for each layer: drawn, calibrated, and refined on all its `examples`.

    Beside a window there are two ways to refine: the frequencies move, or all parameters of `Far`
    do. The way with the lower error on held-out examples serves all layers.
    """
    drawn, learned, gain = [], [], 0.0
    for key, layer in zip(jax.random.split(jax.random.key(seed), len(layers)), layers, strict=True):
        heads, head_dim = layer.sample.key.shape[-2:]
        itself = layer.sample.query.shape[1] == layer.sample.key.shape[1]
        own, fitted = window if itself else window._replace(exact_window=0, exact_first=0), None
        if layer.kind != "of keys" or layer.slopes is not None:
            own = own._replace(exact_keys=0)
        if calibrations.parts(calibration):
            fitted = calibrations.fit(layer.moments.astype(jnp.float32), calibration, coupling)
        w = couplings.draw(key, coupling, num_features or 2 * head_dim, head_dim, heads)
        linear = far = Linear(w, fitted, window=own)
        if refine_steps:
            sample = examples(layer)
            options: Any = dict(steps=refine_steps, is_causal=layer.is_causal)
            moved = transfer(_moved, w, linear, sample, **options)
            linear = far = replace(linear, frequencies=moved)
            if own.exact_window:
                kind: Any = dict(method=calibration, coupling=coupling, is_causal=layer.is_causal)
                start, fitted = calibrated_far(w, own, sample, **kind)
                start = Far.of(START * start.of_key)
                best = refine_far(start, fitted, own, sample, **options)
                far = Linear(best.of_key, None, best.of_query, best.weights, own)
                unseen = layer._replace(sample=parted(sample)[1])
                errors = (jnp.mean(errors_of(unseen, x)["attention error"]) for x in (linear, far))
                gain += float(next(errors) - next(errors))
        drawn.append(linear)
        learned.append(far)
    return learned if gain > 0 else drawn


def _moved(frequencies: Array, attention: Linear, sample: Sample, is_causal: bool) -> Array:
    return estimated(replace(attention, frequencies=frequencies), sample, is_causal)


def estimated(
    attention: Linear, sample: Sample, is_causal: bool = False
) -> Float[Array, "b n t s"]:
    """Estimated attention matrix."""
    options: Any = attention.options | dict(mask=sample.keys[:, None, None], is_causal=is_causal)
    return attention_weights(*sample[:2], segment_ids=sample.segments, **options)


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
    estimate = estimated(attention, sample, is_causal)
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
