"""Minimisation as one compiled loop, shared by `gp` and `graphs.gp`.

`smooth` is L-BFGS with a line search, for losses without randomness. `stochastic` takes the steps
of an optax optimizer. `warn_if_steep` warns if a descent ended too early.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float

from performer.typing import Key

Parameters = Any
"""A pytree of floating-point arrays."""

STALLED = 3
"""Steps of L-BFGS without a smaller loss after which it ends."""
STEEP = 1e-2
"""Largest gradient, of a loss in units of its own, that counts as converged."""
SURE = 4.0
"""Standard errors above which a gradient is no noise."""


class Point(NamedTuple):
    """Parameters, the loss there, and its gradient."""

    parameters: Parameters
    loss: Array
    gradient: Parameters


class Descent(NamedTuple):
    """Result of a minimisation."""

    parameters: Parameters
    losses: Float[Array, " steps"]
    """Loss before each step; the last one is repeated after convergence."""
    gradient: Parameters
    """At the parameters; of `stochastic`, the mean over the last tenth of the steps."""
    error: Parameters
    """Standard error of `gradient`."""


def smooth(
    loss: Callable[[Parameters], Float[Array, ""]], start: Parameters, *, num_steps: int
) -> Descent:
    """Return the best parameters of at most `num_steps` steps of L-BFGS.

    It ends where the gradient is below the square root of the rounding unit, or where three steps
    in sequence make the loss no smaller.
    """
    zeros = jax.tree.map(jnp.zeros_like, start)
    if not num_steps or not jax.tree.leaves(start):
        losses = jnp.full(num_steps, loss(start)) if num_steps else jnp.zeros(0)
        return Descent(start, losses, zeros, zeros)
    optimizer = optax.lbfgs()
    evaluate: Callable[..., Any] = optax.value_and_grad_from_state(loss)
    state = optimizer.init(start)
    first = Point(start, *evaluate(start, state=state))
    epsilon = jnp.finfo(first.loss.dtype).eps

    def goes_on(carry) -> Array:
        _, _, best, stalled, step, _ = carry
        largest = optax.tree.norm(best.gradient, ord=jnp.inf)
        return (step < num_steps) & (stalled < STALLED) & ~(largest < epsilon**0.5)

    def advance(carry):
        point, state, best, stalled, step, losses = carry
        updates, state = optimizer.update(
            point.gradient, state, point.parameters,
            value=point.loss, grad=point.gradient, value_fn=loss,
        )  # fmt: skip
        parameters = optax.apply_updates(point.parameters, updates)
        after = Point(parameters, *evaluate(parameters, state=state))
        is_better = best.loss - after.loss > 4 * epsilon * abs(best.loss)
        best = jax.tree.map(lambda a, b: jnp.where(after.loss < best.loss, a, b), after, best)
        stalled = jnp.where(is_better, 0, stalled + 1)
        return after, state, best, stalled, step + 1, losses.at[step].set(point.loss)

    losses = jnp.zeros(num_steps, first.loss.dtype)
    carry = jax.lax.while_loop(goes_on, advance, (first, state, first, 0, 0, losses))
    _, _, best, _, steps, losses = carry
    losses = jnp.where(jnp.arange(num_steps) < steps, losses, best.loss)
    return Descent(best.parameters, losses, best.gradient, zeros)


def stochastic(
    key: Key,
    loss: Callable[[Parameters, Key], Float[Array, ""]],
    start: Parameters,
    *,
    num_steps: int,
    optimizer: optax.GradientTransformation,
) -> Descent:
    """Return the parameters after `num_steps` optimizer steps.

    Args:
        key: random key, split into one for each step.
        loss: (parameters, key) -> scalar.
        start: initial parameters, any pytree of floating-point arrays.
        num_steps: number of steps.
        optimizer: of optax, as `optax.adam(1e-2)`.
    """

    def step(carry, step_key):
        parameters, state = carry
        value, gradients = jax.value_and_grad(loss)(parameters, step_key)
        updates, state = optimizer.update(gradients, state, parameters)
        return (optax.apply_updates(parameters, updates), state), (value, gradients)

    keys = jax.random.split(key, num_steps)
    carry = (start, optimizer.init(start))
    (parameters, _), (losses, gradients) = jax.lax.scan(step, carry, keys)
    last = jax.tree.map(lambda g: g[len(g) - window(len(g)) :], gradients)
    error = jax.tree.map(lambda g: g.std(axis=0) / len(g) ** 0.5, last)
    return Descent(parameters, losses, jax.tree.map(lambda g: g.mean(axis=0), last), error)


def window(num_steps: int) -> int:
    """Return a tenth of the steps, and at least one."""
    return max(num_steps // 10, 1)


def require_finite(losses: Float[Array, " steps"]) -> None:
    """Raise ValueError if a loss is not finite; traced losses are not checked."""
    if not isinstance(losses, Tracer) and not bool(jnp.isfinite(losses).all()):
        first = int(jnp.argmin(jnp.isfinite(losses)))
        raise ValueError(
            f"the loss is not finite in step {first} of {len(losses)}: check the data for NaN,"
            " start elsewhere, or use a smaller learning rate"
        )


def warn_if_steep(descent: Descent, stacklevel: int) -> None:
    """Warn if the gradient in one of the named logarithms is neither small nor noise."""
    if isinstance(descent.losses, Tracer) or not len(descent.losses):
        return
    size = {name: np.abs(np.asarray(g)) for name, g in descent.gradient.items()}
    sure = {name: SURE * np.asarray(error) for name, error in descent.error.items()}
    steep = {k: x[x > np.maximum(STEEP, sure[k])].max(initial=0) for k, x in size.items()}
    name = max(steep, key=steep.__getitem__, default="")
    if name and steep[name]:
        warnings.warn(
            f"the fit has not converged: after {len(descent.losses)} steps the loss per point still"
            f" changes by {steep[name]:.3g} per unit of log {name}. Use more num_steps, or start"
            " from scales nearer to the data's (None: their spread)",
            stacklevel=stacklevel + 1,
        )
