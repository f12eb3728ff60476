"""Gradient descent on a loss, as one compiled loop: what `gp` and `copula` share."""

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
    """Parameters after `num_steps` steps of an optax optimizer, and the losses before each.

    Args:
        key: of the losses' keys.
        loss: (parameters, key) -> scalar; the key is another one in each step.
        start: any pytree of floating-point arrays.
        num_steps: how many steps.
        optimizer: as `optax.adam(1e-2)`.

    Jit- and vmap-able.

    Raises:
        ValueError: when a loss is not finite. (Inside `jit`, where nothing can be raised, the
            parameters are NaN then.)
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
            f"the loss left the finite numbers in step {first} of {len(losses)}: look for NaN in"
            " the data, start elsewhere, or take a smaller learning rate"
        )
