"""Gaussian processes against scikit-learn and against the equations in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as of_sklearn

from performer import gp, kernels

RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(30, 3)), RNG.normal(size=(12, 3))
Y = np.sin(X.sum(axis=1)) + 0.1 * RNG.normal(size=30)
PHI, NEW_PHI = RNG.normal(size=(30, 7)), RNG.normal(size=(12, 7))
SCALES = gp.Scales(0.8, 1.3, 0.2)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def exact(kernel, scales=SCALES):
    options = dict(lengthscale=scales.lengthscale, output_scale=scales.output_scale)
    x, new = jnp.asarray(X), jnp.asarray(NEW)
    return kernel(x, x, **options), kernel(new, x, **options), kernel(new, new, **options)


def regressor(kernel, scales=SCALES, **options):
    kernel = of_sklearn.ConstantKernel(scales.output_scale**2) * kernel
    return GaussianProcessRegressor(kernel, alpha=scales.noise_scale**2, **options)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kernels.gaussian, of_sklearn.RBF(0.8)),
        *((kernels.matern(nu), of_sklearn.Matern(0.8, nu=nu)) for nu in (0.5, 1.5, 2.5)),
    ],
    ids=["gaussian", "matern 1/2", "3/2", "5/2"],
)
def test_exact_is_that_of_sklearn(ours, theirs):
    reference = regressor(theirs, optimizer=None).fit(X, Y)
    mean, covariance = reference.predict(NEW, return_cov=True)
    gram, cross, test_gram = exact(ours)
    f = gp.condition(gram, cross, test_gram, jnp.asarray(Y), 0.2)
    np.testing.assert_allclose(f.mean, mean, atol=1e-9)
    np.testing.assert_allclose(f.covariance, covariance, atol=1e-9)
    likelihood = gp.log_marginal_likelihood(gram, jnp.asarray(Y), 0.2)
    assert float(likelihood) == pytest.approx(reference.log_marginal_likelihood_value_, abs=1e-9)


def test_fit_finds_the_optimum_of_sklearn():
    kernel = of_sklearn.ConstantKernel() * of_sklearn.RBF() + of_sklearn.WhiteKernel()
    reference = GaussianProcessRegressor(kernel, random_state=0).fit(X, Y)
    scales, losses = gp.fit(
        jnp.asarray(X),
        jnp.asarray(Y),
        gp.Scales(1.0, 1.0, 1.0),
        num_steps=400,
        optimizer=optax.adam(0.1),
    )
    variance, lengthscale, noise = np.exp(reference.kernel_.theta)
    assert float(scales.lengthscale) == pytest.approx(lengthscale, rel=1e-3)
    assert float(scales.output_scale) == pytest.approx(variance**0.5, rel=1e-3)
    assert float(scales.noise_scale) == pytest.approx(noise**0.5, rel=1e-3)
    value = reference.log_marginal_likelihood_value_
    assert float(losses[-1]) == pytest.approx(-value / 30, abs=1e-6)


def test_fit_holds_what_is_fixed_and_takes_one_lengthscale_for_each_dimension():
    start = gp.Scales(np.array([1.0, 2.0, 3.0]), 1.0, 0.5)
    fitted, losses = gp.fit(
        jnp.asarray(X), jnp.asarray(Y), start, fixed=("noise_scale",), num_steps=3
    )
    assert float(fitted.noise_scale) == 0.5
    assert len(set(np.round(np.asarray(fitted.lengthscale) / start.lengthscale, 12))) == 3
    assert losses[2] < losses[0]


def test_features_are_the_exact_form_of_their_gram_matrix():
    """VRC Eqs 39 (corrected) and 41 against Eq. 43."""
    phi, new, y = jnp.asarray(PHI), jnp.asarray(NEW_PHI), jnp.asarray(Y)
    fast = gp.condition_features(phi, new, y, 0.3)
    slow = gp.condition(phi @ phi.T, new @ phi.T, new @ new.T, y, 0.3)
    np.testing.assert_allclose(fast.mean, slow.mean, atol=1e-9)
    np.testing.assert_allclose(fast.covariance, slow.covariance, atol=1e-9)
    assert float(gp.log_marginal_likelihood_features(phi, y, 0.3)) == pytest.approx(
        float(gp.log_marginal_likelihood(phi @ phi.T, y, 0.3)), abs=1e-9
    )
    # Eq. 39 as printed has no 1 / sigma_n^2 before Phi_d y; Eq. 41 has the observed covariance.
    B = PHI.T @ PHI / 0.09 + np.eye(7)
    np.testing.assert_allclose(NEW_PHI @ np.linalg.solve(B, PHI.T @ Y) / 0.09, fast.mean, atol=1e-9)
    np.testing.assert_allclose(
        NEW_PHI @ np.linalg.solve(B, NEW_PHI.T) + 0.09 * np.eye(12),
        gp.observed(fast, 0.3).covariance,
        atol=1e-9,
    )


def test_features_never_make_a_matrix_of_all_points():
    """O(N m^2) time and O(N m) memory: no intermediate of 4000 x 4000."""
    phi, y = jnp.ones((4000, 5)), jnp.ones(4000)

    def posterior(phi, y):
        return gp.condition_features(phi, phi[:3], y, 0.3), gp.log_marginal_likelihood_features(
            phi, y, 0.3
        )

    memory = jax.jit(posterior).lower(phi, y).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4000 * 4000


def random_law(seed, n=4):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    return gp.Gaussian(jnp.asarray(rng.normal(size=n)), jnp.asarray(root @ root.T + np.eye(n)))


def test_kl_against_simulation():
    """The mean log ratio of 200,000 draws, within 5 standard errors."""
    p, q = random_law(1), random_law(2)
    of_p, of_q = (
        stats.multivariate_normal(np.asarray(a.mean), np.asarray(a.covariance)) for a in (p, q)
    )
    draws = of_p.rvs(200_000, random_state=3)
    ratios = of_p.logpdf(draws) - of_q.logpdf(draws)
    error = ratios.std() / np.sqrt(len(ratios))
    assert abs(float(gp.kl(p, q)) - ratios.mean()) < 5 * error
    assert abs(float(gp.kl(q, p)) - ratios.mean()) > 20 * error  # not symmetric: the order is seen
    assert abs(float(gp.kl(p, p))) < 1e-12


def test_negative_log_density():
    law = random_law(4)
    y = np.arange(4.0)
    sd = np.sqrt(np.diag(np.asarray(law.covariance)))
    want = -stats.norm(np.asarray(law.mean), sd).logpdf(y).mean()
    assert float(gp.negative_log_density(law, jnp.asarray(y))) == pytest.approx(want)


def test_float32_is_near():
    """Jitter included; 256 points so close that their Gram matrix is singular in float32."""
    x = jnp.linspace(0, 1, 256, dtype=jnp.float32)[:, None]
    y = jnp.sin(6 * x[:, 0])
    with pytest.raises(ValueError, match="not positive definite in float32"):
        gp._cholesky("K", kernels.gaussian(x, x) - 1e-3 * jnp.eye(256, dtype=jnp.float32))
    results = []
    for dtype in (jnp.float32, jnp.float64):
        gram = kernels.gaussian(x.astype(dtype), x.astype(dtype), lengthscale=0.3)
        results.append(gp.condition(gram, gram, gram, y.astype(dtype), 0.1).mean)
    np.testing.assert_allclose(results[0], results[1], atol=2e-3)


def test_vmap_and_jit():
    grams = jnp.stack([exact(kernels.gaussian)[0]] * 2)
    likelihoods = jax.jit(jax.vmap(lambda g: gp.log_marginal_likelihood(g, jnp.asarray(Y), 0.2)))(
        grams
    )
    np.testing.assert_allclose(
        likelihoods, gp.log_marginal_likelihood(grams[0], jnp.asarray(Y), 0.2), rtol=1e-12
    )


def test_bad_input():
    gram, cross, test_gram = exact(kernels.gaussian)
    y = jnp.asarray(Y)
    with pytest.raises(ValueError, match=r"noise_scale must be positive and finite, got 0\.0"):
        gp.condition(gram, cross, test_gram, y, 0.0)
    with pytest.raises(ValueError, match="noise_scale must be positive and finite, got -1"):
        gp.condition_features(jnp.asarray(PHI), jnp.asarray(NEW_PHI), y, -1)
    with pytest.raises(ValueError, match="30 x 30, is not positive definite in float64: .* least"):
        gp.log_marginal_likelihood(gram - 2 * jnp.eye(30), y, 0.2)
    with pytest.raises(ValueError, match="the Gram matrix plus noise has entries that are not fin"):
        gp.log_marginal_likelihood(gram.at[0, 0].set(jnp.nan), y, 0.2)
    singular = gp.Gaussian(jnp.zeros(12), -jnp.eye(12))
    with pytest.raises(ValueError, match="covariance of q, 12 x 12, is not positive definite"):
        gp.kl(gp.Gaussian(jnp.zeros(12), jnp.eye(12)), singular)
    with pytest.raises(ValueError, match="fixed='lengthscales' is none of lengthscale, output_sc"):
        gp.fit(jnp.asarray(X), y, SCALES, fixed=("lengthscales",))
    with pytest.raises(ValueError, match="noise_scale must be positive and finite, got 0"):
        gp.fit(jnp.asarray(X), y, SCALES._replace(noise_scale=0))
    with pytest.raises(ValueError, match="left the finite numbers in step 0 of 3: look for NaN"):
        gp.fit(jnp.asarray(X), y.at[3].set(jnp.nan), SCALES, num_steps=3)
