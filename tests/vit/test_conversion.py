"""Settings that `vit.convert` compares, without a model."""

from types import SimpleNamespace

import pytest

from vit import convert, data
from vit.config import Block
from vit.run import runs
from vit.weights import conversion
from vit.weights.conversion import Case


class Stub(runs.Restored):
    """A run whose data and model nothing reads."""

    def __init__(self):
        self.config, self.dataset = SimpleNamespace(data=None), None
        self.task = SimpleNamespace(layers=lambda _: [])

    def evaluation_examples(self, number):
        return {}


def test_each_draw_of_a_case_has_a_seed_of_its_own(monkeypatch):
    """Accuracies 0.1, 0.2, 0.3 of the seeds 0, 1, 2: their mean and its standard error."""
    model, seeds = SimpleNamespace(seed=6), []

    def replaced(case):
        seeds.append(case.seed)
        return SimpleNamespace(seed=case.seed), None

    evaluated = lambda task, new, batches: {"eval_accuracy": 0.1 * (new.seed + 1)}  # noqa: E731
    monkeypatch.setattr(convert, "evaluate_model", evaluated)
    monkeypatch.setattr(conversion, "samples", lambda *_: [])
    monkeypatch.setattr(conversion, "errors", lambda *_: [0.5])
    monkeypatch.setattr(conversion, "exchanged", lambda *_: model)
    monkeypatch.setattr(data, "eval_batches", lambda *_: [])
    run = Stub()
    *_, record = convert.compare(run, model, replaced, [Case("orf", Block())], 3)
    assert seeds == [0, 1, 2]
    assert record["accuracy"] == pytest.approx(0.2)
    assert record["standard error"] == pytest.approx(0.1 / 3**0.5)
