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

B is never formed: in float32 its I would drown beside N / sigma_n^2. Its factor is that of
[phi / sigma_n; I] by QR, which is as exact as the features. Matrices that must be formed, K +
sigma_n^2 I and the covariances of `kl`, get a *jitter* on the diagonal: eps times the mean of it
(eps = 1.2e-7 in float32, 2.2e-16 in float64), the rounding error of an entry; and where a pivot of
Cholesky's is no larger than rounding errors make it, n times as much, which all those n^2 errors
together do not exceed. A matrix that is not positive definite even so raises ValueError; inside
`jit`, where nothing can be raised, it makes the results NaN.

Arrays are of any real dtype: all become float64 where one is, and float32 where none is.

Sources: VRC App. B.1, B.2 (Eqs 37 to 43); Rasmussen and Williams 2006, Algorithm 2.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, ArrayLike, Float, Num

from performer import _descent, kernels
from performer.choices import checked_arrays, finite_arrays, positive_number, positive_values

_dot = partial(jnp.matmul, precision="highest")
_NOISY = "the Gram matrix plus noise"


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

    def logarithms(
        self, dtype: Any, fixed: tuple[str, ...] = ()
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """By name, of the scales that a fit moves and of those that it holds `fixed`.

        Raises:
            ValueError: for an unknown name in `fixed`, or a scale that is not positive and finite,
                or not one number; the lengthscale may be several.
        """
        for name in fixed:
            if name not in self._fields:
                raise ValueError(f"fixed={name!r} is none of {', '.join(self._fields)}")
        positive_number("output_scale", self.output_scale)
        positive_number("noise_scale", self.noise_scale)
        logs = {
            name: jnp.log(jnp.asarray(positive_values(name, value), dtype))
            for name, value in self._asdict().items()
        }
        return logs, {name: logs.pop(name) for name in fixed}


def log_marginal_likelihood(
    gram: Num[ArrayLike, "n n"], y: Num[ArrayLike, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """log N(y; 0, K + sigma_n^2 I).

    Args:
        gram: K, the kernel of the training points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: for other shapes, entries that are not finite, sigma_n that is not positive, or
            when K + sigma_n^2 I is not positive definite.
    """
    gram, y = finite_arrays(gram=(gram, "nn"), y=(y, "n"))
    noise_scale = _noise_scale(noise_scale, gram.dtype)
    result = _log_marginal_likelihood(gram, y, noise_scale)
    return _sound(result, lambda: _indefinite(_NOISY, _noisy(gram, noise_scale)))


@jax.jit
def _log_marginal_likelihood(gram: Array, y: Array, noise_scale: Array) -> tuple[Array, Array]:
    factor = _factor(_noisy(gram, noise_scale))
    whitened = solve_triangular(factor, y, lower=True)
    total = jnp.sum(whitened**2) + _log_det(factor) + len(y) * jnp.log(2 * jnp.pi)
    return -total / 2, jnp.isfinite(factor).all()


def log_marginal_likelihood_features(
    phi: Num[ArrayLike, "n p"], y: Num[ArrayLike, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """log N(y; 0, phi phi^T + sigma_n^2 I) in O(N m^2).

    By the determinant of B, and y^T (phi phi^T + sigma_n^2 I)^{-1} y as the least value of
    |y - phi w|^2 / sigma_n^2 + |w|^2. Arguments and errors as for `condition_features`.
    """
    phi, y = finite_arrays(phi=(phi, "np"), y=(y, "n"))
    noise_scale = _noise_scale(noise_scale, phi.dtype)
    return _sound(_log_marginal_likelihood_features(phi, y, noise_scale), lambda: _too_large(phi))


@jax.jit
def _log_marginal_likelihood_features(
    phi: Array, y: Array, noise_scale: Array
) -> tuple[Array, Array]:
    factor, weights = _weights(phi, y, noise_scale)
    least = jnp.sum(((y - _dot(phi, weights)) / noise_scale) ** 2) + jnp.sum(weights**2)
    log_det = _log_det(factor) + len(y) * 2 * jnp.log(noise_scale)
    total = least + log_det + len(y) * jnp.log(2 * jnp.pi)
    return -total / 2, jnp.isfinite(factor).all()


def condition(
    gram: Num[ArrayLike, "n n"],
    cross: Num[ArrayLike, "k n"],
    test_gram: Num[ArrayLike, "k k"],
    y: Num[ArrayLike, " n"],
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
        ValueError: for other shapes, entries that are not finite, sigma_n that is not positive, or
            when K + sigma_n^2 I is not positive definite.

    Example:
        >>> kernel = partial(kernels.gaussian, lengthscale=0.7)
        >>> f = gp.condition(kernel(x, x), kernel(new, x), kernel(new, new), y, 0.1)
        >>> f.mean, jnp.sqrt(jnp.diag(gp.observed(f, 0.1).covariance))
    """
    gram, cross, test_gram, y = finite_arrays(
        gram=(gram, "nn"), cross=(cross, "kn"), test_gram=(test_gram, "kk"), y=(y, "n")
    )
    noise_scale = _noise_scale(noise_scale, gram.dtype)
    result = _condition(gram, cross, test_gram, y, noise_scale)
    return _sound(result, lambda: _indefinite(_NOISY, _noisy(gram, noise_scale)))


@jax.jit
def _condition(
    gram: Array, cross: Array, test_gram: Array, y: Array, noise_scale: Array
) -> tuple[Gaussian, Array]:
    factor = _factor(_noisy(gram, noise_scale))
    half = solve_triangular(factor, cross.T, lower=True)
    mean = _dot(cross, cho_solve((factor, True), y))
    return Gaussian(mean, test_gram - _dot(half.T, half)), jnp.isfinite(factor).all()


def condition_features(
    phi: Num[ArrayLike, "n p"],
    test_phi: Num[ArrayLike, "k p"],
    y: Num[ArrayLike, " n"],
    noise_scale: ArrayLike,
) -> Gaussian:
    """The posterior of f = phi w, w ~ N(0, I), at k test points (VRC Eqs 38, 39 and 41; O(N m^2)).

    Args:
        phi: features of the training points; their kernel is phi phi^T.
        test_phi: features of the test points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: for other shapes, entries that are not finite, or sigma_n that is not positive.
    """
    phi, test_phi, y = finite_arrays(phi=(phi, "np"), test_phi=(test_phi, "kp"), y=(y, "n"))
    noise_scale = _noise_scale(noise_scale, phi.dtype)
    return _sound(_condition_features(phi, test_phi, y, noise_scale), lambda: _too_large(phi))


@jax.jit
def _condition_features(
    phi: Array, test_phi: Array, y: Array, noise_scale: Array
) -> tuple[Gaussian, Array]:
    factor, weights = _weights(phi, y, noise_scale)
    half = solve_triangular(factor, test_phi.T, lower=True)
    return Gaussian(_dot(test_phi, weights), _dot(half.T, half)), jnp.isfinite(factor).all()


def observed(law: Gaussian, noise_scale: ArrayLike) -> Gaussian:
    """The law of y = f + noise, given that of f."""
    mean, covariance = checked_arrays(mean=(law.mean, "n"), covariance=(law.covariance, "nn"))
    return Gaussian(mean, _noisy(covariance, _noise_scale(noise_scale, covariance.dtype)))


def kl(p: Gaussian, q: Gaussian) -> Float[Array, ""]:
    """KL(p || q) = E_p log(p / q) in nats, not below 0 but by rounding.

    Both must have full rank: features alone have not, so compare laws of `observed` values, whether
    posteriors or priors, N(0, K) and N(0, phi phi^T).

    Raises:
        ValueError: for laws of different numbers of values, entries that are not finite, or a
            covariance that is not positive definite.
    """
    p_covariance, p_mean, q_covariance, q_mean = finite_arrays(
        covariance_of_p=(p.covariance, "nn"),
        mean_of_p=(p.mean, "n"),
        covariance_of_q=(q.covariance, "nn"),
        mean_of_q=(q.mean, "n"),
    )
    p, q = Gaussian(p_mean, p_covariance), Gaussian(q_mean, q_covariance)
    value, definite = _kl(p, q)
    for name, covariance in (("p", p.covariance), ("q", q.covariance)):
        _sound(
            (value, definite[name]), partial(_indefinite, f"the covariance of {name}", covariance)
        )
    return value


@jax.jit
def _kl(p: Gaussian, q: Gaussian) -> tuple[Array, dict[str, Array]]:
    p_factor, q_factor = _factor(p.covariance), _factor(q.covariance)
    ratio = solve_triangular(q_factor, p_factor, lower=True)
    shift = solve_triangular(q_factor, q.mean - p.mean, lower=True)
    log_dets = _log_det(q_factor) - _log_det(p_factor)
    value = (jnp.sum(ratio**2) + jnp.sum(shift**2) - len(p.mean) + log_dets) / 2
    return value, {"p": jnp.isfinite(p_factor).all(), "q": jnp.isfinite(q_factor).all()}


def negative_log_density(law: Gaussian, y: Num[ArrayLike, " n"]) -> Float[Array, ""]:
    """-log N(y_i; mean_i, covariance_ii), averaged over the points (the papers' predictive NLL).

    Raises:
        ValueError: for other shapes, entries that are not finite, or a variance that is not
            positive.
    """
    mean, covariance, y = finite_arrays(
        mean=(law.mean, "n"), covariance=(law.covariance, "nn"), y=(y, "n")
    )
    return _negative_log_density(mean, positive_values("a variance", jnp.diagonal(covariance)), y)


@jax.jit
def _negative_log_density(mean: Array, variance: Array, y: Array) -> Array:
    squares = (y - mean) ** 2 / variance
    return jnp.mean(squares + jnp.log(2 * jnp.pi * variance)) / 2


def fit(
    x: Num[ArrayLike, "n d"],
    y: Num[ArrayLike, " n"],
    start: Scales,
    *,
    kernel: str | kernels.Kernel = kernels.gaussian,
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
        kernel: of `kernels`, by its word or as a value.
        fixed: names of the scales that stay as they are, as ("lengthscale",).
        num_steps: how many steps of the optimizer.
        optimizer: the paper's by default.

    Returns:
        The scales, and the negative log marginal likelihood per point before each step.

    Raises:
        ValueError: for other shapes, entries that are not finite, no points at all, a start that is
            not positive, an unknown name in `fixed`, or a fit that left the finite numbers. (Inside
            `jit` that makes the result NaN.)
    """
    x, y = finite_arrays(x=(x, "nd"), y=(y, "n"))
    if not len(y):
        raise ValueError("there are no training points to fit: x has the shape " + str(x.shape))
    logs, held = start.logarithms(x.dtype, fixed)
    scales, losses = _fit(
        x, y, logs, held, kernel=kernels.get(kernel), num_steps=num_steps, optimizer=optimizer
    )
    _descent.require_finite(losses)
    return scales, losses


@partial(jax.jit, static_argnames=("kernel", "num_steps", "optimizer"))
def _fit(x, y, logs, held, *, kernel, num_steps, optimizer) -> tuple[Scales, Array]:
    def loss(logs, _):
        lengthscale, output_scale, noise_scale = Scales(**jax.tree.map(jnp.exp, logs | held))
        gram = kernel(x, x, lengthscale=lengthscale, output_scale=output_scale)
        return -log_marginal_likelihood(gram, y, noise_scale) / len(y)

    logs, losses = _descent.minimize(
        jax.random.key(0), loss, logs, num_steps=num_steps, optimizer=optimizer
    )
    return Scales(**jax.tree.map(jnp.exp, logs | held)), losses


def _noise_scale(value: ArrayLike, dtype: Any) -> Array:
    return jnp.asarray(positive_number("noise_scale", value), dtype)


@jax.jit
def _noisy(matrix: Array, noise_scale: Array) -> Array:
    return matrix + noise_scale**2 * jnp.eye(len(matrix), dtype=matrix.dtype)


def _sound(result: tuple[Any, Array], error: Callable[[], ValueError]) -> Any:
    """What a program computed, unless it says that its factor is not finite; traced, it passes."""
    value, finite = result
    if not isinstance(finite, Tracer) and not bool(finite):
        raise error()
    return value


def _too_large(phi: Array) -> ValueError:
    return ValueError(f"phi / noise_scale is too large for {phi.dtype}")


def _weights(phi: Array, y: Array, noise_scale: Array) -> tuple[Array, Array]:
    """The factor of B, and the w with the least |y - phi w|^2 / sigma_n^2 + |w|^2."""
    phi, y = phi / noise_scale, y / noise_scale
    factor = _triangle(phi)
    weights = jnp.zeros(phi.shape[1], phi.dtype)
    for _ in range(2):  # the second time what rounding left of the first
        residual = _dot(phi.T, y - _dot(phi, weights)) - weights
        weights = weights + cho_solve((factor, True), residual)
    return factor, weights


@jax.custom_jvp
@jax.jit
def _triangle(A: Array) -> Array:
    """A lower triangular L with L L^T = A^T A + I, of entries that may be negative everywhere."""
    stacked = jnp.concatenate([A, jnp.eye(A.shape[1], dtype=A.dtype)])
    return jnp.linalg.qr(stacked, mode="r").T


@_triangle.defjvp
def _triangle_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (A,), (change,) = primals, tangents
    factor, half = _triangle(A), _dot(change.T, A)
    return factor, _factor_derivative(factor, half + half.T)


def _indefinite(name: str, matrix: Array) -> ValueError:
    """What is wrong with a matrix that has no Cholesky factor."""
    if not bool(jnp.isfinite(matrix).all()):
        return ValueError(f"{name} has entries that are not finite")
    least = float(jnp.linalg.eigvalsh(matrix)[0])
    return ValueError(
        f"{name}, {len(matrix)} x {len(matrix)}, is not positive definite in {matrix.dtype}:"
        f" its least eigenvalue is {least:.3g}; use a larger noise_scale, or float64"
    )


@jax.custom_jvp
@jax.jit
def _factor(matrix: Array) -> Array:
    """Cholesky's factor with as little jitter as the rounding errors allow."""
    n = len(matrix)
    rounding = jnp.finfo(matrix.dtype).eps * jnp.mean(jnp.diagonal(matrix))

    def factor(jitter: Array) -> Array:
        return jnp.linalg.cholesky(matrix + jitter * jnp.eye(n, dtype=matrix.dtype))

    first = factor(rounding)
    least = jnp.min(jnp.diagonal(first) ** 2, initial=jnp.inf)
    # n^2 independent errors of that size are a matrix of norm sqrt(n), and a pivot below it is one.
    # A loop, not a condition: of a stack, under vmap, it ends at once where all are well.
    well = least >= 4 * n**0.5 * rounding
    return jax.lax.while_loop(
        lambda state: ~state[0], lambda _: (jnp.array(True), factor(n * rounding)), (well, first)
    )[1]


@_factor.defjvp
def _cholesky_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    factor, change = _factor(*primals), tangents[0]
    return factor, _factor_derivative(factor, (change + change.T) / 2)


def _factor_derivative(factor: Array, change: Array) -> Array:
    """Of L with L L^T = M: L times the lower half of L^{-1} dM L^{-T}, its diagonal halved."""
    whitened = solve_triangular(factor, change, lower=True)
    whitened = solve_triangular(factor, whitened.T, lower=True)
    return _dot(factor, jnp.tril(whitened) - jnp.diag(jnp.diagonal(whitened)) / 2)


def _log_det(factor: Array) -> Array:
    return 2 * jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factor))))
