"""Photographs: trained at a low resolution, then at a high one, and converted.

    performer-vit prepare --source=IMAGENETTE --out=data --name=imagenette --max_side=0
    performer-vit benchmark photographs --data=data --out=results/photographs

ViT-S/8 of `vit.train --config=imagenette:S/8` learns with softmax attention at 96 pixels (145
tokens). From there it goes on at 224 pixels (785 tokens), once with softmax attention and once with
features that are calibrated while training, one run after the other, each in a process of its own.
Then the softmax run is converted, and accuracy, speed and memory are compared. After --minutes, 9
by default, the run in progress is stopped like with Ctrl-C; the same command resumes it.

    trained.csv      accuracy, seconds, images/s and memory of each run
    curves.csv       accuracy against seconds of training, evaluations included; with a figure
    equal.csv        seconds until both runs at 224 pixels first reached the lower of their best
                     accuracies
    converted.csv    the softmax run at 224 pixels, the one with features, and the conversion
                     (`vit.speed.converted`)

With --quick it is a rehearsal: ViT-Ti/8 at 16 and 32 pixels for a part of an epoch.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vit.reports import metrics
from vit.speed import converted
from vit.study import harness

KINDS = ("softmax", "performer")
FULL = 224
"""Pixels of the photographs."""
TUNED = """data.mixup=0 optim.learning_rate=2e-4 optim.warmup_steps=0.1 optim.ema=0 eval_every=12
checkpoint_every=36 log_every=12"""
"""Fields of a run that goes on at a higher resolution."""
QUICK = "data.batch_size=16 log_every=3 eval_every=3 checkpoint_every=3"
"""Fields of a rehearsal."""
SIZES = "num_features=16 exact_keys=32 exact_rows=1 refine_steps=100 draws=1 images=64"
"""Flags of the conversion."""
RESULTS = ("accuracy", "seconds", "images/s", "memory, GiB")
FIGURE: harness.Row = dict(
    x="seconds", y="accuracy", line="{pixels} pixels, {attention}", ylabel="accuracy (validation)"
)
Row = harness.Row


def cases(quick: bool) -> list[Row]:
    """Return the runs, in order; the others begin with the parameters of the first."""
    low, high, first, then = (16, 32, 0.01, 0.01) if quick else (96, FULL, 30.0, 3.0)
    start = {"pixels": low, "attention": "softmax", "epochs": first}
    return [start, *harness.cases(pixels=(high,), attention=KINDS, epochs=(then,))]


def command(case: Row, data: Path, runs: Path, quick: bool) -> list[str]:
    """Return the command of a run, which also resumes it."""
    first, pixels = cases(quick)[0], case["pixels"]
    words = [f"--config=imagenette:{'Ti' if quick else 'S'}/8", f"--workdir={folder(runs, case)}"]
    fields = [f"data.dir={data}", f"data.image_size={pixels}", f"num_epochs={case['epochs']}"]
    fields.append(f"data.eval_resize={min(FULL, round(pixels * 8 / 7))}")
    fields.append(f"attention.kind={case['attention']}")
    if case != first:
        words.append(f"--init_from={folder(runs, first)}")
        fields += TUNED.split()
    words += [f"--config.{field}" for field in [*fields, *(QUICK.split() if quick else ())]]
    return [sys.executable, "-m", "vit.train", *words]


def folder(runs: Path, case: Row) -> Path:
    """Return the folder of a run."""
    return runs / f"{case['pixels']}-{case['attention']}"


def compare_conversion(softmax: Path, features: Path, out: Path, images: int) -> None:
    """Convert the softmax run if that is not done, and compare the three on `images`, 0 for all."""
    conversion = softmax.with_name(f"{softmax.name}-converted")
    if not conversion.exists():
        words = [f"--workdir={softmax}", f"--out={conversion}", f"--eval_images={images}"]
        words += [f"--{x}" for x in SIZES.split()]
        subprocess.run([sys.executable, "-m", "vit.convert", *words], check=True)
    converted.measure([str(softmax), str(features), str(conversion)], out, images)


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
    """Return, for each resolution with all kinds of attention, the seconds to the same accuracy.

    It is the lower of the best accuracies of the kinds.
    """
    rows = []
    for pixels in dict.fromkeys(row["pixels"] for row in curves):
        by_kind = {
            kind: [r for r in curves if (r["pixels"], r["attention"]) == (pixels, kind)]
            for kind in KINDS
        }
        if not all(by_kind.values()):
            continue
        target = min(max(r["accuracy"] for r in some) for some in by_kind.values())
        for kind, some in by_kind.items():
            first = next(r for r in some if r["accuracy"] >= target)
            row = {"pixels": pixels, "attention": kind, "accuracy reached": target}
            rows.append(row | {"seconds until then": first["seconds"], "epoch": first["epoch"]})
    return rows


def measure(data: Path, out: Path, minutes: float, quick: bool) -> None:
    """Train and convert what is missing, and write the tables and the figure.

    Raises:
        ValueError: if there are no prepared photographs.
    """
    if not data.is_dir():
        raise ValueError(f"--data={data}: no folder; prepare the photographs with vit.prepare")
    deadline, runs = time.monotonic() + 60 * minutes, out / "runs"

    def run(case: Row, _: list[Row]) -> Row | None:
        ended = trained(command(case, data, runs, quick), deadline)
        return summary(folder(runs, case)) if ended else None

    rows = harness.resumed(out / "trained", cases(quick), run, RESULTS, deadline)
    ended = [row for row in rows if not row["note"]]
    curves = [row | evaluation for row in ended for evaluation in curve(folder(runs, row))]
    columns = "pixels", "attention", "epoch", "seconds", "accuracy"
    curves = [{name: row[name] for name in columns} for row in curves]
    if curves:
        harness.show(curves, out / "curves", {"curves": FIGURE})
    if equal := until_equal(curves):
        harness.show(equal, out / "equal")
        softmax, features = (folder(runs, case) for case in cases(quick)[1:])
        compare_conversion(softmax, features, out, 32 if quick else 0)
