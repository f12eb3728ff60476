"""Signals, output without a reader, how divergence is named, and folders that appear whole."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from vit.config import Optim
from vit.run import safety
from vit.run.loop import check_finite
from vit.storage import folders, streams


def test_the_second_signal_ends_the_process(capfd):
    """The first says at once that it was heard, and what a second one does."""
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    previous = signal.getsignal(signal.SIGINT)
    with safety.interruption() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
        assert "a second Ctrl-C ends at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is previous
    signal.signal(signal.SIGINT, outer)


def test_other_signals_ask_to_stop_however_often():
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with safety.interruption() as stopping:
        assert not stopping()
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stopping()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with safety.interruption() as stopping:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stopping()
    signal.signal(signal.SIGHUP, previous)


def test_output_whose_reader_is_gone_is_dropped():
    """As `| head -1` leaves it: printing is no error, then or later."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, streams.without_broken_pipe(stream) as output:
        print("read", file=output, flush=True)
        assert os.read(reader, 9) == b"read\n"
        os.close(reader)
        for _ in range(2):
            print("unread", file=output, flush=True)
        assert output.buffer.raw.is_broken


def test_until():
    taken: list[int] = []
    items = safety.until(lambda: len(taken) == 2, range(9))
    taken += [next(items), next(items)]
    assert taken == [0, 1]
    with pytest.raises(safety.Stopped):
        next(items)


OPTIM = Optim(learning_rate=0.5)
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
        check_finite(OPTIM, [step(), bad, step(np.nan)], 13, NAMES)
    assert "learning_rate=0.5" in str(error.value)
    check_finite(OPTIM, [step(), step()], 13, NAMES)


def test_a_folder_appears_in_one_piece_and_begins_anew_after_a_kill(tmp_path):
    folder, unfinished = tmp_path / "run", tmp_path / "run.unfinished"
    code = f"""
from pathlib import Path
import os, signal
from vit.storage import folders
with folders.atomic(Path({str(folder)!r}), "--out") as folder:
    (folder / "checkpoints").mkdir()
    (folder / "config.json").write_text("{{}}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."})
    assert not folder.exists()
    assert (unfinished / "config.json").exists()
    with folders.atomic(folder, "--out") as inside:
        assert {path.name for path in inside.iterdir()} == {"lock"}
        (inside / "config.json").write_text("{}")
        assert not folder.exists()
    assert (folder / "config.json").exists()
    assert not unfinished.exists()
    with (
        pytest.raises(ValueError, match="run holds a run already; choose another --out"),
        folders.atomic(folder, "--out"),
    ):
        pass


def test_nothing_stays_of_a_folder_that_could_not_be_filled(tmp_path):
    with pytest.raises(OSError, match="full"), folders.atomic(tmp_path / "run", "--out"):
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(ValueError, match="run is not empty; choose another --out"),
        folders.atomic(tmp_path / "run", "--out"),
    ):
        pass
