"""From scratch at equal steps: softmax, window alone, features alone, both, over a few seeds.

    python -m experiments.language_model scratch --out=results/scratch

Two blocks of width 64 with two heads of 32, on windows of --length characters: held-out
loss in nats a character, with Student's 95% interval over the seeds, and the difference to softmax
with the same seeds. Writes --out/runs.csv, a run at a time, and --out/scratch.md; the same command
goes on. --quick is of fewer steps and two seeds.
"""

from pathlib import Path

from experiments.common import launch, statistics
from experiments.language_model import config as configs
from experiments.language_model import rows
from experiments.language_model import text as texts
from experiments.language_model.task import task
from vit import loop, report
from vit.data import Dataset


def measured(
    out: Path, source: str, dataset: Dataset, asked: dict, kind: str, seed: int
) -> rows.Row:
    """The held-out loss of a run in a folder in `out`."""
    own, near = configs.attention(kind, asked["m"], asked["window"])
    config = configs.of_run(
        own,
        dataset,
        size=configs.QUICK,
        optim=configs.optim(asked["rate"], asked["steps"]),
        steps=asked["steps"],
        dir=source,
        batch_size=asked["batch"],
    )
    config.seed = seed
    settings = configs.Settings(asked["length"], near, int(near > 0))
    learned = task(dataset.num_classes, settings)
    record = loop.train(config, out / f"{kind}_{seed}", dataset, learned)
    return {"loss": record["eval_loss"], "seconds": record["seconds"]}


def summary(table: list[rows.Row]) -> list[rows.Row]:
    """A row for each attention: loss, and how much more than softmax, with intervals."""
    found, losses = [], {}
    for row in table:
        losses.setdefault(row["attention"], []).append(row["loss"])
    for kind, values in losses.items():
        mean, half = statistics.interval(values)
        row = {"attention": kind, "loss": f"{mean:.4f} ± {half:.4f}", "more than softmax": ""}
        if kind != "softmax":
            more = statistics.paired(values, losses["softmax"])
            row["more than softmax"] = f"{more.mean:.4f} ({more.low:.4f} to {more.high:.4f})"
        found.append(row | {"seeds": len(values)})
    return found


def main(
    text: Path | None = None,
    num_features: int = 64,
    window: int = 16,
    length: int = 256,
    steps: int = 400,
    batch_size: int = 8,
    learning_rate: float = 3e-3,
    seeds: int = 3,
    out: Path = Path("results/language_model/scratch"),
) -> None:
    """Prints the table.

    Args:
        text: a file in UTF-8; Python's help topics if none.
        num_features: m.
        window: tokens of a chunk.
        length: characters of a window of the text.
        steps: of the optimiser.
        batch_size: windows of a step.
        learning_rate: the highest one.
        seeds: of each.
        out: folder of the tables and the runs.
    """
    launch.at_least(1, window=window, steps=steps, batch_size=batch_size)
    launch.at_least(2, num_features=num_features, length=length, seeds=seeds)
    source = str(text or "")
    asked = {
        "text": source,
        "m": num_features,
        "window": window,
        "length": length,
        "steps": steps,
        "batch": batch_size,
        "rate": learning_rate,
    }
    dataset = texts.dataset(texts.read(source), length)
    table = rows.grown(
        out / "runs",
        asked,
        [(kind, s) for s in range(seeds) for kind in configs.ATTENTION],
        ("attention", "seed"),
        lambda *case: measured(out, source, dataset, asked, *case),
    )
    print(report.table(summary(table), out / "scratch"))


if __name__ == "__main__":
    launch.run(main, quick={"length": 128, "steps": 20, "seeds": 2})
