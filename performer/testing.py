"""Statistical assertions about a coupling, for the tests of one of your own.

    from performer import testing

    testing.assert_gaussian_marginals(my_coupling, m=24, d=8)
    testing.assert_unbiased(my_coupling, m=24, d=8)
    testing.assert_mse(my_coupling, m=24, d=8, expected=performer.theory.kernel_mse(...))
    testing.assert_lower_mse(my_coupling, "orf", m=24, d=8)

A draw that is not (m, d), or not finite, fails every assertion. Each is a test with a stated
false-alarm rate: a right coupling fails it with at most the probability `FALSE_ALARM_RATE`, divided
among the comparisons it makes (Bonferroni). The keys are fixed by `seed`, so that a result never
changes by itself. A failure says where, and by how many standard errors.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import special, stats

from performer import couplings, features
from performer.typing import Coupling, hashable, jit_static

FALSE_ALARM_RATE = 1e-4
Kernel = Literal["softmax", "gaussian"]
_BATCH = 2000


def samples(coupling: str | Coupling, m: int, d: int, draws: int, seed: int = 0) -> np.ndarray:
    """That many draws, (draws, m, d) in float64."""
    return _draws(coupling, m, d, draws, seed).astype(np.float64)


def _draws(coupling: str | Coupling, m: int, d: int, draws: int, seed: int) -> np.ndarray:
    coupling = couplings.get(coupling)
    remembered = _drawn if hashable(coupling) else _drawn.__wrapped__
    return remembered(coupling, m, d, draws, seed)


@lru_cache(maxsize=2)
def _drawn(coupling: Coupling, m: int, d: int, draws: int, seed: int) -> np.ndarray:
    """In batches of one size, so that one program makes any number of draws."""
    keys = jax.random.split(jax.random.key(seed), draws)
    keys = jnp.concatenate([keys, jnp.broadcast_to(keys[:1], -draws % _BATCH)])
    batches = [
        np.asarray(_batch(coupling, m, d, keys[i : i + _BATCH])) for i in range(0, draws, _BATCH)
    ]
    return np.concatenate(batches)[:draws]


@jit_static(0, 1, 2)
def _batch(coupling: Coupling, m: int, d: int, keys: Array) -> Array:
    return jax.vmap(lambda key: coupling(key, m, d))(keys)


def assert_gaussian_marginals(
    coupling: str | Coupling, m: int, d: int, *, draws: int = 10_000, seed: int = 0
) -> None:
    """Every row is N(0, I_d), whatever the rows are to one another.

    For each row, Kolmogorov-Smirnov tests of its length against chi_d and of projections on fixed
    directions (the first axis, the diagonal, one oblique) against N(0, 1); and z tests of the mean
    of each coordinate and of the mean square length.

    Args:
        coupling: a name, or (key, m, d) -> (m, d).
        m: number of frequencies; take more than d, to see blocks.
        d: dimension.
        draws: independent draws; a shift of a marginal by 0.06 standard deviations is found.
        seed: of the draws.

    Raises:
        AssertionError: naming the row, the statistic, its value and the threshold.
    """
    drawn = samples(coupling, m, d, draws, seed)
    _assert_shape(drawn.shape[1:], (m, d))
    _assert_finite(int(np.sum(~np.isfinite(drawn))))
    oblique = np.random.default_rng(0).standard_normal(d)
    directions = {
        "first axis": np.eye(d)[0],
        "diagonal": np.ones(d) / np.sqrt(d),
        "oblique direction": oblique / np.linalg.norm(oblique),
    }
    level = FALSE_ALARM_RATE / (m * (2 + 2 * len(directions)))
    for row in range(m):
        x = drawn[:, row]
        length = np.linalg.norm(x, axis=-1)
        _assert_law(length, stats.chi(d).cdf, level, f"row {row}: the length is not chi_{d}")
        _assert_mean(length**2, float(d), level, f"row {row}: the mean square length is not {d}")
        for name, direction in directions.items():
            along = x @ direction
            where = f"row {row}: the projection on the {name}"
            _assert_mean(along, 0.0, level, f"{where} has not mean 0")
            _assert_law(along, stats.norm.cdf, level, f"{where} is not N(0, 1)")


def assert_unbiased(
    coupling: str | Coupling,
    m: int,
    d: int,
    *,
    kernel: Kernel = "softmax",
    draws: int = 10_000,
    seed: int = 0,
) -> None:
    """The mean of the estimates phi(x).phi(y) with positive features is the kernel.

    z tests at three pairs of points: on the first axis, on the diagonal and in general position,
    with |x + y| about 1, where a signed bias of the directions shows.

    Args:
        coupling: a name, or (key, m, d) -> (m, d).
        m: number of frequencies.
        d: dimension.
        kernel: "softmax" or "gaussian".
        draws: independent draws.
        seed: of the draws.

    Raises:
        AssertionError: naming the pair, the mean, the kernel, and the distance in standard errors.
    """
    names = tuple(_points(d))
    points = np.array([_points(d)[name] for name in names])
    estimates = _estimates(coupling, m, d, points, kernel, draws, seed)
    for name, (x, y), estimate in zip(names, points, estimates.T, strict=True):
        fault = f"{kernel} kernel at x, y {name}: the estimate is biased"
        _assert_mean(estimate, _exact(x, y, kernel), FALSE_ALARM_RATE / len(names), fault)


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
    """The mean squared error of the estimate at `general_points(d)` is `expected`, both ways.

    Args:
        coupling: a name, or (key, m, d) -> (m, d).
        m: number of frequencies.
        d: dimension.
        expected: the error, as from `performer.theory.kernel_mse`.
        kernel: "softmax" or "gaussian".
        draws: independent draws; the standard error is 1.4 to 2.2 / sqrt(draws) of
            the error for orf, simrf and pm-antithetic at m = 24, d = 8.
        seed: of the draws.

    Raises:
        AssertionError: with the measured error and the distance in standard errors.
    """
    squares = _squared_errors(coupling, m, d, kernel, draws, seed)
    _assert_mean(squares, expected, FALSE_ALARM_RATE, f"the {kernel} kernel's squared error is off")


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
    """The kernel estimate of `lower` has the smaller mean squared error, significantly.

    A z test of the difference at `general_points(d)`. Two couplings with the same error pass it
    with at most the probability `FALSE_ALARM_RATE`; a difference of 5 standard errors is found,
    some 10 to 15 / sqrt(draws) of the error.

    Raises:
        AssertionError: with both errors and the distance in standard errors.
    """
    a = _squared_errors(lower, m, d, kernel, draws, seed)
    b = _squared_errors(higher, m, d, kernel, draws, seed + 1)
    error = np.sqrt((a.var() + b.var()) / draws)
    score = (b.mean() - a.mean()) / error
    threshold = -special.ndtri(FALSE_ALARM_RATE)
    assert score > threshold, (
        f"the first coupling's squared error is not lower: {a.mean():.4g} against {b.mean():.4g},"
        f" {score:.1f} standard errors apart ({threshold:.1f} needed)"
    )


def general_points(d: int) -> tuple[np.ndarray, np.ndarray]:
    """Two points in general position, |x|^2 = |y|^2 = 1/4, at which errors are compared."""
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
    """phi(x).phi(y) for pairs of points (pairs, 2, d): (draws, pairs) in float64."""

    frequencies, pairs = _draws(coupling, m, d, draws, seed), jnp.asarray(points, jnp.float32)
    _assert_shape(frequencies.shape[1:], (m, d))
    _assert_finite(int(np.sum(~np.isfinite(frequencies))))
    batches = [
        np.asarray(_products(jnp.asarray(frequencies[i : i + _BATCH]), pairs, kernel))
        for i in range(0, draws, _BATCH)
    ]
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


def _assert_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert shape == expected, f"the coupling gives {shape}, expected {expected}"


def _assert_finite(bad: int) -> None:
    assert bad == 0, f"{bad} values of the coupling are not finite"


def _assert_mean(sample: np.ndarray, expected: float, level: float, fault: str) -> None:
    error = sample.std() / np.sqrt(len(sample))
    score = (sample.mean() - expected) / max(error, 1e-7 * max(abs(expected), 1e-7))
    threshold = -special.ndtri(level / 2)
    assert abs(score) < threshold, (
        f"{fault}: {sample.mean():.6g} instead of {expected:.6g}, {score:+.1f} standard errors away"
        f" ({threshold:.1f} allowed)"
    )


def _assert_law(
    sample: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray], level: float, fault: str
) -> None:
    result = stats.kstest(sample, cdf)
    assert result.pvalue > level, (
        f"{fault}: Kolmogorov-Smirnov distance {result.statistic:.4f} at"
        f" {result.statistic_location:.3g}, {result.statistic * np.sqrt(len(sample)):.1f} standard"
        f" errors, p = {result.pvalue:.1e}"
    )
