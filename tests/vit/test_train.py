"""Training: a few steps, resuming bit for bit, interruptions, refusals, several devices."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx

from performer.nnx import Frequencies
from tests.support.small import (
    CALIBRATED,
    PATIENCE,
    SHALLOW,
    TRAINED,
    final_state,
    small_config,
    stop_at,
    train_batches,
)
from vit import config, evaluate, train
from vit.reports import metrics
from vit.run import checkpoint, devices, loop, optim, runs, safety, steps
from vit.task import opened

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture
def shallow(monkeypatch):
    monkeypatch.setitem(config.SIZES, "XS", SHALLOW)


def program(settings, task=None):
    """Functions and data of a run of three steps."""
    (dataset, own), mesh = opened(settings), devices.mesh(settings)
    batches = train_batches(dataset, settings, mesh)
    return steps.build(settings, task or own, 3, mesh), batches


def frequencies(state):
    return jax.tree.leaves(nnx.filter_state(state, Frequencies))


def test_the_time_left_is_by_all_steps(monkeypatch, capsys):
    """Steps of 2 and of 30 seconds: 98 more take 98 x 16 seconds, not 98 x 30."""
    now = 0.0
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now)
    (dataset, task), mesh = opened(TRAINED), devices.mesh(TRAINED)
    run = runs.Run(TRAINED, dataset, task, mesh)
    run.__dict__["length"] = 10, 100
    progress = loop.Progress(run, (), lambda record: None, True, 0.0)
    for step, seconds in ((1, 2.0), (2, 30.0)):
        now += seconds
        values = {"train_loss": np.float32(1), "finite": np.ones(1, bool)}
        progress.ended.append((step, values, 0.0))
        progress._log()
    assert capsys.readouterr().out.splitlines()[-1].endswith("0:26:08 left")


def test_three_steps(digits_run):
    workdir, record = digits_run
    assert record["step"] == 3
    assert record["eval_examples"] == 360
    assert config.load(workdir / "config.json") == TRAINED
    log = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in log] == [1, 2, 3]
    assert log[0]["train_loss"] == pytest.approx(np.log(10), rel=1e-3)  # the head starts at zero
    assert log[2]["train_loss"] < log[0]["train_loss"]
    assert [r["learning_rate"] for r in log[:2]] == pytest.approx([0.0, 1e-2])
    assert all(0 <= r["data_seconds"] < r["seconds"] for r in log)
    assert (workdir / "learning_curve.png").exists()
    assert checkpoint.complete_steps(workdir) == [2, 3]

    run, _ = program(TRAINED)
    before, after = frequencies(run.initial()), frequencies(final_state(run, workdir))
    np.testing.assert_array_equal(before, after)  # saved, and not trained

    report = evaluate.evaluate_run(workdir)
    assert report["step"] == 3
    assert evaluate.evaluate_run(workdir, step="best") == report
    assert report["eval_accuracy"] == record["eval_accuracy"]
    assert report["eval_loss"] == pytest.approx(record["eval_loss"], rel=1e-5)


ODD = "a[1] *?é"


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch, capsys):
    """Dropout, augmentation, shuffling, optimiser, schedule and frequencies go on as they were.

    With gradients in parts and a running mean. One run is stopped by a signal before the
    frequencies are drawn anew, and dies after it, between two checkpoints. Its folder has a name
    that Orbax takes for a pattern.
    """
    settings = small_config(
        attention=dataclasses.replace(CALIBRATED, redraw_every=2),
        optim=config.Optim(learning_rate=1e-2, warmup_steps=1, accumulate=2, ema=0.9),
    )
    monkeypatch.setattr(devices, "peak_flops", lambda: 1e12)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of the link to the folder
    train.train(settings, tmp_path / "whole")

    for stop, end in ((1, SystemExit), (2, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            stop_at(patch, stop, end)
            with pytest.raises(end) as ended:
                train.train(settings, tmp_path / ODD)
        if end is SystemExit:
            assert ended.value.code == safety.STOPPED == 75
            assert "stopped at step 1 of 3; the same command resumes" in capsys.readouterr().out
        assert metrics.read(tmp_path / ODD / "metrics.jsonl")[-1]["step"] == stop
    assert checkpoint.complete_steps(tmp_path / ODD) == [1]
    train.train(settings, tmp_path / ODD)

    run, _ = program(settings)
    states = [final_state(run, tmp_path / name) for name in ("whole", ODD)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    first = run.initial()
    kept, drawn = (frequencies(state) for state in (first, states[0]))
    assert not any(np.allclose(a, b) for a, b in zip(kept, drawn, strict=True))  # at step 2
    logs = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", ODD)]
    for a, b in zip(*logs, strict=True):
        assert (a["step"], a["train_loss"]) == (b["step"], b["train_loss"])
    flops = 3 * opened(settings)[1].operations(settings)
    shares = [record["images_per_second"] * flops / 1e12 for record in logs[0]]
    assert [record["mfu"] for record in logs[0]] == pytest.approx(shares)
    found = evaluate.evaluate_run(tmp_path / ODD)
    assert found["eval_loss"] == pytest.approx(logs[0][-1]["eval_loss"], rel=1e-5)


def test_a_run_whose_checkpoints_are_gone_keeps_its_log(digits_run, tmp_path):
    workdir = shutil.copytree(digits_run[0], tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    log = (workdir / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="trained to step 3 .* is missing: restore it"):
        train.train(TRAINED, workdir)
    assert (workdir / "metrics.jsonl").read_text() == log
    assert not (workdir / "checkpoints").exists()


def test_an_evaluation_that_a_run_was_stopped_in_is_made_on_resumption(digits_run, tmp_path):
    """With the same result; the duration goes on from the last one of the log."""
    workdir = shutil.copytree(digits_run[0], tmp_path / "run")
    path = workdir / "metrics.jsonl"
    *kept, evaluation = map(json.loads, path.read_text().splitlines())
    assert "eval_loss" in evaluation
    kept[-1]["seconds"] = 1e6
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    record = train.train(TRAINED, workdir)
    assert {k: record[k] for k in evaluation if k != "seconds"} == {
        k: x for k, x in evaluation.items() if k != "seconds"
    }
    assert 0 < record["seconds"] - 1e6 < PATIENCE


def test_a_line_of_the_log_is_of_all_steps_since_the_last():
    """Means of the values, images in the time of these steps, and all waiting for data."""
    settings, written = small_config(log_every=4, data=config.Data(batch_size=5)), []
    run = runs.Run(settings, *opened(TRAINED))
    run.rate, run.length = (lambda step: 0.1 * step), (10, 12)
    progress = loop.Progress(run, ["w"], written.append, False, 0.0)
    losses, begin = [3.0, 1.0, 6.0, 4.0, 2.5, 1.5], time.perf_counter()
    for step, value in enumerate(losses, start=1):
        values = {"train_loss": value, "train_top": 2 * value, "finite": np.array([True])}
        progress.add(step, {k: np.asarray(x) for k, x in values.items()}, begin, 0.25 * step)
    progress.read()
    assert [record["step"] for record in written] == [4, 6]
    for record, part in zip(written, (losses[:4], losses[4:]), strict=True):
        assert record["train_loss"] == pytest.approx(np.mean(part))
        assert record["train_top"] == pytest.approx(2 * np.mean(part))
        assert record["learning_rate"] == pytest.approx(0.1 * (record["step"] - 1))
        assert record["epoch"] == record["step"] / 10
    assert [record["data_seconds"] for record in written] == [2.5, 2.75]
    elapsed = time.perf_counter() - begin
    assert 4 * 5 / elapsed < written[0]["images_per_second"]


def test_sums_of_an_evaluation_are_exact():
    """In float32 ones are lost beside 2^24."""
    batches = [
        {"loss": jax.numpy.float32(x), "examples": jax.numpy.ones(())} for x in (2**24, 1, 1)
    ]
    task = opened(TRAINED)[1]._replace(results=lambda totals: {"loss": totals["loss"]})
    found = steps.evaluate(task, lambda batch: batch, batches)
    assert found == {"eval_loss": 2**24 + 2, "eval_examples": 3}


def test_a_finished_run_only_reports_and_refuses_another_config(digits_run):
    workdir, first = digits_run
    log = (workdir / "metrics.jsonl").read_text()
    assert train.train(TRAINED, workdir) == first
    assert (workdir / "metrics.jsonl").read_text() == log
    attention = config.Attention(coupling="orf", num_features=8)
    other = dataclasses.replace(TRAINED, attention=attention)
    with pytest.raises(ValueError, match="attention.coupling: 'pm-antithetic' -> 'orf'"):
        train.train(other, workdir)
    assert config.load(workdir / "config.json") == TRAINED


@pytest.mark.thorough
def test_divergence_names_step_and_parameter_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    """At a rate of 1e38, which the second step reaches, the third overflows."""
    monkeypatch.setattr(config, "validate", lambda settings: None)  # it refuses such a rate
    settings = small_config(
        optim=config.Optim(learning_rate=1e38, final_learning_rate=1e38, warmup_steps=1)
    )
    message = "loss is nan at step 3; the first parameter .* is blocks.0.attention.key.bias"
    with pytest.raises(FloatingPointError, match=message):
        train.train(settings, tmp_path / "run")
    assert checkpoint.complete_steps(tmp_path / "run") == [1, 2]


def without_dropout(**fields):
    """A run whose steps are the same wherever an example stands in its batch; three batches."""
    model = config.Model(variant="XS/4", pooling="mean")
    optimiser = config.Optim(learning_rate=1e-2, warmup_steps=0, **fields)
    run, batches = program(small_config(model=model, optim=optimiser))
    return run, [next(batches) for _ in range(3)]


@pytest.fixture(scope="module")
def programs():
    """Each is compiled once: the plain one, and one in parts with a running mean."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.SIZES, "XS", SHALLOW)
        return without_dropout(), without_dropout(accumulate=4, ema=0.9)


def test_one_compilation_for_all_steps(programs):
    """No value of a step reaches the host while the next ones are started, and none recompiles."""
    run, batches = programs[0]
    state, _ = run.train(run.initial(), batches[0])
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, _ = run.train(state, batch)
    assert run.train.func._cache_size() == 1


def test_a_batch_in_parts_gives_the_same_step(programs):
    """Gradient accumulation: no dropout here, for its masks depend on the place in the batch."""
    results = [run.train(run.initial(), batches[0])[1] for run, batches in programs]
    for name in ("train_loss", "train_accuracy", "gradient_norm"):
        assert float(results[1][name]) == pytest.approx(float(results[0][name]), rel=1e-5)
    # The head starts at zero, and the first of equal classes is the prediction.
    share = np.mean(np.asarray(programs[0][1][0]["label"]) == 0)
    assert 0 < share == pytest.approx(float(results[0]["train_accuracy"]))


def test_mixup_and_label_smoothing_are_in_the_step():
    """What the loss is of: images and targets blended with their neighbours by one share."""
    settings = small_config(
        data=config.Data(batch_size=8, mixup=0.4),
        optim=config.Optim(warmup_steps=1, label_smoothing=0.1),
    )
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1)).astype(np.uint8)
    batch = {"image": jax.numpy.asarray(images), "label": jax.numpy.arange(8)}
    task = opened(settings)[1]
    examples = task.examples(settings, jax.random.key(0), batch)
    smooth = 0.9 * np.eye(10)[:8] + 0.01
    share = float(examples[1][0, 0] - 0.01) / 0.9
    assert 1e-3 < share < 1 - 1e-3
    for got, x in zip(examples, (images.astype(float), smooth), strict=True):
        want = share * x + (1 - share) * np.roll(x, 1, axis=0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_the_running_mean_is_what_is_evaluated(programs):
    run, (batch, *_) = programs[1]
    state, batch = run.initial(), batch | {"mask": jax.numpy.ones(32)}
    before = run.evaluate(state, batch)["loss"]
    state, _ = run.train(state, batch)
    _, optimizer = nnx.merge(run.graph, state)
    mean = nnx.as_pure(optim.averaged(optimizer))
    params = nnx.as_pure(nnx.state(steps.evaluated_model(run.graph, state), nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, mean, params)
    assert float(run.evaluate(state, batch)["loss"]) != pytest.approx(float(before), rel=1e-4)


COMMAND = [
    *(sys.executable, "-m", "vit.train"),
    *("--config=tests/support/small.py", "--config.num_epochs=2"),
    *("--config.log_every=8", "--config.eval_every=88", "--config.checkpoint_every=8"),
]
ENVIRONMENT = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def reached(workdir, process):
    """The last step in the log of a process, when it has written five records or has ended."""
    log, deadline = workdir / "metrics.jsonl", time.time() + PATIENCE
    while len(metrics.read(log)) < 5 and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    return metrics.read(log)[-1]["step"]


@pytest.mark.thorough
def test_a_killed_process_resumes_and_is_evaluated(tmp_path):
    """kill -9 between two checkpoints, at the real command line; this process goes on."""
    workdir = tmp_path / "run"
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    process = subprocess.Popen([*COMMAND, f"--workdir={workdir}"], **quiet)
    step = reached(workdir, process)
    process.kill()
    process.wait()
    assert 10 <= step < 88
    train.train(config.of_run(workdir), workdir)
    log = metrics.read(workdir / "metrics.jsonl")
    assert [r["step"] for r in log] == list(range(8, 89, 8))
    assert evaluate.evaluate_run(workdir)["eval_accuracy"] == log[-1]["eval_accuracy"]
