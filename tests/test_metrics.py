"""Counts under a mask, ties and NaN; the log; the plot."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from vit import metrics, steps


def count(logits, labels, mask):
    logits, mask = jnp.asarray(logits, jnp.float32), jnp.asarray(mask, jnp.float32)
    return {k: float(v) for k, v in metrics.counts(logits, jnp.asarray(labels), mask).items()}


def test_counts():
    logits = np.arange(10.0)[None] * np.ones((4, 1))
    got = count(logits, [9, 5, 4, 9], [1, 1, 1, 0])
    assert got == {"top1": 1, "top5": 2, "examples": 3}


def test_ties_and_nan_are_no_hits():
    assert count(np.zeros((2, 10)), [0, 9], [1, 1])["top5"] == 0
    assert count(np.full((2, 10), np.nan), [0, 9], [1, 1])["top5"] == 0


def test_hidden_examples_have_no_loss():
    """Of an evaluation: the cross entropy of the others, in NumPy."""
    logits = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    labels, mask = np.array([1, 5, 0, 3]), np.array([1, 0, 1, 0], np.float32)
    batch = {"image": logits, "label": labels, "mask": mask, "bad": np.array([-1, -1, -1, 7])}
    got = steps.count.__wrapped__(
        lambda images: (images, None), {name: jnp.asarray(x) for name, x in batch.items()}
    )
    exact = logits.astype(float)
    losses = np.log(np.sum(np.exp(exact), axis=1)) - exact[range(4), labels]
    assert float(got["loss"]) == pytest.approx(losses[0] + losses[2], rel=1e-5)
    assert (float(got["examples"]), int(got["bad"])) == (2, 1)


def test_log(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert metrics.read(log) == []
    for step in (1, 2, 3):
        metrics.append(log, {"step": step, "train_loss": 1 / step})
    with log.open("a") as file:
        file.write('{"step": 4, "tra')  # the process was killed here
    assert [r["step"] for r in metrics.read(log)] == [1, 2, 3]
    metrics.keep_up_to(log, 2)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]


def test_plot(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        metrics.append(log, {"step": step, "train_loss": 1.0, "train_accuracy": 0.5})
    metrics.append(log, {"step": 3, "eval_loss": 1.0, "eval_accuracy": 0.5})
    metrics.plot_learning_curve(log, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_a_step_are_one_record_and_a_cut_line_is_dropped(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for record in ({"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "b": 3}):
        metrics.append(log, record)
    with log.open("a") as file:
        file.write('{"step": 3, "a"')
    assert metrics.read(log) == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 3}]
    assert metrics.keep_up_to(log, 2) == metrics.read(log)
    assert log.read_text().count("\n") == 3  # lines stay as they were written
    assert metrics.keep_up_to(log, 1) == [{"step": 1, "a": 1}]


def test_tensorboard_gets_what_the_log_gets(tmp_path, monkeypatch):
    seen = []

    class Board:
        def __init__(self, folder, purge_step):
            seen.append((folder, purge_step))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen.append("closed")

        def add_scalar(self, *scalar):
            seen.append(scalar)

    log = tmp_path / "metrics.jsonl"
    metrics.append(log, {"step": 4})
    with metrics.writer(log, Board) as write:
        write({"step": 5, "train_loss": 0.5})
    assert seen == [
        (str(tmp_path / "tensorboard"), 5),
        ("step", 5, 5),
        ("train_loss", 0.5, 5),
        "closed",
    ]
    assert metrics.read(log)[-1] == {"step": 5, "train_loss": 0.5}
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        metrics.summary_writer()
