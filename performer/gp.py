"""Gaussian-process regression, exact and with random features.

y = f(x) + noise with f ~ N(0, K) and noise N(0, sigma_n^2 I). The exact posterior (`condition`)
takes Gram matrices, of whatever kernel, in O(N^3); the one with features (`condition_features`)
takes feature matrices with K = phi phi^T, in O(N m^2). Both give a `Gaussian` of f; `observed` adds
the noise, which makes it one of y.

    exact      mean = K_* A^{-1} y,  covariance = K_** - K_* A^{-1} K_*^T,  A = K + sigma_n^2 I
    features   mean = phi_* B^{-1} phi^T y / sigma_n^2,  covariance = phi_* B^{-1} phi_*^T,
               B = phi^T phi / sigma_n^2 + I

Our K_* is the paper's K_pd, our phi its Phi_d, our phi_* its Phi_p. Corrected here, each checked
against the exact form with K = phi phi^T in the tests:

    VRC Eq. 38   covariance Phi^T Phi    read  Phi Phi^T (rows of Phi are points, Eq. 37)
    VRC Eq. 39   no factor before Phi_d y, and sigma_p     read  1 / sigma_n^2, and sigma_n
    VRC Eq. 41, 42   one of y, the other of f: compare them only after `observed`

All matrices that are factored get a *jitter*, eps times their trace, on the diagonal: the size of
the rounding errors of their entries and of Cholesky's own (eps = 1.2e-7 in float32, 2.2e-16 in
float64). A matrix that is not positive definite even so raises ValueError; inside `jit`, where
nothing can be raised, it makes the results NaN.

Sources: VRC App. B.1, B.2 (Eqs 37 to 43); Rasmussen and Williams 2006, Algorithm 2.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, ArrayLike, Float

from performer import descent, kernels
from performer.kernels import checked


class Gaussian(NamedTuple):
    """A normal law N(mean, covariance) of n values."""

    mean: Float[Array, " n"]
    covariance: Float[Array, "n n"]


class Scales(NamedTuple):
    """The hyperparameters of VRC App. B.1, all positive."""

    lengthscale: ArrayLike
    """In the units of x; a number, or one for each dimension."""
    output_scale: ArrayLike
    """sigma_v, in the units of y."""
    noise_scale: ArrayLike
    """sigma_n, the standard deviation of the noise, in the units of y."""


def log_marginal_likelihood(
    gram: Float[Array, "n n"], y: Float[Array, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """log N(y; 0, K + sigma_n^2 I).

    Args:
        gram: K, the kernel of the training points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: when sigma_n is not positive or K + sigma_n^2 I not positive definite.
    """
    factor = _cholesky("the Gram matrix plus noise", _noisy(gram, noise_scale))
    return _log_density(factor, y)


def log_marginal_likelihood_features(
    phi: Float[Array, "n p"], y: Float[Array, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """log N(y; 0, phi phi^T + sigma_n^2 I) in O(N m^2), by the determinant and inverse of B."""
    n, variance = len(y), checked("noise_scale", noise_scale) ** 2
    factor = _weight_precision(phi, variance)
    projected = solve_triangular(factor, phi.T @ y, lower=True) / variance
    quadratic = y @ y / variance - projected @ projected
    log_det = _log_det(factor) + n * jnp.log(variance)
    return -(quadratic + log_det + n * jnp.log(2 * jnp.pi)) / 2


def condition(
    gram: Float[Array, "n n"],
    cross: Float[Array, "k n"],
    test_gram: Float[Array, "k k"],
    y: Float[Array, " n"],
    noise_scale: ArrayLike,
) -> Gaussian:
    """The posterior of f at k test points (VRC Eqs 40 and 42).

    Args:
        gram: K, of the training points.
        cross: K_*, of test points against training points.
        test_gram: K_**, of the test points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: when sigma_n is not positive or K + sigma_n^2 I not positive definite.

    Example:
        >>> kernel = partial(kernels.gaussian, lengthscale=0.7)
        >>> f = gp.condition(kernel(x, x), kernel(new, x), kernel(new, new), y, 0.1)
        >>> f.mean, jnp.sqrt(jnp.diag(gp.observed(f, 0.1).covariance))
    """
    factor = _cholesky("the Gram matrix plus noise", _noisy(gram, noise_scale))
    half = solve_triangular(factor, cross.T, lower=True)
    return Gaussian(cross @ cho_solve((factor, True), y), test_gram - half.T @ half)


def condition_features(
    phi: Float[Array, "n p"],
    test_phi: Float[Array, "k p"],
    y: Float[Array, " n"],
    noise_scale: ArrayLike,
) -> Gaussian:
    """The posterior of f = phi w, w ~ N(0, I), at k test points (VRC Eqs 38, 39 and 41; O(N m^2)).

    Args:
        phi: features of the training points; their kernel is phi phi^T.
        test_phi: features of the test points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: when sigma_n is not positive.
    """
    variance = checked("noise_scale", noise_scale) ** 2
    factor = _weight_precision(phi, variance)
    weights = cho_solve((factor, True), phi.T @ y) / variance
    half = solve_triangular(factor, test_phi.T, lower=True)
    return Gaussian(test_phi @ weights, half.T @ half)


def observed(law: Gaussian, noise_scale: ArrayLike) -> Gaussian:
    """The law of y = f + noise, given that of f."""
    return Gaussian(law.mean, _noisy(law.covariance, noise_scale))


def kl(p: Gaussian, q: Gaussian) -> Float[Array, ""]:
    """KL(p || q) = E_p log(p / q) in nats, not below 0 but by rounding.

    Both must have full rank: features alone have not, so compare laws of `observed` values, whether
    posteriors or priors, N(0, K) and N(0, phi phi^T).

    Raises:
        ValueError: when a covariance is not positive definite.
    """
    of_p = _cholesky("the covariance of p", p.covariance)
    of_q = _cholesky("the covariance of q", q.covariance)
    ratio = solve_triangular(of_q, of_p, lower=True)
    shift = solve_triangular(of_q, q.mean - p.mean, lower=True)
    log_dets = _log_det(of_q) - _log_det(of_p)
    return (jnp.sum(ratio**2) + shift @ shift - len(p.mean) + log_dets) / 2


def negative_log_density(law: Gaussian, y: Float[Array, " n"]) -> Float[Array, ""]:
    """-log N(y_i; mean_i, covariance_ii), averaged over the points (the papers' predictive NLL)."""
    variance = jnp.diagonal(law.covariance)
    squares = (y - law.mean) ** 2 / variance
    return jnp.mean(squares + jnp.log(2 * jnp.pi * variance)) / 2


def fit(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    start: Scales,
    *,
    kernel: kernels.Kernel = kernels.gaussian,
    fixed: tuple[str, ...] = (),
    num_steps: int = 1000,
    optimizer: optax.GradientTransformation = optax.adam(1e-2),  # noqa: B008 (stateless)
) -> tuple[Scales, Float[Array, " steps"]]:
    """The scales that maximise the exact marginal likelihood (VRC App. B.1).

    The descent is in their logarithms.

    Args:
        x: training points (n, d).
        y: training values (n,).
        start: where to start; lengthscale (d,) fits one for each dimension.
        kernel: of `kernels`.
        fixed: names of the scales that stay as they are, as ("lengthscale",).
        num_steps: how many steps of the optimizer.
        optimizer: the paper's by default.

    Returns:
        The scales, and the negative log marginal likelihood per point before each step.

    Raises:
        ValueError: for a start that is not positive, an unknown name in `fixed`, or a fit that left
            the finite numbers. (Inside `jit` that makes the result NaN.)
    """
    for name in fixed:
        if name not in Scales._fields:
            raise ValueError(f"fixed={name!r} is none of {', '.join(Scales._fields)}")
    logs = {
        name: jnp.log(jnp.asarray(checked(name, value), x.dtype))
        for name, value in start._asdict().items()
    }
    held = {name: logs.pop(name) for name in fixed}

    def loss(logs, _):
        scales = Scales(**jax.tree.map(jnp.exp, logs | held))
        lengthscale, output_scale, noise_scale = scales
        gram = kernel(x, x, lengthscale=lengthscale, output_scale=output_scale)
        return -log_marginal_likelihood(gram, y, noise_scale) / len(y)

    logs, losses = descent.minimize(
        loss, logs, jax.random.key(0), num_steps=num_steps, optimizer=optimizer
    )
    return Scales(**jax.tree.map(jnp.exp, logs | held)), losses


def _noisy(matrix: Array, noise_scale: ArrayLike) -> Array:
    return matrix + checked("noise_scale", noise_scale) ** 2 * jnp.eye(
        len(matrix), dtype=matrix.dtype
    )


def _weight_precision(phi: Array, variance: ArrayLike) -> Array:
    """The Cholesky factor of B, (p, p)."""
    with jax.default_matmul_precision("highest"):
        B = phi.T @ phi / variance + jnp.eye(phi.shape[1], dtype=phi.dtype)
    return _cholesky("the precision of the weights", B)


def _cholesky(what: str, matrix: Array) -> Array:
    jitter = jnp.finfo(matrix.dtype).eps * jnp.trace(matrix)
    factor = jnp.linalg.cholesky(matrix + jitter * jnp.eye(len(matrix), dtype=matrix.dtype))
    if not isinstance(factor, Tracer) and not bool(jnp.isfinite(factor).all()):
        if not bool(jnp.isfinite(matrix).all()):
            raise ValueError(f"{what} has entries that are not finite")
        least = float(jnp.linalg.eigvalsh(matrix)[0])
        raise ValueError(
            f"{what}, {len(matrix)} x {len(matrix)}, is not positive definite in {matrix.dtype}:"
            f" its least eigenvalue is {least:.3g}; use a larger noise_scale, or float64"
        )
    return factor


def _log_det(factor: Array) -> Array:
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))


def _log_density(factor: Array, y: Array) -> Array:
    whitened = solve_triangular(factor, y, lower=True)
    return -(whitened @ whitened + _log_det(factor) + len(y) * jnp.log(2 * jnp.pi)) / 2
