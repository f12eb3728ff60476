"""Classes are names, not positions: of a run, of the data that it is evaluated on, of weights."""

from functools import partial

import numpy as np
import pytest

from tests.support.small import SHALLOW, sized
from vit import data, evaluate
from vit.data.classes import in_order, matched, placeholders
from vit.run import runs
from vit.weights import transfer

_shallow = sized(SHALLOW)

TEXT_ORDER = sorted(placeholders(12))
"""0, 1, 10, 11, 2, ...: as folders were sorted."""


@pytest.mark.parametrize(
    ("ours", "theirs", "labels"),
    [
        (placeholders(12), TEXT_ORDER, list(map(int, TEXT_ORDER))),
        (TEXT_ORDER, placeholders(12), list(map(TEXT_ORDER.index, placeholders(12)))),
        ("cde", "ec", [2, 0]),
        ("0123", "31", [3, 1]),
        ("cc", "cc", [0, 1]),
        (("00", "01"), "10", [1, 0]),
        (("1.0", "e\u0301"), ("\u00e9", "01"), [1, 0]),
    ],
)
def test_matched(ours, theirs, labels):
    """By name: a whole number however it is written, text in NFC."""
    assert matched(ours, theirs) == labels


@pytest.mark.parametrize(
    ("ours", "theirs", "labels"),
    [
        ("cde", "012", [0, 1, 2]),
        ("cde", "021", [0, 2, 1]),
        ("021", "cde", [0, 2, 1]),
        ("012", "cde", [0, 1, 2]),
        ("cde", "xyz", [0, 1, 2]),
        ("cde", "edc", [0, 1, 2]),
        ("cc", "01", [0, 1]),
        ("123", "012", [0, 1, 2]),
        ("cde", "01", None),
    ],
)
def test_matched_by_number_if_the_user_says_so(ours, theirs, labels):
    """Where one side has only numbers a name stays unmatched, and the message says how."""
    if labels is None:
        with pytest.raises(ValueError, match="--match=number: the data have 2 classes, the run 3"):
            matched(ours, theirs, "number")
        return
    assert matched(ours, theirs, "number") == labels
    if {*ours} != {*theirs}:
        numbered = {*"012"} in ({*ours}, {*theirs}) or {*theirs} == {*"01"}
        with pytest.raises(ValueError, match="none of the") as error:
            matched(ours, theirs)
        assert ("--match=number takes them in the order" in str(error.value)) == numbered


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("cde", "cdx", "1 of the 3 classes of the data are none of the 3 of the run: x; the run's"),
        ("012", "123", "1 of the 3 classes .* 3; the run's begin with 0, 1, 2"),
        ("123", "012", "1 of the 3 classes .* 0; the run's begin with 1, 2, 3"),
        ("cde", "01", "2 of the 2 classes .* 0, 1; the run's begin with c, d, e"),
        ("ccd", "cd", "several classes have the same name"),
    ],
)
def test_classes_that_cannot_be_matched(ours, theirs, message):
    with pytest.raises(ValueError, match=message):
        matched(ours, theirs)


def test_numbers_are_in_order_of_their_size_before_words():
    assert in_order(["b", "11", "2", "09", "a", "2", "1"]) == ["1", "2", "09", "11", "a", "b"]


def with_names(dataset, names):
    """The same images, whose classes have other labels."""
    label = [names.index(name) for name in dataset.class_names]
    train, held = (
        [r | {"label": label[r["label"]]} for r in records]
        for records in (dataset.train, dataset.evaluation)
    )
    return dataset._replace(train=train, evaluation=held, class_names=tuple(names))


def test_a_run_is_evaluated_by_the_names_of_the_classes(digits_run, monkeypatch):
    """Its own data set has been prepared again, or another one has the classes in other order."""
    workdir, record = digits_run
    want = {name: x for name, x in record.items() if name.startswith("eval_")}
    digits, load = data.load(runs.configs.of_run(workdir).data), data.load
    again = partial(data.Dataset._replace, channels=3)  # in colour
    names = "7931502468"
    monkeypatch.setattr(data, "load", lambda section: again(with_names(load(section), names)))
    for found in (evaluate.evaluate_run(workdir), evaluate.evaluate_on(workdir, {})):
        assert {name: found[name] for name in want} == pytest.approx(want)
    assert runs.restore(workdir).dataset.class_names == digits.class_names
    restored = runs.restore(workdir, with_names(digits, "7931502468"))
    labels = next(restored.eval_batches())["label"]
    assert labels.tolist() == [record["label"] for record in digits.evaluation[:32]]
    monkeypatch.setattr(data, "load", lambda section: with_names(load(section), "0123456789X"))
    with pytest.raises(ValueError, match="'digits' in .* is not the data set of the run: .* X; "):
        evaluate.evaluate_run(workdir)


def test_a_head_is_sorted_as_the_classes_of_the_data():
    rng = np.random.default_rng(0)
    head = {"head/kernel": rng.normal(size=(4, 12)), "head/bias": rng.normal(size=12)}
    named = dict(head)
    lines = transfer.fit_head(named, placeholders(12), TEXT_ORDER)
    assert lines == ["head: its classes are sorted as the data's"]
    for name, x in head.items():
        np.testing.assert_array_equal(named[name], x[..., list(map(int, TEXT_ORDER))])
    assert transfer.fit_head(named, placeholders(12), "abcdefghijkl") is None
    assert transfer.fit_head(named, placeholders(12), "abcdefghijkl", "number") == []
    assert transfer.fit_head(named, TEXT_ORDER, placeholders(10)) is None
    assert transfer.fit_head(named, "abcdefghijkl", "abcdefghijkm") is None
