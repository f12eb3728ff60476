"""A trained softmax model beside what becomes of it with random-feature attention.

`vit.convert` is the command, `performer.nnx.linearize` what replaces the attention.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from performer import performer_attention
from performer.nnx import PerformerAttention, linearize, measure
from performer.nnx.linearization import Measured
from performer.nnx.report import head_errors, uniform_error
from performer.refinement import Sample
from vit import data, metrics
from vit.runs import Restored, evaluation_examples
from vit.steps import count, evaluate
from vit.task import Task

ERROR_EXAMPLES = 8
"""Examples of the evaluation split whose attention errors are measured."""

Attention = tuple[Callable[..., Array], tuple]
"""(query, key, value, *arguments) -> output, and the arguments."""


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
            return _performer, (attention_fn.frequencies[...], attention_fn.calibration)
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


def _performer(query, key, value, frequencies, calibration):
    output = performer_attention(query, key, value, frequencies, calibration=calibration)
    return cast(Array, output)


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
) -> Iterator[metrics.Record]:
    """One record for each coupling, method and m: accuracy over draws, attention error by layer.

    The first two records are of softmax and of uniform attention. Attention errors are those on the
    inputs that the layers have with softmax attention on evaluation examples; means over heads.

    Args:
        run: with softmax attention; its data are those of the evaluation.
        model: of the run, in evaluation mode.
        batches: of training examples, which calibrate and refine.
        names: couplings.
        methods: pairs of a method of calibration and the steps of refinement.
        num_features: each m.
        draws: how many, of the frequencies.
        keep: layers that stay exact, those with the largest errors.
    """
    measured = measured_layers(run.task, model, batches)
    examples = evaluation_examples(run.dataset, run.config, ERROR_EXAMPLES)
    held_out = [layer.sample for layer in measured_layers(run.task, model, [examples]).layers]

    def record(coupling, method, m, accuracies, errors):
        spread = np.std(accuracies, ddof=1) / len(accuracies) ** 0.5 if accuracies[1:] else 0.0
        layers = np.mean(errors, axis=0)
        return {
            "coupling": coupling,
            "calibration": method,
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
    for name, (method, steps), m in itertools.product(names, methods, num_features):
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
                call=run.task.count,
                measured=measured,
                seed=draw,
            )
            layers = attentions(run.task, new)
            accuracies.append(accuracy(run, model, layers))
            pairs = zip(held_out, layers, strict=True)
            errors.append([_error(sample, arguments) for sample, (_, arguments) in pairs])
        yield record(name, method + ", refined" * (steps > 0), m, accuracies, errors)


def _error(sample: Sample, arguments: tuple) -> float:
    """The mean over heads; 0 of exact attention, which has no arguments."""
    return float(jnp.mean(head_errors(sample, *arguments)["attention error"])) if arguments else 0.0
