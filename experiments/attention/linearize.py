"""Replace a trained model's softmax attention by feature maps: ours, T2R's, Hedgehog's.

    python -m experiments.attention.linearize --workdir=runs/softmax --num_features=16,32,64 \\
        --steps=300 --out=results/attention/linearize

All maps are trained on the queries and keys of the softmax model on training images, with the same
steps of Adam, rate and loss (see `experiments.attention.feature_maps`). The model's own parameters
are not trained. Errors are measured on images of the evaluation split.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.attention.feature_maps import METHODS
from experiments.common import launch, statistics
from performer.attention.refinement import Sample, divergence, softmax_attention, squared, transfer
from performer.linearization.layers import uniform_error
from vit.reports import report
from vit.run import runs
from vit.weights import conversion


def samples(run: runs.Restored, model: nnx.Module, batches: Sequence[Any], layer: int) -> Sample:
    """Return queries and keys of one layer on all examples."""
    graph, state = nnx.split(model)
    seen = [_projected(run.task, graph, layer, state, batch) for batch in batches]
    return Sample.of(*(jnp.concatenate(x) for x in zip(*seen, strict=True)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _projected(task, graph, layer, state, batch):
    return task.projections(nnx.merge(graph, state), batch)[layer][:2]


@partial(jax.jit, static_argnums=0)
def errors(estimate, trained, fixed, sample: Sample) -> tuple[jax.Array, jax.Array]:
    """Return relative squared error and divergence, means over heads."""
    parts = estimate(trained, fixed, sample), softmax_attention(sample), sample.pairs(False)
    return jnp.mean(squared(*parts)), jnp.mean(divergence(*parts))


@cache
def attention(estimate: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return (query, key, value, parameters, fixed) -> output, in quadratic time."""

    def of(query, key, value, trained, fixed):
        weights = estimate(trained, fixed, Sample.of(query, key))
        return jnp.einsum("bnts,bsnv->btnv", weights, value)

    return of


def main(
    workdir: Path,
    num_features: Sequence[int] = (16, 32, 64),
    steps: int = 300,
    draws: int = 2,
    images: int = 512,
    eval_images: int = 0,
    out: Path = Path("results/attention/linearize"),
) -> None:
    """Write and print the table `linearize` in `out`.

    Args:
        num_features: each m; even numbers.
        steps: most steps of Adam for each layer.
        draws: draws of the initial parameters.
        images: training images.
        eval_images: images to measure accuracy on; 0 for all.

    Raises:
        ValueError: for a folder without a run, or a run without softmax attention.
    """
    launch.at_least(1, steps=steps, draws=draws, images=images)
    launch.at_least(0, eval_images=eval_images)
    run = runs.restore(workdir)
    if run.config.attention.kind != "softmax":
        raise ValueError(f"{workdir} has attention {run.config.attention.kind!r}: train a softmax")
    run = runs.evaluated_on(run, eval_images)
    model = run.model()
    batches = list(runs.training_examples(run, images))
    layers = conversion.measured_layers(run.task, model, batches).layers
    held_out = runs.evaluation_examples(run.dataset, run.config, conversion.ERROR_EXAMPLES)
    seen = [samples(run, model, [held_out], i) for i in range(len(layers))]
    found: dict[tuple[str, int], list[list[Any]]] = {
        (name, m): [[] for _ in range(draws)] for name in METHODS for m in num_features
    }
    for i, layer in enumerate(layers):
        sample = samples(run, model, batches, i)
        for (name, m), of_draws in found.items():
            for draw, fitted in enumerate(of_draws):
                seed = draw * len(layers) + i
                start, estimate, loss = METHODS[name]
                maps, fixed = start(jax.random.key(seed), layer.moments, m)
                if loss:
                    options: Any = dict(steps=steps, loss=loss, seed=seed)
                    maps = transfer(estimate, maps, fixed, sample, **options)
                fitted.append((maps, fixed))
        print(f"layer {i + 1} of {len(layers)}", flush=True)
    exact = conversion.accuracy(run, model, [(nnx.dot_product_attention, ())] * len(layers))
    uniform = float(np.mean([uniform_error(sample) for sample in seen]))
    empty = {"accuracy": "", "standard error": "", "of softmax, %": ""}
    rows = [
        {"feature map": "softmax", "m": 0, **_accuracy([exact], exact), **_errors(0.0, 0.0)},
        {"feature map": "uniform", "m": 0, **empty, **_errors(uniform, "")},
    ]
    for (name, m), of_draws in found.items():
        estimate = METHODS[name].estimate
        accuracies = [
            conversion.accuracy(run, model, [(attention(estimate), own) for own in fitted])
            for fitted in of_draws
        ]
        wrong = [
            errors(estimate, *own, sample)
            for fitted in of_draws
            for own, sample in zip(fitted, seen, strict=True)
        ]
        measured = _accuracy(accuracies, exact) | _errors(*map(float, np.mean(wrong, axis=0)))
        rows.append({"feature map": name, "m": m, **measured})
        print(name, m, accuracies, flush=True)
    print(report.table(rows, out / "linearize"))


def _accuracy(values: Sequence[float], exact: float) -> dict[str, Any]:
    mean, error = statistics.mean_and_error(values)
    return {"accuracy": mean, "standard error": error, "of softmax, %": 100 * mean / exact}


def _errors(squares: Any, divergences: Any) -> dict[str, Any]:
    return {"attention error": squares, "divergence": divergences}


if __name__ == "__main__":
    launch.run(main, quick={"num_features": (16,), "steps": 5, "draws": 1, "images": 16})
