"""Gaussian copulas over the lengths of the frequencies, learned by gradient.

The m lengths of a block are l_i = F^{-1}(Phi(g_i)) with normal scores g ~ N(0, Sigma), Sigma a
correlation matrix. Each length keeps its law; Sigma is the coupling. Its Cholesky factor L has
unconstrained parameters theta, one for each pair j < i:

    L_ij = theta_ij / s_i  for j < i,   L_ii = 1 / s_i,   s_i^2 = 1 + sum_{j < i} theta_ij^2

(VRC Eq. 34 corrected: it prints i <= j, and theta > 0, under which all correlations are positive
and PNC cannot be expressed). Independent lengths are theta = 0; PNC has correlation -1 in the pairs
(0, 1), (2, 3), ... and PM +1 everywhere. Both are limits of the family:

    theta = learned.parameters(learned.pairwise(d))    # -0.999999 in pairs
    coupling = learned.orthogonal(theta)               # an ordinary coupling

`learn` minimises a loss of the frequencies by gradient descent in theta (the reparameterisation
trick: g = L times independent normals). Losses: `kernel_rmse` (VRC Eq. 35), `attention_mse`.

Source: VRC Sec. 3.2 and App. A.5. Their u_i is our Phi(g_i).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Num

from performer import _descent, attention, couplings, directions, features, kernels
from performer.norms import FromScores, independent_scores
from performer.numerics import root
from performer.typing import Coupling, Frequencies, Key, Value, float32_or_wider

Theta = Float[Array, " pairs"]
Loss = Callable[[Frequencies], Float[Array, ""]]

FALLING = 0.01
"""Share of the whole fall of a loss that may still happen in the last tenth of the steps."""
_NEAR_ONE = 1 - 1e-6


@jax.jit
def cholesky(theta: Theta) -> Float[Array, "m m"]:
    """Return L of Eq. 34 (corrected): lower triangular with unit rows, so L L^T has diagonal 1.

    Args:
        theta: rows of the strict lower triangle, concatenated, (m (m - 1) / 2,).

    Raises:
        ValueError: for a size that is not m (m - 1) / 2.
    """
    m = (1 + isqrt(1 + 8 * theta.size)) // 2
    if theta.size != m * (m - 1) // 2:
        raise ValueError(
            f"theta has {theta.size} parameters; m lengths take m (m - 1) / 2 of them, as"
            f" {m * (m - 1) // 2} for m = {m}"
        )
    rows = jnp.eye(m, dtype=theta.dtype).at[jnp.tril_indices(m, -1)].set(theta)
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def parameters(correlation: Float[Array, "m m"]) -> Theta:
    """Return the theta with L L^T = `correlation`: theta_ij = L_ij / L_ii.

    Args:
        correlation: (m, m), positive definite, with ones on the diagonal.

    Raises:
        ValueError: for a matrix that is not symmetric, another diagonal, or an eigenvalue that is
            not positive (use `pairwise` and `monotone` for the limits PNC and PM).
    """
    if not bool(jnp.allclose(correlation, correlation.T, atol=1e-5)):
        raise ValueError("a correlation matrix is symmetric: pass L L^T, not a factor")
    if not bool(jnp.allclose(jnp.diagonal(correlation), 1, atol=1e-5)):
        raise ValueError("a correlation matrix has ones on its diagonal")
    factor = jnp.linalg.cholesky(correlation)
    if not bool(jnp.isfinite(factor).all()):
        raise ValueError(
            "the correlation matrix is not positive definite: its least eigenvalue is"
            f" {float(jnp.linalg.eigvalsh(correlation)[0]):.3g}"
        )
    rows = factor / jnp.diagonal(factor)[:, None]
    return rows[jnp.tril_indices(len(correlation), -1)]


def pairwise(m: int) -> Float[Array, "m m"]:
    """Return the correlations of PNC within 1e-6: -1 in the pairs (0, 1), (2, 3), ..., else 0."""
    i, j = jnp.arange(m)[:, None], jnp.arange(m)[None]
    return jnp.where((i // 2 == j // 2) & (i != j), -_NEAR_ONE, jnp.eye(m, dtype=jnp.float32))


def monotone(m: int) -> Float[Array, "m m"]:
    """Return the correlations of PM within 1e-6: 1 everywhere."""
    return jnp.where(jnp.eye(m, dtype=bool), jnp.float32(1), jnp.float32(_NEAR_ONE))


@dataclass(frozen=True, repr=False)
class Scores(Value):
    """m normal scores with the correlation of theta: g = L n for independent normal n.

    Hashable if theta is a tuple; an array may be traced and differentiated.
    """

    theta: tuple[float, ...] | Theta

    def __call__(self, key: Key, m: int) -> Float[Array, " m"]:
        """Draw the scores (m,), float32; ValueError for another m than that of theta."""
        factor = cholesky(jnp.asarray(self.theta, jnp.float32))
        if m != len(factor):
            raise ValueError(f"the copula couples {len(factor)} lengths, the block has {m}")
        return jnp.matmul(factor, independent_scores(key, m), precision="highest")


def norms(theta: Theta) -> FromScores:
    """Return the law of m lengths with the copula of theta, for `couplings.Blocks`.

    A block has m = d lengths, float32 whatever the dtype of theta is.

    Raises:
        ValueError: for a wrong number of parameters; in a draw, for blocks of another size.
    """
    cholesky(theta)
    scores = Scores(theta if isinstance(theta, Tracer) else tuple(theta.tolist()))
    return FromScores(scores)


def orthogonal(theta: Theta) -> couplings.Blocks:
    """Return the coupling of orthogonal directions and these lengths.

    `orf`, `pnc` and `pm` are special cases. It is accepted wherever a built-in coupling is.
    """
    return couplings.Blocks(directions.orthogonal, norms(theta))


def kernel_rmse(
    x: Num[ArrayLike, "n d"],
    feature_map: Callable[..., Array] = features.trigonometric,
    *,
    lengthscale: ArrayLike = 1.0,
) -> Loss:
    """Return the loss "root mean square error of the Gaussian kernel over all pairs" (VRC Eq. 35).

    Args:
        x: points (n, d).
        feature_map: `features.trigonometric` or `features.positive`.
        lengthscale: lengthscale of the kernel.
    """
    exact = kernels.gaussian(x, x, lengthscale=lengthscale)

    def loss(frequencies: Frequencies) -> Float[Array, ""]:
        phi = feature_map(x, frequencies, kernel="gaussian", lengthscale=lengthscale)
        errors = jnp.matmul(phi, phi.T, precision="highest") - exact
        return root(jnp.mean(errors**2))  # an error of 0 has the gradient 0, not NaN

    return loss


def attention_mse(query: Float[Array, "t h"], key: Float[Array, "s h"]) -> Loss:
    """Return the loss "mean squared error of the attention weights softmax(q.k) of one head"."""
    query, key = (x.astype(float32_or_wider(query, key)) for x in (query, key))
    exact = jax.nn.softmax(jnp.matmul(query, key.T, precision="highest"), axis=-1)

    def loss(frequencies: Frequencies) -> Float[Array, ""]:
        weights = attention.attention_weights(query[:, None], key[:, None], frequencies, scale=1.0)
        return jnp.mean((weights[0] - exact) ** 2)

    return loss


def learn(
    key: Key,
    loss: Loss,
    start: Theta,
    *,
    num_features: int,
    coupling: Callable[[Theta], Coupling] = orthogonal,
    num_draws: int = 8,
    num_steps: int = 500,
    optimizer: optax.GradientTransformation = optax.adam(3e-2),  # noqa: B008 (stateless)
) -> tuple[Theta, Float[Array, " steps"]]:
    """Minimise the mean loss over draws by stochastic gradient descent in theta.

    It warns if the losses still fall in the last tenth of the steps (outside `jit`).

    Args:
        key: random key.
        loss: frequencies (num_features, d) -> scalar, differentiable: `kernel_rmse`,
            `attention_mse`, or one of your own.
        start: initial theta for blocks of d; zeros are independent lengths.
        num_features: m.
        coupling: theta -> coupling, as `lambda theta: couplings.Antithetic(orthogonal(theta))`.
        num_draws: draws of the frequencies in each step.
        num_steps: number of steps.
        optimizer: of optax.

    Returns:
        Theta, and the loss before each step, a mean over `num_draws` draws.

    Raises:
        ValueError: if a loss is not finite (inside `jit` theta is NaN instead).

    Example:
        >>> start = jnp.zeros(d * (d - 1) // 2)
        >>> theta, losses = learned.learn(key, learned.kernel_rmse(x), start, num_features=d)
        >>> frequencies = learned.orthogonal(theta)(key, d, d)
    """
    d = len(cholesky(start))

    def mean_loss(theta: Theta, step_key: Key) -> Float[Array, ""]:
        keys = jax.random.split(step_key, num_draws)
        drawn = coupling(theta)
        return jnp.mean(jax.vmap(lambda k: loss(drawn(k, num_features, d)))(keys))

    descent = _descent.stochastic(key, mean_loss, start, num_steps=num_steps, optimizer=optimizer)
    _descent.require_finite(descent.losses)
    warn_if_falling(descent.losses, stacklevel=2)
    return descent.parameters, descent.losses


def warn_if_falling(losses: Float[Array, " steps"], stacklevel: int) -> None:
    """Warn if noisy losses still fall, in a tenth of the steps by more than `FALLING` of all.

    A line through the last fifth has the slope.
    """
    size = max(len(losses) // 10, 5)
    if isinstance(losses, Tracer) or len(losses) < 3 * size:
        return
    first, last = np.asarray(losses)[:size], np.asarray(losses)[-2 * size :]
    line, covariance = np.polyfit(np.arange(2 * size), last, 1, cov=True)
    fall, error = -size * line[0], size * covariance[0, 0] ** 0.5
    if fall > max(_descent.SURE * error, FALLING * (first.mean() - last.mean())):
        warnings.warn(
            f"the loss still falls: by {fall:.3g} ± {error:.2g} over the last {size} of"
            f" {len(losses)} steps, to {last.mean():.3g}. Use more num_steps",
            stacklevel=stacklevel + 1,
        )
