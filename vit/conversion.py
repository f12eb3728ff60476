"""A trained softmax ViT with random-feature attention in its place: measured, compared, built.

`vit.convert` is the command.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import couplings, performer_attention
from performer.attention import attention_weights
from performer.calibration import Calibration, Moments, fit, pair_moments
from vit import config as configs
from vit import data, metrics
from vit.runs import Restored, evaluation_examples
from vit.steps import count, evaluate
from vit.task import Task, Triple, random_streams

ERROR_EXAMPLES = 8
"""Examples of the evaluation split whose attention errors are measured."""
REFINE_EXAMPLES, REFINE_RATE = 16, 0.05
"""Examples in a step of `refine`, and Adam's rate at its start."""


def measure(
    task: Task, model: nnx.Module, batches: Iterable[data.Batch]
) -> tuple[list[Moments], list[Triple]]:
    """What each layer is calibrated with, and its queries, keys and values.

    Args:
        task: of the model.
        model: with softmax attention, in evaluation mode.
        batches: of examples, all of one shape.

    Returns:
        Means over all examples of (heads, 2 h + 1, 2 h + 1); and (examples, tokens, heads, h).
    """
    project, pairs = nnx.jit(task.projections), jax.jit(pair_moments)
    moments, triples = [], []
    for batch in batches:
        triples.append(project(model, batch))
        moments.append([pairs(query, key) for query, key, _ in triples[-1]])
    return (
        [jnp.mean(jnp.stack(layer), axis=0) for layer in zip(*moments, strict=True)],
        jax.tree.map(lambda *batches: jnp.concatenate(batches), *triples),
    )


def relative_error(
    query: Array, key: Array, frequencies: Array, calibration: Calibration | None
) -> Float[Array, " n"]:
    """|A^ - A|^2 / |A|^2 of each head, sums over the examples (b, t, n, h)."""
    estimate = attention_weights(query, key, frequencies, calibration=calibration)
    return _error_of(estimate, query, key)


def _error_of(estimate: ArrayLike, query: Array, key: Array) -> Float[Array, " n"]:
    exact = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5)
    over = (0, 2, 3)
    return jnp.sum((estimate - exact) ** 2, over) / jnp.sum(exact**2, over)


@partial(jax.jit, static_argnames="steps")
def refine(
    query: Array, key: Array, frequencies: Array, calibration: Calibration | None, *, steps: int
) -> Float[Array, "n m h"]:
    """Frequencies (n, m, h) that Adam has moved to a lower `relative_error` on these examples."""
    size = min(REFINE_EXAMPLES, query.shape[0])
    optimizer = optax.adam(optax.cosine_decay_schedule(REFINE_RATE, steps))

    def step(carry, i):
        frequencies, state = carry
        start = i % (query.shape[0] // size) * size
        q, k = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (query, key))
        gradient = jax.grad(lambda w: jnp.sum(relative_error(q, k, w, calibration)))(frequencies)
        update, state = optimizer.update(gradient, state)
        return (frequencies + update, state), None

    carry = (frequencies, optimizer.init(frequencies))
    return jax.lax.scan(step, carry, jnp.arange(steps))[0][0]


def performer_of(
    task: Task,
    model: nnx.Module,
    config: configs.Config,
    moments: Sequence[Moments],
    frequencies: Sequence[Array],
) -> nnx.Module:
    """The same parameters with random-feature attention, in evaluation mode.

    Args:
        task: of the model.
        model: trained, with softmax attention.
        config: what `attention` the new model has; the rest as of the trained one.
        moments: from `measure`.
        frequencies: of each layer, (n, m, h).
    """
    new = task.create(config, rngs=random_streams(config.seed))
    nnx.update(new, nnx.state(model, nnx.Param))
    for layer, measured, w in zip(task.layers(new), moments, frequencies, strict=True):
        attention = layer.attention_fn
        attention.frequencies[...] = w
        if attention.calibration is not None:
            attention.calibrate(measured)
    return new


def accuracy(
    run: Restored, model: nnx.Module, attention_fn: Callable[..., Array], *arguments: Any
) -> float:
    """Accuracy on the evaluation split with another attention.

    Args:
        run: of the model.
        model: in evaluation mode.
        attention_fn: (query, key, value, *arguments of the layer) -> output.
        arguments: sequences with one entry for each layer: what is passed to `attention_fn`.
    """
    graph, state = nnx.split(model)
    count = partial(_count, run.task, graph, attention_fn, state, arguments)
    batches = data.eval_batches(run.dataset, run.config.data)
    return evaluate(run.task, count, batches)["eval_accuracy"]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _count(task, graph, attention_fn, state, arguments, batch):
    model = nnx.merge(graph, state)
    for number, layer in enumerate(task.layers(model)):
        own = [x[number] for x in arguments]
        layer.attention_fn = lambda query, key, value, own=own, **_: attention_fn(
            query, key, value, *own
        )
    return count(task, model, batch)


def _uniform(query: Array, key: Array, value: Array) -> Array:
    del query, key
    return jnp.broadcast_to(jnp.mean(value, axis=-3, keepdims=True), value.shape)


def _performer(query, key, value, frequencies, calibration):
    output = performer_attention(query, key, value, frequencies, calibration=calibration)
    return cast(Array, output)


def layers_of(
    name: str,
    method: str,
    m: int,
    key: Array,
    moments: Sequence[Moments],
    triples: Sequence[Triple],
    refine_steps: int,
) -> tuple[list[Array], list[Calibration]]:
    """Frequencies and calibration for each layer; the frequencies refined if there are steps.

    Args:
        name: coupling of the frequencies; each layer and head has its own draw.
        method: of calibration.
        m: number of features.
        key: random key.
        moments: from `measure`.
        triples: from `measure`.
        refine_steps: of `refine`; 0 leaves the draw as it is.
    """
    heads, head_dim = triples[0][1].shape[-2:]
    frequencies = [
        couplings.draw(k, name, m, head_dim, heads) for k in jax.random.split(key, len(triples))
    ]
    fitted = [fit(x, method, name) for x in moments]
    if refine_steps:
        frequencies = [
            refine(q, k, w, c, steps=refine_steps)
            for (q, k, _), w, c in zip(triples, frequencies, fitted, strict=True)
        ]
    return frequencies, fitted


def compare(
    run: Restored,
    model: nnx.Module,
    moments: Sequence[Moments],
    triples: Sequence[Triple],
    *,
    names: Sequence[str],
    methods: Sequence[tuple[str, int]],
    num_features: Sequence[int],
    draws: int,
) -> Iterator[metrics.Record]:
    """One record for each coupling, method and m: accuracy over draws, attention error by layer.

    The first two records are of softmax and of uniform attention. Attention errors are those on the
    inputs that the layers have with softmax attention on evaluation examples; means over heads.

    Args:
        run: with softmax attention; its data are those of the evaluation.
        model: of the run, in evaluation mode.
        moments: from `measure`.
        triples: from `measure`.
        names: couplings.
        methods: pairs of a method of calibration and the steps of refinement.
        num_features: each m.
        draws: how many, of the frequencies.
    """
    examples = evaluation_examples(run.dataset, run.config, ERROR_EXAMPLES)
    held_out = nnx.jit(run.task.projections)(model, examples)
    error = jax.jit(relative_error)

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

    original = accuracy(run, model, nnx.dot_product_attention)
    yield record("softmax", "", 0, [original], [[0.0] * len(triples)])
    errors = [jnp.mean(_error_of(1 / k.shape[1], q, k)) for q, k, _ in held_out]
    yield record("uniform", "", 0, [accuracy(run, model, _uniform)], [errors])
    for name, (method, steps), m in itertools.product(names, methods, num_features):
        accuracies, errors = [], []
        for draw in range(draws):
            random_key = jax.random.key(draw)
            frequencies, fitted = layers_of(name, method, m, random_key, moments, triples, steps)
            accuracies.append(accuracy(run, model, _performer, frequencies, fitted))
            errors.append(
                [
                    jnp.mean(error(q, k, w, c))
                    for (q, k, _), w, c in zip(held_out, frequencies, fitted, strict=True)
                ]
            )
        yield record(name, method + ", refined" * (steps > 0), m, accuracies, errors)
