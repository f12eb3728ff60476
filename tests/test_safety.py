"""One process to a folder, what a signal does, and how divergence is named."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from vit import safety

HOLD = """
import sys, time
from pathlib import Path
from vit import safety
with safety.exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_held_until_the_process_ends_even_if_killed(tmp_path):
    workdir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(workdir)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(ValueError, match=f"is in use by process {holder.pid} on .*; wait for it"),
        safety.exclusive(workdir),
    ):
        pass
    holder.kill()
    holder.communicate()
    with safety.exclusive(workdir):
        assert f"process {os.getpid()} on" in (workdir / "lock").read_text()


def test_the_second_signal_ends_the_process():
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    previous = signal.getsignal(signal.SIGINT)
    with safety.interruption() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
    signal.signal(signal.SIGINT, outer)


def test_until():
    taken: list[int] = []
    items = safety.until(lambda: len(taken) == 2, range(9))
    taken += [next(items), next(items)]
    assert taken == [0, 1]
    with pytest.raises(safety.Stopped):
        next(items)


NAMES = ["embed.bias", "embed.kernel", "head.kernel"]


def step(loss=1.0, finite=(True, True, True)):
    return {"train_loss": np.float32(loss), "finite": np.array(finite)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (step(np.nan), "the loss is nan at step 12; all parameters and gradients are finite"),
        (step(np.inf), "the loss is inf at step 12"),
        (
            step(2.0, (True, False, False)),
            r"the loss is 2.0 at step 12; the first .* is embed.kernel \(2 of 3 are\)",
        ),
    ],
)
def test_the_first_step_that_diverged_is_named(bad, message):
    with pytest.raises(FloatingPointError, match=message) as error:
        safety.check_finite([step(), bad, step(np.nan)], 13, NAMES, 0.5)
    assert "learning_rate=0.5" in str(error.value)
    safety.check_finite([step(), step()], 13, NAMES, 0.5)
