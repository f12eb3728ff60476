"""From scratch at equal steps: softmax, window alone, features alone, both, over a few seeds.

    python -m experiments.language_model scratch --out=results/scratch

Two blocks of width 64 with two heads of 32, on windows of --length characters: held-out
loss in nats a character, with Student's 95% interval over the seeds, and the difference to softmax
with the same seeds. Writes --out/runs.csv, a run at a time, and --out/scratch.md; the same command
goes on. --quick is of fewer steps and two seeds.
"""

from pathlib import Path

from absl import flags

from experiments import launch, statistics
from experiments.language_model import rows, runs, text
from vit import report
from vit.data import Dataset


def measured(
    out: Path, source: str, dataset: Dataset, asked: dict, kind: str, seed: int
) -> rows.Row:
    """The held-out loss of a run in a folder in `out`."""
    own, near = runs.attention(kind, asked["m"], asked["window"])
    config = runs.config(
        own,
        dataset,
        size=runs.QUICK,
        optim=runs.optim(asked["rate"], asked["steps"]),
        steps=asked["steps"],
        dir=source,
        batch_size=asked["batch"],
    )
    config.seed = seed
    settings = runs.Settings(asked["length"], near, int(near > 0))
    record = runs.train(out / f"{kind}_{seed}", config, settings, dataset)
    return {"loss": record["eval_loss"], "seconds": record["seconds"]}


def summary(table: list[rows.Row]) -> list[rows.Row]:
    """A row for each attention: loss, and how much more than softmax, with intervals."""
    found, losses = [], {}
    for row in table:
        losses.setdefault(row["attention"], []).append(row["loss"])
    for kind, values in losses.items():
        mean, half = statistics.interval(values)
        more = statistics.paired(values, losses["softmax"])
        found.append(
            {
                "attention": kind,
                "loss": f"{mean:.4f} ± {half:.4f}",
                "more than softmax": f"{more.mean:.4f} ({more.low:.4f} to {more.high:.4f})",
                "seeds": len(values),
            }
        )
    return found


def main() -> None:
    """Prints the table."""
    out, quick, source = Path(str(_OUT.value)), bool(_QUICK.value), str(_TEXT.value)
    asked = {
        "text": source,
        "m": _NUM_FEATURES.value,
        "window": _WINDOW.value,
        "length": 128 if quick else _LENGTH.value,
        "steps": 20 if quick else _STEPS.value,
        "batch": _BATCH_SIZE.value,
        "rate": _LEARNING_RATE.value,
    }
    dataset = text.dataset(text.read(source), asked["length"])
    cases = [(kind, s) for s in range(2 if quick else _SEEDS.value) for kind in runs.ATTENTION]
    table = rows.grown(
        out / "runs",
        asked,
        cases,
        ("attention", "seed"),
        lambda *case: measured(out, source, dataset, asked, *case),
    )
    print(report.table(summary(table), out / "scratch"))


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", "results/scratch", "folder of the tables and the runs")
    _TEXT = flags.DEFINE_string("text", "", "a file in UTF-8; Python's help topics if none")
    _NUM_FEATURES = flags.DEFINE_integer("num_features", 64, "m", lower_bound=2)
    _WINDOW = flags.DEFINE_integer("window", 16, "tokens of a chunk", lower_bound=1)
    _LENGTH = flags.DEFINE_integer("length", 256, "characters of a window", lower_bound=2)
    _STEPS = flags.DEFINE_integer("steps", 400, "of the optimiser", lower_bound=1)
    _BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "windows of a step", lower_bound=1)
    _LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "the highest one", lower_bound=0)
    _SEEDS = flags.DEFINE_integer("seeds", 3, "of each", lower_bound=2)
    _QUICK = flags.DEFINE_bool("quick", False, "20 steps of two seeds")
    launch.run(main)
