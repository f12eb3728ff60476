"""Sequences split over devices: states cross the mesh, tokens never do.

A state is m (v + 2) numbers for each batch entry and head, whatever the length of the sequence.
For use inside `jax.shard_map`; `performer_attention(..., axis_name=...)` calls these. Batch and
heads need nothing: split the arrays, and frequencies of each head with the heads.
"""

import jax
import jax.numpy as jnp

from performer.attention.state import State, finite


def over_devices(state: State, axis_name: str) -> State:
    """The state of the keys of all devices along the axis: one pmax, one psum."""
    maximum = jax.lax.pmax(jax.lax.stop_gradient(state.maximum), axis_name)
    factor = jnp.exp(state.maximum - finite(maximum))
    both = jnp.concatenate([state.numerator, state.normaliser[..., None]], axis=-1)
    both = jax.lax.psum(both * factor[..., None], axis_name)
    return State(maximum, both[..., -1], both[..., :-1])


def earlier_devices(state: State, axis_name: str) -> State:
    """The state of the keys of all devices before this one, as causal attention needs it.

    An exclusive fold: one all_gather of the states, of which the later ones are left out.
    """
    states = jax.lax.all_gather(state, axis_name)
    here = jax.lax.axis_index(axis_name)
    earlier = jnp.arange(states.maximum.shape[0], dtype=here.dtype) < here
    earlier = earlier.reshape(-1, *[1] * (states.maximum.ndim - 1))
    states = states._replace(maximum=jnp.where(earlier, states.maximum, -jnp.inf))
    maximum = jnp.max(jax.lax.stop_gradient(states.maximum), axis=0)
    factor = jnp.exp(states.maximum - finite(maximum)[None])
    return State(
        maximum,
        jnp.sum(states.normaliser * factor, axis=0),
        jnp.sum(states.numerator * factor[..., None], axis=0),
    )
