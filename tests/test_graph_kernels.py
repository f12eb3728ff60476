"""Dense kernels against expressions of matrices, and modulations against the dense kernels."""

from functools import partial

import numpy as np
import pytest
import scipy.linalg

from performer.graphs import Graph, kernels, modulations
from tests.graph_examples import NUM_NODES, example, laplacian, weights_matrix

L = laplacian(weights_matrix())
ONE = np.eye(NUM_NODES)


def power(matrix, exponent):
    return np.linalg.matrix_power(matrix, exponent)


CASES = {
    "regularised_laplacian": ({"d": 2, "sigma": 0.7}, power(ONE + 0.49 * L, -2)),
    "regularised_laplacian, d = 3": ({"d": 3, "sigma": 1.0}, power(ONE + L, -3)),
    "diffusion": ({"sigma": 1.2}, scipy.linalg.expm(-0.72 * L)),
    "random_walk": ({"p": 4, "alpha": 2.5}, power(2.5 * ONE - L, 4)),
    "random_walk, odd": ({"p": 3, "alpha": 4.0}, power(4 * ONE - L, 3)),
    "inverse_cosine": ({}, scipy.linalg.cosm(np.pi / 4 * L)),
    "matern": ({"nu": 2.0, "kappa": 1.5}, power(4 / 2.25 * ONE + L, -2)),
}


@pytest.mark.parametrize("case", CASES)
def test_dense_kernels_are_the_functions_of_the_laplacian(case):
    parameters, expected = CASES[case]
    found = getattr(kernels, case.split(",")[0])(example(), **parameters)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_modulations_square_to_the_kernels(case):
    """(sum_k f_k A^k)^2, by powers in float64."""
    parameters, expected = CASES[case]
    f = np.asarray(getattr(modulations, case.split(",")[0])(**parameters)(600), np.float64)
    root, power = np.zeros_like(ONE), ONE.copy()
    for coefficient in f:
        root, power = root + coefficient * power, power @ (ONE - L)
    slow = 2e-3 if case == "inverse_cosine" else 3e-6  # its f falls off like k^{-3/2}
    np.testing.assert_allclose(root @ root, expected, atol=slow)


def test_the_recurrence_finds_the_closed_forms():
    """The series of (1 - a / 2)^{-d} has the root that `resolvent` has in closed form."""

    def series(length):
        k = np.arange(length)
        return (k + 1) * (k + 2) / 2 * 0.5**k  # of (1 - a / 2)^{-3}

    expected = np.asarray(modulations.resolvent(3)(12)) * 0.5 ** np.arange(12)
    np.testing.assert_allclose(modulations.from_series(series)(12), expected, rtol=1e-5)


def test_resolvent_of_the_weights():
    graph = example()
    small = graph._replace(weights=graph.weights * 0.2)
    expected = np.linalg.inv(ONE - 0.2 * weights_matrix())
    np.testing.assert_allclose(kernels.resolvent(small, 1), expected, atol=1e-5)
    np.testing.assert_allclose(kernels.resolvent(small, 2), expected @ expected, atol=1e-5)


def test_a_node_alone_is_exactly_one():
    for name in ("regularised_laplacian", "diffusion"):
        assert abs(float(getattr(kernels, name)(example())[5, 5]) - 1) < 1e-7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kernels.resolvent(example()), r"the spectral radius of the weights is 3\."),
        (partial(kernels.diffusion, example(), sigma=-1.0), "sigma must be positive and finite"),
        (lambda: kernels.regularised_laplacian(example(), d=0), "d must be positive"),
        (lambda: kernels.random_walk(example(), alpha=1.5), "alpha must be at least 2"),
        (lambda: kernels.matern(example(), nu=0.0), "nu must be positive"),
        (lambda: modulations.from_series(lambda n: -np.ones(n)), "begin with c_0 > 0, got -1"),
        (lambda: kernels.diffusion(Graph.from_edges([(0, 1)], 2, [-1.0])), "weights >= 0"),
    ],
)  # fmt: skip
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_convergence_follows_the_series_and_not_the_radius_alone():
    """An entire series converges everywhere; that of the resolvent up to radius 1."""
    kernels.require_convergence(example(), modulations.diffusion())
    just_below = Graph.from_edges([(0, 1), (1, 2), (2, 0)], 3, [0.499] * 3)
    just_above = Graph.from_edges([(0, 1), (1, 2), (2, 0)], 3, [0.501] * 3)
    kernels.require_convergence(just_below, modulations.resolvent())
    with pytest.raises(ValueError, match="spectral radius of the weights is 1.002"):
        kernels.require_convergence(just_above, modulations.resolvent())
