"""A trained softmax model beside what becomes of it with random-feature attention.

`vit.convert` is the command, `performer.nnx.linearize` what replaces the attention.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from performer import performer_attention
from performer.attention import attention_weights
from performer.nnx import PerformerAttention, linearize, measure
from performer.nnx.layer import NO_WINDOW, Window
from performer.nnx.linearization import Measured
from performer.nnx.report import head_errors, uniform_error
from performer.refinement import Sample, softmax_attention, squared
from vit import config as configs
from vit import data, metrics
from vit.runs import Restored, evaluation_examples
from vit.steps import count, evaluate
from vit.task import Task, of_folder

ERROR_EXAMPLES = 8
"""Examples of the evaluation split whose attention errors are measured."""

Attention = tuple[Callable[..., Array], tuple]
"""(query, key, value, *arguments) -> output, and the arguments."""


def of_softmax(workdir: Path, task: str) -> configs.Config:
    """The config of a run with softmax attention.

    Raises:
        ValueError: for a folder without a run, or with a run of another task or attention.
    """
    of_folder(workdir, task)
    config = configs.of_run(workdir)
    if config.attention.kind != "softmax":
        raise ValueError(
            f"{workdir} was trained with config.attention.kind={config.attention.kind!r}; only a"
            " run with 'softmax' can be converted"
        )
    return config


def measured_layers(task: Task, model: nnx.Module, batches: Iterable[Any]) -> Measured:
    """What `measure` finds of the task's layers; others, as pooling by attention, stay exact."""
    own = {id(layer) for layer in task.layers(model)}
    found = [path for path, module in nnx.iter_modules(model) if id(module) in own]
    paths = {".".join(map(str, path)) for path in found}
    return measure(model, batches, call=task.count, where=paths.__contains__)


def attentions(task: Task, model: nnx.Module) -> list[Attention]:
    """What the layers of a model do; layers of one kind and shape as the same function."""

    def of(attention_fn: Any) -> Attention:
        if isinstance(attention_fn, PerformerAttention):
            own = attention_fn.frequencies[...], attention_fn.calibration
            return _performer(attention_fn.window), own
        return nnx.dot_product_attention, ()

    return [of(layer.attention_fn) for layer in task.layers(model)]


def accuracy(run: Restored, model: nnx.Module, layers: Sequence[Attention]) -> float:
    """Accuracy on the evaluation split with another attention in each layer.

    Args:
        run: of the model.
        model: in evaluation mode.
        layers: what each of them does. That of other arguments is the same program.
    """
    graph, state = nnx.split(model)
    functions, arguments = zip(*layers, strict=True)
    count = partial(_count, run.task, graph, functions, state, arguments)
    batches = data.eval_batches(run.dataset, run.config.data)
    return evaluate(run.task, count, batches)["eval_accuracy"]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _count(task, graph, functions, state, arguments, batch):
    model = nnx.merge(graph, state)
    for layer, function, own in zip(task.layers(model), functions, arguments, strict=True):
        layer.attention_fn = lambda query, key, value, function=function, own=own, **_: function(
            query, key, value, *own
        )
    return count(task, model, batch)


def _uniform(query: Array, key: Array, value: Array) -> Array:
    del query, key
    return jnp.broadcast_to(jnp.mean(value, axis=-3, keepdims=True), value.shape)


@cache  # the same function for the same window is the same program
def _performer(window: Window) -> Callable[..., Array]:
    def attend(query, key, value, frequencies, calibration):
        options: Any = dict(calibration=calibration, **window._asdict())
        return cast(Array, performer_attention(query, key, value, frequencies, **options))

    return attend


@cache
def _window_alone(window: Window) -> Callable[..., Array]:
    def attend(query, key, value):
        options: Any = _nothing_far(query) | window._asdict()
        return cast(Array, performer_attention(query, key, value, **options))

    return attend


def _nothing_far(query: Array) -> dict[str, Array]:
    """One feature, of weight 0."""
    return {"frequencies": jnp.zeros((1, query.shape[-1])), "weights": jnp.zeros(1)}


def _error_alone(sample: Sample, window: Window) -> float:
    query, key = sample[:2]
    estimate = attention_weights(query, key, **_nothing_far(query), **window._asdict())
    return float(jnp.mean(squared(estimate, softmax_attention(sample), sample.pairs(False))))


def compare(
    run: Restored,
    model: nnx.Module,
    batches: Sequence[data.Batch],
    *,
    names: Sequence[str],
    methods: Sequence[tuple[str, int]],
    num_features: Sequence[int],
    draws: int,
    keep: int = 0,
    windows: Sequence[Window] = (NO_WINDOW,),
) -> Iterator[metrics.Record]:
    """One record for each coupling, method, window and m: accuracy over draws, attention errors.

    The first records, with m = 0, are of softmax and of uniform attention, and of softmax over the
    exact keys of each window alone. Attention errors are those on the inputs that the layers have
    with softmax attention on evaluation examples; means over heads.

    Args:
        run: with softmax attention; its data are those of the evaluation.
        model: of the run, in evaluation mode.
        batches: of training examples, which calibrate and refine.
        names: couplings.
        methods: pairs of a method of calibration and the steps of refinement.
        num_features: each m.
        draws: how many, of the frequencies.
        keep: layers that stay exact, those with the largest errors.
        windows: of near keys that are exact; the model must have its tokens in their order.
    """
    measured = measured_layers(run.task, model, batches)
    examples = evaluation_examples(run.dataset, run.config, ERROR_EXAMPLES)
    held_out = [layer.sample for layer in measured_layers(run.task, model, [examples]).layers]

    def record(coupling, method, m, accuracies, errors, window=NO_WINDOW):
        spread = np.std(accuracies, ddof=1) / len(accuracies) ** 0.5 if accuracies[1:] else 0.0
        layers = np.mean(errors, axis=0)
        return {
            "coupling": coupling,
            "calibration": method,
            "window": window.exact_window,
            "m": m,
            "accuracy": float(np.mean(accuracies)),
            "standard error": float(spread),
            "attention error": float(np.mean(layers)),
            **{f"error layer {i}": float(e) for i, e in enumerate(layers)},
        }

    layers = attentions(run.task, model)
    yield record("softmax", "", 0, [accuracy(run, model, layers)], [[0.0] * len(layers)])
    errors = [float(jnp.mean(uniform_error(sample))) for sample in held_out]
    yield record("uniform", "", 0, [accuracy(run, model, [(_uniform, ())] * len(layers))], [errors])
    for window in filter(any, windows):
        alone = [(_window_alone(window), ())] * len(layers)
        errors = [_error_alone(sample, window) for sample in held_out]
        yield record("window alone", "", 0, [accuracy(run, model, alone)], [errors], window)
    rows = itertools.product(names, methods, windows, num_features)
    for name, (method, steps), window, m in rows:
        accuracies, errors = [], []
        for draw in range(draws):
            new, _ = linearize(
                model,
                batches,
                coupling=name,
                num_features=m,
                calibration=method,
                refine_steps=steps,
                keep=keep,
                **window._asdict(),
                call=run.task.count,
                measured=measured,
                seed=draw,
            )
            layers = attentions(run.task, new)
            accuracies.append(accuracy(run, model, layers))
            pairs = zip(held_out, layers, strict=True)
            errors.append([_error(sample, arguments, window) for sample, (_, arguments) in pairs])
        yield record(name, method + ", refined" * (steps > 0), m, accuracies, errors, window)


def _error(sample: Sample, arguments: tuple, window: Window) -> float:
    """The mean over heads; 0 of exact attention, which has no arguments."""
    if not arguments:
        return 0.0
    errors = head_errors(sample, *arguments, window=window)
    return float(jnp.mean(errors["attention error"]))
