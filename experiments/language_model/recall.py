"""Recall of values seen far beyond the window: softmax, window alone, features alone, both.

    python -m experiments.language_model recall --out=results/recall

Multi-query associative recall (see `experiments.language_model.pairs`), each model trained from
scratch: two blocks of width 64 with two heads. Writes --out/recall.csv and .md, a row at a time;
the same command goes on. --quick is the shortest length, of fewer steps.
"""

from pathlib import Path

from absl import flags

from experiments import launch
from experiments.language_model import pairs, rows, runs
from vit import loop
from vit.config import Optim, Size

SIZE = Size(width=64, depth=2, num_heads=2, mlp_dim=128)
BATCH = 64


def measured(
    out: Path, m: int, window: int, steps: int, rate: float, length: int, kind: str, seed: int
) -> rows.Row:
    """Held-out accuracy; the run lies in a folder in `out`."""
    own, near = runs.attention(kind, m, window)
    dataset = pairs.dataset(length, steps * BATCH)
    optim = Optim(learning_rate=rate, warmup_steps=steps // 10, b2=0.99, weight_decay=0.1)
    config = runs.config(own, dataset, size=SIZE, optim=optim, steps=steps, batch_size=BATCH)
    config.seed = seed
    workdir = out / f"{kind}_{length}_{seed}"
    record = loop.train(config, workdir, dataset, pairs.task(near))
    names = {"accuracy": "eval_accuracy", "loss": "eval_loss", "seconds": "seconds"}
    return {name: record[key] for name, key in names.items()}


def main() -> None:
    """Prints the table."""
    out, quick = Path(str(_OUT.value)), bool(_QUICK.value)
    lengths = sorted({int(x) for x in _LENGTHS.value})[: 1 if quick else None]
    m, window = int(_NUM_FEATURES.value), int(_WINDOW.value)
    steps, rate = 100 if quick else int(_STEPS.value), float(_LEARNING_RATE.value)
    asked = {"m": m, "window": window, "steps": steps, "rate": rate}
    cases = [(t, kind, s) for t in lengths for kind in runs.ATTENTION for s in range(_SEEDS.value)]
    rows.grown(
        out / "recall",
        asked,
        cases,
        ("length", "attention", "seed"),
        lambda *case: measured(out, m, window, steps, rate, *case),
    )


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", "results/recall", "folder of the table and the runs")
    _LENGTHS = flags.DEFINE_list("lengths", ["64", "128", "256", "512"], "tokens of a sequence")
    _NUM_FEATURES = flags.DEFINE_integer("num_features", 128, "m", lower_bound=2)
    _WINDOW = flags.DEFINE_integer("window", 8, "tokens of a chunk", lower_bound=1)
    _STEPS = flags.DEFINE_integer("steps", 1000, "of the optimiser", lower_bound=10)
    _LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "the highest one", lower_bound=0)
    _SEEDS = flags.DEFINE_integer("seeds", 1, "of each", lower_bound=1)
    _QUICK = flags.DEFINE_bool("quick", False, "the shortest length, 100 steps")
    launch.run(main)
