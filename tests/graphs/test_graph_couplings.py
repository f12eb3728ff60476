"""Laws of the lengths of walks: marginals, joint laws against Eq. 11 step by step."""

from functools import partial

import jax
import numpy as np
import pytest
from scipy import stats

from performer.graphs import couplings
from tests.support.tiers import tiers

DRAWS = 40_000
ALARM = 1e-6
"""The rate of false alarms of each statistical test."""
PERMUTATION = np.array([4, 2, 0, 1, 3])
CASES = {
    "independent": couplings.independent,
    "antithetic": couplings.antithetic,
    "ensemble": couplings.ensemble,
    "close pairs": partial(couplings.antithetic, offset=0.2),
    "crowded": partial(couplings.antithetic, offset=0.15, size=4),
    "sigma": couplings.sigma(PERMUTATION),
}


def draw(coupling, num_walks, p_halt, seed=0):
    return np.asarray(couplings.lengths(jax.random.key(seed), coupling, DRAWS, num_walks, p_halt))


def chi_square(counts, chances):
    """The p-value of counts against chances; cells below five are one."""
    expected = counts.sum() * chances
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert observed[~kept].sum() == 0
    statistic = np.sum((observed[kept] - expected[kept]) ** 2 / expected[kept])
    return stats.chi2.sf(statistic, kept.sum() - 1)


def step_by_step(rng, count, num_walks, p_halt, offset):
    """qGRF Eq. 11 as it stands: new termination variables at each step, until all have halted."""
    lengths = np.full((count, num_walks), -1)
    time = 0
    while (lengths < 0).any():
        first = rng.random((count, 1))
        halts = np.mod(first + offset * np.arange(num_walks), 1) < p_halt
        lengths[halts & (lengths < 0)] = time
        time += 1
    return lengths


# Above 1 / 2 two antithetic walks may halt at once.
@pytest.mark.parametrize("p_halt", tiers([0.7, 0.1], 1))
@pytest.mark.parametrize("case", tiers(CASES, ["antithetic", "ensemble", "sigma"]))
def test_every_length_is_geometric(case, p_halt):
    lengths = draw(CASES[case], 5, p_halt)
    chances = p_halt * (1 - p_halt) ** np.arange(200)
    for of_walk in lengths.T:
        counts = np.bincount(of_walk, minlength=200)
        assert len(counts) == 200
        assert chi_square(counts, chances) > ALARM


@pytest.mark.parametrize(
    ("size", "offset", "p_halt"),
    tiers(
        [
            *((2, 0.5, 0.3), (4, 0.25, 0.25), (2, 0.5, 0.7)),
            *((2, 0.2, 0.3), (3, 0.15, 0.3), (3, 0.4, 0.4)),
        ],
        3,
    ),
)
def test_the_joint_law_is_that_of_termination_step_by_step(size, offset, p_halt):
    """Counts of all patterns of lengths 0, 1, 2, 3+: two samples, chi-square of homogeneity."""
    drawn = draw(partial(couplings.antithetic, offset=offset, size=size), size, p_halt)
    reference = step_by_step(np.random.default_rng(1), DRAWS, size, p_halt, offset)
    cells = [np.minimum(x, 3) @ 4 ** np.arange(size) for x in (drawn, reference)]
    a, b = (np.bincount(x, minlength=4**size).astype(float) for x in cells)
    impossible = (a == 0) & (b == 0)
    rare = (a + b < 20) & ~impossible
    a, b = (np.append(x[~rare & ~impossible], x[rare].sum()) for x in (a, b))
    kept = a + b > 0
    statistic = np.sum((a[kept] - b[kept]) ** 2 / (a[kept] + b[kept]))
    assert stats.chi2.sf(statistic, kept.sum() - 1) > ALARM
    assert kept.sum() > 5


@pytest.mark.parametrize("p_halt", [0.2, 0.45])
def test_antithetic_pairs_follow_the_table_of_the_paper(p_halt):
    """qGRF Eqs 34 and 48, and the conditional mean of Eq. 15."""
    first, second = draw("antithetic", 2, p_halt).T
    stay, each = (1 - 2 * p_halt) / (1 - p_halt), p_halt / (1 - p_halt)
    for m in range(4):
        given = second[first == m]
        j = np.arange(80)
        after = stay**m * (1 - p_halt) ** np.maximum(j - m - 1.0, 0) * p_halt
        law = np.where(j < m, stay**j * each, np.where(j == m, 0, after))
        assert abs(law.sum() - 1) < 1e-6
        assert chi_square(np.bincount(given, minlength=80)[:80], law) > ALARM
        z = (given.mean() - ((1 - 2 * p_halt) / p_halt + 2 * stay**m)) / stats.sem(given)
        assert abs(z) < stats.norm.isf(ALARM / 2)


def test_an_offset_of_p_times_one_minus_p_is_independence():
    """qGRF Eq. 92: the chance to go on together is then (1 - p)^2."""
    p_halt = 0.3
    first, second = draw(partial(couplings.antithetic, offset=p_halt * (1 - p_halt)), 2, p_halt).T
    cells = np.minimum(first, 4) * 5 + np.minimum(second, 4)
    marginal = np.append(p_halt * (1 - p_halt) ** np.arange(4), (1 - p_halt) ** 4)
    assert (
        chi_square(np.bincount(cells, minlength=25), np.outer(marginal, marginal).ravel()) > ALARM
    )


def test_no_two_of_an_ensemble_halt_at_once():
    lengths = draw("ensemble", 8, 0.25)
    groups = np.sort(lengths.reshape(DRAWS, 2, 4), axis=-1)
    assert (np.diff(groups, axis=-1) > 0).all(), "floor(1 / p) walkers"
    assert (lengths[:, :4] == lengths[:, 4:]).any(), "another group is another draw"


def test_sigma_matches_quantiles():
    """The chance of (l, k) is the overlap of their quantiles with the tiles (VRC Sec. 4.1)."""
    p_halt, order = 0.3, len(PERMUTATION)
    first, second = draw(couplings.sigma(PERMUTATION), 2, p_halt).T
    bounds = 1 - (1 - p_halt) ** np.arange(7.0)
    bounds = np.append(bounds, 1)

    def overlap(low, high, tile):
        return np.clip(np.minimum(high, (tile + 1) / order) - np.maximum(low, tile / order), 0, 1)

    law = np.zeros((7, 7))
    for q, matched in enumerate(PERMUTATION):
        of_first = overlap(bounds[:-1], bounds[1:], q)
        of_second = overlap(bounds[:-1], bounds[1:], matched)
        law += order * np.outer(of_first, of_second)
    assert abs(law.sum() - 1) < 1e-12
    cells = np.minimum(first, 6) * 7 + np.minimum(second, 6)
    assert chi_square(np.bincount(cells, minlength=49), law.ravel()) > ALARM


def test_nodes_are_independent_and_keep_their_draws():
    lengths = draw("antithetic", 4, 0.3)
    a, b = lengths[:-1, 0], lengths[1:, 0]
    assert abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(DRAWS) < 5
    fewer = couplings.lengths(jax.random.key(0), "antithetic", 10, 4, 0.3)
    np.testing.assert_array_equal(fewer, lengths[:10])
