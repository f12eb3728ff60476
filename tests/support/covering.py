"""Pairwise covering arrays: few cases in which any two levels of two factors meet."""

import itertools
from functools import cache

import numpy as np


def allowed(factors, excluded, name, row):
    """The levels of a factor that no level of the row excludes."""
    return [x for x in factors[name] if not any(excluded((name, x), y) for y in row.items())]


def covering_array(factors, excluded, seed=0, tries_per_row=5):
    """Rows {factor: level} so that each pair of levels that may go together does in some row.

    Args:
        factors: the levels of each factor, by name. The first is neutral: it goes with everything.
        excluded: whether (factor, level) and (another, level) exclude each other.
        seed: of the draws.
        tries_per_row: of so many rows the one is taken that has most that is missing.
    """
    rng, excluded = np.random.default_rng(seed), cache(excluded)

    def draw(start):
        row = dict(start)
        for name in rng.permutation([name for name in factors if name not in row]):
            levels = allowed(factors, excluded, str(name), row)
            gains = [
                sum(frozenset([(str(name), level), item]) in missing for item in row.items())
                for level in levels
            ]
            row[str(name)] = levels[int(np.argmax(gains))]
        return row, sum(
            frozenset(pair) in missing for pair in itertools.combinations(row.items(), 2)
        )

    items = [(name, level) for name, levels in factors.items() for level in levels]
    missing = {
        frozenset(pair)
        for pair in itertools.combinations(items, 2)
        if pair[0][0] != pair[1][0] and not excluded(*pair)
    }
    rows = []
    while missing:
        starts = sorted(missing, key=lambda pair: sorted(map(str, pair)))
        tries = [draw(starts[i]) for i in rng.integers(len(starts), size=tries_per_row)]
        row, _ = max(tries, key=lambda found: found[1])
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


def random_row(factors, excluded, rng):
    """One level of each factor at random, none of which exclude each other."""
    row = {}
    for name in rng.permutation(list(factors)):
        levels = allowed(factors, excluded, str(name), row)
        row[str(name)] = levels[rng.integers(len(levels))]
    return row
