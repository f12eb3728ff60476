"""Exact keys and rows beside features in a trained ViT: accuracy and attention error.

    python -m experiments.attention.exact --workdir=runs/softmax --out=results/attention/exact

The original is softmax attention, whose parameters stay as they are. Layers are calibrated on
training images, refined in some rows, and measured on evaluation images.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from experiments.attention.linearize import samples
from experiments.common import launch, statistics
from performer.nnx import linearize
from performer.typing import NO_WINDOW, Window
from vit.reports import report
from vit.run import runs
from vit.weights import conversion

ROWS = {
    "features": NO_WINDOW,
    "8 keys": Window(exact_keys=8),
    "16 keys": Window(exact_keys=16),
    "class row": Window(exact_rows=1),
    "8 keys, class row": Window(exact_keys=8, exact_rows=1),
    "16 keys, class row": Window(exact_keys=16, exact_rows=1),
}


def main(
    workdir: Path,
    num_features: Sequence[int] = (64, 72, 128),
    steps: Sequence[int] = (0, 200),
    coupling: str = "pm-antithetic",
    draws: int = 3,
    images: int = 256,
    eval_images: int = 0,
    out: Path = Path("results/attention/exact"),
) -> None:
    """Write and print a table for the run, named after its folder.

    Args:
        num_features: each m; exact keys and rows stand beside the first.
        steps: steps of refinement, 0 for none.
        coupling: coupling of the frequencies.
        draws: draws of the frequencies.
        images: training images.
        eval_images: images to measure accuracy on; 0 for all.
    """
    launch.at_least(1, draws=draws, images=images)
    run = runs.evaluated_on(runs.restore(workdir), eval_images)
    model = run.model()
    batches = list(runs.training_examples(run, images))
    measured = conversion.measured_layers(run.task, model, batches)
    held_out = runs.evaluation_examples(run.dataset, run.config, conversion.ERROR_EXAMPLES)
    seen = [samples(run, model, [held_out], i) for i in range(len(measured.layers))]
    exact = conversion.results(run, model)["eval_accuracy"]
    errors: Any = {f"error {i}": 0.0 for i in range(len(seen))}
    line: Any = {"exact": "softmax", "m": 0, "refined": 0, "accuracy": exact, "±": 0.0}
    lines: list[dict[str, Any]] = [line | {"of softmax": 1.0} | errors]
    for refined, (name, window) in itertools.product(steps, ROWS.items()):
        for m in num_features if not any(window) else num_features[:1]:
            options: Any = dict(refine_steps=refined, num_features=m, coupling=coupling)
            options |= dict(call=run.task.count, measured=measured) | window._asdict()
            new: list[nnx.Module] = [
                linearize(model, batches, seed=draw, **options)[0] for draw in range(draws)
            ]
            values = [conversion.results(run, each)["eval_accuracy"] for each in new]
            errors = [conversion.errors(run.task, model, each, seen) for each in new]
            mean, error = statistics.mean_and_error(values)
            layers = {f"error {i}": sum(x) / draws for i, x in enumerate(zip(*errors, strict=True))}
            line = {"exact": name, "m": m, "refined": refined, "accuracy": mean, "±": error}
            lines.append(line | {"of softmax": mean / exact} | layers)
            print(lines[-1], flush=True)
    print(report.table(lines, out / workdir.name))


if __name__ == "__main__":
    launch.run(main, quick={"num_features": (16,), "steps": (0,), "draws": 1, "images": 16})
