"""Gradient descent on a loss as one compiled loop, shared by `gp` and `copula`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Float

from performer.typing import Key

Parameters = Any
"""A pytree of floating-point arrays."""


def minimize(
    key: Key,
    loss: Callable[[Parameters, Key], Float[Array, ""]],
    start: Parameters,
    *,
    num_steps: int,
    optimizer: optax.GradientTransformation,
) -> tuple[Parameters, Float[Array, " steps"]]:
    """Return the parameters after `num_steps` optimizer steps, and the loss before each step.

    Args:
        key: random key, split into one for each step.
        loss: (parameters, key) -> scalar.
        start: initial parameters, any pytree of floating-point arrays.
        num_steps: number of steps.
        optimizer: of optax, as `optax.adam(1e-2)`.

    Raises:
        ValueError: if a loss is not finite. (Inside `jit` the parameters are NaN instead.)
    """

    def step(carry, step_key):
        parameters, state = carry
        value, gradients = jax.value_and_grad(loss)(parameters, step_key)
        updates, state = optimizer.update(gradients, state, parameters)
        return (optax.apply_updates(parameters, updates), state), value

    keys = jax.random.split(key, num_steps)
    (parameters, _), losses = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    require_finite(losses)
    return parameters, losses


def require_finite(losses: Float[Array, " steps"]) -> None:
    """Raise ValueError if a loss is not finite; traced losses are not checked."""
    if not isinstance(losses, Tracer) and not bool(jnp.isfinite(losses).all()):
        first = int(jnp.argmin(jnp.isfinite(losses)))
        raise ValueError(
            f"the loss is not finite in step {first} of {len(losses)}: check the data for NaN,"
            " start elsewhere, or use a smaller learning rate"
        )
