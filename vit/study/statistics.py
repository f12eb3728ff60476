"""Statistics of few seeds: means, paired differences, corrected p-values, power.

Two settings trained with the same seeds differ by d_s = a_s - b_s for seed s; the effect of the
seed cancels. The d_s are assumed normal and independent: t-tests with n - 1 degrees of freedom.
Draws and splits are treated in the same way.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats
from scipy.optimize import brentq

Values = Sequence[float] | np.ndarray

LEVEL = 0.05
"""Level of the tests, after Holm's correction."""
POWER = 0.8
"""Chance of finding a difference with which seeds are planned."""
ROUNDING = 1e-9
"""Standard error, relative to the largest value, up to which differences are equal."""


class Difference(NamedTuple):
    """A paired difference over n seeds."""

    mean: float
    standard_error: float
    low: float
    high: float
    """The ends of the 95% confidence interval."""
    p_value: float
    """Two-sided, of the paired t-test; not corrected."""
    deviation: float
    """Standard deviation of the d_s."""
    count: int


def mean_and_error(values: Values) -> tuple[float, float]:
    """Return the mean and its standard error; NaN where the values are too few."""
    x = np.asarray(values, np.float64)
    mean = float(np.mean(x)) if len(x) else float("nan")
    return mean, float(np.std(x, ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def plus_minus(mean: float, error: float) -> str:
    """Format mean and error with as many decimals as the error needs: "0.988 ± 0.012"."""
    if np.isnan(error):
        return f"{mean:.4g}"
    digits = max(1 - int(np.floor(np.log10(error))), 0) if error > 0 else 4
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def estimate(values: Values) -> str:
    """Format the mean and its standard error."""
    return plus_minus(*mean_and_error(values))


def relative_error(estimate: Any, exact: Any) -> Any:
    """Return |K^ - K|_F / |K|_F, the relative Frobenius error of arrays of any shape.

    NumPy's arrays are computed in their own precision, float64.
    """
    library = jnp if isinstance(estimate, jax.Array) else np
    return library.linalg.norm(estimate - exact) / library.linalg.norm(exact)


def interval(values: Values) -> tuple[float, float]:
    """Return the mean and half of its 95% confidence interval, Student's t over the values."""
    mean, error = mean_and_error(values)
    return mean, float(stats.t.ppf(0.975, max(len(values) - 1, 1))) * error


def ratio(values: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Return the ratio of two means, and its standard error (delta method, paired values)."""
    value = values.mean() / reference.mean()
    residuals = values - value * reference
    return float(value), float(residuals.std(ddof=1) / np.sqrt(len(values)) / reference.mean())


def paired(a: Values, b: Values) -> Difference:
    """Test a - b, seed by seed; NaN for a single seed or without spread.

    Equal differences of accuracies, such as 0.6 - 0.5 and 0.8 - 0.7, have a spread of rounding.
    """
    d = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    mean, error = mean_and_error(d.tolist())
    if not error > ROUNDING * max(np.max(np.abs(x), initial=0) for x in (a, b)):
        nothing = float("nan")
        return Difference(mean, error, nothing, nothing, nothing, error, len(d))
    t = stats.t(len(d) - 1)
    half = float(t.ppf(0.975)) * error
    p = float(2 * t.sf(abs(mean) / error))
    return Difference(mean, error, mean - half, mean + half, p, float(np.std(d, ddof=1)), len(d))


def holm(p_values: Sequence[float]) -> list[float]:
    """Apply Holm's correction (1979): the chance of any false alarm is at most the level.

    The i-th smallest of n is multiplied by n - i + 1; a corrected value is at least the one before.
    A NaN (nothing could be tested) stays one and is not counted.
    """
    p = np.asarray(p_values, np.float64)
    tested = np.flatnonzero(~np.isnan(p))
    corrected, largest = p.copy(), 0.0
    for rank, i in enumerate(tested[np.argsort(p[tested])]):
        largest = max(largest, float(min(1.0, p[i] * (len(tested) - rank))))
        corrected[i] = largest
    return corrected.tolist()


def verdict(name: str, other: str, cases: Mapping[str, tuple[Any, Any]]) -> str:
    """Report how often one differs from another, and by how much at most elsewhere.

    Args:
        name: first of each pair.
        other: second of each pair.
        cases: (values, values of the other) by the name of the case, paired.
    """
    tests = {case: paired(a, b) for case, (a, b) in cases.items()}
    corrected = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    shown = [np.sign(tests[case].mean) for case, p in corrected.items() if p < LEVEL]
    said = (
        f"{name} below {other} in {shown.count(-1)} and above in {shown.count(1)}"
        f" of {len(tests)} cases (paired t-tests, Holm, {LEVEL:.0%})"
    )
    ends = [
        100 * np.array([tests[case].low, tests[case].high]) / abs(np.mean(cases[case][1]))
        for case, p in corrected.items()
        if p >= LEVEL  # not NaN
    ]
    if ends:
        low, high = np.min(ends), np.max(ends)
        said += f"; in {len(ends)} without a difference the 95% intervals lie in"
        said += f" {low:+.2g}% to {high:+.2g}% of {other}"
    return said


def power(effect: float, deviation: float, count: int, level: float = LEVEL) -> float:
    """Return the chance that a two-sided paired t-test over `count` seeds finds a difference.

    The square of the statistic has the noncentral F distribution. SciPy's noncentral t is NaN for
    some large effects.
    """
    freedom, shift = count - 1, effect / deviation * np.sqrt(count)
    limit = stats.t.ppf(1 - level / 2, freedom)
    return float(stats.ncf.sf(limit**2, 1, freedom, shift**2))


def seeds_needed(effect: float, deviation: float, level: float = LEVEL) -> int:
    """Return the fewest seeds (at least 2) that detect a difference with a chance of 80%.

    Raises:
        ValueError: when the effect or the deviation is not positive.
    """
    if not (effect > 0 and deviation > 0):
        raise ValueError(f"effect={effect} and deviation={deviation} must be positive")
    counts = range(2, 10**6)  # power grows with the count
    return 2 + bisect_left(counts, POWER, key=lambda n: power(effect, deviation, n, level))


def detectable(deviation: float, count: int, level: float = LEVEL) -> float:
    """Return the smallest difference that `count` seeds detect with a chance of 80%."""
    high = 1.0
    while power(high, 1, count, level) < POWER:
        high *= 2
    ratio: Any = brentq(lambda effect: power(effect, 1, count, level) - POWER, 0, high)
    return deviation * ratio


def deviation_interval(deviation: float, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a standard deviation of `count` normal values."""
    ends = stats.chi2.ppf([0.975, 0.025], count - 1)
    low, high = deviation * np.sqrt((count - 1) / ends)
    return float(low), float(high)


def level_of_look(look: int) -> float:
    """Return the level of the k-th look at growing data, LEVEL / (k (k + 1)): they sum to LEVEL."""
    return LEVEL / (look * (look + 1))
