"""Gaussian processes against scikit-learn and against the equations in float64 NumPy."""

import inspect
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as of_sklearn

from performer import gp, kernels
from tests.support.tiers import tiers

RNG = np.random.default_rng(0)
X, NEW = RNG.normal(size=(30, 3)), RNG.normal(size=(12, 3))
Y = np.sin(X.sum(axis=1)) + 0.1 * RNG.normal(size=30)
PHI, NEW_PHI = RNG.normal(size=(30, 7)), RNG.normal(size=(12, 7))
SCALES = gp.Scales(0.8, 1.3, 0.2)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("kernel", ["gaussian", "matern-3/2"])
@pytest.mark.parametrize("noise_scale", [1e-3, 1e-2])
def test_float32_with_little_noise_is_that_of_float64(kernel, noise_scale):
    """In float32 alone it was up to 25 standard deviations off."""
    points = [np.sort(RNG.uniform(-2, 2, n)).astype(np.float32)[:, None] for n in (200, 50)]
    values = np.sin(3 * points[0][:, 0]).astype(np.float32)
    scales = gp.Scales(1.0, 1.0, noise_scale)

    def predicted(dtype):
        x, new = (a.astype(dtype) for a in points)
        return gp.GaussianProcess(kernel, scales, x=x, y=values.astype(dtype)).predict(new)

    want = predicted(np.float64)
    with jax.enable_x64(False):
        found = predicted(np.float32)
        assert found.mean.dtype == found.covariance.dtype == jnp.float32
    deviation = np.sqrt(np.diagonal(want.covariance))
    assert np.max(np.abs(found.mean - want.mean) / deviation) < 0.05
    np.testing.assert_allclose(np.sqrt(np.diagonal(found.covariance)), deviation, rtol=0.05)


def test_matrices_that_are_too_coarse_for_the_noise_warn():
    x = np.linspace(-2, 2, 200)[:, None]
    with jax.enable_x64(False):
        gram = kernels.gaussian(x, x)
        with pytest.warns(
            UserWarning, match="in float32 may be 23.8 times the variance of the noi"
        ):
            gp.condition(gram, gram, gram, x[:, 0], 1e-3)
        with pytest.warns(UserWarning, match="give matrices in float64, or a larger noise_scale"):
            gp.log_marginal_likelihood(gram, x[:, 0], 1e-3)
        jax.jit(gp.log_marginal_likelihood)(gram, x[:, 0], 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gram = kernels.gaussian(x, x)
        gp.condition(gram, gram, gram, x[:, 0], 1e-3)


def test_exact_is_that_of_sklearn():
    """Posterior, likelihood and prior."""
    pairs = [(kernels.matern(nu), of_sklearn.Matern(0.8, nu=nu)) for nu in (0.5, 2.5)]
    for ours, theirs in [("gaussian", of_sklearn.RBF(0.8)), *pairs]:
        kernel = of_sklearn.ConstantKernel(SCALES.output_scale**2) * theirs
        alpha = SCALES.noise_scale**2
        reference = GaussianProcessRegressor(kernel, alpha=alpha, optimizer=None).fit(X, Y)
        mean, covariance = reference.predict(NEW, return_cov=True)
        process = gp.GaussianProcess(ours, SCALES)
        prior, seen = process.predict(NEW), process.fit(X, Y, num_steps=1, fixed=SCALES._fields)
        f = seen.predict(NEW)
        np.testing.assert_allclose(f.mean, mean, atol=1e-9)
        np.testing.assert_allclose(f.covariance, covariance, atol=1e-9)
        np.testing.assert_allclose(prior.covariance, kernel(NEW), atol=1e-9)
        assert not prior.mean.any()
        value = reference.log_marginal_likelihood_value_
        assert float(seen.losses[0]) == pytest.approx(-value / 30, abs=1e-9)


def test_a_fit_that_is_too_coarse_for_the_noise_warns():
    """The noise of exact values: fitted in float32 it is the size of the rounding errors."""
    x = np.linspace(-2, 2, 20)[:, None]
    options = dict(num_steps=80, optimizer=optax.adam(0.1))
    with jax.enable_x64(False):
        x32, y32 = np.float32(x), np.float32(np.sin(2 * x[:, 0]))
        with pytest.warns(UserWarning, match="the fitted noise.*: fit in float64"):
            gp.GaussianProcess().fit(x32, y32, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gp.GaussianProcess(scales=gp.Scales(1, 1, 1e-4)).fit(x32, y32, num_steps=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the rounding errors")
        gp.GaussianProcess().fit(x, np.sin(2 * x[:, 0]), **options)


@pytest.mark.parametrize("rate", tiers(["L-BFGS", 0.1], 1))
def test_fit_finds_the_optimum_of_sklearn(rate):
    kernel = of_sklearn.ConstantKernel() * of_sklearn.RBF() + of_sklearn.WhiteKernel()
    reference = GaussianProcessRegressor(kernel, random_state=0).fit(X, Y)
    process = gp.GaussianProcess().fit(
        X, Y, num_steps=400, optimizer=None if rate == "L-BFGS" else optax.adam(rate)
    )
    variance, lengthscale, noise = np.exp(reference.kernel_.theta)
    want = lengthscale, variance**0.5, noise**0.5
    np.testing.assert_allclose(process.scales, want, rtol=1e-3)
    value = reference.log_marginal_likelihood_value_
    assert float(process.losses[-1]) == pytest.approx(-value / 30, abs=1e-6)


def loss_by_hand(logs, x, y, kernel):
    """The negative log marginal likelihood per point."""
    lengthscale, output_scale, noise_scale = np.exp(logs)
    distance = np.sqrt(((x[:, None] - x) ** 2).sum(axis=-1)) / lengthscale
    root = np.sqrt(3) * distance
    gram = np.exp(-(distance**2) / 2) if kernel == "gaussian" else (1 + root) * np.exp(-root)
    covariance = output_scale**2 * gram + noise_scale**2 * np.eye(len(y))
    log_det = np.linalg.slogdet(covariance)[1] + len(y) * np.log(2 * np.pi)
    return (y @ np.linalg.solve(covariance, y) + log_det) / 2 / len(y)


FOUR = np.array([[20.0], [20], [140], [140]]), np.array([-230.0, -290, 290, 230])
LINE = np.random.default_rng(5).uniform(-4, 2, (40, 1))
SINES = np.sin(2 * LINE[:, 0]) + 0.1 * np.random.default_rng(6).normal(size=40)
UNITS = {
    "four points": ("matern-3/2", *FOUR),
    "y x 10^6": ("gaussian", LINE, 1e6 * SINES),
    "x x 10^4": ("gaussian", 1e4 * LINE, SINES),
}


@pytest.mark.parametrize("case", UNITS)
def test_fit_finds_the_optimum_whatever_the_units(case):
    """In float32, against the best of SciPy from 18 starts. No fit may warn."""
    kernel, x, y = UNITS[case]
    grid = itertools.product((0.03, 0.3, 3), (0.3, 3), (0.01, 0.1, 1))
    units = np.array([x.std(), y.std(), y.std()])
    with np.errstate(over="ignore"):
        found = [optimize.minimize(loss_by_hand, np.log(units * s), (x, y, kernel)) for s in grid]
    best = min(found, key=lambda each: each.fun)
    strict = jax.enable_x64(False), jax.numpy_rank_promotion("raise")
    with strict[0], strict[1], warnings.catch_warnings():
        warnings.simplefilter("error")
        process = gp.GaussianProcess(kernel).fit(np.float32(x), np.float32(y))
    scales = np.array([float(scale) for scale in process.scales])
    assert loss_by_hand(np.log(scales), x, y, kernel) < best.fun + 1e-5
    assert float(process.losses[-1]) == pytest.approx(best.fun, abs=1e-4)
    identified = slice(1, 3) if case == "four points" else slice(3)  # small lengthscales are alike
    np.testing.assert_allclose(scales[identified], np.exp(best.x)[identified], rtol=0.01)


def test_the_best_of_several_starts_counts():
    """From the spread of these data the descent ends where all is noise."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(-5, 5, 8))[:, None]
    y = np.sin(1.5 * x[:, 0]) + 0.2 * rng.normal(size=8)
    one, several = (gp.GaussianProcess().fit(x, y, num_starts=n) for n in (1, 8))
    assert several.losses[-1] < one.losses[-1] - 0.2
    want = optimize.minimize(loss_by_hand, np.log([0.5, 0.8, 0.2]), (x, y, "gaussian"))
    np.testing.assert_allclose(several.scales, np.exp(want.x), rtol=1e-3)


def test_a_fit_that_has_not_converged_warns_with_the_slope():
    options = dict(num_steps=1, optimizer=optax.adam(1e-2))
    with pytest.warns(UserWarning, match="has not converged: after 1 steps") as told:
        gp.GaussianProcess(scales=SCALES).fit(X, Y, **options)
    start = np.log(SCALES)
    slopes = optimize.approx_fprime(start, loss_by_hand, 1e-6, X, Y, "gaussian")
    worst = np.argmax(abs(slopes))
    figure = f"changes by {abs(slopes[worst]):.3g} per unit of log {SCALES._fields[worst]}"
    assert figure in str(told[0].message)
    with pytest.raises(ValueError, match=r"'noise_scale' has no value: give it, as Scales\(noise"):
        gp.GaussianProcess().fit(X, Y, fixed=("noise_scale",))


def test_fit_holds_what_is_fixed_and_takes_one_lengthscale_for_each_dimension():
    start = gp.Scales(np.array([1.0, 2.0, 3.0]), 1.0, 0.5)
    process = gp.GaussianProcess(scales=start).fit(X, Y, fixed=("noise_scale",))
    assert float(process.scales.noise_scale) == 0.5
    ratios = np.asarray(process.scales.lengthscale) / start.lengthscale
    assert len(set(np.round(ratios, 12))) == 3
    assert process.losses[-1] < process.losses[0]
    given = gp.GaussianProcess(scales=gp.Scales(noise_scale=0.5)).fit(X, Y, fixed=("noise_scale",))
    assert float(given.scales.noise_scale) == 0.5  # and the others start from the data


@pytest.mark.thorough
def test_a_process_of_random_features():
    """Predictions are `condition_features` of its features; fitted is their likelihood."""
    w = kernels.frequencies(jax.random.key(0), "gaussian", 16, 3)
    process = gp.GaussianProcess("gaussian", SCALES, w).fit(X, Y)
    *options, noise = process.scales
    phi, new = (
        kernels.gaussian.feature_map(a, w, lengthscale=options[0], output_scale=options[1])
        for a in (X, NEW)
    )
    want = gp.condition_features(phi, new, Y, noise)
    for got, value in zip(process.predict(NEW), want, strict=True):
        np.testing.assert_allclose(got, value, atol=1e-12)
    phi = kernels.gaussian.feature_map(X, w, lengthscale=0.8, output_scale=1.3)
    value = gp.log_marginal_likelihood_features(phi, Y, 0.2)
    assert float(process.losses[0]) == pytest.approx(-float(value) / 30, abs=1e-9)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_above_32_bits_are_numbers(dtype):
    """Milliseconds and large counts, which JAX would keep modulo 2^32."""
    x = (1_700_000_000_000 + 86_400_000 * np.arange(60)[:, None]).astype(dtype)
    y = (np.arange(60, dtype=dtype) * 7 % 11) * dtype(1_000_000_000)
    process = gp.GaussianProcess("matern-3/2", gp.Scales(3 * 86_400_000.0, 5e9, 1e9))
    want = process.fit(x.astype(float), y.astype(float), num_steps=0).predict(x[:9])
    with jax.enable_x64(False):
        found = process.fit(x, y, num_steps=0).predict(x[:9])
        phi = kernels.random_features(jax.random.key(0), "gaussian", x, 8, lengthscale=1e9)
    np.testing.assert_allclose(found.mean, want.mean, atol=1e7)
    want = kernels.random_features(jax.random.key(0), "gaussian", x, 8, lengthscale=1e9)
    np.testing.assert_allclose(phi, want, atol=1e-3)


def test_dates_and_strings_are_no_points():
    for x in (np.array([["2024-05-01"]], "datetime64[D]"), np.array([["a"], [1.0]], object)):
        with pytest.raises(ValueError, match="x must be real numbers, got (datetime64|object)"):
            inspect.unwrap(gp.GaussianProcess.fit)(gp.GaussianProcess(), x, np.zeros(len(x)))


def test_features_are_drawn_for_the_training_points():
    """The repr has shapes, not data; without points there is no dimension to draw."""
    process = gp.GaussianProcess("matern-3/2", SCALES).fit(X, Y, num_steps=0)
    drawn = process.with_features(jax.random.key(1), 6, "orf")
    want = kernels.frequencies(jax.random.key(1), "matern-3/2", 6, 3, "orf")
    np.testing.assert_array_equal(drawn.frequencies, want)
    assert drawn.x is process.x
    assert repr(drawn).endswith(
        "frequencies of shape (6, 3), x of shape (30, 3), y of shape (30,))"
    )
    with pytest.raises(ValueError, match="dimension of the points is not known before fit"):
        gp.GaussianProcess().with_features(jax.random.key(1), 6)


def test_samples_have_the_law_of_the_prediction():
    """Means and covariances of 20,000 draws, within 5 standard errors."""
    process = jax.jit(lambda x, y: gp.GaussianProcess(scales=SCALES).fit(x, y, num_steps=2))(X, Y)
    f = process.predict(NEW)
    with jax.numpy_rank_promotion("raise"):
        draws = np.asarray(process.sample(jax.random.key(0), NEW, 20_000))
    variances = np.diag(f.covariance)
    assert (abs(draws.mean(axis=0) - f.mean) < 5 * np.sqrt(variances / 20_000)).all()
    errors = np.sqrt((np.outer(variances, variances) + f.covariance**2) / 20_000)
    assert (abs(np.cov(draws.T) - f.covariance) < 5 * errors).all()


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


def test_kl_of_singular_posteriors_warns():
    """200 new points, 8 features: of rank 16. Their observed values have full rank."""
    x = jnp.linspace(-4, 2, 40)[:, None]
    process = gp.GaussianProcess(scales=gp.Scales(1.0, 1.0, 0.3)).fit(
        x, jnp.sin(2 * x[:, 0]), num_steps=0
    )
    features = process.with_features(jax.random.key(0), 8)
    new = jnp.linspace(-5, 5, 200, dtype=jnp.float32)[:, None]
    exact, estimate = process.predict(new), features.predict(new)
    of_p, of_q = (f"covariance of {name} is singular .*gp.observed" for name in "pq")
    with pytest.warns(UserWarning, match=of_p), pytest.warns(UserWarning, match=of_q):
        gp.kl(exact, estimate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 < float(gp.kl(gp.observed(exact, 0.3), gp.observed(estimate, 0.3))) < 1e3


def test_negative_log_density():
    law, y = random_law(4), np.arange(4.0)
    want = -stats.norm(law.mean, np.sqrt(np.diag(law.covariance))).logpdf(y).mean()
    assert float(gp.negative_log_density(law, jnp.asarray(y))) == pytest.approx(want)


def normal_log_density(y, covariance):
    return stats.multivariate_normal(np.zeros(len(y)), covariance, allow_singular=False).logpdf(y)


@pytest.mark.parametrize("noise", [0.1, 0.02])
def test_features_in_float32_are_as_sure_as_they_may_be(noise):
    """4,000 points, 64 features; far from the data, too. By the singular values in float64."""
    rng = np.random.default_rng(0)
    x, w, new = (rng.normal(size=shape) for shape in ((4000, 2), (32, 2), (8, 2)))
    new[4:] *= 8
    phi, new_phi = (
        np.concatenate([np.sin(p @ w.T), np.cos(p @ w.T)], axis=1) / 32**0.5 for p in (x, new)
    )
    y = np.sin(2 * x.sum(axis=1)) + noise * rng.normal(size=4000)
    u, s, v = np.linalg.svd(phi, full_matrices=False)
    mean = new_phi @ (v.T @ (s / (s**2 + noise**2) * (u.T @ y)))
    half = new_phi @ v.T / np.sqrt(1 + s**2 / noise**2)
    beyond = y @ y - np.sum((u.T @ y) ** 2)
    quadratic = np.sum((u.T @ y) ** 2 / (s**2 + noise**2)) + beyond / noise**2
    log_det = np.sum(np.log(s**2 + noise**2)) + (4000 - 64) * np.log(noise**2)
    likelihood = -(quadratic + log_det + 4000 * np.log(2 * np.pi)) / 2

    narrow = [jnp.asarray(a, jnp.float32) for a in (phi, new_phi, y)]
    f = gp.condition_features(*narrow, noise)
    assert f.mean.dtype == jnp.float32
    np.testing.assert_allclose(np.diag(f.covariance), np.sum(half**2, axis=1), rtol=1e-4)
    np.testing.assert_allclose(f.mean, mean, atol=1e-4 * abs(mean).max())
    found = gp.log_marginal_likelihood_features(narrow[0], narrow[2], noise)
    assert float(found) == pytest.approx(likelihood, rel=1e-6)  # some units in the last place


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_singular_gram_matrices_have_a_posterior(dtype):
    """Points seen twice, and noise far below the rounding errors: the mean stays near the data."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.uniform(size=(64, 1)), 2, axis=0)
    gram = np.exp(-((x - x.T) ** 2) / 2 / 0.3**2)
    gram, y = (jnp.asarray(a, dtype) for a in (gram, np.sin(6 * x[:, 0])))
    laws = jax.jit(jax.vmap(lambda noise: gp.condition(gram, gram, gram, y, noise)))(
        jnp.asarray([1e-9, 1e-6, 1e-4, 1e-2], dtype)
    )
    np.testing.assert_allclose(laws.mean, np.tile(y, (4, 1)), atol=5e-3)
    assert (abs(np.diagonal(laws.covariance, axis1=1, axis2=2)) < 1e-3).all()


@pytest.mark.thorough
def test_derivatives_of_the_likelihoods():
    """First and second in the logarithm of the noise, first in the features and values."""
    phi, y = PHI[:6, :3], Y[:6]

    def exactly(log_noise, phi, y):
        return normal_log_density(y, phi @ phi.T + np.exp(2 * log_noise) * np.eye(6))

    def ours(log_noise, phi, y, form):
        if form == "features":
            return gp.log_marginal_likelihood_features(phi, y, jnp.exp(log_noise))
        return gp.log_marginal_likelihood(phi @ phi.T, y, jnp.exp(log_noise))

    h = 1e-4
    values = [exactly(step * h - 1, phi, y) for step in (-1, 0, 1)]
    slope, curvature = (values[2] - values[0]) / 2 / h, (values @ np.array([1, -2, 1])) / h**2
    of_phi = np.zeros_like(phi)
    for i, j in np.ndindex(*phi.shape):
        step = h * np.eye(6)[i][:, None] * np.eye(3)[j]
        of_phi[i, j] = (exactly(-1, phi + step, y) - exactly(-1, phi - step, y)) / 2 / h
    of_y = [(exactly(-1, phi, y + e) - exactly(-1, phi, y - e)) / 2 / h for e in h * np.eye(6)]

    @jax.jit
    def derivatives(arguments):
        return [
            (
                jax.grad(lambda a, form=form: ours(*a, form))(arguments),
                jax.jacfwd(jax.grad(ours))(*arguments, form),
            )
            for form in ("exact", "features")
        ]

    for gradient, second in derivatives((jnp.asarray(-1.0), jnp.asarray(phi), jnp.asarray(y))):
        assert float(gradient[0]) == pytest.approx(slope, abs=1e-6)
        np.testing.assert_allclose(gradient[1], of_phi, atol=1e-6)
        np.testing.assert_allclose(gradient[2], of_y, atol=1e-6)
        assert float(second) == pytest.approx(curvature, abs=1e-4)
