"""The assertions of performer.testing find planted faults, and say by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from performer import couplings, directions, norms, testing, theory

M, D = 16, 8


def test_a_name_is_a_coupling():
    np.testing.assert_array_equal(
        testing.samples("pm", 4, 3, 5), testing.samples(couplings.get("pm"), 4, 3, 5)
    )
    with pytest.raises(AssertionError, match="not lower"):
        testing.assert_lower_mse("orf", "orf", 4, 3, draws=2000)


def haar_without_signs(key, lengths, d):
    """What most public code does: the Q of a QR factorisation as it comes."""
    return jnp.linalg.qr(jax.random.normal(key, (d, d)))[0][: len(lengths)]


def unrotated_simplex(key, lengths, d):
    return directions.multiply_simplex(jnp.eye(d)).T[: len(lengths)]


def one_length_for_all_blocks(key, m, d):
    lengths_key, directions_key = jax.random.split(key)
    unit = couplings.Blocks(directions.orthogonal, lambda k, m, d: jnp.ones(m))
    return norms.independent(lengths_key, 1, d) * unit(directions_key, m, d)


def test_a_dropped_sign_is_found():
    coupling = couplings.Blocks(haar_without_signs, norms.independent)
    with pytest.raises(AssertionError, match="standard errors"):
        testing.assert_gaussian_marginals(coupling, M, D)
    with pytest.raises(AssertionError, match=r"softmax kernel at x, y .*biased.* standard errors"):
        testing.assert_unbiased(coupling, M, D)


def test_lengths_of_one_degree_less_are_found():
    coupling = couplings.Blocks(
        directions.orthogonal, lambda key, m, d: norms.independent(key, m, d - 1)
    )
    with pytest.raises(AssertionError, match="row 0: the length is not chi_8: .* standard errors"):
        testing.assert_gaussian_marginals(coupling, M, D)
    with pytest.raises(AssertionError, match="biased"):
        testing.assert_unbiased(coupling, M, D)


def test_a_simplex_that_is_not_rotated_is_found():
    coupling = couplings.Blocks(unrotated_simplex, norms.independent)
    with pytest.raises(AssertionError, match="row 0: the projection"):
        testing.assert_gaussian_marginals(coupling, M, D)


def test_one_length_shared_by_all_blocks_is_found():
    """Each row is Gaussian, so only the error tells: PM has a length for each block."""
    x, y = testing.general_points(D)
    expected = float(theory.kernel_mse("pm", x, y, 4 * D))
    testing.assert_mse(couplings.get("pm"), 4 * D, D, expected)
    testing.assert_gaussian_marginals(one_length_for_all_blocks, 10, D, draws=2000)
    with pytest.raises(AssertionError, match="squared error is off: .* standard errors away"):
        testing.assert_mse(one_length_for_all_blocks, 4 * D, D, expected)


def test_wrong_shapes_and_infinite_values_are_named():
    iid = couplings.get("iid")
    with pytest.raises(AssertionError, match=r"gives \(17, 8\), expected \(16, 8\)"):
        testing.assert_gaussian_marginals(lambda k, m, d: iid(k, m + 1, d), M, D, draws=10)
    with pytest.raises(AssertionError, match="values of the coupling are not finite"):
        testing.assert_gaussian_marginals(lambda k, m, d: iid(k, m, d) / 0, M, D, draws=10)


def test_equal_couplings_are_not_lower():
    with pytest.raises(AssertionError, match="not lower: .* standard errors apart"):
        testing.assert_lower_mse(couplings.get("orf"), couplings.get("orf"), M, D)
    with pytest.raises(AssertionError, match="not lower"):
        testing.assert_lower_mse(couplings.get("iid"), couplings.get("simrf"), M, D)


@pytest.mark.slow
def test_false_alarms_are_rare():
    """100 right couplings, three assertions each: at 1e-4, one alarm has a chance of 3%."""
    for seed in range(100):
        testing.assert_gaussian_marginals(couplings.get("orf"), 4, 3, draws=2000, seed=seed)
        testing.assert_unbiased(couplings.get("orf"), 4, 3, draws=2000, seed=seed)


def one_in_a_hundred(bad):
    def coupling(key, m, d):
        draw = couplings.get("iid")(key, m, d)
        return jnp.where(jax.random.uniform(key) < 0.01, draw.at[0].set(bad), draw)

    return coupling


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_draws_that_are_not_finite_fail_every_assertion(bad):
    coupling, iid = one_in_a_hundred(bad), couplings.get("iid")
    for check in (
        lambda: testing.assert_gaussian_marginals(coupling, 2, 3, draws=1000),
        lambda: testing.assert_unbiased(coupling, 2, 3, draws=1000),
        lambda: testing.assert_mse(coupling, 2, 3, 0.1, draws=1000),
        lambda: testing.assert_lower_mse(coupling, iid, 2, 3, draws=1000),
        lambda: testing.assert_lower_mse(iid, coupling, 2, 3, draws=1000),
    ):
        with pytest.raises(AssertionError, match="values of the coupling are not finite"):
            check()


def test_draws_of_another_shape_fail_every_assertion():
    def taller(key, m, d):
        return couplings.get("iid")(key, m + 1, d)

    for check in (
        lambda: testing.assert_unbiased(taller, 2, 3, draws=10),
        lambda: testing.assert_mse(taller, 2, 3, 0.1, draws=10),
        lambda: testing.assert_lower_mse(taller, taller, 2, 3, draws=10),
    ):
        with pytest.raises(AssertionError, match=r"gives \(3, 3\), expected \(2, 3\)"):
            check()
