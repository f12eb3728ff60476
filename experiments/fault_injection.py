"""Kills a training run at random moments, and looks whether it ends as if nothing had happened.

    python -m experiments.fault_injection [--kills=20] [--seed=0] [--out=results/fault_injection]

Two runs of the same config (scikit-learn's digits): one is left alone; the other is killed
(SIGKILL) in turn in a step, while it writes a checkpoint and while it evaluates, and started again
by the same command. In the end every array of the two last checkpoints must have the same bits, and
every loss in the logs must be the same number. `--out` receives the table, and both runs.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit import evaluate, metrics, report

FLAGS = [
    "--config=experiments/configs/digits.py",
    "--config.num_epochs=40",
    "--config.model.dropout=0.1",
    "--config.data.max_shift=1",
    "--config.attention.calibration=full",
    "--config.attention.redraw_every=100",
    "--config.optim.ema=0.99",
    "--config.log_every=5",
    "--config.eval_every=20",
    "--config.checkpoint_every=10",
]
MOMENTS = ("in a step", "while saving", "while evaluating")


def start(workdir: Path) -> subprocess.Popen[str]:
    """The training command, as a user gives it; compiled programs are kept for the next start."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "programs")}
    return subprocess.Popen(
        [sys.executable, "-m", "vit.train", *FLAGS, f"--workdir={workdir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )


def half_written(workdir: Path) -> bool:
    """Whether there is a checkpoint that does not have its final name yet."""
    return any(not p.name.isdecimal() for p in (workdir / "checkpoints").glob("*"))


def unevaluated(workdir: Path) -> bool:
    """Whether the log ends with a step after which an evaluation is due."""
    last = metrics.read(workdir / "metrics.jsonl")[-1:]
    return bool(last) and last[0]["step"] % 20 == 0 and "eval_accuracy" not in last[0]


def wait(process: subprocess.Popen[str], condition: Callable[[], bool], seconds: float) -> bool:
    """Until the condition holds; False when the process has ended or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return True
        time.sleep(0.0005)
    return False


def kill_once(workdir: Path, moment: str, chance: random.Random) -> dict[str, Any]:
    """One life of the process: a few records of the log, then SIGKILL at that moment."""
    log = workdir / "metrics.jsonl"
    process = start(workdir)
    known = len(metrics.read(log))
    records = chance.randint(1, 8)
    alive = wait(process, lambda: len(metrics.read(log)) >= known + records, 300)
    if moment == "while saving":
        alive = alive and wait(process, lambda: half_written(workdir), 60)
    if moment == "while evaluating":
        alive = alive and wait(process, lambda: unevaluated(workdir), 60)
    time.sleep(chance.uniform(0, 0.2 if moment == "in a step" else 0.03))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    if not alive:
        raise RuntimeError(f"the run ended before it could be killed {moment}:\n{output}")
    started = [line.split()[-3] for line in output.splitlines() if ": at step" in line]
    return {
        "started at step": int(started[0]) if started else 0,
        "killed": moment,
        "last step in the log": metrics.read(log)[-1]["step"],
        "checkpoint left half-written": "yes" if half_written(workdir) else "no",
        "evaluation cut off": "yes" if unevaluated(workdir) else "no",
    }


def finish(workdir: Path) -> None:
    """Lets the run go on to its end."""
    process = start(workdir)
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(output)


def differences(one: Path, other: Path) -> list[str]:
    """Names of arrays of the last checkpoints that differ in any bit, and steps whose losses do."""

    def arrays(workdir: Path) -> dict[str, np.ndarray]:
        leaves = jax.tree.leaves_with_path(evaluate.restore(workdir).state)
        return {jax.tree_util.keystr(path): _bits(x) for path, x in leaves}

    def losses(workdir: Path) -> list[tuple[Any, ...]]:
        names = ("step", "train_loss", "gradient_norm", "eval_loss", "eval_accuracy")
        records = metrics.read(workdir / "metrics.jsonl")
        return [tuple(record.get(name) for name in names) for record in records]

    a, b = arrays(one), arrays(other)
    different = [name for name in a if not np.array_equal(a[name], b[name])]
    pairs = zip(losses(one), losses(other), strict=True)
    return different + [f"step {x[0]}: {x[1:]} {y[1:]}" for x, y in pairs if x != y]


def _bits(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).reshape(-1).view(np.uint8)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fault_injection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("results/fault_injection"))
    arguments = parser.parse_args()
    left_alone, killed = arguments.out / "left_alone", arguments.out / "killed"
    for workdir in (left_alone, killed):
        if workdir.exists():
            parser.error(f"{workdir} exists; remove it, or take another --out")
    arguments.out.mkdir(parents=True, exist_ok=True)

    chance, rows = random.Random(arguments.seed), []
    for number in range(arguments.kills):
        rows.append(kill_once(killed, MOMENTS[number % len(MOMENTS)], chance))
        print(f"{number + 1} of {arguments.kills}: {rows[-1]}", flush=True)
    finish(killed)
    finish(left_alone)
    print("\n" + report.table(rows, arguments.out / "kills"))
    different = differences(left_alone, killed)
    if different:
        sys.exit("not the same as the run that was left alone:\n  " + "\n  ".join(different))
    print(f"{arguments.kills} kills: every array and loss is bitwise that of the run left alone.")


if __name__ == "__main__":
    main()
