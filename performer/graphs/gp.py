"""Gaussian processes on the nodes of a graph, without a Gram matrix.

f ~ N(0, sigma_v^2 K) over all nodes, seen with noise N(0, sigma_n^2) at some of them (VRC Sec. 4.2,
App. F.2; their kappa is sigma_v^2, gamma the lengthscale). Only products K v are computed. Systems
of equations are solved by conjugate gradients, to a relative residual of `tolerance`. The gradient
of the likelihood,

    d/dtheta -log p(y) = -1/2 alpha^T (dC) alpha + 1/2 E_z (C^{-1} z)^T (dC) z,    alpha = C^{-1} y,

estimates the trace with random signs z (Hutchinson). C = sigma_v^2 K + sigma_n^2 I over the nodes
seen. `performer.gp` does the same with dense matrices (`estimate.gram()`).

`sample` draws posterior functions at all nodes by Matheron's rule (Wilson et al. 2020, "Efficiently
sampling functions from Gaussian process posteriors"): a draw of the prior, sigma_v Phi w with w ~
N(0, I), is corrected by the kernel of the nodes seen. Its equations need the features of these
nodes alone, so their cost does not grow with the graph.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, ArrayLike, Float, Int, Num

from performer import _descent
from performer.choices import finite_arrays, positive_integer, positive_number
from performer.gp import Gaussian, Scales, fit_scales
from performer.graphs import features, kernels, walks
from performer.typing import Key

TOLERANCE = 1e-5
"""Default relative residual of a system of equations."""


def condition(
    kernel: Any,
    observed: Int[ArrayLike, " n"],
    nodes: Int[ArrayLike, " k"],
    y: Num[ArrayLike, " n"],
    noise_scale: ArrayLike,
    *,
    output_scale: ArrayLike = 1.0,
    tolerance: float = TOLERANCE,
) -> Gaussian:
    """Return the posterior of f at k nodes, by one system of equations for each of them.

    It warns if rounding errors of K may exceed the variance of the noise (outside `jit`), as
    `performer.gp` does.

    Args:
        kernel: K, any object of shape (N, N) that multiplies traced vectors with `@`. A matrix of
            SciPy does not: use `.toarray()`.
        observed: nodes seen (n,); a node may occur more than once.
        nodes: nodes to predict (k,).
        y: values at the nodes seen (n,), of any real dtype.
        noise_scale: sigma_n.
        output_scale: sigma_v; the prior is N(0, sigma_v^2 K).
        tolerance: relative residual of the conjugate gradients.

    Raises:
        ValueError: for a scale that is not positive, nodes that are not in the graph, values that
            are not finite or not one for each node seen, or if the conjugate gradients do not
            converge (inside `jit` the results are NaN instead).
    """
    num_nodes = kernel.shape[0]
    observed, y = _observations(num_nodes, observed, y)
    nodes = _checked_nodes("nodes", num_nodes, nodes)
    positive_number("noise_scale", noise_scale)
    positive_number("output_scale", output_scale)
    arrays = all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(kernel))
    program = jax.jit(_condition) if arrays else _condition  # a user-defined kernel
    posterior, residual, ratio = program(
        kernel, observed, nodes, y, noise_scale, output_scale, tolerance
    )
    posterior = _converged(posterior, residual, tolerance)
    if not isinstance(ratio, Tracer) and float(ratio) > 1:
        warnings.warn(
            f"the rounding errors of the kernel in {ratio.dtype} may be {float(ratio):.3g} times"
            " the variance of the noise, and the posterior off by several of its standard"
            " deviations: use float64, or a larger noise_scale",
            stacklevel=2,
        )
    return posterior


@jax.default_matmul_precision("highest")
def _condition(
    kernel, observed, nodes, y, noise_scale, output_scale, tolerance
) -> tuple[Gaussian, Array, Array]:
    """Return the posterior, the residual, and rounding errors of K in units of the noise."""
    one_hot = jnp.zeros((kernel.shape[0], len(nodes)), y.dtype)
    columns = kernel @ one_hot.at[nodes, jnp.arange(len(nodes))].set(1)  # (N, k)
    dtype = columns.dtype  # the wider of kernel and values
    y, noise_scale, output_scale = (jnp.asarray(x, dtype) for x in (y, noise_scale, output_scale))
    columns = output_scale**2 * columns
    cross = columns[observed]
    system = _system(kernel, observed, output_scale, noise_scale)
    right = jnp.concatenate([y[:, None], cross], axis=1)
    solution, residual = _solve(system, right, tolerance)
    # With the residuals r, the error r^T C^-1 r is of second order in the tolerance.
    known = cross.T @ solution + solution[:, 1:].T @ (right - system(solution))
    trace = len(y) / max(len(nodes), 1) * jnp.trace(columns[nodes])  # as if all nodes were alike
    ratio = jnp.finfo(dtype).eps * trace / noise_scale**2
    return Gaussian(known[:, 0], columns[nodes] - known[:, 1:]), residual, ratio


def sample(
    key: Key,
    kernel: features.EstimatedKernel,
    observed: Int[ArrayLike, " n"],
    y: Num[ArrayLike, " n"],
    noise_scale: ArrayLike,
    num_samples: int = 1,
    *,
    output_scale: ArrayLike = 1.0,
    tolerance: float = TOLERANCE,
) -> Float[Array, "num_samples N"]:
    """Draw f at all nodes from the posterior; one system of equations for each sample.

        f = g + sigma_v^2 K_{.o} C^{-1} (y - g_o - noise),    g = sigma_v Phi w,    w ~ N(0, I)

    Args:
        key: random key of w and the noise.
        kernel: K = Phi Phi^T of one ensemble.
        observed: nodes seen (n,), none for the prior.
        num_samples: number of samples.

    The other arguments are as in `condition`.

    Raises:
        ValueError: as `condition`, and for a kernel of two ensembles, which is no covariance.

    Example:
        >>> paths = sample(key, K, seen, y, 0.1, num_samples=8)  # (8, N)
        >>> best = jnp.argmax(paths, axis=1)  # Thompson sampling: 8 nodes to observe next
    """
    observed, y = _observations(kernel.shape[0], observed, y)
    if kernel.right is not None:
        raise ValueError("sample needs a kernel of one ensemble: unbiased_diagonal=False")
    positive_number("noise_scale", noise_scale)
    positive_number("output_scale", output_scale)
    settings = noise_scale, output_scale, tolerance
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((kernel, observed)))
    near = kernel if traced else _rows(kernel, observed)
    num_samples = positive_integer("num_samples", num_samples)
    paths, residual = _sample(key, kernel, near, observed, y, *settings, num_samples=num_samples)
    return _converged(paths, residual, tolerance)


@partial(jax.jit, static_argnames="num_samples")
@jax.default_matmul_precision("highest")
def _sample(key, kernel, near, observed, y, noise_scale, output_scale, tolerance, *, num_samples):
    """Return the samples, and the residual of the equations; `near` has the rows observed."""
    dtype = jnp.promote_types(kernel.left.value.dtype, y.dtype)
    y, noise_scale, output_scale = (jnp.asarray(x, dtype) for x in (y, noise_scale, output_scale))
    prior_key, noise_key = jax.random.split(key)
    weights = jax.random.normal(prior_key, (kernel.shape[0], num_samples), dtype)
    noise = jax.random.normal(noise_key, (len(y), num_samples), dtype)
    prior = output_scale * (kernel.left @ weights)  # (N, samples)
    right = y[:, None] - prior[observed] - noise_scale * noise
    solution, residual = _solve(
        _system(near, observed, output_scale, noise_scale), right, tolerance
    )
    on_nodes = jnp.zeros_like(prior).at[observed].add(solution)
    correction = kernel.left @ near.left.transposed(on_nodes)
    return (prior + output_scale**2 * correction).T, residual


def _rows(kernel: features.EstimatedKernel, nodes: Array) -> features.EstimatedKernel:
    """Return the estimate without the features of other nodes; between these it is the same."""
    phi = kernel.left
    chosen = np.zeros(phi.num_nodes, bool)
    chosen[np.asarray(nodes)] = True
    kept = np.flatnonzero(chosen[np.asarray(phi.start)])
    start, node, value = (
        jnp.asarray(np.asarray(x)[kept]) for x in (phi.start, phi.node, phi.value)
    )
    return features.EstimatedKernel(features.Features(start, node, value, phi.num_nodes))


def solve(
    system: Callable[[Array], Array], right: Float[Array, "n k"], tolerance: float = TOLERANCE
) -> Float[Array, "n k"]:
    """Return the k solutions of C x = right, by conjugate gradients on all columns at once.

    Raises:
        ValueError: if a residual stays above ten times the tolerance (inside `jit`: NaN).
    """
    return _converged(*_solve(system, right, tolerance), tolerance)


def _solve(system: Any, right: Array, tolerance: Any) -> tuple[Array, Array]:
    """Return the solutions, and the largest relative residual."""
    size = jnp.max(jnp.abs(right), axis=0, initial=0)
    size = jnp.where(size > 0, size, 1)  # squares of small or large units leave float32
    right = right / size[None]
    one = lambda b: cg(lambda x: system(x[:, None])[:, 0], b, tol=tolerance)[0]  # noqa: E731
    solution = jax.vmap(one, 1, 1)(right)
    residual = jnp.linalg.norm(system(solution) - right, axis=0)
    relative = residual / jnp.maximum(jnp.linalg.norm(right, axis=0), 1e-30)
    return solution * size[None], jnp.max(relative)


def _converged(result: Any, residual: Array, tolerance: float) -> Any:
    """Return the result if its residual is small; else raise, or NaN inside `jit`."""
    if isinstance(residual, Tracer):
        return jax.tree.map(lambda x: jnp.where(residual <= 10 * tolerance, x, jnp.nan), result)
    if not float(residual) <= 10 * tolerance:
        raise ValueError(
            f"the conjugate gradients stopped at a relative residual of {float(residual):.3g}, for"
            f" a tolerance of {tolerance:.3g}: use a larger noise_scale or tolerance, or float64"
        )
    return result


def fit(
    key: Key,
    sampled: walks.Walks,
    observed: Int[ArrayLike, " n"],
    y: Num[ArrayLike, " n"],
    start: Scales = Scales(),  # noqa: B008 (immutable)
    *,
    kernel: Callable[[ArrayLike], kernels.Modulation] = kernels.Diffusion,
    fixed: tuple[str, ...] = (),
    num_steps: int = 1000,
    num_probes: int = 8,
    tolerance: float = 1e-3,
    optimizer: optax.GradientTransformation = optax.adam(1e-2),  # noqa: B008 (stateless)
) -> tuple[Scales, Float[Array, " steps"]]:
    """Fit the scales that maximise the likelihood under the estimated kernel (VRC App. F.2).

    The descent is in the logarithms of the scales. The walks are drawn once (`features.sample`);
    only their modulation changes. Outside `jit` it warns if the gradient at the end, a mean over
    the last tenth of the steps, is not small.

    Args:
        key: random key of the signs z.
        sampled: the walks.
        observed: nodes seen (n,); a node may occur more than once.
        y: values there (n,), of any real dtype.
        start: initial lengthscale (the argument of `kernel`), output_scale and noise_scale; None
            is 1, the root mean square of y, and 0.3 times that.
        kernel: lengthscale -> kernel.
        fixed: names of the scales to leave as they are, as ("lengthscale",).
        num_steps: number of optimizer steps.
        num_probes: vectors of random signs in each step.
        tolerance: relative residual of the conjugate gradients.
        optimizer: the paper's by default.

    Returns:
        The scales, and y^T C^{-1} y / n before each step (up to the tolerance): 1 if the output and
        noise scales have converged. (The likelihood itself would need a determinant.)

    Raises:
        ValueError: as `performer.gp.GaussianProcess.fit`, for nodes that are not in the graph, or
            for values that are not finite or not one for each node seen.
    """
    observed, y = _observations(sampled.num_nodes, observed, y)
    y = y.astype(jnp.promote_types(y.dtype, sampled.load.dtype))
    positive_number("lengthscale", 1.0 if start.lengthscale is None else start.lengthscale)
    scales, descent = fit_scales(
        key, _loss, [sampled, observed, y], (kernel, num_probes, tolerance), start,
        fixed=fixed, num_steps=num_steps, optimizer=optimizer,
    )  # fmt: skip
    _descent.warn_if_steep(descent, stacklevel=2)
    return scales, 1 - 2 * descent.losses


def _loss(scales: Scales, key: Key, data: list[Any], kernel, num_probes, tolerance) -> Array:
    """Return (mean_z (C^{-1} z)^T C z - alpha^T C alpha) / 2 n; its gradient is -d log p / n."""
    sampled, observed, y = data
    estimate = features.EstimatedKernel(features.modulate(sampled, kernel(scales.lengthscale)))
    system = _system(estimate, observed, scales.output_scale, scales.noise_scale)
    signs = jax.random.rademacher(key, (len(y), num_probes), y.dtype)
    right = jnp.concatenate([y[:, None], signs], axis=1)
    solved = solve(lambda v: jax.lax.stop_gradient(system(v)), right, tolerance)
    products = jnp.sum(solved * system(jnp.concatenate([solved[:, :1], signs], axis=1)), axis=0)
    return (-products[0] + jnp.mean(products[1:])) / (2 * len(y))


def _system(kernel, observed, output_scale, noise_scale) -> Callable[[Array], Array]:
    """Return v -> C v over the nodes seen, for v (n, k)."""

    def system(v):
        # Added, not set: both values of a node seen twice count.
        everywhere = jnp.zeros((kernel.shape[0], v.shape[1]), v.dtype).at[observed].add(v)
        with jax.default_matmul_precision("highest"):
            product = kernel @ everywhere
        return output_scale**2 * product[observed] + noise_scale**2 * v

    return system


def _observations(num_nodes: int, observed: Any, y: Any) -> tuple[Array, Array]:
    observed = _checked_nodes("observed", num_nodes, observed)
    (y,) = finite_arrays(y=(y, "n"))
    if len(y) != len(observed):
        raise ValueError(f"y must have a value for each of {len(observed)} nodes, got {len(y)}")
    return observed, y


def _checked_nodes(name: str, num_nodes: int, nodes: Any) -> Array:
    nodes = jnp.asarray(nodes) if np.size(nodes) else jnp.zeros(np.shape(nodes), jnp.int32)
    if nodes.ndim != 1 or not jnp.issubdtype(nodes.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be whole numbers (n,), got {nodes.dtype} of the shape {nodes.shape}"
        )
    known = np.zeros(0, int) if isinstance(nodes, Tracer) else np.asarray(nodes)
    for absent in known[(known < 0) | (known >= num_nodes)]:
        raise ValueError(f"{name} must be nodes from 0 to {num_nodes - 1}, got {absent}")
    return nodes
