"""Linearize a trained model of a public repository, and measure what is kept.

    python -m experiments.strangers --model=vit_cifar10 --file=vit_cifar10.pth --data=cifar10

A row for the model itself, for uniform attention (queries of zero) and for each recipe. The model's
file and its data are the user's; the file's sha256 must be the one that was measured.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import performer
from experiments.strangers.data import IGNORED, READERS, Data
from experiments.strangers.models import MODELS, Model
from performer import Exact
from performer.linearization.report import Report
from vit.reports import report
from vit.study import launch

BATCH = 64
"""Examples at once."""
BIDIRECTIONAL = dict(exact=Exact(keys=16, rows=1))
CAUSAL = dict(exact=Exact(window=16, first=1), num_features=16)
REFINED = dict(refine_steps=300)


def options(width: int, is_causal: bool) -> dict[str, dict[str, Any]]:
    """Return options of `performer.linearize` by the name of a recipe, for heads of this width."""
    exact = CAUSAL if is_causal else BIDIRECTIONAL | dict(num_features=width)
    return {
        "default": {},
        "exact": exact,
        "default-refined": REFINED,
        "exact-refined": exact | REFINED,
    }


SIZES = ("m", "window", "exact keys", "exact rows")
TIMES = ("attention before, ms", "attention after, ms", "before, ms", "after, ms", "times as fast")
NO_NUMBERS = dict.fromkeys(
    ("attention error", *SIZES, "cost", "keys", "exact layers", "left", *TIMES, "seconds"), ""
)


def uniform(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with queries of zero: each query attends to all keys alike."""
    layers = [
        layer | {"query": jax.tree.map(jnp.zeros_like, layer["query"])}
        for layer in parameters["layers"]
    ]
    return {**parameters, "layers": layers}


def logits(apply: Callable[..., Any], parameters: Any, inputs: np.ndarray) -> np.ndarray:
    """Log-probabilities of all examples."""
    program = jax.jit(lambda p, x: jax.nn.log_softmax(apply(p, x)))
    return np.concatenate([np.asarray(program(parameters, part)) for part in batched(inputs)])


def batched(inputs: np.ndarray) -> list[np.ndarray]:
    """Cut examples into batches."""
    return [inputs[i : i + BATCH] for i in range(0, len(inputs), BATCH)]


def measured(new: np.ndarray, old: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracy of whole examples and of labels, loss, and difference to the model, in nats.

    Without labels only the difference, over all examples.
    """
    chosen, known = np.argmax(new, axis=-1), labels != IGNORED
    counted = known if known.any() else np.ones_like(known)
    divergence = np.sum(np.exp(old) * (old - new), axis=-1)
    row: dict[str, Any] = dict.fromkeys(("accuracy", "accuracy of labels", "loss, nats"), "")
    if known.any():
        right = (chosen == labels) | ~known
        losses = -np.take_along_axis(new, np.maximum(labels, 0)[..., None], -1)[..., 0]
        row["accuracy"] = float(np.mean(right if right.ndim == 1 else right.all(axis=1)))
        row["accuracy of labels"] = float(np.mean(right[known]))
        row["loss, nats"] = float(np.mean(losses[known]))
    same = chosen == np.argmax(old, axis=-1)
    return row | {
        "agreement": float(np.mean(same[counted])),
        "divergence, nats": float(np.mean(divergence[counted])),
    }


def rows_of(
    model: Model, parameters: Any, data: Data, recipes: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield rows of the model, of uniform attention and of `linearize` with these options."""
    inputs, labels = data.held_out
    old = logits(model.apply, parameters, inputs)

    def row(name: str, new: np.ndarray, **numbers: Any) -> dict[str, Any]:
        kept = measured(new, old, labels)
        return {"attention": name} | NO_NUMBERS | numbers | kept | {"examples": len(labels)}

    yield row("softmax", old)
    yield row("uniform", logits(model.apply, uniform(parameters), inputs))
    batches = [(parameters, part) for part in batched(data.calibration)]
    for name, recipe in recipes.items():
        start = time.perf_counter()
        new, report = performer.linearize(model.apply, batches, **recipe)
        seconds = time.perf_counter() - start
        print(f"{name}:\n{report}")
        yield row(name, logits(new, parameters, inputs), **numbers_of(report), seconds=seconds)


def numbers_of(report: Report) -> dict[str, Any]:
    """Return the sizes of all layers and the mean of their errors and costs.

    A layer that stays exact has the error 0 and costs as much as there are keys.
    """
    layers = [row for row in report.rows if row["head"] == 0]
    replaced = [row["path"] for row in layers if row["attention"] == "linear"]
    errors = [report.layer_errors()[path] for path in replaced]
    return {
        "attention error": sum(errors) / len(layers),
        **{size: chosen(layers, size) for size in SIZES},
        "cost": float(np.mean([row["cost"] for row in layers])),
        "keys": float(np.mean([row["keys"] for row in layers])),
        "exact layers": len(layers) - len(replaced),
        "left": len(report.left),
        **times_of(report, layers),
    }


def times_of(report: Report, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of the attention of all layers and of the model; none without times."""
    if "speed-up" not in layers[0]:
        return {}
    after = [
        row["replacement, ms" if row["attention"] == "linear" else "exact, ms"] for row in layers
    ]
    times: list[Any] = [sum(row["exact, ms"] for row in layers), sum(after)]
    if report.whole is not None:
        before, new = (1e3 * x.seconds for x in (report.whole.before, report.whole.after))
        times += [before, new, report.whole.speed_up]
    return dict(zip(TIMES, times, strict=False))


def chosen(layers: Sequence[Mapping[str, Any]], size: str) -> str:
    """Return the size of each layer, "16 16 -", or one number if all are equal; "-" if exact."""
    sizes = [str(row[size]) if row["attention"] == "linear" else "-" for row in layers]
    return sizes[0] if len(set(sizes)) == 1 else " ".join(sizes)


def main(
    model: str,
    file: Path,
    data: Path = Path(),
    recipes: Sequence[str] = (),
    out: Path = Path("results"),
) -> None:
    """Print and write a row for the model, for uniform attention and for each recipe.

    Args:
        model: name in `experiments.strangers.models`.
        file: the model's file.
        data: folder of its data (`experiments.strangers.data`).
        recipes: names in `options`; all if empty.
        out: folder of the table MODEL.csv.
    """
    known, rows = MODELS[model], []
    parameters, examples = known.load(file), READERS[known.data](data)
    width = parameters["layers"][0]["query"][0].shape[1] // known.heads
    named = options(width, known.is_causal)
    named = {name: named[name] for name in recipes or named}
    for row in rows_of(known, parameters, examples, named):
        rows.append(row)
        table = report.table(rows, out / model, f"{known.source}: {known.stated}")
    print(table)


if __name__ == "__main__":
    launch.run(main)
