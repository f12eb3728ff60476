"""Draw the committed figures again, each from the csv next to it.

    python -m experiments.figures

The options of a figure stand in `FIGURES` of the module that its run.json names. `OWN` has those of
folders without a run.json, and of programs that are no longer in the tree.
"""

import importlib
import json
from pathlib import Path

from experiments.graphs import scale
from vit.speed import attention, lengths, vit
from vit.speed import converted as conversions
from vit.study import comparison, harness, launch
from vit.study.statistics import mean_and_error

RESULTS = Path(__file__).parent / "results"
PASSES = {"forward": "forward", "both": "forward and backward"}


def counted(rows: list[harness.Row]) -> list[harness.Row]:
    """Return a row for each attention and pass, without the counts that the page disowns."""
    names = [f"{x}, {y}" for x in ("exact", "performer", "performer, kernel") for y in PASSES]
    split = [(row, *row["line"].rsplit(", ", 1)) for row in harness.melt(rows, names)]
    return [
        row | {"line": name, "pass": PASSES[word]}
        for row, name, word in split
        if name != "exact" or row["tokens"] < 8192
    ]


def converted(rows: list[harness.Row]) -> list[harness.Row]:
    """Draw softmax and uniform attention, which have no features, as horizontal lines."""
    names = [f"{row['coupling']}, {row['calibration']}" for row in rows]
    return [
        row
        | {"line": name.removesuffix(", ").removesuffix(", none"), "m": row["m"] or ""}
        | {"accuracy ±": row["standard error"], "attention error": row["attention error"] or ""}
        for row, name in zip(rows, names, strict=True)
        if not row["window"]
    ]


def kept(rows: list[harness.Row]) -> list[harness.Row]:
    """Share of softmax's accuracy against the cost: two exact pairs of a query are one feature."""
    softmax = {row["table"]: row["accuracy"] for row in rows if row["coupling"] == "softmax"}
    shares = []
    for row in rows:
        model, _, pairs = row["table"].partition("_")
        exact, words = EXACT[pairs]
        words += ", refined" * ("refined" in row["calibration"])
        cost, percent = row["m"] + exact / 2, 100 / softmax[row["table"]]
        share = {"model": MODELS[model], "line": words, "cost": cost}
        share |= {"kept": percent * row["accuracy"], "kept ±": percent * row["standard error"]}
        shares += [share] * (row["m"] > 0 and row["calibration"] != "none")
    return shares


def in_texts(rows: list[harness.Row]) -> list[harness.Row]:
    """Return the rows of a comparison of an earlier version, whose intervals are texts."""
    new = []
    for row in rows:
        if row["difference to baseline"] != "baseline":
            low, high = map(float, row["95% interval"].split(" to "))
            dots = enumerate(map(float, row["of seeds"].split()))
            new.append(row | {"difference": row["difference to baseline"], "95%": (high - low) / 2})
            new[-1] |= {f"{comparison.DOT}{seed}": x for seed, x in dots}
    return new


def over_seeds(rows: list[harness.Row]) -> list[harness.Row]:
    """Means over the seeds of each attention at each epoch, with standard errors."""
    means = []
    for group in harness.grouped(rows, "{attention} {epoch}").values():
        mean = dict(group[0])
        for key in ("accuracy", "loss"):
            mean[key], mean[f"{key} ±"] = mean_and_error([row[key] for row in group])
        means.append(mean)
    return means


MODELS = {"digits": "Digits, 65 tokens", "fashion": "Fashion-MNIST, 101 tokens"}
EXACT = {
    "alone": (0, "features alone"),
    "row": (1, "exact class row"),
    "both": (17, "class row and 16 keys"),
}
"""Exact pairs of a query, and their words, by the second word of a table."""


OWN: dict[str, harness.Row] = {
    "benchmark/attention/crossover": attention.FIGURES["crossover"],
    "benchmark/gpu/lengths_gpu": lengths.FIGURE,
    "benchmark/vit/vit": vit.FIGURES["vit"],
    "compare/fashion_197/results": comparison.FIGURES["results"] | {"change": in_texts},
    "convert/cost/cost": dict(
        tables=[f"{model}_{pairs}" for model in MODELS for pairs in EXACT],
        change=kept,
        x="cost",
        y="kept",
        line="{line}",
        panel="{model}",
        log="x",
        xlabel="cost (features; two exact pairs of a query are one)",
        ylabel="accuracy kept (% of softmax)",
    ),
    "convert/default/conversion": dict(
        x="m",
        y={"accuracy": "accuracy, not retrained", "attention error": "relative attention error"},
        change=converted,
        line="{line}",
        log="x",
    ),
    "converted/converted": conversions.FIGURES["converted"],
    "graphs/scale/graph_scale": scale.FIGURES["graph_scale"],
    "imagenette/curves": dict(
        x="epoch",
        y={"accuracy": "accuracy", "loss": "loss (nats)"},
        change=over_seeds,
        line="{attention}",
    ),
    "imagenette/tokens_577": dict(
        x="minutes",
        y={"accuracy": "accuracy (3,925 photographs)", "loss": "loss (nats)"},
        line="{attention}",
    ),
    "language_model/convert/convert": dict(
        change=lambda rows: [r | {"m": r["m"] or ""} for r in rows if r["window"] <= 16],
        x="m",
        y="lost",
        error="standard error",
        line="{method}",
        panel="window {window}",
        log="x",
        ylabel="nats lost a character",
    ),
    "speed/accelerators/lengths": dict(
        change=counted,
        x="tokens",
        line="{line}",
        panel="{pass}",
        log="xy",
        ylabel="time (ms, counted)",
    ),
}
"""By the path of the figure below `RESULTS`."""


def options(png: Path) -> harness.Row:
    """Return the options of a figure."""
    name = png.relative_to(RESULTS).with_suffix("").as_posix()
    if name in OWN:
        return OWN[name]
    made = json.loads(png.with_name("run.json").read_text())[-1]["command"]
    script, *words = made.split()
    name = f"vit.{words[0].replace('-', '_')}" if script == "performer-vit" else words[1]
    return importlib.import_module(name).FIGURES[png.stem]


def main() -> None:
    """Draw the figures."""
    for png in sorted(RESULTS.rglob("*.png")):
        harness.figure(png.with_suffix(""), **options(png))
        print(png.relative_to(RESULTS))


if __name__ == "__main__":
    launch.run(main)
