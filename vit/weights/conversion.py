"""A trained softmax model with another attention.

`vit.convert` is the command. The layers of a task are replaced by `performer.nnx.linearize`, or by
the task's own `Task.replacement`; attention errors are measured alike for every task.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from performer import performer_attention
from performer.attention import Exact
from performer.linearization import Report
from performer.linearization.layers import Measured
from performer.nnx import linearize, measure
from performer.refinement import Sample, softmax_attention, squared
from vit import config as configs
from vit import data
from vit.task import Model, Task

ERROR_EXAMPLES = 8
"""Examples of the evaluation split whose attention errors are measured."""


class Case(NamedTuple):
    """The attention that replaces softmax."""

    attention: configs.Attention
    """`num_features` is 0 for the exact keys alone."""
    refine_steps: int = 0
    keep: int = 0
    """Number of layers that stay exact, those with the largest errors."""
    seed: int = 0
    tolerance: float | None = None
    """Largest error of a layer, for which numbers of features and exact keys are limits."""
    is_sized: bool = True
    """False if `linearize` chooses the sizes of each layer."""


class Replaced(NamedTuple):
    """A model with another attention and the same parameters."""

    model: Model
    heads: Report | None = None
    """Errors of each head on the training examples, if the task has them."""
    transferred: bool = False
    """Features are those of attention transfer, as `config.attention.transferred`."""


class Function(nnx.Module):
    """(query, key, value, *own) -> output as an `attention_fn`; other arrays, same program."""

    def __init__(self, function: Callable[..., Array], own: tuple = ()):
        self.function, self.own = function, nnx.Variable(own)

    def __call__(self, query: Array, key: Array, value: Array, **_: Any) -> Array:
        """Return the output; masks and dropout are ignored."""
        return self.function(query, key, value, *self.own.get_value())


def exchanged(task: Task, model: Model, functions: Iterable[Any]) -> Model:
    """Return a copy of the model with these `attention_fn`, one for each layer."""
    new = nnx.clone(model)
    for layer, function in zip(task.layers(new), functions, strict=True):
        layer.attention_fn = nnx.data(function) if isinstance(function, nnx.Module) else function
    return new


def uniform(query: Array, key: Array, value: Array) -> Array:
    """Return the mean of all values."""
    return jnp.broadcast_to(jnp.mean(value, axis=-3, keepdims=True), value.shape)


def uniform_so_far(query: Array, key: Array, value: Array) -> Array:
    """Return the mean of the values up to each place."""
    return jnp.cumsum(value, axis=-3) / jnp.arange(1, value.shape[-3] + 1)[:, None, None]


@cache  # the same function for the same window is the same program
def window_alone(exact: Exact) -> Callable[..., Array]:
    """Return softmax over the exact keys of a window."""

    def attend(query: Array, key: Array, value: Array) -> Any:
        options: Any = exact.options
        return performer_attention(query, key, value, None, **options)

    return attend


def measured_layers(task: Task, model: nnx.Module, batches: Iterable[Any]) -> Measured:
    """Measure the task's layers; others, as pooling by attention, stay exact."""
    own = {id(layer) for layer in task.layers(model)}
    found = [path for path, module in nnx.iter_modules(model) if id(module) in own]
    paths = {".".join(map(str, path)) for path in found}
    return measure(model, batches, call=task.count, where=paths.__contains__)


def linearized(
    task: Task, config: configs.Config, model: Model, batches: Sequence[data.Batch]
) -> Callable[[Case], Replaced]:
    """Return (case) -> the model with a Performer's attention, by `performer.nnx.linearize`.

    Args:
        task: task of the model.
        config: config of the run; its prefix tokens are exact beside a window.
        model: in evaluation mode, its tokens in the order of a window.
        batches: training examples, which calibrate and refine.
    """
    measured = measured_layers(task, model, batches)

    def replaced(case: Case) -> Replaced:
        own = case.attention
        exact = configs.exact(dataclasses.replace(config, attention=own))
        if not own.num_features:
            alone = [Function(window_alone(exact)) for _ in task.layers(model)]
            return Replaced(exchanged(task, model, alone))
        sizes: Any = exact.options | {"num_features": own.num_features} if case.is_sized else {}
        new, heads = linearize(
            model,
            batches,
            coupling=own.coupling,
            calibration=own.calibration,
            refine_steps=case.refine_steps,
            keep=case.keep,
            tolerance=case.tolerance,
            **sizes,
            call=task.count,
            measured=measured,
            seed=case.seed,
        )
        learned = any(getattr(layer.attention_fn, "learned", None) for layer in task.layers(new))
        return Replaced(new, heads, transferred=learned)

    return replaced


def samples(task: Task, model: Model, batches: Iterable[data.Batch]) -> list[Sample]:
    """Return queries and keys of each layer of a model."""
    projections = nnx.jit(task.projections)
    layers = zip(*(projections(model, batch) for batch in batches), strict=True)
    parts = [list(zip(*layer, strict=True))[:2] for layer in layers]
    return [Sample.of(*map(jnp.concatenate, layer)) for layer in parts]


def errors(task: Task, old: Model, new: Model, seen: Sequence[Sample]) -> list[float]:
    """Return the relative squared error of each layer's attention matrix, mean over its heads.

    Args:
        task: task of the models.
        old: model with exact attention; layers of `new` of the same kind have the error 0.
        new: model with another attention.
        seen: queries and keys of each layer of `old`.
    """
    pairs = zip(task.layers(old), task.layers(new), seen, strict=True)
    return [
        0.0 if is_same(*layers) else float(_error(task.is_causal, layers[1].attention_fn, sample))
        for *layers, sample in pairs
    ]


def is_same(old: Any, new: Any) -> bool:
    """Return true if both layers have attention of one kind."""
    return type(old.attention_fn) is type(new.attention_fn)


@partial(nnx.jit, static_argnums=0)
def _error(is_causal: bool, attention_fn: Any, sample: Sample) -> Float[Array, ""]:
    query, key = sample[:2]
    b, s, n, _ = key.shape
    # Values of unit vectors give the rows of the matrix: (b, t, n, s) -> (b, n, t, s)
    units = jnp.broadcast_to(jnp.eye(s)[:, None], (b, s, n, s))
    estimate = jnp.moveaxis(attention_fn(query, key, units), -2, -3)
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    return jnp.mean(squared(estimate, exact, pairs))
