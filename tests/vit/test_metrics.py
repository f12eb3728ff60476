"""Counts under a mask, ties and NaN; the log; the plot."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit.model import classification
from vit.reports import metrics
from vit.run import steps


def count(logits, labels, mask):
    logits, mask = jnp.asarray(logits, jnp.float32), jnp.asarray(mask, jnp.float32)
    return {
        k: float(v) for k, v in classification.counts(logits, jnp.asarray(labels), mask).items()
    }


def test_counts():
    logits = np.arange(10.0)[None] * np.ones((4, 1))
    got = count(logits, [9, 5, 4, 9], [1, 1, 1, 0])
    assert got == {"top1": 1, "top5": 2, "examples": 3}


def test_the_top_five_of_five_are_not_counted():
    """They would be all; so are they in the results and the report of classes."""
    assert count(np.eye(5), [0, 1, 2, 3, 0], [1] * 5) == {"top1": 4, "examples": 5}
    totals = {"loss": np.array(2.0), "top1": np.array(4.0), "examples": np.array(5.0)}
    assert list(classification.results(totals)) == ["loss", "accuracy"]


def test_ties_and_nan_are_no_hits():
    assert count(np.zeros((2, 10)), [0, 9], [1, 1])["top5"] == 0
    assert count(np.full((2, 10), np.nan), [0, 9], [1, 1])["top5"] == 0


def test_hidden_examples_have_no_loss():
    """Of an evaluation: the cross entropy of the others, in NumPy."""
    logits = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    labels, mask = np.array([1, 5, 0, 3]), np.array([1, 0, 1, 0], np.float32)
    batch = {"image": logits, "label": labels, "mask": mask}
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    task = classification.task(6, 1)._replace(count=classification.count.__wrapped__)
    got = steps.count(task, lambda images: (images, None), batch)
    exact = logits.astype(float)
    losses = np.log(np.sum(np.exp(exact), axis=1)) - exact[range(4), labels]
    assert float(got["loss"]) == pytest.approx(losses[0] + losses[2], rel=1e-5)
    assert float(got["examples"]) == 2


def test_a_sigmoid_for_each_class():
    """-log sigma(x) of the label and -log(1 - sigma(x)) of the rest, summed over the classes."""
    logits = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    labels = np.array([2, 0, 5])
    signs = np.where(np.arange(6) == labels[:, None], 1, -1)
    losses = np.log1p(np.exp(-signs * logits.astype(float))).sum(axis=1)
    task = classification.task(6, 1, "sigmoid")
    model = lambda images: (jnp.asarray(logits), {})  # noqa: E731
    targets = jnp.asarray((signs + 1) / 2, jnp.float32)
    loss, count = (f.func.__wrapped__ for f in (task.loss, task.count))
    mean, _ = loss(model, (jnp.zeros(3), targets), **task.loss.keywords)
    assert float(mean) == pytest.approx(losses.mean(), rel=1e-5)
    batch = {"image": jnp.zeros(3), "label": jnp.asarray(labels), "mask": jnp.array([1.0, 0, 1])}
    total = count(model, batch, **task.count.keywords)["loss"]
    assert float(total) == pytest.approx(losses[0] + losses[2], rel=1e-5)


def test_the_right_answer_of_a_blend_is_the_larger_share():
    """Logits for the own class, of which 0.3 stays, or for the neighbour's."""
    own = np.eye(3, dtype=np.float32)
    targets = 0.3 * own + 0.7 * np.roll(own, 1, axis=0)
    for logits, right in ((own, 0), (np.roll(own, 1, axis=0), 3)):
        model = lambda images, logits=logits: (jnp.asarray(logits), {})  # noqa: E731
        _, sums = classification.loss.__wrapped__(model, (jnp.zeros(3), jnp.asarray(targets)))
        assert int(sums["accuracy"]) == right


def test_log(tmp_path):
    """Lines of a step are one record; the last line may be cut, by a kill."""
    log = tmp_path / "metrics.jsonl"
    assert metrics.read(log) == []
    for record in ({"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "b": 3}):
        metrics.append(log, record)
    with log.open("a") as file:
        file.write('{"step": 3, "a"')
    assert metrics.read(log) == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 3}]
    assert metrics.keep_up_to(log, 2) == metrics.read(log)
    assert log.read_text().count("\n") == 3  # lines stay as they were written
    assert metrics.keep_up_to(log, 1) == [{"step": 1, "a": 1}]
    assert log.read_text() == '{"step": 1, "a": 1}\n'


LOG = [{"step": step, "train_loss": 1 / step} for step in (1, 2, 3, 4)]


def written(log):
    for record in LOG:
        metrics.append(log, record)
    return log.read_bytes()


def test_the_end_of_a_run_needs_its_last_line(tmp_path):
    whole = {"step": 3, "epoch": 1.0, "seconds": 2.0, "eval_loss": 0.5, "eval_examples": 4}
    for name in ("epoch", "eval_loss"):
        (tmp_path / "log").unlink(missing_ok=True)
        metrics.append(tmp_path / "log", {k: x for k, x in whole.items() if k != name})
        with pytest.raises(ValueError, match=f"last line of .*log lacks {name}: the log was chan"):
            metrics.last(tmp_path / "log")
    metrics.append(tmp_path / "log", whole)
    assert metrics.last(tmp_path / "log") == whole
    with pytest.raises(ValueError, match="lacks epoch, eval_examples, eval_loss, seconds"):
        metrics.last(tmp_path / "none")


def test_a_damaged_line_of_a_log_costs_itself_alone(tmp_path):
    log = tmp_path / "metrics.jsonl"
    content = written(log)
    log.write_bytes(content.replace(b'"step": 2', b'"stop": 2').replace(b"{", b"[", 1))
    assert metrics.keep_up_to(log, 4) == LOG[2:] == metrics.read(log)


def test_shares_have_standard_errors():
    record = {"step": 3, "eval_loss": 1.8922683, "eval_accuracy": 0.341667, "eval_examples": 360}
    assert metrics.evaluation(record).splitlines() == [
        "step           3",
        "eval_loss      1.8923",
        "eval_accuracy  0.34167 ± 0.025",
        "eval_examples  360",
    ]
