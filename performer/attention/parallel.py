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
from jaxtyping import Array, Float

from performer.attention import _decay
from performer.attention.state import Features, Keys, State, finite, summarise
from performer.typing import Size


def over_tokens(attention: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Split the tokens of attention(query, key, value, axis_name=...) over an axis of the mesh.

    The mesh is that in context. Its other axes stay with the compiler; without the axis, or with
    one device along it, nothing is split.
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
    """The state of the keys of all devices along the axis, by one pmax and one psum."""
    maximum = jax.lax.pmax(jax.lax.stop_gradient(state.maximum), axis_name)
    factor = jnp.exp(state.maximum - finite(maximum))
    both = jnp.concatenate([state.numerator, state.normaliser[..., None]], axis=-1)
    both = jax.lax.psum(both * factor[..., None], axis_name)
    return State(maximum, both[..., -1], both[..., :-1])


def earlier_devices(
    state: State, axis_name: str, log_decay: Float[Array, "k b"] | None = None
) -> State:
    """The state of the keys of all devices before this one, for causal attention.

    An exclusive fold by one all_gather. A state fades by the log-decay of each device between.
    """
    return _of_some(state, axis_name, jnp.less, log_decay)


def later_devices(
    state: State, axis_name: str, log_decay: Float[Array, "k b"] | None = None
) -> State:
    """The state of the keys of all devices after this one."""
    return _of_some(state, axis_name, jnp.greater, log_decay)


def on_one_side(
    key_map: Features, keys: Keys, side: str, nothing: State, block: Size, axis_name: str
) -> State:
    """The state of the keys of all devices before this one ("until"), or after it ("since")."""
    own = summarise(key_map, _decay.as_seen(keys, side), nothing, block)
    devices = earlier_devices if side == "until" else later_devices
    return devices(own, axis_name, _decay.total(keys))


def beside(keys: Keys, before: int, after: int, axis_name: str) -> Keys:
    """Fill in the last keys of the previous device and the first keys of the next.

    Args:
        keys: keys of this device, padded by `before` and `after`.
        before: number of keys of the previous device.
        after: number of keys of the next device.
        axis_name: mesh axis.
    """
    here, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    own = jax.tree.map(lambda x: x[:, before : x.shape[1] - after], keys)

    def passed(count, there, part):
        pairs = [(i, i + there) for i in range(size) if 0 <= i + there < size]
        got = jax.tree.map(lambda x: jax.lax.ppermute(part(x, count), axis_name, pairs), own)
        at_the_end = here == (0 if there == 1 else size - 1)
        return got._replace(log_weights=jnp.where(at_the_end, -jnp.inf, got.log_weights))

    parts = [passed(before, 1, lambda x, count: x[:, x.shape[1] - count :]), own]
    if after:
        parts.append(passed(after, -1, lambda x, count: x[:, :count]))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)


def _of_some(state: State, axis_name: str, which, log_decay: Array | None) -> State:
    states = jax.lax.all_gather(state, axis_name)
    here = jax.lax.axis_index(axis_name)
    devices = jnp.arange(states.maximum.shape[0], dtype=here.dtype)
    some = which(devices, here)
    if log_decay is not None:
        # [i, j]: j is between i and here
        between = which(devices[:, None], devices[None]) & some[None]
        per_device = jax.lax.all_gather(log_decay, axis_name)[None]
        faded = jnp.sum(jnp.where(between[..., None, None], per_device, 0.0), axis=1)
        states = _decay.faded(states, faded)
    some = some.reshape(-1, *[1] * (states.maximum.ndim - 1))
    states = states._replace(maximum=jnp.where(some, states.maximum, -jnp.inf))
    maximum = jnp.max(jax.lax.stop_gradient(states.maximum), axis=0)
    factor = jnp.exp(states.maximum - finite(maximum)[None])
    return State(
        maximum,
        jnp.sum(states.normaliser * factor, axis=0),
        jnp.sum(states.numerator * factor[..., None], axis=0),
    )
