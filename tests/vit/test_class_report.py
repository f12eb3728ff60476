"""Accuracy by class and the confusion matrix, against scikit-learn and a plain count."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.metrics import confusion_matrix, recall_score

from tests.support.small import SHALLOW, new_vit, read_csv, sized, small_config
from vit import config, data
from vit.reports import class_report

CLASSES = 10
SOFTMAX = config.Attention(kind="softmax")


_shallow = sized(SHALLOW)


@pytest.fixture(scope="module")
def guessing():
    """A model with random logits, batches of which the last is mostly padding, and its logits."""
    settings = small_config(
        attention=SOFTMAX, data=config.Data(batch_size=128)
    )  # 360 images: 3 batches
    model = new_vit(settings, num_classes=CLASSES)
    rng = np.random.default_rng(0)
    model.head.kernel[...] = jnp.asarray(rng.normal(0, 1, (SHALLOW.width, CLASSES)), jnp.float32)
    batches = list(data.eval_batches(data.load(settings.data), settings.data))
    assert [int(batch["mask"].sum()) for batch in batches] == [128, 128, 104]
    forward = nnx.jit(lambda model, images: model(images)[0])
    outputs = [np.asarray(forward(model, jnp.asarray(batch["image"]))) for batch in batches]
    real = [
        (output[i], int(batch["label"][i]))
        for output, batch in zip(outputs, batches, strict=True)
        for i in np.flatnonzero(batch["mask"])
    ]
    logits, labels = (np.array(values) for values in zip(*real, strict=True))
    return model, batches, logits, labels


def test_counts_are_those_of_a_plain_count(guessing, tmp_path):
    model, batches, logits, labels = guessing
    counted = class_report.tally(model, batches, CLASSES)
    predicted = logits.argmax(axis=1)
    assert len(set(predicted)) > 3
    np.testing.assert_array_equal(
        counted.confusion, confusion_matrix(labels, predicted, labels=range(CLASSES))
    )
    top5 = np.zeros(CLASSES, int)
    for row, label in zip(logits, labels, strict=True):
        top5[label] += label in np.argsort(-row)[:5]
    np.testing.assert_array_equal(counted.top5, top5)
    assert counted.confusion.sum() == 360  # every image once, no padding
    class_report.write(counted, "abcdefghij", tmp_path)
    few = class_report.Tally(np.eye(3, dtype=int), np.ones(3, int))
    assert class_report.write(few, "abc", tmp_path / "few").startswith("top-1 1.0000 of 3 images;")
    assert "top-5" not in read_csv(tmp_path / "few" / "classes.csv")[0]
    rows = read_csv(tmp_path / "classes.csv")
    recall = recall_score(labels, predicted, labels=range(CLASSES), average=None, zero_division=0)
    np.testing.assert_allclose([float(row["top-1"]) for row in rows], recall, rtol=1e-4)
