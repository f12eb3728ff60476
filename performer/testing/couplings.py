"""Statistical assertions about a coupling, also one of your own.

    from performer import testing

    testing.assert_gaussian_marginals(my_coupling, m=24, d=8)
    testing.assert_unbiased(my_coupling, m=24, d=8)
    testing.assert_mse(my_coupling, m=24, d=8, expected=performer.theory.kernel_mse(...))
    testing.assert_lower_mse(my_coupling, "orf", m=24, d=8)

Draws that are no array of floats (m, d), not finite, or the same for all keys fail every assertion.
A correct coupling fails an assertion with at most the probability `FALSE_ALARM_RATE`, divided among
its comparisons (Bonferroni). The keys are fixed by `seed`, so that results are reproducible. A
failure reports where, and by how many standard errors.

Estimates with few positive features, and more so their squared errors, have heavy right tails.
Samples without the rare large values have too small a mean and standard deviation: for m <= 2 a z
test of the squared error raises 5 to 15 times its nominal alarms. Therefore scores of means are
corrected for skewness if that lowers them (Hall 1992), and `assert_mse` uses a lower bound of the
standard deviation from the log-normal distribution of a feature. Checked over repeated keys, at
nominal rates of 5e-2 to 1e-4, for m = 1, 2 and 4, iid, coupled and antithetic: `assert_mse` keeps
its rate with 200 to 20,000 draws, `assert_unbiased` with 2,000 or more (within errors of counting).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special, stats

from performer import couplings, features
from performer.features import Kernel
from performer.typing import Coupling, hashable, jit_static

FALSE_ALARM_RATE = 1e-4
_BATCH = 2000


def samples(coupling: str | Coupling, m: int, d: int, draws: int, seed: int = 0) -> np.ndarray:
    """Return independent draws (draws, m, d) in float64; AssertionError as all assertions."""
    return _draws(coupling, m, d, draws, seed).astype(np.float64)


def _draws(coupling: str | Coupling, m: int, d: int, draws: int, seed: int) -> np.ndarray:
    coupling = couplings.get(coupling)
    drawn = (_drawn if hashable(coupling) else _drawn.__wrapped__)(coupling, m, d, draws, seed)
    bad, is_random = np.sum(~np.isfinite(drawn)), np.any(drawn[1:] != drawn[:1])
    assert bad == 0, f"{bad} values of the coupling are not finite"
    assert draws < 2 or is_random, f"the coupling returns the same frequencies for {draws} keys"
    return drawn


@lru_cache(maxsize=2)
def _drawn(coupling: Coupling, m: int, d: int, draws: int, seed: int) -> np.ndarray:
    """Draw in batches of one size: one program for any number of draws."""
    keys = jax.random.split(jax.random.key(seed), draws)
    keys = jnp.concatenate([keys, jnp.broadcast_to(keys[:1], -draws % _BATCH)])
    batches = [_batch(coupling, m, d, part) for part in keys.reshape(-1, _BATCH)]
    return np.concatenate(batches)[:draws]


@jit_static(0, 1, 2)
def _batch(coupling: Coupling, m: int, d: int, keys: Array) -> Array:
    def one(key):
        drawn = coupling(key, m, d)
        floats = hasattr(drawn, "dtype") and jnp.issubdtype(drawn.dtype, jnp.floating)
        got = f"{drawn.dtype}{drawn.shape}" if hasattr(drawn, "dtype") else type(drawn).__name__
        fits = floats and drawn.shape == (m, d)
        assert fits, f"the coupling returns {got}, expected floats {(m, d)}"
        return drawn

    return jax.vmap(one)(keys)


def assert_gaussian_marginals(
    coupling: str | Coupling, m: int, d: int, *, draws: int = 10_000, seed: int = 0
) -> None:
    """Assert that every row is N(0, I_d), for any dependence between rows.

    Tests of each row: exact tests of the d means and d (d + 1) / 2 second moments of its
    coordinates and of its mean square length; Kolmogorov-Smirnov tests of each coordinate, of the
    projections on the diagonal and on an oblique direction, and of the length against chi_d.
    `FALSE_ALARM_RATE` is that of all m (d (d + 1) / 2 + 2 d + 6) comparisons together.

    Power: with 10,000 draws, m = 16 and d = 64, the following errors are found with a probability
    of at least 95%: .08 in a mean, a correlation of .08, .12 in a variance, and .042 in a
    distribution function (.057 for a uniform coordinate of variance 1). These errors scale with
    1 / sqrt(draws).

    Args:
        coupling: a name, or (key, m, d) -> (m, d).
        m: number of frequencies; use more than d, to test several blocks.
        d: dimension.
        draws: number of independent draws.
        seed: seed of the draws.

    Raises:
        AssertionError: with the row, the statistic, its value and the threshold.
    """
    drawn = samples(coupling, m, d, draws, seed)
    oblique = np.random.default_rng(0).standard_normal(d)
    directions = np.stack([*np.eye(d), np.ones(d) / np.sqrt(d), oblique / np.linalg.norm(oblique)])
    places = [*(f"axis {i}" for i in range(d)), "the diagonal", "an oblique direction"]
    level = FALSE_ALARM_RATE / (m * (d * (d + 1) // 2 + 2 * len(directions) + 2))
    for row in range(m):
        x, name = drawn[:, row], f"row {row}: the"
        length, along = np.linalg.norm(x, axis=-1), x @ directions.T
        distribution = stats.chi(d).cdf
        _assert_laws(length[:, None], distribution, level, [f"{name} length is not chi_{d}"])
        means = np.mean(along, axis=0)
        i = np.argmax(abs(means))
        fault = f"{name} projection on {places[i]} has the mean {means[i]:.4g} instead of 0"
        _assert_score(np.sqrt(draws) * means[i], level, fault)
        faults = [f"{name} projection on {place} is not N(0, 1)" for place in places]
        _assert_laws(along, special.ndtr, level, faults)
        moments = x.T @ x / draws
        squares = np.diag(moments)
        # For i != j given coordinate j: a sum of N(0, x_j^2).
        scores = np.sqrt(draws) * np.tril(moments / np.sqrt(squares), k=-1)
        scores += np.diag(_of_squares(squares, draws))
        i, j = np.unravel_index(np.argmax(abs(scores)), scores.shape)
        fault = f"{name} coordinates {i} and {j} have the mean product {moments[i, j]:.4g}"
        _assert_score(scores[i, j], level, f"{fault} instead of {int(i == j)}")
        mean = np.mean(squares)
        fault = f"{name} mean square length is {d * mean:.6g} instead of {d}"
        _assert_score(_of_squares(mean, draws * d), level, fault)


def assert_unbiased(
    coupling: str | Coupling,
    m: int,
    d: int,
    *,
    kernel: Kernel = "softmax",
    draws: int = 10_000,
    seed: int = 0,
) -> None:
    """Assert that the mean of the estimates phi(x).phi(y) with positive features is the kernel.

    z tests at three pairs of points: on the first axis, on the diagonal and in general position,
    with |x + y| about 1, where a signed bias of the directions is visible.

    Args:
        kernel: "softmax" or "gaussian". The assertions about errors take the Gaussian kernel by
            default, as the papers do.

    The other arguments are those of `assert_gaussian_marginals`.

    Raises:
        AssertionError: with the pair, the mean, the kernel, and the distance in standard errors.
    """
    points = _points(d)
    pairs = np.array([*points.values()])
    estimates = _estimates(coupling, m, d, pairs, kernel, draws, seed)
    for name, (x, y), estimate in zip(points, pairs, estimates.T, strict=True):
        fault = f"{kernel} kernel at x, y {name}: the estimate is biased"
        _assert_mean(estimate, _exact(x, y, kernel), FALSE_ALARM_RATE / len(points), fault)


def assert_mse(
    coupling: str | Coupling,
    m: int,
    d: int,
    expected: float,
    *,
    kernel: Kernel = "gaussian",
    draws: int = 20_000,
    seed: int = 0,
) -> None:
    """Assert that the mean squared error at `general_points(d)` is `expected` (two-sided).

    Args:
        expected: the error, as from `performer.theory.kernel_mse`.
        kernel: "softmax" or "gaussian".
        draws: number of independent draws. The relative standard error is 1.8 to 2.2 / sqrt(draws)
            for orf, simrf and pm-antithetic at m = 24, d = 8, and 3.9 / sqrt(draws) for m <= 2. A
            deviation of 7 standard errors is found.

    The other arguments are those of `assert_gaussian_marginals`.

    Raises:
        AssertionError: with the measured error and the distance in standard errors.
    """
    squares = _squared_errors(coupling, m, d, kernel, draws, seed)
    fault = f"the {kernel} kernel's squared error is off"
    least = expected * _relative_deviation(m, d)
    _assert_mean(squares, expected, FALSE_ALARM_RATE, fault, least)


def assert_lower_mse(
    lower: str | Coupling,
    higher: str | Coupling,
    m: int,
    d: int,
    *,
    kernel: Kernel = "gaussian",
    draws: int = 20_000,
    seed: int = 0,
) -> None:
    """Assert that the mean squared error of `lower` is significantly below that of `higher`.

    A z test of the difference at `general_points(d)`. Couplings whose errors are alike pass with at
    most the probability `FALSE_ALARM_RATE` (5 to 8 times that for equal means and a far
    heavier tail of `lower`). A difference of 5 standard errors, about 10 to 15 / sqrt(draws) of the
    error, is found.

    Raises:
        AssertionError: with both errors and the distance in standard errors.
    """
    a = _squared_errors(lower, m, d, kernel, draws, seed)
    b = _squared_errors(higher, m, d, kernel, draws, seed + 1)
    score = _mean_score(b - a, 0.0)
    threshold = -special.ndtri(FALSE_ALARM_RATE)
    assert score > threshold, (
        f"the first coupling's squared error is not lower: {a.mean():.4g} against {b.mean():.4g},"
        f" {score:.1f} standard errors apart ({threshold:.1f} needed)"
    )


def general_points(d: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two points in general position, |x|^2 = |y|^2 = 1/4, for comparisons of errors."""
    x, y = np.random.default_rng(1).standard_normal((2, d))
    return x / np.linalg.norm(x) / 2, y / np.linalg.norm(y) / 2


def _points(d: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    axis, diagonal = np.eye(d)[0] / 2, np.ones(d) / np.sqrt(d) / 2
    return {
        "on the first axis": (axis, axis),
        "on the diagonal": (diagonal, diagonal),
        "in general position": general_points(d),
    }


def _exact(x: np.ndarray, y: np.ndarray, kernel: Kernel) -> float:
    return float(np.exp(x @ y) if kernel == "softmax" else np.exp(-np.sum((x - y) ** 2) / 2))


def _estimates(
    coupling: str | Coupling,
    m: int,
    d: int,
    points: np.ndarray,
    kernel: Kernel,
    draws: int,
    seed: int,
) -> np.ndarray:
    """Return phi(x).phi(y) for pairs of points (pairs, 2, d): (draws, pairs) in float64."""
    frequencies, pairs = _draws(coupling, m, d, draws, seed), jnp.asarray(points, jnp.float32)
    batches_of_draws = (jnp.asarray(frequencies[i : i + _BATCH]) for i in range(0, draws, _BATCH))
    batches = [np.asarray(_products(part, pairs, kernel)) for part in batches_of_draws]
    return np.concatenate(batches).astype(np.float64)


@partial(jax.jit, static_argnames="kernel")
def _products(
    frequencies: Float[Array, "draws m d"], points: Float[Array, "pairs 2 d"], kernel: Kernel
) -> Float[Array, "draws pairs"]:
    phi = jax.vmap(lambda w: features.positive(points, w, kernel=kernel))(frequencies)
    return jnp.sum(phi[:, :, 0] * phi[:, :, 1], axis=-1)


def _squared_errors(
    coupling: str | Coupling, m: int, d: int, kernel: Kernel, draws: int, seed: int
) -> np.ndarray:
    x, y = general_points(d)
    estimates = _estimates(coupling, m, d, np.array([[x, y]]), kernel, draws, seed)
    return (estimates[:, 0] - _exact(x, y, kernel)) ** 2


def _relative_deviation(m: int, d: int) -> float:
    """Return the standard deviation of a squared error over its mean, for m / 2 independent rows.

    A row gives a log-normal number; dependent rows may be worth half as many.
    """
    x, y = general_points(d)
    e = np.exp(np.sum((x + y) ** 2))
    kurtosis = (e**6 - 4 * e**3 + 6 * e - 3) / (e - 1) ** 2
    return float(np.sqrt(2 + (kurtosis - 3) / max(m / 2, 1)))


def _mean_score(sample: np.ndarray, expected: float, least: float = 0.0) -> float:
    """Return (mean - expected) in standard errors, corrected for the skewness of the sample.

    By Hall's transformation (1992, On the removal of skewness by transformation) if that makes it
    smaller. `least` is a lower bound of the standard deviation.
    """
    n, mean = len(sample), sample.mean()
    rounding = 1e-7 * np.sqrt(n) * max(abs(expected), 1e-7)
    deviation = max(sample.std(), least, rounding)
    score = (mean - expected) / deviation
    skewness = np.mean(((sample - mean) / deviation) ** 3)
    corrected = score + skewness * score**2 / 3 + skewness**2 * score**3 / 27 + skewness / (6 * n)
    return float(np.sqrt(n) * min(score, corrected, key=abs))


def _of_squares(mean: Any, number: int) -> Any:
    """Return the normal score of a mean of `number` squares of N(0, 1) (Wilson, Hilferty 1931)."""
    variance = 2 / (9 * number)
    return (np.cbrt(mean) - 1 + variance) / np.sqrt(variance)


def _assert_mean(
    sample: np.ndarray, expected: float, level: float, fault: str, least: float = 0.0
) -> None:
    fault = f"{fault}: {sample.mean():.6g} instead of {expected:.6g}"
    _assert_score(_mean_score(sample, expected, least), level, fault)


def _assert_score(score: Any, level: float, fault: str) -> None:
    threshold = -special.ndtri(level / 2)
    assert abs(score) < threshold, (
        f"{fault}, {score:+.1f} standard errors away ({threshold:.1f} allowed)"
    )


def _assert_laws(
    samples: Float[np.ndarray, "n k"],
    cdf: Callable[[np.ndarray], np.ndarray],
    level: float,
    faults: Sequence[str],
) -> None:
    """Kolmogorov-Smirnov tests of the columns by Massart's bound (1990), valid for any n."""
    n, ordered = len(samples), np.sort(samples, axis=0)
    distribution, below = cdf(ordered), np.arange(n)[:, None] / n
    distances = np.maximum(distribution - below, below + 1 / n - distribution)
    at, i = np.unravel_index(np.argmax(distances), distances.shape)
    fault = f"{faults[int(i)]}: Kolmogorov-Smirnov distance {distances[at, i]:.4f}"
    score, threshold = np.sqrt(n) * distances[at, i], np.sqrt(np.log(2 / level) / 2)
    assert score < threshold, (
        f"{fault} at {ordered[at, i]:.3g}, {score:.1f} standard errors ({threshold:.1f} allowed)"
    )
