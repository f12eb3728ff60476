"""Sequences sharded over devices: states cross the mesh, tokens do not.

A state is m (v + 2) numbers for each batch entry and head, whatever the length of the sequence.
`performer_attention(..., axis_name=...)` calls these functions inside `jax.shard_map`. To shard
batch and heads, shard the arrays, and frequencies of each head with the heads. `over_tokens` is for
programs of `jax.jit` that are written as for one device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from performer.attention.state import State
from performer.numerics import finite


def over_tokens(attention: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Split the tokens of attention(query, key, value, axis_name=...) over an axis of the mesh.

    Other axes of the mesh in context stay with the compiler. Without the axis, or with one device
    along it, nothing is split.
    """
    if jax.sharding.get_abstract_mesh().shape.get(axis_name, 1) == 1:
        return attention

    def split(*tokens: Array) -> Any:
        spec = PartitionSpec(*[None] * (tokens[0].ndim - 3), axis_name)
        mapped = jax.shard_map(
            lambda *shards: attention(*shards, axis_name=axis_name),
            in_specs=spec,
            out_specs=spec,
            axis_names={axis_name},
        )
        return mapped(*tokens)

    return split


def over_devices(state: State, axis_name: str) -> State:
    """Return the state of the keys of all devices along the axis, by one pmax and one psum."""
    maximum = jax.lax.pmax(jax.lax.stop_gradient(state.maximum), axis_name)
    factor = jnp.exp(state.maximum - finite(maximum))
    both = jnp.concatenate([state.numerator, state.normaliser[..., None]], axis=-1)
    both = jax.lax.psum(both * factor[..., None], axis_name)
    return State(maximum, both[..., -1], both[..., :-1])


def earlier_devices(state: State, axis_name: str) -> State:
    """Return the state of the keys of all devices before this one, for causal attention.

    An exclusive fold by one all_gather.
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
