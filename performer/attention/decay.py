"""Decay: a pair of tokens t >= s counts e^{a_(s+1) + ... + a_t} times, for log-decays a <= 0.

A constant a = -slope is ALiBi (Press et al. 2022). A decay that depends on the data, one number for
a head and a token, is the forget gate of forgetting attention (Lin et al. 2025). RetNet (Sun et al.
2023) and simple gated linear attention have the same decays, but no normaliser; gated linear
attention (Yang et al. 2024) has a gate for each channel of the keys, which is not supported.
Without causality the pair s > t counts e^{a_(t+1) + ... + a_s} times.

Within a chunk the sums are over the tokens between, never differences of longer sums: nothing
cancels, and a token may forget all (-inf). The state fades from chunk to chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from performer.attention.state import Keys, State
from performer.numerics import finite


class Sums(NamedTuple):
    """Sums of the log-decays of a chunk."""

    since: Float[Array, "*c w"]
    """From the first token to this one: the decay of the keys before the chunk."""
    until: Float[Array, "*c w"]
    """After this token to the last: its decay for the queries after the chunk."""
    total: Float[Array, "*c"]


def sums(log_decay: Float[Array, "*c w"]) -> Sums:
    """Sums up to each token of a chunk."""
    since = jnp.cumsum(log_decay, axis=-1)
    after = jnp.concatenate([log_decay[..., 1:], jnp.zeros_like(log_decay[..., :1])], axis=-1)
    return Sums(since, jax.lax.cumsum(after, axis=after.ndim - 1, reverse=True), since[..., -1])


def between(log_decay: Float[Array, "*c w"]) -> Float[Array, "*c w w"]:
    """The sums between two tokens, in either order."""
    w = log_decay.shape[-1]
    later = jnp.tri(w, k=-1, dtype=bool)  # t > s
    lower = jnp.cumsum(jnp.where(later, log_decay[..., None], 0.0), axis=-2)
    lower = jnp.where(later, lower, 0.0)
    return lower + jnp.swapaxes(lower, -1, -2)


def faded(state: State, log_decay: Float[Array, "*b"] | None) -> State:
    """The state whose keys count e^{log_decay} times; unchanged for None.

    Whole units go into the maximum and the rest into the sums, which are then brought back to the
    range of 1. So small rates add up over any number of tokens, and a maximum fades with its key.
    """
    if log_decay is None:
        return state
    log_decay = log_decay[..., None]
    units = jax.lax.stop_gradient(jnp.round(log_decay))
    rest = log_decay - finite(units)
    size = jnp.abs(jax.lax.stop_gradient(state.normaliser * jnp.exp(rest)))
    drift = jnp.where(size > 0, jnp.round(jnp.log(jnp.where(size > 0, size, 1.0))), 0.0)
    drift = jnp.clip(drift, -8.0, 8.0)  # sums of features with signs may vanish
    less = jnp.expm1(rest - drift)  # exp would round away small rates
    return State(
        state.maximum + units + drift,
        state.normaliser + state.normaliser * less,
        state.numerator + state.numerator * less[..., None],
    )


def decayed(keys: Keys) -> Keys:
    """Keys weighted as for queries after all of them."""
    if keys.log_decay is None:
        return keys
    weights = jnp.swapaxes(sums(jnp.swapaxes(keys.log_decay, 1, 2)).until, 1, 2)  # (b, s, k)
    if keys.log_weights is not None:
        weights = weights + keys.log_weights
    return keys._replace(log_weights=weights)


def total(keys: Keys) -> Float[Array, "k b"] | None:
    """Log-decay over all of these keys."""
    return None if keys.log_decay is None else jnp.sum(keys.log_decay, axis=1).T


def since_begin(
    log_decay: Float[Array, "b t *k"], begins: Bool[Array, "#b t"]
) -> Float[Array, "b t *k"]:
    """Running sums that start anew, with the token itself, wherever `begins` is True."""

    def add(left, right):
        (started, x), (starts, y) = left, right
        return started | starts, jnp.where(starts, y, x + y)

    begins = begins.reshape(*begins.shape, *[1] * (log_decay.ndim - 2))
    begins = jnp.broadcast_to(begins, log_decay.shape)
    return jax.lax.associative_scan(add, (begins, log_decay), axis=1)[1]
