"""Killed runs end with the same bits: one on digits is killed `KILLS` times (default 6; slow)."""

import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from tests.support.small import PATIENCE, bits, losses
from vit.reports import metrics
from vit.run import runs

KILLS = int(os.environ.get("KILLS", "6"))
MOMENTS = ("in a step", "while saving", "while evaluating")
COMMAND = [
    *(sys.executable, "-m", "vit.train", "--config=digits", f"--config.num_epochs={2 * KILLS}"),
    *("--config.model.dropout=0.1", "--config.data.max_shift=1", "--config.optim.ema=0.99"),
    *("--config.attention.calibration=full", "--config.attention.redraw_every=100"),
    *("--config.log_every=5", "--config.eval_every=20", "--config.checkpoint_every=10"),
]
HURRIED = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in HURRIED}
"""Programs as users compile them."""


def start(workdir):
    return subprocess.Popen(
        [*COMMAND, f"--workdir={workdir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


def half_written(workdir):
    """A checkpoint does not have its final name yet."""
    return any(not path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))


def unevaluated(workdir):
    """The log ends with a step after which an evaluation is due."""
    last = metrics.read(workdir / "metrics.jsonl")[-1:]
    return bool(last) and last[0]["step"] % 20 == 0 and "eval_accuracy" not in last[0]


def wait(process, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"it ended before it was killed:\n{process.stdout.read()}"
        assert time.monotonic() < end
        time.sleep(0.0005)


def kill_once(workdir, moment, chance):
    """One life of the process: a few records of the log, then SIGKILL at that moment."""
    log, process, records = workdir / "metrics.jsonl", start(workdir), chance.randint(1, 8)
    known = len(metrics.read(log))
    wait(process, lambda: len(metrics.read(log)) >= known + records)
    if moment == "while saving":
        wait(process, lambda: half_written(workdir))
    if moment == "while evaluating":
        wait(process, lambda: unevaluated(workdir))
    time.sleep(chance.uniform(0, 0.2 if moment == "in a step" else 0.03))
    process.kill()
    output, _ = process.communicate()
    began = [line.split()[-3] for line in output.splitlines() if ": at step" in line]
    step, cut = metrics.read(log)[-1]["step"], (half_written(workdir), unevaluated(workdir))
    print("|", *(began or "0"), "|", moment, "|", step, "|", cut[0], "|", cut[1], "|")


@pytest.mark.slow
def test_kills_leave_no_trace(tmp_path):
    """In a step, while it saves and while it evaluates; `-s` prints the table.

    Columns: started at step, killed, last step in the log, checkpoint left half-written, evaluation
    cut off.
    """
    chance, killed, alone = random.Random(0), tmp_path / "killed", tmp_path / "alone"
    for moment in itertools.islice(itertools.cycle(MOMENTS), KILLS):
        kill_once(killed, moment, chance)
    for workdir in (killed, alone):
        process = start(workdir)
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert losses(killed) == losses(alone)
    one, other = (bits(runs.restore(workdir).state) for workdir in (killed, alone))
    assert [name for name in one if one[name] != other[name]] == []
