"""Training: a few steps, resuming bit for bit, interruptions, refusals, several devices."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from performer.nnx import Frequencies
from tests.small import TINY, small_config
from vit import checkpoint, config, data, evaluate, metrics, optim, train

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended, and what it returned; tests leave it as it is."""
    workdir = tmp_path_factory.mktemp("train") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", TINY)
        return workdir, train.train(small_config(), workdir)


def final_state(workdir):
    """The arrays of the last checkpoint, keys of random streams as numbers."""
    settings = config.load(workdir / "config.json")
    graph, state = train.create(settings, data.load(settings.data), lambda step: 0.0)
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        state = checkpoint.restore_state(checkpoints, state)

    def number(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(number, state), graph


def frequencies(state):
    return jax.tree.leaves(nnx.filter_state(state, Frequencies))


def test_three_steps(finished):
    workdir, record = finished
    assert record["step"] == 3
    assert record["eval_examples"] == 360
    assert config.load(workdir / "config.json") == small_config()
    log = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in log] == [1, 2, 3]
    assert log[0]["train_loss"] == pytest.approx(np.log(10), rel=1e-3)  # the head starts at zero
    assert log[2]["train_loss"] < log[0]["train_loss"]
    assert (workdir / "learning_curve.png").exists()
    with checkpoint.open_checkpoints(workdir) as checkpoints:
        assert [c.step for c in checkpoints.checkpoints] == [2, 3]

    report = evaluate.evaluate_run(workdir)
    assert report["step"] == 3
    assert report["eval_accuracy"] == record["eval_accuracy"]
    assert report["eval_loss"] == pytest.approx(record["eval_loss"], rel=1e-5)


def test_frequencies_are_saved_and_not_trained(finished):
    state, _ = final_state(finished[0])
    settings = small_config()
    _, initial = train.create(settings, data.load(settings.data), lambda step: 0.0)
    before, after = frequencies(initial), frequencies(state)
    assert len(before) == 2
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch):
    """Dropout, augmentation, shuffling, optimiser, schedule and frequencies go on as they were.

    One run is stopped twice: before the frequencies are drawn anew and after it.
    """
    settings = small_config(attention=config.Attention(num_features=8, redraw_every=2))
    train.train(settings, tmp_path / "whole")

    append = metrics.append

    def append_and_stop(log, record):
        append(log, record)
        if record["step"] < 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(metrics, "append", append_and_stop)
    for stop in (1, 2):
        with pytest.raises(SystemExit, match=f"stopped at step {stop} of 3"):
            train.train(settings, tmp_path / "parts")
        assert metrics.read(tmp_path / "parts" / "metrics.jsonl")[-1]["step"] == stop
    train.train(settings, tmp_path / "parts")

    states = [final_state(tmp_path / name)[0] for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    _, first = train.create(settings, data.load(settings.data), lambda step: 0.0)
    kept, drawn = (frequencies(state) for state in (first, states[0]))
    assert not any(np.allclose(a, b) for a, b in zip(kept, drawn, strict=True))  # at step 2
    logs = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    for a, b in zip(*logs, strict=True):
        assert (a["step"], a["train_loss"]) == (b["step"], b["train_loss"])


def test_a_finished_run_only_reports(finished):
    workdir, first = finished
    log = (workdir / "metrics.jsonl").read_text()
    assert train.train(small_config(), workdir) == first
    assert (workdir / "metrics.jsonl").read_text() == log


def test_another_config_is_refused_with_the_difference(finished):
    workdir, _ = finished
    other = small_config(attention=config.Attention(coupling="orf", num_features=8))
    with pytest.raises(ValueError, match="attention.coupling: 'pm-antithetic' -> 'orf'"):
        train.train(other, workdir)
    assert config.load(workdir / "config.json") == small_config()


def test_divergence_is_an_error_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    mean = train._mean

    def poisoned(stretch):
        record = mean(stretch)
        poisoned.calls += 1
        return record | ({"train_loss": float("nan")} if poisoned.calls == 3 else {})

    poisoned.calls = 0
    monkeypatch.setattr(train, "_mean", poisoned)
    with pytest.raises(FloatingPointError, match="nan at step 3"):
        train.train(small_config(), tmp_path / "run")
    with checkpoint.open_checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.latest is not None
        assert checkpoints.latest.step == 2


def test_one_compilation_for_all_steps_and_label_smoothing():
    settings = small_config()
    dataset = data.load(settings.data)
    graph, state = train.create(settings, dataset, optim.schedule(settings.optim, 100))
    chex.clear_trace_counter()

    @partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def step(smoothing, state, batch):
        return train.train_step(graph, smoothing, jax.random.key(0), state, batch)

    batches = iter(data.train_batches(dataset, settings.data, 0))
    for _ in range(3):
        before, batch = state, next(batches)
        state, _ = step(0.0, before, batch)
    chex.clear_trace_counter()
    smooth, _ = step(0.1, before, batch)
    same = jax.tree.map(np.array_equal, nnx_params(state), nnx_params(smooth))
    assert not all(jax.tree.leaves(same))


def test_softmax_twin_trains(tmp_path):
    settings = small_config(attention=config.Attention(kind="softmax"))
    assert train.train(settings, tmp_path / "run")["step"] == 3


def nnx_params(state):
    return nnx.filter_state(state, nnx.Param)


def test_evaluate_refuses_a_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        evaluate.evaluate_run(tmp_path)
    config.save(small_config(), tmp_path / "config.json")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        evaluate.evaluate_run(tmp_path)


FLAGS = [
    "--config=experiments/configs/digits.py",
    "--config.model.variant=XS/4",
    "--config.attention.num_features=8",
    "--config.data.batch_size=64",
    "--config.num_epochs=4",
    "--config.log_every=2",
    "--config.eval_every=88",
    "--config.checkpoint_every=4",
]


def command(workdir):
    return [sys.executable, "-m", "vit.train", *FLAGS, f"--workdir={workdir}"]


def test_a_killed_process_resumes(tmp_path):
    """kill -9 between two checkpoints, at the real command line."""
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        command(workdir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = workdir / "metrics.jsonl"
    deadline = time.time() + 120
    while len(metrics.read(log)) < 5 and time.time() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    reached = metrics.read(log)[-1]["step"]
    assert 10 <= reached < 88
    done = subprocess.run(command(workdir), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "at step" in done.stdout
    assert "test accuracy" in done.stdout
    assert [r["step"] for r in metrics.read(log)] == list(range(2, 89, 2))


def test_two_devices_train_as_one(finished, tmp_path):
    """The same run on two virtual CPU devices: the same losses up to rounding."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.small import TINY, small_config\n"
        "from vit import config, train\n"
        "config.SIZES['XS'] = TINY\n"
        "print('loss', train.train(small_config(), Path(sys.argv[1]))['train_loss'])\n"
    )
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": ".",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert "loss" in done.stdout, done.stderr
    loss = float(done.stdout.split("loss")[-1].split()[0])
    assert loss == pytest.approx(finished[1]["train_loss"], rel=1e-4)


def test_batches_must_divide_among_devices(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(ValueError, match="batch_size=32 is not divisible by the 3 devices"):
        train.shardings(32)
