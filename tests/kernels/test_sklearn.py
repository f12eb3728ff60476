"""RandomFeatures against scikit-learn's own checks and kernels, and inside its tools."""

import pickle

import jax
import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.estimator_checks import check_estimator

from performer import kernels
from performer.sklearn import RandomFeatures
from tests.support.tiers import tiers

# The columns have different means: the variance of all entries is not the mean of the variances.
X = np.random.default_rng(0).normal([0, 2, 4], size=(8, 3))


@pytest.mark.thorough
def test_scikit_learns_checks():
    """All pass but the one that needs a setting of SciPy's."""
    results = check_estimator(RandomFeatures(), on_skip=None, on_fail="raise")
    status = {result["check_name"]: result["status"] for result in results}
    assert {name for name in status if status[name] != "passed"} <= {"check_array_api_input"}
    assert len(status) > 30


@pytest.mark.thorough
@pytest.mark.parametrize("columns", tiers([1, 5], 1))
def test_odd_numbers_of_columns(columns):
    """Means over 1,000 draws within 5 standard errors of the kernel, in every pair.

    The points are near the origin, where a cosine without its phase has another mean.
    """
    x = X[:3] - [0, 2, 4]
    features = RandomFeatures("halton", n_components=columns, gamma=0.1)
    estimates = []
    for seed in range(1000):
        phi = features.set_params(random_state=seed).fit_transform(x)
        assert phi.shape == (3, columns)
        estimates.append(phi @ phi.T)
    errors = np.std(estimates, axis=0) / np.sqrt(1000)
    assert (abs(np.mean(estimates, axis=0) - rbf_kernel(x, gamma=0.1)) < 5 * errors + 1e-6).all()


@pytest.mark.parametrize("kernel", tiers(["arc-cosine-1", kernels.matern(1.5)], 1, str))
def test_other_kernels(kernel):
    """Means over 300 draws within 5 standard errors of the exact kernel, in every pair."""
    x, exact = np.float32(X[:4] - [0, 2, 4]), kernels.get(kernel)
    features = RandomFeatures(kernel=kernel, n_components=6, gamma=0.5 / 1.5**2)
    draws = [features.set_params(random_state=seed).fit_transform(x) for seed in range(300)]
    assert features.frequencies_.shape == (3 if kernel == exact else 6, 3)
    estimates = np.stack([phi @ phi.T for phi in draws]).astype(np.float64)
    errors = estimates.std(axis=0) / np.sqrt(300)
    want = np.asarray(exact(x, x, lengthscale=1.5))
    assert (abs(estimates.mean(axis=0) - want) < 5 * errors + 1e-6).all()
    assert pickle.loads(pickle.dumps(features)).transform(x).shape == (4, 6)


def test_gamma_scale_is_that_of_rbf_sampler():
    for x in (X, X.astype(np.float32), np.ones((4, 2))):
        features = RandomFeatures("halton", gamma="scale").fit(x)
        assert features.gamma_ == pytest.approx(RBFSampler(gamma="scale").fit(x)._gamma)
        assert features.gamma == "scale"


def test_gamma_scale_survives_rounding():
    """Equal entries have no variance, although their mean may round; an offset does not cancel."""
    x = 1e8 + np.random.default_rng(0).normal(size=(200, 3))
    for make in (np.asarray, scipy.sparse.csr_array):
        for constant in (0.0, 0.1, 1.0):
            assert RandomFeatures(gamma="scale").fit(make(np.full((5, 3), constant))).gamma_ == 1
        gamma = RandomFeatures(gamma="scale").fit(make(x)).gamma_
        assert gamma == pytest.approx(1 / (3 * x.var()), rel=1e-6)
    rare = scipy.sparse.random(50, 20, 0.1, random_state=0, format="csr")
    gamma = RandomFeatures(gamma="scale").fit(rare).gamma_
    assert gamma == pytest.approx(1 / (20 * rare.toarray().var()), rel=1e-12)


def test_float64_is_computed_in_float64():
    features = RandomFeatures(gamma=0.7, random_state=0).fit(X)
    W = features.frequencies_
    assert W.shape == (50, 3)
    projections = np.sqrt(2 * 0.7) * X @ W.T.astype(np.float64)
    want = np.concatenate([np.sin(projections), np.cos(projections)], axis=1) / np.sqrt(50)
    got = features.transform(X)
    assert got.dtype == np.float64
    assert got.flags.writeable
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)

    integers = np.arange(12).reshape(4, 3)
    assert features.transform(integers).dtype == np.float64
    np.testing.assert_array_equal(
        features.transform(integers), features.transform(integers.astype(np.float64))
    )
    narrow = features.transform(X.astype(np.float32))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", tiers(["rbf", "softmax"], 1))
def test_sparse_points_have_the_features_of_dense_ones(kernel):
    x = np.where(X > 1, X, 0) / 4
    for dense in (x, x.astype(np.float32)):
        for container in (scipy.sparse.csr_array, scipy.sparse.csc_matrix):
            features = RandomFeatures("orf", 15, "scale", random_state=0, kernel=kernel)
            want = features.fit_transform(dense)
            got = features.fit_transform(container(dense))
            assert got.dtype == dense.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_global_setting_of_jax_changes_nothing():
    features = RandomFeatures(random_state=0).fit(X.astype(np.float32))
    with jax.enable_x64(True):
        again = clone(features).fit(X.astype(np.float32))
        narrow = again.transform(X.astype(np.float32))
    np.testing.assert_array_equal(again.frequencies_, features.frequencies_)
    assert narrow.dtype == np.float32
    np.testing.assert_array_equal(narrow, features.transform(X.astype(np.float32)))
