"""Recall of values seen far beyond the window: softmax, window alone, features alone, both.

    python -m experiments.language_model recall --out=results/recall

Multi-query associative recall (see `experiments.language_model.pairs`), each model trained from
scratch: two blocks of width 64 with two heads. Writes --out/recall.csv and .md, a row at a time;
the same command goes on. --quick is the shortest length, of fewer steps.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from experiments.common import launch
from experiments.language_model import config as configs
from experiments.language_model import pairs, rows
from vit import loop
from vit.config import Optim, Size

SIZE = Size(width=64, depth=2, num_heads=2, mlp_dim=128)
BATCH = 16


def measured(
    out: Path, m: int, window: int, steps: int, rate: float, length: int, kind: str, seed: int
) -> rows.Row:
    """Held-out accuracy; the run lies in a folder in `out`."""
    own, near = configs.attention(kind, m, window)
    dataset = pairs.dataset(length, steps * BATCH)
    optim = Optim(learning_rate=rate, warmup_steps=steps // 10, b2=0.99, weight_decay=0.1)
    config = configs.of_run(own, dataset, size=SIZE, optim=optim, steps=steps, batch_size=BATCH)
    config.seed = seed
    workdir = out / f"{kind}_{length}_{seed}"
    record = loop.train(config, workdir, dataset, pairs.task(near))
    names = {"accuracy": "eval_accuracy", "loss": "eval_loss", "seconds": "seconds"}
    return {name: record[key] for name, key in names.items()}


def main(
    lengths: Sequence[int] = (64, 128, 256, 512),
    attention: Sequence[Literal["softmax", "performer", "window", "both"]] = configs.ATTENTION,
    num_features: int = 128,
    window: int = 8,
    steps: int = 1200,
    learning_rate: float = 3e-3,
    seeds: int = 1,
    out: Path = Path("results/language_model/recall"),
) -> None:
    """Prints the table.

    Args:
        lengths: tokens of a sequence.
        attention: rows of each length.
        num_features: m.
        window: tokens of a chunk.
        steps: of the optimiser.
        learning_rate: the highest one.
        seeds: of each.
        out: folder of the table and the runs.
    """
    launch.at_least(1, window=window, seeds=seeds)
    launch.at_least(2, num_features=num_features)
    launch.at_least(10, steps=steps)
    asked = {"m": num_features, "window": window, "steps": steps, "rate": learning_rate}
    cases = itertools.product(sorted(set(lengths)), attention, range(seeds))
    rows.grown(
        out / "recall",
        asked,
        cases,
        ("length", "attention", "seed"),
        lambda *case: measured(out, num_features, window, steps, learning_rate, *case),
    )


if __name__ == "__main__":
    launch.run(main, quick={"lengths": (64,), "steps": 100})
