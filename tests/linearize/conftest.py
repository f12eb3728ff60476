"""Tests of linearize do not depend on times: recipes have the order of their counts."""

import math

import pytest

from performer.linearization import recipes
from performer.linearization.timing import Compiled, Table, Time


class Planted(Table):
    """A table in which a recipe takes as many seconds as it has features and exact pairs."""

    def __init__(self, exact=math.inf, causal=False):
        super().__init__(Time(exact, 0), Compiled(print, (), 0), (), (), ())
        self.chunks = 2 if causal else 3

    def time(self, features):
        window, first, keys, rows = features.exact
        count = 2 * int(features.num_features) + self.chunks * window + first + keys + rows
        return Time(float(count), 0)


@pytest.fixture(autouse=True)
def _no_times(monkeypatch):
    """Plants a table in which each recipe is faster than exact attention."""

    def planted(*_, kind, **__):
        return Planted(causal="causal" in kind)

    monkeypatch.setattr(recipes, "table", planted)
