"""Wall time to equal accuracy of softmax attention and random features, on photographs.

    performer-vit prepare --source=IMAGENETTE --out=data --name=imagenette --max_side=160
    performer-vit benchmark photographs --data=data --out=results/photographs

ViT-S/16 (197 tokens) and S/8 (785) of `vit.train --config=imagenette:S/16` at 224 pixels, with the
same seed and recipe, one run after the other, each in a process of its own. After --minutes, 9 by
default, the run in progress is stopped like with Ctrl-C; the same command resumes it.

    trained.csv    accuracy, seconds, images/s and memory of each run
    curves.csv     accuracy against seconds of training, evaluations included; with a figure
    equal.csv      seconds until each run first reached the lower of the best accuracies of its size

With --quick it is a rehearsal: ViT-Ti/32 at 32 pixels for a part of an epoch.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vit.reports import metrics
from vit.study import harness

EPOCHS = 30.0
KINDS = ("softmax", "performer")
QUICK = ("image_size=32", "eval_resize=36", "batch_size=16")
"""Data of a rehearsal."""
RESULTS = ("accuracy", "seconds", "images/s", "memory, GiB")
FIGURE: harness.Row = dict(
    x="seconds", y="accuracy", line="{variant}, {attention}", ylabel="accuracy (validation)"
)
Row = harness.Row


def command(case: Row, data: Path, workdir: Path, quick: bool) -> list[str]:
    """Return the command of a run, which also resumes it."""
    words = [f"--config=imagenette:{case['variant']}", f"--workdir={workdir}"]
    words += [f"--config.data.dir={data}", f"--config.attention.kind={case['attention']}"]
    words += [f"--config.num_epochs={case['epochs']}"]
    if quick:
        every = (f"--config.{name}_every=3" for name in ("log", "eval", "checkpoint"))
        words += [*(f"--config.data.{word}" for word in QUICK), *every]
    return [sys.executable, "-m", "vit.train", *words]


def trained(words: Sequence[str], deadline: float) -> bool:
    """Train until the run ends or time is up; return whether it ended.

    Raises:
        CalledProcessError: if the run fails.
    """
    process = subprocess.Popen(words)
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # saves a checkpoint
        process.wait()
        return False
    if status:
        raise subprocess.CalledProcessError(status, words)
    return True


def curve(workdir: Path) -> list[Row]:
    """Return the evaluations of a run."""
    records = metrics.read(workdir / "metrics.jsonl")
    return [
        {"epoch": x["epoch"], "seconds": x["seconds"], "accuracy": x["eval_accuracy"]}
        for x in records
        if "eval_accuracy" in x
    ]


def summary(workdir: Path) -> Row:
    """Return the `RESULTS` of a finished run."""
    records, last = metrics.read(workdir / "metrics.jsonl"), curve(workdir)[-1]
    speeds = [x["images_per_second"] for x in records if "images_per_second" in x]
    memory = max((x["memory_gib"] for x in records if "memory_gib" in x), default="")
    values = last["accuracy"], last["seconds"], max(speeds, default=""), memory
    return dict(zip(RESULTS, values, strict=True))


def until_equal(curves: Sequence[Row]) -> list[Row]:
    """Return, for each size with all kinds of attention, the seconds to the same accuracy.

    It is the lower of the best accuracies of the kinds.
    """
    rows = []
    for variant in dict.fromkeys(row["variant"] for row in curves):
        by_kind = {
            kind: [r for r in curves if (r["variant"], r["attention"]) == (variant, kind)]
            for kind in KINDS
        }
        if not all(by_kind.values()):
            continue
        target = min(max(r["accuracy"] for r in some) for some in by_kind.values())
        for kind, some in by_kind.items():
            first = next(r for r in some if r["accuracy"] >= target)
            row = {"variant": variant, "attention": kind, "accuracy reached": target}
            rows.append(row | {"seconds until then": first["seconds"], "epoch": first["epoch"]})
    return rows


def measure(data: Path, out: Path, minutes: float, quick: bool) -> None:
    """Train what is missing, and write the tables and the figure.

    Raises:
        ValueError: if there are no prepared photographs.
    """
    if not data.is_dir():
        raise ValueError(f"--data={data}: no folder; prepare the photographs with vit.prepare")
    deadline = time.monotonic() + 60 * minutes
    variants, epochs = (("Ti/32",), 0.01) if quick else (("S/16", "S/8"), EPOCHS)
    cases = harness.cases(variant=variants, attention=KINDS, epochs=(epochs,))

    def workdir(case: Row) -> Path:
        return out / "runs" / f"{case['variant']}-{case['attention']}".replace("/", "")

    def run(case: Row, _: list[Row]) -> Row | None:
        ended = trained(command(case, data, workdir(case), quick), deadline)
        return summary(workdir(case)) if ended else None

    rows = harness.resumed(out / "trained", cases, run, RESULTS, deadline)
    ended = [row for row in rows if not row["note"]]
    curves = [row | evaluation for row in ended for evaluation in curve(workdir(row))]
    columns = "variant", "attention", "epoch", "seconds", "accuracy"
    curves = [{name: row[name] for name in columns} for row in curves]
    if curves:
        harness.show(curves, out / "curves", {"curves": FIGURE})
    if equal := until_equal(curves):
        harness.show(equal, out / "equal")
