"""Feature maps in the place of a trained model's softmax attention: ours, T2R's, Hedgehog's.

    python -m experiments.attention.linearize --workdir=runs/softmax --num_features=16,32,64 \\
        --steps=300 --out=results/attention/linearize

All have the same queries and keys, those of the softmax model on training images, the same steps of
Adam, rate and loss (see `experiments.attention.feature_maps`). The model's own parameters stay:
accuracy is that without any further training. Errors are those on images of the evaluation split.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.attention import feature_maps
from experiments.attention.feature_maps import METHODS
from experiments.common import launch, statistics
from performer.choices import unknown
from performer.nnx.report import uniform_error
from performer.refinement import Sample, divergence, softmax_attention, squared
from vit import conversion, report, runs


def samples(run: runs.Restored, model: nnx.Module, batches: Sequence[Any], layer: int) -> Sample:
    """Queries and keys of one layer on all examples."""
    graph, state = nnx.split(model)
    seen = [_projected(run.task, graph, layer, state, batch) for batch in batches]
    return Sample.of(*(jnp.concatenate(x) for x in zip(*seen, strict=True)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _projected(task, graph, layer, state, batch):
    return task.projections(nnx.merge(graph, state), batch)[layer][:2]


@partial(jax.jit, static_argnums=0)
def errors(estimate, trained, fixed, sample: Sample) -> tuple[jax.Array, jax.Array]:
    """Relative squared error and divergence, means over heads."""
    parts = estimate(trained, fixed, sample), softmax_attention(sample), sample.pairs(False)
    return jnp.mean(squared(*parts)), jnp.mean(divergence(*parts))


def main(
    workdir: Path,
    method: Sequence[str] = (),
    num_features: Sequence[int] = (16, 32, 64),
    steps: int = 300,
    draws: int = 2,
    images: int = 512,
    eval_images: int = 0,
    out: Path = Path("results/attention/linearize"),
) -> str:
    """Writes and prints the table, `linearize` in `out`, and returns it.

    Args:
        workdir: of a run with softmax attention.
        method: names of feature maps, the rows; all.
        num_features: each m; even numbers.
        steps: of Adam, at most, for each layer.
        draws: of the first parameters.
        images: of the training split.
        eval_images: to measure accuracy on; 0 for all.
        out: folder for the table.

    Raises:
        ValueError: when there is no such run, or it has no softmax attention.
    """
    launch.at_least(1, steps=steps, draws=draws, images=images)
    launch.at_least(0, eval_images=eval_images)
    names = method or list(METHODS)
    if bad := [name for name in names if name not in METHODS]:
        raise ValueError(unknown("--method", bad[0], METHODS))
    run = runs.restore(workdir)
    if run.config.attention.kind != "softmax":
        raise ValueError(f"{workdir} has attention {run.config.attention.kind!r}: train a softmax")
    run = runs.evaluated_on(run, eval_images)
    model = run.model()
    batches = list(runs.training_examples(run, images))
    layers = conversion.measured_layers(run.task, model, batches).layers
    held_out = runs.evaluation_examples(run.dataset, run.config, conversion.ERROR_EXAMPLES)
    seen = [samples(run, model, [held_out], i) for i in range(len(layers))]
    cases = [(name, m, draw) for name in names for m in num_features for draw in range(draws)]
    found: dict[tuple, list] = {case: [] for case in cases}
    for i, layer in enumerate(layers):
        sample = samples(run, model, batches, i)
        for name, m, draw in cases:
            seed = draw * len(layers) + i
            fitted = feature_maps.fitted(METHODS[name], layer.moments, sample, m, steps, seed)
            found[name, m, draw].append(fitted)
        print(f"layer {i + 1} of {len(layers)}", flush=True)
    exact = conversion.accuracy(run, model, [(nnx.dot_product_attention, ())] * len(layers))
    uniform = float(np.mean([uniform_error(sample) for sample in seen]))
    rows = [
        _row("softmax", 0, exact, [exact], 0.0, 0.0),
        _row("uniform", 0, exact, [], uniform, ""),
    ]
    for name in names:
        for m in num_features:
            of_draws = [found[name, m, draw] for draw in range(draws)]
            rows.append(_measured(run, model, name, m, exact, of_draws, seen))
            text = report.table(rows, out / "linearize")
    print(text)
    return text


def _measured(run, model, name, m, exact, of_draws, seen) -> dict[str, Any]:
    estimate = METHODS[name].estimate
    accuracies, wrong = [], []
    for layers in of_draws:
        attention = [(feature_maps.attention(estimate), own) for own in layers]
        accuracies.append(conversion.accuracy(run, model, attention))
        pairs = zip(layers, seen, strict=True)
        wrong += [errors(estimate, *own, sample) for own, sample in pairs]
    squares, divergences = np.mean(wrong, axis=0)
    print(f"{name}, m = {m}: {np.mean(accuracies):.4f}", flush=True)
    return _row(name, m, exact, accuracies, float(squares), float(divergences))


def _row(name, m, exact, accuracies, squares, divergences) -> dict[str, Any]:
    mean, spread = statistics.mean_and_error(accuracies) if accuracies else ("", "")
    return {
        "feature map": name,
        "m": m,
        "accuracy": mean,
        "standard error": spread,
        "of softmax, %": 100 * mean / exact if accuracies else "",
        "attention error": squares,
        "divergence": divergences,
    }


if __name__ == "__main__":
    launch.run(main, quick={"num_features": (16,), "steps": 5, "draws": 1, "images": 16})
