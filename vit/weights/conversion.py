"""A trained softmax model with another attention.

`vit.convert` is the command. The layers of any task are replaced by `performer.nnx.linearize`, and
attention errors are measured alike for every task.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from performer.linearization import Report
from performer.linearization.layers import Measured
from performer.nnx import PerformerAttention, linearize, measure
from performer.refinement import Sample, softmax_attention, squared
from vit import config as configs
from vit import data
from vit.task import Model, Task

ERROR_EXAMPLES = 8
"""Examples of the evaluation split whose attention errors are measured."""


class Case(NamedTuple):
    """The attention that replaces softmax."""

    coupling: str
    block: configs.Block
    """Sizes and calibration of each layer."""
    refine_steps: int = 0
    keep: int = 0
    """Number of layers that stay exact, those with the largest errors."""
    seed: int = 0
    tolerance: float | None = None
    """Largest error of a layer, for which numbers of features and exact keys are limits."""
    time: str | None = "forward"
    """Passes to time: "forward", "train" or None."""
    is_sized: bool = True
    """False if `linearize` chooses the sizes of each layer."""


def exchanged(task: Task, model: Model, functions: Iterable[Any]) -> Model:
    """Return a copy of the model with these `attention_fn`, one for each layer."""
    new = nnx.clone(model)
    for layer, function in zip(task.layers(new), functions, strict=True):
        layer.attention_fn = nnx.data(function) if isinstance(function, nnx.Module) else function
    return new


def uniform(query: Array, key: Array, value: Array, is_causal: bool = False, **_: Any) -> Array:
    """Return the mean of the values, of all or up to each query; an `attention_fn`."""
    if is_causal:
        return jnp.cumsum(value, axis=-3) / jnp.arange(1, value.shape[-3] + 1)[:, None, None]
    return jnp.broadcast_to(jnp.mean(value, axis=-3, keepdims=True), value.shape)


def measured_layers(task: Task, model: nnx.Module, batches: Iterable[Any]) -> Measured:
    """Measure the task's layers; others, as pooling by attention, stay exact."""
    layer_ids = {id(layer) for layer in task.layers(model)}
    layer_paths = [path for path, module in nnx.iter_modules(model) if id(module) in layer_ids]
    paths = {".".join(map(str, path)) for path in layer_paths}
    return measure(model, batches, call=task.count, where=paths.__contains__)


def linearized(
    task: Task, config: Any, model: Model, batches: Sequence[data.Batch]
) -> Callable[[Case], tuple[Model, Report]]:
    """Return (case) -> the model with a Performer's attention and its errors (`linearize`).

    Args:
        task: task of the model.
        config: config of the run; its prefix tokens are exact with a window.
        model: in evaluation mode, its tokens in the order of a window.
        batches: training examples, which calibrate and refine.
    """
    measured = measured_layers(task, model, batches)

    def replaced(case: Case) -> tuple[Model, Report]:
        exact, sizes = configs.exact(config, case.block), {}
        if case.is_sized:
            sizes: Any = {"num_features": case.block.num_features, "exact": exact}
        return linearize(
            model,
            batches,
            coupling=case.coupling,
            calibration=case.block.calibration,
            refine_steps=case.refine_steps,
            keep=case.keep,
            tolerance=case.tolerance,
            time=case.time,
            **sizes,
            call=task.count,
            measured=measured,
            seed=case.seed,
        )

    return replaced


def blocks_of(task: Task, model: Model, case: Case) -> tuple[configs.Block, ...]:
    """Return the records of a converted model's layers for `config.attention.blocks`."""

    def block(function: Any) -> configs.Block:
        if not isinstance(function, PerformerAttention):
            return case.block._replace(kind="softmax")
        window, _, keys, rows = function.exact
        return configs.Block(
            kind="performer",
            num_features=function.num_features,
            calibration=case.block.calibration if function.statistics else "none",
            exact_window=window,
            exact_keys=keys,
            exact_rows=rows,
            transferred=bool(function.learned),
        )

    return tuple(block(layer.attention_fn) for layer in task.layers(model))


def samples(task: Task, model: Model, batches: Iterable[data.Batch]) -> list[Sample]:
    """Return queries and keys of each layer of a model."""
    projections = nnx.jit(task.projections)
    layers = zip(*(projections(model, batch) for batch in batches), strict=True)
    pairs = [list(zip(*layer, strict=True))[:2] for layer in layers]
    return [Sample.of(*map(jnp.concatenate, layer)) for layer in pairs]


def errors(task: Task, old: Model, new: Model, samples: Sequence[Sample]) -> list[float]:
    """Return the relative squared error of each layer's attention matrix, mean over its heads.

    Args:
        task: task of the models.
        old: model with exact attention; layers of `new` of the same kind have the error 0.
        new: model with another attention.
        samples: queries and keys of each layer of `old`.
    """
    pairs = zip(task.layers(old), task.layers(new), samples, strict=True)
    return [
        0.0 if is_same(*layers) else float(_error(task.is_causal, layers[1], sample))
        for *layers, sample in pairs
    ]


def is_same(old: Any, new: Any) -> bool:
    """Return true if both layers have the same function, or modules of one class."""
    functions = old.attention_fn, new.attention_fn
    kinds = [type(x) if isinstance(x, nnx.Module) else x for x in functions]
    return kinds[0] is kinds[1]


@partial(nnx.jit, static_argnums=0)
def _error(is_causal: bool, layer: Any, sample: Sample) -> Float[Array, ""]:
    query, key = sample[:2]
    b, s, n, _ = key.shape
    # Values of unit vectors give the rows of the matrix: (b, t, n, s) -> (b, n, t, s)
    units = jnp.broadcast_to(jnp.eye(s)[:, None], (b, s, n, s))
    estimate = jnp.moveaxis(layer.attention_fn(query, key, units, is_causal=is_causal), -2, -3)
    exact, pairs = softmax_attention(sample, is_causal), sample.pairs(is_causal)
    return jnp.mean(squared(estimate, exact, pairs))
