"""Dense kernels against expressions of matrices, and their series against the dense kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.sparse.linalg
import scipy.special

from performer.graphs import Graph, kernels
from tests.support.graph_examples import NUM_NODES, example, laplacian, weights_matrix

L = laplacian(weights_matrix())
ONE = np.eye(NUM_NODES)


def power(matrix, exponent):
    return np.linalg.matrix_power(matrix, exponent)


CASES = {
    "RegularisedLaplacian": ({"d": 2, "sigma": 0.7}, power(ONE + 0.49 * L, -2)),
    "RegularisedLaplacian, d = 3": ({"d": 3, "sigma": 1.0}, power(ONE + L, -3)),
    "Diffusion": ({"sigma": 1.2}, scipy.linalg.expm(-0.72 * L)),
    "RandomWalk": ({"p": 4, "alpha": 2.5}, power(2.5 * ONE - L, 4)),
    "RandomWalk, odd": ({"p": 3, "alpha": 4.0}, power(4 * ONE - L, 3)),
    "InverseCosine": ({}, scipy.linalg.cosm(np.pi / 4 * L)),
    "Matern": ({"nu": 2.0, "kappa": 1.5}, power(4 / 2.25 * ONE + L, -2)),
}


def all_cases():
    for case, (parameters, expected) in CASES.items():
        yield case, getattr(kernels, case.split(",")[0])(**parameters), expected


def test_dense_kernels_are_the_functions_of_the_laplacian():
    for case, kernel, expected in all_cases():
        found = kernel.dense(example())
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=case)


def test_series_square_to_the_kernels():
    """(sum_k f_k A^k)^2, by powers in float64."""
    for case, kernel, expected in all_cases():
        root, power = np.zeros_like(ONE), ONE.copy()
        for coefficient in np.asarray(kernel(600), np.float64):
            root, power = root + coefficient * power, power @ (ONE - L)
        slow = 2e-3 if case == "InverseCosine" else 3e-6  # its f falls off like k^{-3/2}
        np.testing.assert_allclose(root @ root, expected, atol=slow, err_msg=case)


def test_a_node_alone_is_exactly_one():
    for name in ("RegularisedLaplacian", "Diffusion"):
        assert abs(float(getattr(kernels, name)().dense(example())[5, 5]) - 1) < 1e-7


def test_a_kernel_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class cosine(kernels.Kernel):  # of twice the angle: cos(t L)^2 is the square of cos(t (1 - A))
        t: float

        def __call__(self, length):
            k = np.arange(length)
            signs = np.where(k % 4 < 2, 1, -1) * np.where(k % 2, np.sin(self.t), np.cos(self.t))
            return jnp.asarray(signs * self.t**k / scipy.special.factorial(k), float)

        def _eigenvalue(self, laplacian):
            return np.cos(self.t * laplacian) ** 2

    kernel, graph = cosine(0.7), example()
    root = sum(f * power(ONE - L, k) for k, f in enumerate(np.asarray(kernel(30), np.float64)))
    np.testing.assert_allclose(root @ root, kernel.dense(graph), atol=1e-6)
    with pytest.raises(ValueError, match="t must be positive"):
        cosine(-1.0)


def test_the_recurrence_finds_the_closed_forms():
    """The series of (1 - a / 2)^{-d} has the root that `Resolvent` has in closed form."""

    def series(length):
        k = np.arange(length)
        return (k + 1) * (k + 2) / 2 * 0.5**k  # of (1 - a / 2)^{-3}

    expected = np.asarray(kernels.Resolvent(3)(12)) * 0.5 ** np.arange(12)
    kernel = kernels.FromSeries(series)
    np.testing.assert_allclose(kernel(12), expected, rtol=1e-5)
    dense = power(np.linalg.inv(ONE - (ONE - L) / 2), 3)
    np.testing.assert_allclose(kernel.dense(example()), dense, atol=2e-6)
    assert kernel == kernels.FromSeries(series)
    with pytest.raises(ValueError, match="diverges: the spectral radius of the weights is 1,"):
        kernels.FromSeries(np.ones).dense(example())


def test_resolvent_of_the_weights():
    graph = example()
    small = graph._replace(weights=graph.weights * 0.2)
    expected = np.linalg.inv(ONE - 0.2 * weights_matrix())
    np.testing.assert_allclose(kernels.Resolvent(1).dense(small), expected, atol=1e-5)
    np.testing.assert_allclose(kernels.Resolvent(2).dense(small), expected @ expected, atol=1e-5)


RING = [(i, (i + 1) % 152) for i in range(152)]


@pytest.mark.parametrize(
    ("graph", "radius"),
    [
        (Graph.from_edges([], 3), 0),
        (Graph.from_edges([], 150), 0),
        (Graph.from_edges(RING, 152, (-1.0) ** np.arange(152)), 2),  # all rows sum to 0
        (Graph.from_edges(RING, 152), 2),  # eigenvalues 2 and -2
        (Graph.from_edges([(0, i) for i in range(1, 150)], 150), 149**0.5),
        (Graph.from_edges([(2 * i, 2 * i + 1) for i in range(75)], 150, [-3.0] * 75), 3),
        (Graph.from_edges([(i, i) for i in range(150)], 150, [-0.5] * 150), 0.5),
        (Graph.from_edges([(140, 141)], 150, [0.25]), 0.25),
    ],
)
def test_spectral_radius(graph, radius):
    np.testing.assert_allclose(kernels.spectral_radius(graph), radius, rtol=1e-6)


@pytest.mark.parametrize("parameter", [1, 2, 3, 4, 8])
def test_convergence_on_both_sides_of_the_radius(parameter):
    """Binomial series: R = 1, (1 + sigma^2) / sigma^2 and alpha - 1; for an even p a polynomial."""
    for kernel, limit in [
        (kernels.Resolvent(parameter), 1.0),
        (kernels.RegularisedLaplacian(parameter, 0.7), 1.49 / 0.49),
        (kernels.RandomWalk(parameter, 3.5), 2.5),
    ]:
        polynomial = isinstance(kernel, kernels.RandomWalk) and parameter % 2 == 0
        for factor in (0.5, 0.9995, 0.9999, 1.0001, 1.0003, 2.0):
            graph = Graph.from_edges([(0, 0)], 1, [limit * factor])  # its matrix is a number
            if factor < 1 or polynomial:
                kernels.require_convergence(graph, kernel)
            else:
                with pytest.raises(ValueError, match="diverges: the spectral radius of the weight"):
                    kernels.require_convergence(graph, kernel)


def test_convergence_on_the_radius_itself():
    """sum_k f_k is finite for sqrt(1 + a) and (1 + a)^{3/2}, whose f fall off like k^{-3/2}."""
    for kernel in (kernels.RandomWalk(1), kernels.InverseCosine()):
        kernels.require_radius(kernel, 1.0)
        with pytest.raises(ValueError, match="is 1.0003, and it converges up to 1;"):
            kernels.require_radius(kernel, 1.0003)
    for d in (0.5, 1, 2):
        with pytest.raises(ValueError, match="diverges"):
            kernels.require_radius(kernels.Resolvent(d), 1.0)


def test_negative_weights_converge_as_their_sizes():
    """A cycle with one negative edge has the radius 0.85, and mean loads that grow like 1.2^k."""
    graph = Graph.from_edges([(0, 1), (1, 2), (2, 3), (3, 0)], 4, [0.6, 0.6, 0.6, -0.6])
    assert kernels.spectral_radius(graph) == pytest.approx(0.6 * 2**0.5)
    with pytest.raises(ValueError, match="the spectral radius of the weights is 1.2, and it conv"):
        kernels.require_convergence(graph, kernels.Resolvent(1))


def test_no_rounding_error_connects_two_components():
    parts = [(0, 1), (1, 2), (3, 4), (4, 5), (6, 7), (7, 8), (8, 6)]
    found = np.asarray(kernels.Diffusion().dense(Graph.from_edges(parts, 9)))
    connected = np.kron(np.eye(3), np.ones((3, 3)))
    np.testing.assert_array_equal(found != 0, connected != 0)


def test_diffusion_with_a_large_sigma_does_not_vanish():
    """f_0 = exp(-sigma^2 / 4) does, in float32; f_k at a = 1 add up to exactly 1."""
    for sigma in (1e-15, 0.1, 10.0, 30.0):
        np.testing.assert_allclose(float(kernels.Diffusion(sigma)(1024).sum()), 1, rtol=3e-4)


def test_a_traced_alpha_below_two_is_no_number():
    values = jax.jit(lambda alpha: kernels.RandomWalk(3, alpha)(4))
    np.testing.assert_allclose(values(2.5), kernels.RandomWalk(3, 2.5)(4), rtol=1e-6)
    assert np.isnan(values(1.99)).all()
    slope = jax.grad(lambda alpha: kernels.RandomWalk(2, alpha)(4)[0])(3.0)
    assert float(slope) == 1, "f_0 = alpha - 1"


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_root_of_a_series(power):
    """A diffusion kernel's is that of sigma / sqrt(power); any other's powers are the series."""
    g = kernels.root(kernels.Diffusion(2.0)(30), power)
    np.testing.assert_allclose(g, kernels.Diffusion(2.0 / power**0.5)(30), atol=1e-6)
    series = 0.5 ** np.arange(20) * (1 + np.arange(20) % 3)
    g, product = np.asarray(kernels.root(series, power), np.float64), np.ones(1)
    for _ in range(power):
        product = np.convolve(product, g)
    np.testing.assert_allclose(product[:20], series, rtol=1e-4, atol=1e-6)
