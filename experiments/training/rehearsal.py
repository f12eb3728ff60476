"""Rehearses an ImageNet run on a CPU: all that a run of days meets, in minutes.

    python -m experiments.training.rehearsal --photographs=DIR

What is done, one after another, and how long each took:

    pictures    1,024 to train on and as many to hold out, in class folders: those in DIR again
                and again, or drawn ones where no folder is given
    prepare     `vit.prepare`, in 1,024 files as TFDS writes ImageNet in
    train       four processes of two virtual devices on loopback run `vit.train` with the config
                `imagenet_rehearsal`, under the usual limit of 1,024 open files
    kill        SIGKILL to the last process when two steps more than the first checkpoint are
                logged; the others must end without it
    resume      two processes of two devices go on from the checkpoint to the end, and evaluate
                a part of the split, 40 pictures, that no batch divides
    evaluate    `vit.evaluate`, one process on one device, which must find what training found

Anything else on the command line goes to `vit.train`, as --config.model.depth=1. The table is
printed and written to `phases.md` in --out; something that is not as it should be ends the command
with an error.
"""

import contextlib
import itertools
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.common import launch
from vit import metrics, report

PICTURES, EVALUATED, FILES = 1024, 40, 1024
"""Of each split, of which so many are evaluated, in so many files."""
CLASSES = 8
PATIENCE = 1800.0
"""Seconds after which a phase counts as one that never ends."""
LIMIT = 1024
"""Open files that most machines allow a process at first."""
SLOW = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_timeout_seconds=600"
)
"""For XLA: devices that share a busy core wait for one another."""


HURRY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
"""Few steps are computed, and six processes compile."""


def pictures(folder: Path, photographs: Path | None) -> str:
    """Class folders train/ and val/ of JPEG files; says of what."""
    sources = _labelled(photographs) if photographs else list(_drawn(folder / "drawn"))
    for split in ("train", "val"):
        for i, (path, name) in zip(range(PICTURES), itertools.cycle(sources), strict=False):
            target = folder / "classes" / split / name / f"{i:04d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return f"twice {PICTURES}, of {len(sources)}"


def _labelled(folder: Path) -> list[tuple[Path, str]]:
    """The JPEG files of a folder, and the class of each: what stands before the first _ or dot.

    Raises:
        ValueError: when there are fewer than two JPEG files, or classes.
    """
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    found = [(path, re.split(r"[_.]", path.name)[0]) for path in paths]
    if len({name for _, name in found}) < 2:
        raise ValueError(
            f"--photographs={folder} must hold JPEG files of two classes or more, which are what"
            " stands before the first _ of their names"
        )
    return found


def _drawn(folder: Path) -> Iterator[tuple[Path, str]]:
    """Pictures of ImageNet's usual size: waves whose direction is the class, and noise."""
    folder.mkdir(parents=True)
    y, x = np.mgrid[:375, :500] / 20
    for i in range(4 * CLASSES):
        angle, noise = np.pi * (i % CLASSES) / CLASSES, np.random.default_rng(i)
        wave = np.sin(x * np.cos(angle) + y * np.sin(angle))[..., None] * [80, 60, 40]
        image = 128 + wave + noise.normal(0, 20, (375, 500, 3))
        path = folder / f"{i}.jpg"
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        yield path, f"class{i % CLASSES}"


def start(
    folder: Path, processes: int, devices: int, others: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """The training command on each of so many hosts, all of them this one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [
        *("-m", "vit.train", "--config=imagenet_rehearsal", f"--workdir={folder / 'run'}"),
        *(f"--config.data.dir={folder / 'data'}", f"--coordinator={coordinator}"),
        *(f"--num_processes={processes}", *others),
    ]
    return [
        python([*command, f"--process_id={i}"], folder / f"process{i}.log", devices)
        for i in range(processes)
    ]


def python(words: Sequence[str], log: Path, devices: int) -> subprocess.Popen[str]:
    """A process with so many virtual devices, and a limit of open files; its output is added."""
    flags = f"--xla_force_host_platform_device_count={devices} {SLOW}"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | HURRY,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard)),
        )


def kill(folder: Path, processes: Sequence[subprocess.Popen[str]], after: int) -> float:
    """Kills the last process when that step is logged; seconds until the others have ended."""
    log, end = folder / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    while _last_step(log) < after:
        ended = [p for p in processes if p.poll() is not None]
        if ended or time.monotonic() > end:
            raise RuntimeError(f"training did not come to step {after}:\n{_said(folder)}")
        time.sleep(0.2)
    processes[-1].kill()
    begun = time.monotonic()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, begun + PATIENCE - time.monotonic()))
    waiting = [i for i, process in enumerate(processes) if process.poll() is None]
    if waiting or any(process.returncode == 0 for process in processes):
        raise RuntimeError(f"a host is gone, and processes {waiting} wait for it for ever")
    return time.monotonic() - begun


def finish(folder: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits for the end of all of them."""
    codes = [process.wait(PATIENCE) for process in processes]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{_said(folder)}")


def _last_step(log: Path) -> int:
    return max((record["step"] for record in metrics.read(log)), default=0)


def _said(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in logs)


def check(folder: Path, before: Sequence[metrics.Record]) -> dict[str, Any]:
    """What the run must have come to; the last record of its log.

    Raises:
        RuntimeError: saying what is otherwise.
    """
    records = metrics.read(folder / "run" / "metrics.jsonl")
    last = records[-1]
    resumed = re.findall(r": at step (\d+) of", (folder / "process0.log").read_text())
    losses = [[r["train_loss"] for r in log[: len(before)]] for log in (before, records)]
    evaluated = (folder / "evaluate.log").read_text()
    found = dict(re.findall(r"^(\w+) +(\S+)$", evaluated, re.MULTILINE))
    files = len(list((folder / "data").rglob("*train.array_record*")))
    expected = {
        "every step is logged": [r["step"] for r in records] == list(range(1, last["step"] + 1)),
        "it resumed from a checkpoint": len(resumed) == 1 and int(resumed[0]) >= 2,
        "the same step has the same loss on another mesh": np.allclose(*losses, rtol=0.01),
        "there are as many files as of ImageNet": files == FILES,
        "all pictures are evaluated": last["eval_examples"] == EVALUATED,
        "all records can be decoded": last["bad_records"] == last["eval_bad_records"] == 0,
        "one device finds the same loss": np.isclose(
            float(found.get("eval_loss", "nan")), last["eval_loss"], rtol=0.01
        ),
    }
    wrong = [name for name, holds in expected.items() if not holds]
    if wrong:
        raise RuntimeError(f"not so: {'; '.join(wrong)}\n{_said(folder)}")
    return last


def rehearse(folder: Path, photographs: Path | None, others: Sequence[str] = ()) -> list[dict]:
    """All phases in that folder, which must not exist; a row for each.

    Raises:
        ValueError: for photographs that are none.
        RuntimeError: when something is not as it should be.
    """
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    clock = [time.monotonic()]

    def done(phase: str, result: str) -> None:
        clock.append(time.monotonic())
        seconds = f"{clock[-1] - clock[-2]:.0f}"
        rows.append({"phase": phase, "seconds": seconds, "what": result})
        print(f"{phase}: {seconds} s, {result}", flush=True)

    done("pictures", pictures(folder, photographs))
    words = [f"--source={folder / 'classes'}", f"--out={folder / 'data'}", "--name=rehearsal"]
    preparing = ["-m", "vit.prepare", *words, f"--files={FILES}"]
    finish(folder, [python(preparing, folder / "prepare.log", 1)])
    files = len(list((folder / "data").rglob("*train.array_record*")))
    done("prepare", f"{files} files of training")
    four, log = start(folder, 4, 2, others), folder / "run" / "metrics.jsonl"
    try:
        seconds = kill(folder, four, after=4)
    finally:
        for process in four:
            process.kill()
    before = metrics.read(log)
    done("train, kill", f"4 x 2 devices, {len(before)} steps; the others ended in {seconds:.0f} s")
    two = start(folder, 2, 2, others)
    try:
        finish(folder, two)
    finally:
        for process in two:
            process.kill()
    done("resume", f"2 x 2 devices, to step {_last_step(log)}, and evaluation")
    evaluation = python(
        ["-m", "vit.evaluate", f"--workdir={folder / 'run'}"], folder / "evaluate.log", 1
    )
    finish(folder, [evaluation])
    last = check(folder, before)
    done("evaluate", f"1 device, {last['eval_examples']} pictures, loss {last['eval_loss']:.4f}")
    return rows


def main(
    *others: str,
    out: Path = Path("results/training/rehearsal"),
    photographs: Path | None = None,
) -> None:
    """Prints the table of the phases.

    Args:
        others: flags for `vit.train`.
        out: folder of all, which must not exist.
        photographs: folder of JPEG files named CLASS_*.jpg.
    """
    if out.exists():
        raise ValueError(f"{out} exists; remove it, or take another --out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))  # its processes end with it
    try:
        rows = rehearse(out.resolve(), photographs, others)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print("\n" + report.table(rows, out / "phases"))


if __name__ == "__main__":
    launch.run(main)
