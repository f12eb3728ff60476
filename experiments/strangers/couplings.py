"""Attention errors of all couplings at queries and keys of trained models.

    python -m experiments.strangers.couplings --runs=runs/softmax \\
        --models=vit_cifar10,kwt1 --files=vit_cifar10.pth,kwt1.tflite --data=cifar10,commands

Which coupling should be the default, as drawn and calibrated? Each layer is measured as
`performer.linearize` does it: moments of a few batches for the calibration, and examples that
nothing is fitted to, on which |A^ - A|^2 / |A|^2 is measured for each head and draw. A model's
number is the geometric mean over heads and draws; its ratio to "orf" has a standard error from the
spread of the draws.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.strangers.data import READERS
from experiments.strangers.models import MODELS
from performer import Features, calibration, couplings
from performer.linearization import measure
from performer.linearization.layers import Layer, head_errors
from vit.run import runs as run_folders
from vit.speed import converted
from vit.study import harness, launch

CALIBRATIONS = "none", "full"
BASELINE = "orf"
Model = tuple[str, Callable[..., Any], Iterable[Any]]
"""Name, function and batches of its arguments."""


def of_run(folder: Path, examples: int) -> Model:
    """Return the model of a run, and the first images of its evaluation split."""
    run = run_folders.restore(folder)
    graph, state = nnx.split(run.model())
    parts = [np.asarray(x["image"]) for x in islice(run.eval_batches(), 2)]
    images = np.concatenate(parts)[:examples]
    batches = [(state, part) for part in np.array_split(images, 2)]
    return folder.name, partial(converted.forward, graph), batches


def of_file(model: str, file: Path, data: Path, examples: int) -> Model:
    """Return a stranger's model, and the first of its data for calibration."""
    known = MODELS[model]
    parameters, inputs = known.load(file), READERS[known.data](data).calibration[:examples]
    return model, known.apply, [(parameters, part) for part in np.array_split(inputs, 2)]


@partial(jax.jit, static_argnums=3)
def errors(layer_sample: Any, frequencies: Any, fitted: Any, is_causal: bool) -> jax.Array:
    """Attention errors (draws, heads) with frequencies (draws, heads, m, h)."""

    def of_draw(w):
        features = Features(w, fitted)
        return head_errors(layer_sample, features, is_causal)["attention error"]

    return jax.lax.map(of_draw, frequencies)


def of_layer(layer: Layer, coupling: str, method: str, draws: int, seed: int) -> np.ndarray:
    """Logarithms of the attention error (draws, heads) of a layer, with m = 2 head_dim."""
    heads, h = layer.held_out.key.shape[-2:]
    keys = jax.random.split(jax.random.key(seed), draws)
    w = jnp.stack([couplings.draw(key, coupling, 2 * h, h, heads) for key in keys])
    fitted = None
    if method != "none":
        fitted = calibration.fit(layer.moments.astype(jnp.float32), method, coupling)
    return np.log(np.asarray(errors(layer.held_out, w, fitted, layer.is_causal)))


def rows_of(model: Model, names: Sequence[str], draws: int) -> Iterator[harness.Row]:
    """Yield a row for each calibration and coupling."""
    name, function, batches = model
    layers = measure(function, batches).layers
    for method in CALIBRATIONS:
        of_draws = {  # means over layers and heads: (draws,)
            coupling: np.mean(
                [
                    np.mean(of_layer(layer, coupling, method, draws, i), axis=1)
                    for i, layer in enumerate(layers)
                ],
                axis=0,
            )
            for coupling in (BASELINE, *(x for x in names if x != BASELINE))
        }
        baseline = of_draws[BASELINE]
        for coupling, logs in of_draws.items():
            spread = np.sqrt((np.var(logs, ddof=1) + np.var(baseline, ddof=1)) / draws)
            ratio = float(np.exp(np.mean(logs) - np.mean(baseline)))
            yield {
                "model": name,
                "layers": len(layers),
                "tokens": layers[0].lengths[1],
                "calibration": method,
                "coupling": coupling,
                "error": float(np.exp(np.mean(logs))),
                "ratio": ratio,
                "ratio ±": 0.0 if coupling == BASELINE else ratio * float(spread),
            }


def main(
    runs: Sequence[str] = (),
    models: Sequence[str] = (),
    files: Sequence[str] = (),
    data: Sequence[str] = (),
    names: Sequence[str] = couplings.names(),
    draws: int = 16,
    examples: int = 16,
    out: Path = Path("results/couplings"),
) -> None:
    """Print and write the errors of couplings at trained models.

    Args:
        runs: folders of runs of `vit.train` with softmax attention.
        models: names in `experiments.strangers.models`.
        files: the file of each of these models.
        data: the folder of each model's data.
        names: couplings.
        draws: draws of the frequencies.
        examples: half of them to calibrate, of the other half a few to measure.
        out: folder of the table.
    """
    if not len(models) == len(files) == len(data):
        raise ValueError(f"{len(models)} models require as many --files and --data")
    given = [of_run(Path(x), examples) for x in runs]
    given += [
        of_file(m, Path(f), Path(d), examples) for m, f, d in zip(models, files, data, strict=True)
    ]
    rows = [row for model in given for row in rows_of(model, names, draws)]
    harness.show(rows, out / "models")


if __name__ == "__main__":
    launch.run(main)
