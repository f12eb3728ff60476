"""Gaussian-process regression, exact and with random features.

y = f(x) + noise with f ~ N(0, K) and noise N(0, sigma_n^2 I). `GaussianProcess` fits, predicts and
samples. It is built on functions of matrices: `condition` takes Gram matrices of any kernel, in
O(N^3); `condition_features` takes features with K = phi phi^T, in O(N m^2). Both return the
posterior of f, a `Gaussian`; `observed` adds the noise and so returns the distribution of y.

    exact      mean = K_* A^{-1} y,  covariance = K_** - K_* A^{-1} K_*^T,  A = K + sigma_n^2 I
    features   mean = phi_* B^{-1} phi^T y / sigma_n^2,  covariance = phi_* B^{-1} phi_*^T,
               B = phi^T phi / sigma_n^2 + I

Our K_* is the paper's K_pd, our phi its Phi_d, our phi_* its Phi_p. Corrected misprints, each
checked in the tests against the exact form with K = phi phi^T:

    VRC Eq. 38   covariance Phi^T Phi    read  Phi Phi^T (rows of Phi are points, Eq. 37)
    VRC Eq. 39   no factor before Phi_d y, and sigma_p     read  1 / sigma_n^2, and sigma_n
    VRC Eq. 41, 42   one of y, the other of f: compare them only after `observed`

B is never formed: in float32 its I would vanish next to N / sigma_n^2. Its factor is that of
[phi / sigma_n; I] by QR, as exact as the features. K + sigma_n^2 I and the covariances of `kl` must
be formed. They get a *jitter* on the diagonal, eps times its mean (eps = 1.2e-7 in float32, 2.2e-16
in float64), the rounding error of one entry. Where a Cholesky pivot is as small as rounding errors,
the jitter is n times larger, a bound on all n^2 errors together. A matrix that is still not
positive definite raises ValueError; inside `jit` the results are NaN instead.

Rounding errors of K, at most eps times its trace together, cannot be told from noise. Where they
exceed sigma_n^2 the posterior is off by several of its standard deviations. `predict` computes in
float64 from a tenth of that on. `fit`, and functions of matrices, whose entries are already
rounded, warn. Inside `jit` neither is possible.

Arrays may have any real dtype. They become float64 if one of them is, else float32.

Sources: VRC App. B.1, B.2 (Eqs 37 to 43); Rasmussen and Williams 2006, Algorithm 2.1.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, ArrayLike, Float, Num

from performer import _descent, kernels
from performer.choices import (
    checked_arrays,
    finite_arrays,
    positive_integer,
    positive_number,
    positive_values,
)
from performer.kernels import Kernel
from performer.typing import Coupling, Key

_dot = partial(jnp.matmul, precision="highest")
_whiten = partial(solve_triangular, lower=True)


class Gaussian(NamedTuple):
    """A normal distribution N(mean, covariance) of n values."""

    mean: Float[Array, " n"]
    covariance: Float[Array, "n n"]


class Scales(NamedTuple):
    """Hyperparameters of VRC App. B.1, all positive.

    None is a value that `fit` chooses from the data; before `fit` it counts as 1.
    """

    # Cast: the scales of a fitted process are arrays to type checkers.
    lengthscale: ArrayLike = cast("ArrayLike", None)
    """In the units of x; a number, or one for each dimension."""
    output_scale: ArrayLike = cast("ArrayLike", None)
    """sigma_v, in the units of y."""
    noise_scale: ArrayLike = cast("ArrayLike", None)
    """sigma_n, the standard deviation of the noise, in the units of y."""

    def filled(self, lengthscale: ArrayLike, spread: ArrayLike) -> "Scales":
        """Return the scales with values in place of None: of y `spread`, of its noise 0.3 times."""
        values = lengthscale, spread, 0.3 * spread
        return Scales(*(b if a is None else a for a, b in zip(self, values, strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GaussianProcess:
    """A Gaussian process with the data that it has seen: fit, predict, sample.

    Its prior mean is 0: subtract the mean of the training values first.
    With `frequencies` the kernel is that of its random features, in O(N m^2) instead of O(N^3).

    Example:
        >>> process = gp.GaussianProcess("matern-3/2").fit(x, y)
        >>> f = process.predict(new)  # f.mean (k,), f.covariance (k, k)
        >>> paths = process.sample(jax.random.key(0), new, 5)  # (5, k)
        >>> fast = process.with_features(jax.random.key(1), 64).predict(new)
    """

    kernel: str | Kernel = dataclasses.field(default="gaussian", metadata=dict(static=True))
    """Kernel of `performer.kernels`, by name or as a value."""
    scales: Scales = Scales()  # noqa: RUF009 (immutable)
    """Hyperparameters; `fit` starts from those that are given."""
    frequencies: Float[Array, "m d"] | None = None
    """Frequencies of the random features (`kernels.frequencies`); None for the exact kernel."""
    x: Num[ArrayLike, "n d"] | None = None
    """Training points; None before `fit`."""
    y: Num[ArrayLike, " n"] | None = None
    """Training values."""
    losses: Float[Array, " steps"] | None = None
    """Negative log marginal likelihood per point before each step of `fit`; after convergence the
    last one is repeated."""

    def fit(
        self,
        x: Num[ArrayLike, "n d"],
        y: Num[ArrayLike, " n"],
        *,
        fixed: tuple[str, ...] = (),
        num_starts: int = 1,
        num_steps: int = 1000,
        optimizer: optax.GradientTransformation | None = None,
    ) -> "GaussianProcess":
        """Return the process given the data, its scales fitted by marginal likelihood.

        The descent is in the logarithms of the scales (VRC App. B.1), in the dtype of the data. It
        starts from the given scales, and where they are None from the spread of the data: the
        standard deviation of x and the root mean square of y, 0.3 times that for the noise. Outside
        `jit` it warns if it has not converged, and if rounding errors exceed the fitted noise.

        Args:
            x: training points (n, d).
            y: training values (n,).
            fixed: names of the scales to leave as they are, as ("lengthscale",).
            num_starts: number of descents, of which the best counts. All but the first start up to
                20 times above or below.
            num_steps: largest number of steps; 0 to leave all scales as they are.
            optimizer: of optax; None: L-BFGS with a line search. The paper's is `optax.adam(1e-2)`.

        Raises:
            ValueError: for wrong shapes, entries that are not finite, no points, scales that are
                not positive and finite or (except the lengthscale) not one number, an unknown name
                in `fixed` or one without a value, or a loss that is not finite (inside `jit` the
                scales are NaN then).
        """
        x, y = finite_arrays(x=(x, "nd"), y=(y, "n"))
        is_exact, epsilon = self.frequencies is None, float(jnp.finfo(y.dtype).eps)
        scales, descent = fit_scales(
            jax.random.key(0), _loss, [self.frequencies, x, y], (kernels.get(self.kernel),),
            self.scales, fixed=fixed, num_steps=num_steps, optimizer=optimizer,
            lengthscale=_spread(x), num_starts=positive_integer("num_starts", num_starts),
            least_noise=(epsilon * len(y)) ** 0.5 / 2 if is_exact else epsilon,
        )  # fmt: skip
        if not (num_steps and is_exact and _warned_of_rounding(self.kernel, x, scales)):
            _descent.warn_if_steep(descent, stacklevel=2)
        return dataclasses.replace(self, scales=scales, x=x, y=y, losses=descent.losses)

    def with_features(
        self, key: Key, num_features: int, coupling: str | Coupling = "pnc"
    ) -> "GaussianProcess":
        """Return the process with random features of its kernel, for its training points.

        Before `fit`, pass `frequencies` of as many dimensions as the points will have.

        Args:
            key: random key.
            num_features: m, the number of frequencies; there are 2 m features.
            coupling: of the frequencies.

        Raises:
            ValueError: without training points, and as `kernels.frequencies`.
        """
        if self.x is None:
            raise ValueError(
                "the dimension of the points is not known before fit: pass"
                " frequencies=kernels.frequencies(key, kernel, num_features, dim)"
            )
        dim = jnp.shape(self.x)[-1]
        drawn = kernels.frequencies(key, self.kernel, num_features, dim, coupling)
        return dataclasses.replace(self, frequencies=drawn)

    def __repr__(self) -> str:
        """Kernel and scales, and the shapes of all other arrays."""
        shapes = {
            name: f"of shape {jnp.shape(array)}"
            for name in ("frequencies", "x", "y")
            if (array := getattr(self, name)) is not None
        }
        fields = [f"kernel={self.kernel!r}", f"scales={self.scales}"]
        return f"GaussianProcess({', '.join([*fields, *(f'{k} {v}' for k, v in shapes.items())])})"

    def predict(self, x: Num[ArrayLike, "k d"]) -> Gaussian:
        """Return the posterior of f at k points, or the prior before `fit`.

        With the exact kernel it is computed in float64 if float32 is too coarse for the noise.

        Raises:
            ValueError: as `condition` and the kernel.
        """
        if self.x is None or self.y is None:
            (new,) = finite_arrays(x=(x, "kd"))
            inputs, y = new[:0], new[:0, 0]
        else:
            inputs, new = finite_arrays(training_points=(self.x, "nd"), x=(x, "kd"))
            y = self.y
        *options, noise_scale = scales = Scales(*(1.0 if s is None else s for s in self.scales))
        if self.frequencies is not None:
            phi, test_phi = (
                _features(self.kernel, self.frequencies, a, *options) for a in (inputs, new)
            )
            return condition_features(phi, test_phi, y, noise_scale)
        gram = _gram(self.kernel, inputs, inputs, *options)
        if gram.dtype == jnp.float32 and _rounding(gram, noise_scale) > 0.1:
            data = (scales, inputs, y, new)
            with jax.enable_x64(True):
                scales, inputs, y, new = jax.tree.map(lambda a: np.asarray(a, np.float64), data)
                precise = dataclasses.replace(self, scales=scales, x=inputs, y=y).predict(new)
            return Gaussian(*(jnp.asarray(np.asarray(a), jnp.float32) for a in precise))
        cross, test_gram = (_gram(self.kernel, new, a, *options) for a in (inputs, new))
        return condition(gram, cross, test_gram, y, noise_scale)

    def sample(
        self, key: Key, x: Num[ArrayLike, "k d"], num_samples: int = 1
    ) -> Float[Array, "num_samples k"]:
        """Draw f at k points jointly, `num_samples` times; as `predict` otherwise."""
        f = self.predict(x)
        # By singular values: the covariance may be singular but for rounding.
        vectors, values, _ = jnp.linalg.svd(f.covariance)
        shape = positive_integer("num_samples", num_samples), len(f.mean)
        noise = jax.random.normal(key, shape, f.mean.dtype)
        noise = noise * jnp.sqrt(values)[None]
        return f.mean[None] + jnp.matmul(noise, vectors.mT, precision="highest")


def log_marginal_likelihood(
    gram: Num[ArrayLike, "n n"], y: Num[ArrayLike, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """Return log N(y; 0, K + sigma_n^2 I).

    Args:
        gram: K, the kernel of the training points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: for wrong shapes, entries that are not finite, sigma_n that is not positive, or
            when K + sigma_n^2 I is not positive definite.
    """
    gram, y = finite_arrays(gram=(gram, "nn"), y=(y, "n"))
    factor = _noisy_factor(gram, noise_scale)
    return _log_density(jnp.sum(_whiten(factor, y) ** 2), _log_det(factor), y)


def log_marginal_likelihood_features(
    phi: Num[ArrayLike, "n p"], y: Num[ArrayLike, " n"], noise_scale: ArrayLike
) -> Float[Array, ""]:
    """Return log N(y; 0, phi phi^T + sigma_n^2 I) in O(N m^2).

    Uses the determinant of B; y^T (phi phi^T + sigma_n^2 I)^{-1} y is the least value of
    |y - phi w|^2 / sigma_n^2 + |w|^2. Arguments and errors are those of `condition_features`.
    """
    phi, y = finite_arrays(phi=(phi, "np"), y=(y, "n"))
    factor, weights, noise_scale = _weights(phi, y, noise_scale)
    least = jnp.sum(((y - _dot(phi, weights)) / noise_scale) ** 2) + jnp.sum(weights**2)
    return _log_density(least, _log_det(factor) + len(y) * 2 * jnp.log(noise_scale), y)


def condition(
    gram: Num[ArrayLike, "n n"],
    cross: Num[ArrayLike, "k n"],
    test_gram: Num[ArrayLike, "k k"],
    y: Num[ArrayLike, " n"],
    noise_scale: ArrayLike,
) -> Gaussian:
    """Return the posterior of f at k test points (VRC Eqs 40 and 42).

    Args:
        gram: K, of the training points.
        cross: K_*, of test points against training points.
        test_gram: K_**, of the test points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: as `log_marginal_likelihood`.

    Example:
        >>> kernel = partial(kernels.gaussian, lengthscale=0.7)
        >>> f = gp.condition(kernel(x, x), kernel(new, x), kernel(new, new), y, 0.1)
        >>> f.mean, jnp.sqrt(jnp.diag(gp.observed(f, 0.1).covariance))
    """
    gram, cross, test_gram, y = finite_arrays(
        gram=(gram, "nn"), cross=(cross, "kn"), test_gram=(test_gram, "kk"), y=(y, "n")
    )
    factor = _noisy_factor(gram, noise_scale)
    half = _whiten(factor, cross.T)
    return Gaussian(_dot(cross, cho_solve((factor, True), y)), test_gram - _dot(half.T, half))


def condition_features(
    phi: Num[ArrayLike, "n p"],
    test_phi: Num[ArrayLike, "k p"],
    y: Num[ArrayLike, " n"],
    noise_scale: ArrayLike,
) -> Gaussian:
    """Return the posterior of f = phi w, w ~ N(0, I), at k test points, in O(N m^2).

    VRC Eqs 38, 39 (corrected) and 41.

    Args:
        phi: features of the training points; their kernel is phi phi^T.
        test_phi: features of the test points.
        y: training values (n,).
        noise_scale: sigma_n.

    Raises:
        ValueError: for wrong shapes, entries that are not finite, or sigma_n that is not positive.
    """
    phi, test_phi, y = finite_arrays(phi=(phi, "np"), test_phi=(test_phi, "kp"), y=(y, "n"))
    factor, weights, _ = _weights(phi, y, noise_scale)
    half = _whiten(factor, test_phi.T)
    return Gaussian(_dot(test_phi, weights), _dot(half.T, half))


def observed(distribution: Gaussian, noise_scale: ArrayLike) -> Gaussian:
    """Return the distribution of y = f + noise, given that of f."""
    mean, covariance = checked_arrays(
        mean=(distribution.mean, "n"), covariance=(distribution.covariance, "nn")
    )
    return Gaussian(mean, _noisy(covariance, noise_scale))


def kl(p: Gaussian, q: Gaussian) -> Float[Array, ""]:
    """Return KL(p || q) = E_p log(p / q) in nats; rounding may make it slightly negative.

    Both distributions must have full rank, which those of features do not have: compare
    distributions of `observed` values, posteriors or priors, N(0, K) and N(0, phi phi^T). A
    covariance that is singular up to rounding is warned about (outside `jit`).

    Raises:
        ValueError: for distributions of different sizes, entries that are not finite, or a
            covariance that is not positive definite.
    """
    p_covariance, p_mean, q_covariance, q_mean = finite_arrays(
        covariance_of_p=(p.covariance, "nn"),
        mean_of_p=(p.mean, "n"),
        covariance_of_q=(q.covariance, "nn"),
        mean_of_q=(q.mean, "n"),
    )
    p_factor = _checked_factor("the covariance of p", p_covariance)
    q_factor = _checked_factor("the covariance of q", q_covariance)
    for name, factor, covariance in (("p", p_factor, p_covariance), ("q", q_factor, q_covariance)):
        if _is_singular(factor, covariance):
            warnings.warn(
                f"the covariance of {name} is singular up to the rounding of {factor.dtype}: the"
                " divergence is one of rounding errors; compare gp.observed(...) of both",
                stacklevel=2,
            )
    squares = jnp.sum(_whiten(q_factor, p_factor) ** 2)
    squares += jnp.sum(_whiten(q_factor, q_mean - p_mean) ** 2)
    return (squares - len(p_mean) + _log_det(q_factor) - _log_det(p_factor)) / 2


def negative_log_density(distribution: Gaussian, y: Num[ArrayLike, " n"]) -> Float[Array, ""]:
    """Return -log N(y_i; mean_i, covariance_ii), averaged over the points (predictive NLL).

    Raises:
        ValueError: for wrong shapes, entries that are not finite, or variances that are not
            positive.
    """
    mean, covariance, y = finite_arrays(
        mean=(distribution.mean, "n"), covariance=(distribution.covariance, "nn"), y=(y, "n")
    )
    variance = jnp.asarray(positive_values("a variance", jnp.diagonal(covariance)))
    return jnp.mean((y - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance)) / 2


def _gram(kernel, x, y, lengthscale, output_scale) -> Array:
    return kernels.get(kernel)(x, y, lengthscale=lengthscale, output_scale=output_scale)


def _features(kernel, frequencies, x, lengthscale, output_scale) -> Array:
    scales = dict(lengthscale=lengthscale, output_scale=output_scale)
    return kernels.get(kernel).feature_map(x, frequencies, **scales)


def _loss(scales: Scales, key: Key, data: list[Any], kernel: Kernel) -> Array:
    frequencies, x, y = data
    *options, noise_scale = scales
    if frequencies is None:
        likelihood = log_marginal_likelihood(_gram(kernel, x, x, *options), y, noise_scale)
    else:
        phi = _features(kernel, frequencies, x, *options)
        likelihood = log_marginal_likelihood_features(phi, y, noise_scale)
    return -likelihood / len(y)


def fit_scales(
    key: Key,
    loss: Callable[..., Array],
    data: list[Any],
    options: tuple,
    start: Scales,
    *,
    fixed: tuple[str, ...],
    num_steps: int,
    optimizer: optax.GradientTransformation | None,
    lengthscale: ArrayLike = 1.0,
    num_starts: int = 1,
    least_noise: float = 0.0,
) -> tuple[Scales, _descent.Descent]:
    """Minimise a loss of the scales by descent in their logarithms, as one compiled program.

    Args:
        key: random key, split into one for each step of an optimizer.
        loss: (scales, key, data, *options) -> scalar.
        data: arrays; the last one has the values to fit, and its dtype is that of the scales.
        options: hashable.
        start: initial scales.
        lengthscale: in place of None in `start`.
        least_noise: least noise scale that L-BFGS reaches, relative to the size of y. Below it the
            loss consists of rounding errors.

    The other arguments and the errors are those of `GaussianProcess.fit`.

    Returns:
        The scales, and the descent in their logarithms.
    """
    if not len(data[-1]):
        raise ValueError("there is nothing to fit: y is empty")
    if isinstance(fixed, str):
        raise ValueError(f"fixed must be a tuple of names, as ({fixed!r},), got {fixed!r}")
    for name in fixed:
        if name not in start._fields:
            raise ValueError(f"fixed={name!r} is none of {', '.join(start._fields)}")
        if getattr(start, name) is None:
            raise ValueError(f"fixed={name!r} has no value: give it, as Scales({name}=0.1)")
    size = jnp.sqrt(jnp.mean(data[-1] ** 2))
    start = start.filled(lengthscale, jnp.where(size > 0, size, 1))
    positive_number("output_scale", start.output_scale)
    positive_number("noise_scale", start.noise_scale)
    logs = {
        name: jnp.log(jnp.asarray(positive_values(name, value), data[-1].dtype))
        for name, value in start._asdict().items()
    }
    held = {name: logs.pop(name) for name in fixed}
    least = least_noise * size if num_steps and optimizer is None else 0.0
    static = loss, options, num_steps, optimizer, num_starts
    scales, descent = _fit(static, key, data, logs, held, least)
    _descent.require_finite(descent.losses)
    return scales, descent


@partial(jax.jit, static_argnums=0)
def _fit(static: tuple, key, data, logs, held, least) -> tuple[Scales, _descent.Descent]:
    loss, options, num_steps, optimizer, num_starts = static

    def scales(logs: dict[str, Array]) -> Scales:
        values = jax.tree.map(jnp.exp, logs | held)
        if "noise_scale" in logs:
            values["noise_scale"] = jnp.hypot(values["noise_scale"], least)
        return Scales(**values)

    def of_scales(logs: dict[str, Array], key: Key = key) -> Array:
        return loss(scales(logs), key, data, *options)

    def descent(logs: dict[str, Array]) -> _descent.Descent:
        if optimizer is None:
            return _descent.smooth(of_scales, logs, num_steps=num_steps)
        return _descent.stochastic(key, of_scales, logs, num_steps=num_steps, optimizer=optimizer)

    if num_starts == 1:
        found = descent(logs)
    else:
        found = jax.lax.map(descent, _starts(logs, num_starts))
        best = jnp.nanargmin(found.losses[:, -1])
        found = jax.tree.map(lambda a: a[best], found)
    return scales(found.parameters), found


def _starts(logs: dict[str, Array], count: int) -> dict[str, Array]:
    """Return the given start, and others within a factor of 20, stacked."""
    keys = jax.random.split(jax.random.key(0), len(logs))

    def spread(key: Key, log: Array) -> Array:
        moves = jax.random.uniform(key, (count - 1, *log.shape), log.dtype, -1, 1)
        return log + np.log(20) * jnp.concatenate([jnp.zeros((1, *log.shape), log.dtype), moves])

    return {name: spread(key, log) for key, (name, log) in zip(keys, logs.items(), strict=True)}


def _spread(x: Array) -> Array:
    """Return the standard deviation of points, the root of the sum over their dimensions."""
    size = jnp.sqrt(jnp.sum(jnp.var(x, axis=0)))
    return jnp.where(size > 0, size, 1)


def _warned_of_rounding(kernel: str | Kernel, x: Array, scales: Scales) -> bool:
    """Warn if the rounding errors of the Gram matrix exceed the fitted noise; return if so."""
    *options, noise_scale = scales
    ratio = _rounding(_gram(kernel, x, x, *options), noise_scale)
    if ratio > 1:
        wider = "in float64 (jax.enable_x64), or " * (x.dtype != jnp.float64)
        warnings.warn(
            f"the rounding errors of the Gram matrix in {x.dtype} may be {ratio:.3g} times the"
            f" variance of the fitted noise, and scales and losses as far off: fit {wider}with a"
            " fixed, larger noise_scale",
            stacklevel=3,
        )
    return ratio > 1


def _log_density(square: Array, log_det: Array, y: Array) -> Array:
    return -(square + log_det + len(y) * jnp.log(2 * jnp.pi)) / 2


def _noisy(matrix: Array, noise_scale: ArrayLike) -> Array:
    noise_scale = jnp.asarray(positive_number("noise_scale", noise_scale), matrix.dtype)
    return matrix + noise_scale**2 * jnp.eye(len(matrix), dtype=matrix.dtype)


def _known_to_fail(factor: Array) -> bool:
    return not isinstance(factor, Tracer) and not bool(jnp.isfinite(factor).all())


def _weights(phi: Array, y: Array, noise_scale: ArrayLike) -> tuple[Array, Array, Array]:
    """Return the factor of B, the minimiser w of |y - phi w|^2 / sigma_n^2 + |w|^2, and sigma_n."""
    noise_scale = jnp.asarray(positive_number("noise_scale", noise_scale), phi.dtype)
    factor, weights = _least_squares(phi / noise_scale, y / noise_scale)
    if _known_to_fail(factor):
        raise ValueError(f"phi / noise_scale is too large for {phi.dtype}")
    return factor, weights, noise_scale


@jax.jit
def _least_squares(phi: Array, y: Array) -> tuple[Array, Array]:
    factor = _triangle(phi)
    weights = jnp.zeros(phi.shape[1], phi.dtype)
    for _ in range(2):  # the second step corrects the rounding errors of the first
        residual = _dot(phi.T, y - _dot(phi, weights)) - weights
        weights = weights + cho_solve((factor, True), residual)
    return factor, weights


def _triangle(A: Array) -> Array:
    """Return a lower triangular L with L L^T = A^T A + I; its diagonal may be negative."""
    stacked = jnp.concatenate([A, jnp.eye(A.shape[1], dtype=A.dtype)])
    return jnp.linalg.qr(stacked, mode="r").T


def _rounding(gram: Array, noise_scale: ArrayLike) -> float:
    """Return the bound of the rounding errors of K in units of sigma_n^2; 0 inside `jit`."""
    if isinstance(gram, Tracer) or isinstance(noise_scale, Tracer):
        return 0.0
    variance = float(np.asarray(positive_number("noise_scale", noise_scale))) ** 2
    return float(jnp.finfo(gram.dtype).eps * jnp.trace(gram)) / variance


def _noisy_factor(gram: Array, noise_scale: ArrayLike) -> Array:
    if (ratio := _rounding(gram, noise_scale)) > 1:
        warnings.warn(
            f"the rounding errors of the Gram matrix in {gram.dtype} may be {ratio:.3g} times the"
            " variance of the noise, and the posterior off by several of its standard deviations:"
            " give matrices in float64, or a larger noise_scale",
            stacklevel=3,
        )
    return _checked_factor("the Gram matrix plus noise", _noisy(gram, noise_scale))


def _checked_factor(name: str, matrix: Array) -> Array:
    """`_factor`; ValueError (inside `jit` NaN) for a matrix that is not positive definite."""
    factor = _factor(matrix)
    if _known_to_fail(factor):
        raise ValueError(
            f"{name}, {len(matrix)} x {len(matrix)}, is not positive definite in {matrix.dtype}:"
            f" its least eigenvalue is {float(jnp.linalg.eigvalsh(matrix)[0]):.3g}; use a larger"
            " noise_scale, or float64"
        )
    return factor


@jax.custom_jvp
@jax.jit
def _factor(matrix: Array) -> Array:
    """Return the Cholesky factor with as little jitter as the rounding errors allow."""
    n, rounding = len(matrix), _ulp(matrix)

    def factor(jitter: Array) -> Array:
        return jnp.linalg.cholesky(matrix + jitter * jnp.eye(n, dtype=matrix.dtype))

    first = factor(rounding)
    least = jnp.min(jnp.diagonal(first) ** 2, initial=jnp.inf)
    # n^2 independent errors of this size form a matrix of norm sqrt(n) times it: smaller pivots are
    # rounding errors. A loop, not a condition: under vmap it ends at once if all pivots are large.
    well = least >= 4 * n**0.5 * rounding
    return jax.lax.while_loop(
        lambda state: ~state[0], lambda _: (jnp.array(True), factor(n * rounding)), (well, first)
    )[1]


def _is_singular(factor: Array, matrix: Array) -> bool:
    """True if the least eigenvalue is within the rounding errors; False inside `jit`."""
    if isinstance(factor, Tracer) or not len(factor):
        return False
    rounding = len(factor) * _ulp(matrix)
    if jnp.min(jnp.diagonal(factor)) ** 2 > 100 * rounding:  # pivots are at least eigenvalues
        return False
    return bool(jnp.linalg.eigvalsh(matrix)[0] <= 4 * rounding)


def _ulp(matrix: Array) -> Array:
    """Return the rounding of a mean entry of the diagonal; also the least jitter."""
    return jnp.finfo(matrix.dtype).eps * jnp.mean(jnp.diagonal(matrix))


@_factor.defjvp
def _cholesky_derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """dL for L L^T = M: L times the lower half of L^{-1} dM L^{-T}, its diagonal halved."""
    factor, change = _factor(*primals), tangents[0]
    whitened = _whiten(factor, _whiten(factor, (change + change.T) / 2).T)
    return factor, _dot(factor, jnp.tril(whitened) - jnp.diag(jnp.diagonal(whitened)) / 2)


def _log_det(factor: Array) -> Array:
    return 2 * jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factor))))
