"""Runs that are killed, and files that are damaged: the same bits in the end, or one clear line.

The slow tier kills a run of scikit-learn's digits `KILLS` times (an environment variable; 6), and
does every damage to every file of a small run.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.small import PATIENCE, SHALLOW
from vit import config
from vit.reports import metrics
from vit.run import checkpoint, devices, loop, runs

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


def bits(state):
    """The bits of every array, keys of random streams too."""

    def as_bytes(x):
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return {jax.tree_util.keystr(path): as_bytes(x) for path, x in jax.tree.leaves_with_path(state)}


def losses(workdir):
    names = ("step", "train_loss", "gradient_norm", "eval_loss", "eval_accuracy")
    return [[r.get(name) for name in names] for r in metrics.read(workdir / "metrics.jsonl")]


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


SMALL = config.Config(
    model=config.Model(variant="XS/8", pooling="mean"),
    attention=config.Attention(kind="softmax"),
    data=config.Data(batch_size=32),
    optim=config.Optim(learning_rate=1e-2, warmup_steps=1),
    num_epochs=3 / 44,
    log_every=1,
    eval_every=3,
    checkpoint_every=1,
)
"""Three steps, and a checkpoint at each."""


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def damages(canary, chance):
    """Damages of a file, by name; a link in its place leads to `canary`."""

    def flipped(path):
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)

    def instead(make):
        return lambda path: (remove(path), make(path))

    return {
        "one bit flipped": flipped,
        "cut": lambda p: p.write_bytes(p.read_bytes()[: chance.randrange(p.stat().st_size)]),
        "emptied": lambda p: p.write_bytes(b""),
        "bytes added": lambda p: p.write_bytes(p.read_bytes() + chance.randbytes(16)),
        "removed": remove,
        "a folder instead": instead(Path.mkdir),
        "a file instead": instead(lambda p: p.write_bytes(b"0")),
        "a link instead": instead(lambda p: p.symlink_to(canary)),
        "a dangling link instead": instead(lambda p: p.symlink_to(canary.with_name("nowhere"))),
        "not readable": lambda p: p.chmod(0),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run; the shapes of its state, and what it has come to."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", SHALLOW)
        loop.train(SMALL, workdir)
        abstract = runs.program(SMALL, *runs.subject(SMALL), devices.mesh(SMALL)).abstract
        return workdir, abstract, bits(checkpoint.restore(workdir, abstract)[1]), losses(workdir)


def after_damage(whole, tmp_path, name, change, canary, capsys):
    """The outcome of the same call on a damaged copy; "" where a folder has no such damage.

    "told clearly": in the message of an error that `vit.train` prints as one line, or in what it
    prints. "harmless": it ends with the same bits and losses.
    """
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    canary.write_text("years of work")
    try:
        change(workdir / name)
    except OSError:  # a folder has no bytes
        return ""
    capsys.readouterr()
    try:
        loop.train(SMALL, workdir)
    except (ValueError, OSError, FloatingPointError) as error:
        return "told clearly" if str(workdir) in str(error) else f"unclear: {error}"
    said = capsys.readouterr().out
    if canary.read_text() != "years of work" or canary.with_name("nowhere").exists():
        return "written through a link"
    if any(word in said for word in ("cannot be read", "damaged", "missing")):
        return "told clearly"
    state = checkpoint.restore(workdir, whole[1])[1]
    same = losses(workdir) == whole[3] and bits(state) == whole[2]
    return "harmless" if same else "silent"


def hang(*_):
    raise AssertionError("it does not end")


@pytest.fixture
def damaged(whole, tmp_path, monkeypatch, capsys):
    """A function of a file and a damage, which leaves the folder for the next one."""
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)
    canary = tmp_path / "canary"
    changes = damages(canary, random.Random(0))
    handler = signal.signal(signal.SIGALRM, hang)

    def outcome(name, damage):
        signal.alarm(PATIENCE)
        try:
            return after_damage(whole, tmp_path, name, changes[damage], canary, capsys)
        finally:
            signal.alarm(0)
            path = tmp_path / "run" / name
            if path.exists():
                path.chmod(0o700)
            shutil.rmtree(tmp_path / "run")

    yield outcome
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's readers
@pytest.mark.parametrize("damage", list(damages(Path(), random.Random())))
def test_every_damage_of_every_file_is_told_or_harmless(damaged, whole, damage):
    names = sorted(str(path.relative_to(whole[0])) for path in whole[0].rglob("*"))
    if damage == "one bit flipped":  # a log may be edited: another number in it is not noticed
        names.remove("metrics.jsonl")
    outcomes = {name: damaged(name, damage) for name in names}
    allowed = ("told clearly", "harmless", "")
    assert {name: came for name, came in outcomes.items() if came not in allowed} == {}
    unread = damage == "not readable"  # root reads it all the same
    assert unread or "told clearly" in outcomes.values()
