"""The assertions of performer.testing find planted faults, and say by how much."""

import jax
import jax.numpy as jnp
import pytest
from scipy import stats

from performer import couplings, directions, norms, testing, theory

M, D = 16, 8


def haar_without_signs(key, lengths, d):
    """What most public code does: the Q of a QR factorisation as it comes."""
    return jnp.linalg.qr(jax.random.normal(key, (d, d)))[0][: len(lengths)]


def unrotated_simplex(key, lengths, d):
    return directions.multiply_simplex(jnp.eye(d)).T[: len(lengths)]


def one_length_for_all_blocks(key, m, d):
    lengths_key, directions_key = jax.random.split(key)
    unit = couplings.Blocks(directions.orthogonal, lambda k, m, d: jnp.ones(m))
    return norms.independent(lengths_key, 1, d) * unit(directions_key, m, d)


def lengths_of_one_degree_less(key, m, d):
    return norms.independent(key, m, d - 1)


@pytest.mark.parametrize(
    ("parts", "marginals", "bias"),
    [
        (
            (haar_without_signs, norms.independent),
            "standard errors",
            r"softmax kernel at x, y .*biased.* standard errors",
        ),
        (
            (directions.orthogonal, lengths_of_one_degree_less),
            "row 0: the length is not chi_8: .* standard errors",
            "biased",
        ),
        ((unrotated_simplex, norms.independent), "row 0: the projection", None),
    ],
    ids=["a dropped sign", "lengths of one degree less", "a simplex that is not rotated"],
)
def test_faults_of_a_part_are_found(parts, marginals, bias):
    coupling = couplings.Blocks(*parts)
    with pytest.raises(AssertionError, match=marginals):
        testing.assert_gaussian_marginals(coupling, M, D)
    if bias:
        with pytest.raises(AssertionError, match=bias):
            testing.assert_unbiased(coupling, M, D)


LONG = [pytest.mark.thorough, pytest.mark.optimised("draws for long else")]


def with_row_1(change):
    """iid, but for one row."""

    def coupling(key, m, d):
        draw = couplings.get("iid")(key, m, d)
        return draw.at[1].set(change(draw[1]))

    return coupling


@pytest.mark.parametrize(
    ("change", "d", "message"),
    [
        pytest.param(
            *(lambda x: x.at[40].add(0.3), 64, "projection on axis 40 has the mean 0.3"), marks=LONG
        ),
        (
            lambda x: x.at[5].set(0.5 * x[2] + 0.75**0.5 * x[5]),
            8,
            "coordinates 5 and 2 have the mean product 0.[45]",
        ),
        pytest.param(
            *(lambda x: x.at[3].set(0.88**0.5 * x[3]), 64, "coordinates 3 and 3 have the mean pro"),
            marks=LONG,
        ),
        (
            lambda x: x.at[3].set(3**0.5 * (2 * jax.scipy.special.ndtr(x[3]) - 1)),
            8,
            r"projection on axis 3 is not N\(0, 1\): Kolmogorov",
        ),
    ],
    ids=["shifted", "correlated", "narrow", "uniform"],
)
def test_faults_of_one_coordinate_are_found(change, d, message):
    """Among 58 comparisons of a row (d = 8) or 2,214 (d = 64)."""
    with pytest.raises(AssertionError, match=f"row 1: the {message}.* standard errors"):
        testing.assert_gaussian_marginals(with_row_1(change), 2, d)


@pytest.mark.thorough
def test_one_length_shared_by_all_blocks_is_found():
    """Each row is Gaussian, so only the error tells: PM has a length for each block."""
    x, y = testing.general_points(D)
    expected = float(theory.kernel_mse("pm", x, y, 4 * D))
    testing.assert_mse(couplings.get("pm"), 4 * D, D, expected)
    testing.assert_gaussian_marginals(one_length_for_all_blocks, 10, D, draws=2000)
    with pytest.raises(AssertionError, match="squared error is off: .* standard errors away"):
        testing.assert_mse(one_length_for_all_blocks, 4 * D, D, expected)


def test_equal_couplings_are_not_lower():
    with pytest.raises(AssertionError, match="not lower: .* standard errors apart"):
        testing.assert_lower_mse("orf", couplings.get("orf"), M, D)  # by its name, too
    with pytest.raises(AssertionError, match="not lower"):
        testing.assert_lower_mse("iid", "simrf", M, D)


def alarms(check, number):
    """How many of so many calls, with seeds of their own, fail."""
    failed = 0
    for seed in range(number):
        try:
            check(seed)
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.thorough
def test_marginals_raise_the_stated_alarms(monkeypatch):
    """5% of 200 samples stated, at most 23 alarms allowed (1e-4); three times the rate makes 30.

    The rows of a draw depend on one another, through their directions and as w and -w.
    """
    monkeypatch.setattr(testing.couplings, "FALSE_ALARM_RATE", 0.05)

    def check(seed):
        testing.assert_gaussian_marginals("pm-antithetic", 4, 2, draws=300, seed=seed)

    assert alarms(check, 200) <= stats.binom(200, 0.05).isf(1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "m", "d"),
    [("pm-antithetic", 4, 3), ("iid", 1, 1), pytest.param("orf", 2, 3, marks=pytest.mark.slow)],
)
def test_squared_errors_raise_the_stated_alarms(name, m, d, monkeypatch):
    """1% of 3000 samples stated, at most 52 alarms allowed (1e-4).

    These have 200 draws each: of a z test 8% to 21% fail, 2% to 3% without the least deviation.
    """
    expected = float(theory.kernel_mse(name, *testing.general_points(d), m))
    drawn = testing.couplings._squared_errors(name, m, d, "gaussian", 200 * 3000, 0).reshape(
        3000, 200
    )
    monkeypatch.setattr(testing.couplings, "FALSE_ALARM_RATE", 0.01)
    monkeypatch.setattr(testing.couplings, "_squared_errors", lambda *args: drawn[args[-1]])

    def check(seed):
        testing.assert_mse(name, m, d, expected, draws=200, seed=seed)

    assert alarms(check, 3000) <= stats.binom(3000, 0.01).isf(1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("m", [24, 1, 2])
def test_errors_that_are_off_are_found(m):
    """By 7 standard errors and more, in either direction."""
    expected = float(theory.kernel_mse("orf", *testing.general_points(D), m))
    testing.assert_mse("orf", m, D, expected)
    for factor in (0.8, 1.25):
        with pytest.raises(AssertionError, match="squared error is off: .* standard errors away"):
            testing.assert_mse("orf", m, D, factor * expected)


def one_in_a_hundred(bad):
    def coupling(key, m, d):
        draw = couplings.get("iid")(key, m, d)
        return jnp.where(jax.random.uniform(key) < 0.01, draw.at[0].set(bad), draw)

    return coupling


def taller(key, m, d):
    return couplings.get("iid")(key, m + 1, d)


def complex_numbers(key, m, d):
    return jnp.fft.ifft(couplings.get("iid")(key, m, d))


def without_its_key(key, m, d):
    return couplings.get("iid")(jax.random.key(0), m, d)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        (one_in_a_hundred(jnp.nan), "values of the coupling are not finite"),
        (one_in_a_hundred(-jnp.inf), "values of the coupling are not finite"),
        (taller, r"returns float32\(3, 3\), expected floats \(2, 3\)"),
        (complex_numbers, r"returns complex64\(2, 3\), expected floats \(2, 3\)"),
        (lambda key, m, d: None, r"returns NoneType, expected floats \(2, 3\)"),
        (without_its_key, "returns the same frequencies for 1000 keys"),
    ],
    ids=["NaN", "infinite", "of another shape", "complex", "None", "of one key"],
)
def test_bad_draws_fail_every_assertion(coupling, message):
    iid = couplings.get("iid")
    for check in (
        lambda: testing.assert_gaussian_marginals(coupling, 2, 3, draws=1000),
        lambda: testing.assert_unbiased(coupling, 2, 3, draws=1000),
        lambda: testing.assert_mse(coupling, 2, 3, 0.1, draws=1000),
        lambda: testing.assert_lower_mse(coupling, iid, 2, 3, draws=1000),
        lambda: testing.assert_lower_mse(iid, coupling, 2, 3, draws=1000),
    ):
        with pytest.raises(AssertionError, match=message):
            check()
