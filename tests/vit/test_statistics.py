"""The statistics of a comparison against SciPy, a simulation, and by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from vit.study import statistics


def test_paired_differences_are_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 8), rng.normal(0, 1, 8)
    ours, want = statistics.paired(a.tolist(), b.tolist()), stats.ttest_rel(a, b)
    interval = want.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(want.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))
    assert ours.mean == pytest.approx(np.mean(a - b))
    assert ours.deviation == pytest.approx(np.std(a - b, ddof=1))
    assert ours.count == 8
    mean, half = statistics.interval((a - b).tolist())
    assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))


def test_relative_errors_are_of_frobenius_norms():
    """|(0, 3, 4)| / |(0, 6, 8)|; NumPy's in float64, so that small ones are not rounded to 0."""
    exact = 2 * np.array([[0.0, 3.0, 4.0]])
    assert statistics.relative_error(0.5 * exact, exact) == pytest.approx(0.5)
    assert statistics.relative_error((1 + 1e-12) * exact, exact) == pytest.approx(1e-12, rel=1e-3)
    assert float(statistics.relative_error(jnp.asarray(1.5 * exact), exact)) == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [1, 1e-3])
def test_differences_that_differ_by_rounding_are_equal(scale):
    """One more of ten right for each seed: p was 1e-31, and two seeds were "needed"."""
    a, b = ([scale * x for x in values] for values in ([0.6, 0.7, 0.8], [0.5, 0.6, 0.7]))
    differences = [x - y for x, y in zip(a, b, strict=True)]
    assert len(set(differences)) > 1
    for given in (a, b), (differences, [0.0] * 3):
        assert np.isnan(statistics.paired(*given).p_value)
    assert np.isnan(statistics.paired([], []).p_value)
    assert statistics.paired(a, [*b[:2], b[2] * (1 + 1e-7)]).p_value < 1e-9


def test_holm_by_hand():
    """Sorted 0.01 0.02 0.03 0.6: times 4, 3, 2, 1, and never less than the one before."""
    corrected = statistics.holm([0.6, 0.01, float("nan"), 0.03, 0.02])
    assert corrected[0] == pytest.approx(0.6)
    assert corrected[1] == pytest.approx(0.04)
    assert np.isnan(corrected[2])
    assert corrected[3] == corrected[4] == pytest.approx(0.06)
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0, 8.0])
def test_seeds_needed_is_the_first_count_that_suffices(ratio):
    count = statistics.seeds_needed(ratio, 1.0)
    assert statistics.power(ratio, 1.0, count) >= 0.8
    assert count == 2 or statistics.power(ratio, 1.0, count - 1) < 0.8


@pytest.mark.parametrize(("ratio", "count"), [(8.0, 2), (5.6234, 3), (17.7828, 8), (0.02, 99)])
def test_power_is_the_mean_over_the_spread_of_the_seeds(ratio, count):
    """Given the deviation of the sample the mean is normal; its variance is chi-squared."""
    freedom = count - 1
    share = (np.arange(200_000) + 0.5) / 200_000
    scale = np.sqrt(stats.chi2.ppf(share, freedom) / freedom)
    limit, shift = stats.t.ppf(0.975, freedom) * scale, ratio * count**0.5
    found = stats.norm.sf(limit - shift) + stats.norm.cdf(-limit - shift)
    assert statistics.power(ratio, 1.0, count) == pytest.approx(np.mean(found), abs=1e-5)


def test_seeds_needed_of_cohens_tables():
    """A paired effect of half a standard deviation: 34 pairs (Cohen 1988; G*Power)."""
    assert statistics.seeds_needed(0.5, 1.0) == 34
    for effect, deviation in [(0.0, 1.0), (1.0, 0.0), (1.0, float("nan"))]:
        with pytest.raises(ValueError, match="must be positive"):
            statistics.seeds_needed(effect, deviation)


def test_what_few_seeds_can_detect():
    """Three seeds of deviation 0.016: 35 seeds for a gain of 0.008, but anything from 11 to 1,288.

    The interval covers the deviation in 95% of 20,000 samples, within three standard errors.
    """
    deviation, level = 0.0163, statistics.LEVEL / 4
    ends = statistics.deviation_interval(deviation, 3)
    assert [statistics.seeds_needed(0.008, x) for x in (deviation, *ends)] == [35, 11, 1289]
    assert statistics.seeds_needed(0.008, deviation, level) > 35
    for count in (2, 3, 30):
        smallest = statistics.detectable(deviation, count, level)
        assert statistics.power(smallest, deviation, count, level) == pytest.approx(0.8)
    found = np.random.default_rng(0).normal(size=(20_000, 4)).std(axis=1, ddof=1)
    low, high = np.array(statistics.deviation_interval(1.0, 4))
    covered = np.mean((found * low < 1) & (found * high > 1))
    assert covered == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / 20_000) ** 0.5)


def test_verdict():
    """Lower and higher by far, and one that shows nothing: the interval of SciPy, in percent."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(10, 0.1, (2, 12))
    said = statistics.verdict("new", "old", {"x": (a - 5, b), "y": (a + 5, b), "z": (a, b)})
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    low, high = 100 * np.array([interval.low, interval.high]) / b.mean()
    assert said == (
        "new below old in 1 and above in 1 of 3 cases (paired t-tests, Holm, 5%); in 1 without a"
        f" difference the 95% intervals lie in {low:+.2g}% to {high:+.2g}% of old"
    )
    p = 0.03  # alone it is below the level, beside a second case twice as much
    half = stats.t.isf(p / 2, 11) / np.sqrt(12)
    noise = (a - a.mean()) / a.std(ddof=1)
    pair = 1 + noise + half, np.ones(12)
    assert "above in 1 of 1" in statistics.verdict("new", "old", {"x": pair})
    assert "above in 0 of 2" in statistics.verdict("new", "old", {"x": pair, "y": (a, b)})
