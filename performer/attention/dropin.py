"""The common part of the drop-ins for Flax, nnx and linen."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from performer.attention.bias import Bias
from performer.attention.masks import key_mask
from performer.attention.op import attention_weights, performer_attention
from performer.attention.refusals import check_bias
from performer.attention.values import Features, as_features


def attention_fn(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    features: Features | Float[Array, "*n m h"],
    *,
    mask: ArrayLike | None,
    bias: Any,
    own_bias: Bias | None = None,
    is_causal: bool,
    dropout_rate: float,
    deterministic: bool,
    dtype: Any,
    return_weights: bool,
    **options: Any,
) -> tuple[Float[Array, "*b t n v"], Float[Array, "*b n t s"] | None]:
    """The output, and with `weights` the attention matrix; options of `performer_attention`.

    `bias` is the argument of Flax's layers, `own_bias` a constant of the layer; they are added.
    One query with a mask over several keys decodes with a cache: window and distances are those of
    the last key that exists.

    Raises:
        ValueError: for attention dropout, causal attention of fewer queries than keys, and as
            `performer_attention`.
    """
    features, bias = as_features(features), check_bias(bias) + (own_bias or Bias())
    if dropout_rate != 0 and not deterministic:  # also NaN and negative rates
        raise ValueError(
            f"linear attention has no attention weights to drop (dropout_rate={dropout_rate}); set"
            " dropout_rate=0 in the attention layer and put dropout after it"
        )
    t, s = query.shape[-3], key.shape[-3]
    mask, triangular = mask_of_keys(mask)
    is_causal |= triangular
    if is_causal and t != s:
        raise ValueError(
            f"is_causal with {t} queries and {s} keys; when decoding leave is_causal out, for the"
            " cache's mask already hides the future"
        )
    if dtype is not None:
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    positional = features.exact.window or bias.decay is not None
    position = None
    if positional and mask is not None and t == 1 < s:
        position, is_causal = _last(mask, key), True
        query = jnp.where(position, query, 0)
    options |= dict(mask=mask, is_causal=is_causal, bias=bias)
    output = performer_attention(query, key, value, features, **options)
    output = _row(output, position, -3)
    if not return_weights:
        return output, None
    if options.get("implementation") == "pallas":  # unit values are as wide as there are keys
        options["implementation"] = None
    return output, _row(attention_weights(query, key, features, **options), position, -2)


def mask_of_keys(mask: ArrayLike | None) -> tuple[ArrayLike | None, bool]:
    """A mask over pairs as a mask of keys, if its rows agree; and whether it is causal.

    Flax's `make_attention_mask` and `make_causal_mask` return masks over pairs. Their values can be
    read unless they are traced; other masks are returned as they are, also those that are added to
    logits, whose zeros are the pairs that exist. Queries without keys have no part in the
    comparison.
    """
    if mask is None or isinstance(mask, Tracer) or np.ndim(mask) < 2 or np.shape(mask)[-2] == 1:
        return mask, False
    values = np.asarray(mask)
    if not np.all(values >= 0):
        return mask, False
    pairs = values.astype(bool)
    keys, queries = (np.any(pairs, axis=axis, keepdims=True) for axis in (-2, -1))
    if np.array_equal(pairs, keys & queries):
        return keys, False
    if np.array_equal(pairs, keys & queries & np.tri(*pairs.shape[-2:], dtype=bool)):
        return keys, True
    return mask, False


def _row(x: Array, position: Bool[Array, "*b s 1 1"] | None, axis: int) -> Array:
    """The row of the query at the position."""
    if position is None:
        return x
    return jnp.sum(x, axis, where=jnp.moveaxis(position, -3, axis), keepdims=True)


def _last(mask: ArrayLike, key: Float[Array, "*b s k h"]) -> Bool[Array, "*b s 1 1"]:
    """Mask of the last key that exists."""
    lead, s = key.shape[:-3], key.shape[-3]
    exists = cast(Array, key_mask(mask, None, lead, key.reshape(-1, *key.shape[-3:])))
    index = jnp.arange(s)
    last = jnp.max(jnp.where(exists, index, -1), axis=-1, keepdims=True)
    return (index == last).reshape(*lead, s, 1, 1)
