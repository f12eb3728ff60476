"""Measured layers, their calibration, draws and report: shared by all fronts of `linearize`."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import calibration as calibrations
from performer.attention.calibration import Calibration
from performer.attention.refinement import Sample, performer_estimate, transfer
from performer.linearization.report import Report, head_errors, rows_of
from performer.typing import NO_WINDOW, Coupling, Window

EXAMPLES = 8
"""Examples of the first batch whose queries and keys are kept to measure errors on."""


class Linear(NamedTuple):
    """Random-feature attention in the place of one layer."""

    frequencies: Float[Array, "k m h"]
    calibration: Calibration | None
    window: Window = NO_WINDOW


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
    batches: Iterable[Any],
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
    if refine_steps and iter(batches) is batches:
        raise ValueError(
            "refine_steps reads the batches once for each layer, and these can be read only once:"
            " pass a list of them"
        )


def draw(
    layers: list[Layer],
    coupling: str | Coupling,
    num_features: int | None,
    calibration: str,
    seed: int,
    window: Window = NO_WINDOW,
) -> list[Linear]:
    """Attention for each layer, calibrated."""
    drawn = []
    for key, layer in zip(jax.random.split(jax.random.key(seed), len(layers)), layers, strict=True):
        heads, head_dim = layer.sample.key.shape[-2:]
        m = num_features or 2 * head_dim
        itself = layer.sample.query.shape[1] == layer.sample.key.shape[1]
        fitted = None
        if calibrations.parts(calibration):
            moments = layer.moments.astype(jnp.float32)
            fitted = calibrations.fit(moments, calibration, coupling)
        frequencies = couplings.draw(key, coupling, m, head_dim, heads)
        drawn.append(Linear(frequencies, fitted, window if itself else NO_WINDOW))
    return drawn


def worst(errors: list[dict[str, Array]]) -> list[int]:
    """Return the numbers of the layers, those with the largest errors first."""
    means = [float(jnp.mean(own["attention error"])) for own in errors]
    return sorted(range(len(means)), key=lambda i: -means[i])


def errors_of(layer: Layer, attention: Linear) -> dict[str, Float[Array, " n"]]:
    """`head_errors` on the examples of the layer."""
    own = attention.frequencies, attention.calibration
    return head_errors(layer.sample, *own, layer.is_causal, attention.window)


def refined(attention: Linear, layer: Layer, sample: Sample, steps: int) -> Linear:
    """Attention whose frequencies have moved, towards lower errors with its window."""
    moved = transfer(
        _estimate_with(attention.window),
        attention.frequencies,
        attention.calibration,
        sample,
        steps=steps,
        is_causal=layer.is_causal,
    )
    return attention._replace(frequencies=moved)


@cache  # the same function for the same window is the same program
def _estimate_with(window: Window) -> Callable[..., Float[Array, "b n t s"]]:
    return partial(performer_estimate, **window._asdict())


def report_of(measured: Measured, errors: list[dict[str, Array]], kept: set[int]) -> Report:
    """Report of all layers, from their `errors_of`."""
    rows = []
    for number, (layer, own) in enumerate(zip(measured.layers, errors, strict=True)):
        rows += rows_of(number, layer.path, "exact" if number in kept else "linear", own)
    return Report(rows, measured.left)
