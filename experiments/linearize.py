"""Feature maps in the place of a trained model's softmax attention: ours, T2R's, Hedgehog's.

    python -m experiments.linearize --workdir=runs/softmax --num_features=16,32,64 --steps=300 \\
        --out=results/linearize

All have the same queries and keys, those of the softmax model on training images, the same steps of
Adam, rate and loss (see `experiments.feature_maps`). The model's own parameters stay: accuracy is
that without any further training. Errors are those on images of the evaluation split.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from experiments import feature_maps, launch
from experiments.feature_maps import METHODS
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


def linearize(
    workdir: Path,
    out: Path,
    *,
    names: Sequence[str],
    num_features: Sequence[int],
    steps: int,
    draws: int = 2,
    images: int = 512,
    eval_images: int = 0,
) -> str:
    """Writes `out`.csv and `out`.md and returns the table.

    Args:
        workdir: of a run with softmax attention.
        out: of the files, without suffix.
        names: of `feature_maps.METHODS`.
        num_features: each m; even.
        steps: of Adam, at most, for each layer.
        draws: of the first parameters.
        images: of the training split.
        eval_images: to measure accuracy on; 0 for all.

    Raises:
        ValueError: when there is no such run, or it has no softmax attention.
    """
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
            text = report.table(rows, out)
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
    spread = np.std(accuracies, ddof=1) / len(accuracies) ** 0.5 if accuracies[1:] else 0.0
    mean = float(np.mean(accuracies)) if accuracies else ""
    return {
        "feature map": name,
        "m": m,
        "accuracy": mean,
        "standard error": float(spread) if accuracies else "",
        "of softmax, %": 100 * mean / exact if accuracies else "",
        "attention error": squares,
        "divergence": divergences,
    }


def main() -> None:
    """The command line."""
    print(
        linearize(
            Path(str(_WORKDIR.value)),
            Path(str(_OUT.value)),
            names=_METHODS.value or list(METHODS),
            num_features=[int(m) for m in _NUM_FEATURES.value],
            steps=int(_STEPS.value),
            draws=int(_DRAWS.value),
            images=int(_IMAGES.value),
            eval_images=int(_EVAL_IMAGES.value),
        )
    )


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "run with softmax attention", required=True)
    _OUT = flags.DEFINE_string("out", "results/linearize", "path without suffix")
    _METHODS = flags.DEFINE_multi_enum("method", [], list(METHODS), "rows, once for each; all")
    _NUM_FEATURES = flags.DEFINE_list("num_features", ["16", "32", "64"], "each m; even numbers")
    _STEPS = flags.DEFINE_integer("steps", 300, "of Adam, for each layer", lower_bound=1)
    _DRAWS = flags.DEFINE_integer("draws", 2, "of the first parameters", lower_bound=1)
    _IMAGES = flags.DEFINE_integer("images", 512, "of the training split", lower_bound=1)
    _EVAL_IMAGES = flags.DEFINE_integer("eval_images", 0, "0: all", lower_bound=0)
    launch.run(main)
