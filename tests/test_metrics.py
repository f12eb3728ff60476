"""Counts under a mask, ties and NaN; the log; the plot."""

import json

import jax.numpy as jnp
import numpy as np

from vit import metrics


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
