"""What the drop-ins for Flax, nnx and linen, have in common."""

from typing import Any, Literal, cast

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention.op import attention_weights, performer_attention
from performer.calibration import Calibration
from performer.features import FeatureMap


def attention_fn(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    value: Float[Array, "*b s k v"],
    frequencies: Float[Array, "*n m h"],
    *,
    calibration: Calibration | None,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    dropout_rate: float,
    deterministic: bool,
    dtype: Any,
    is_causal: bool,
    feature_map: str | FeatureMap,
    weights: bool,
    implementation: Literal["pallas"] | None = None,
) -> tuple[Float[Array, "*b t n v"], Float[Array, "*b n t s"] | None]:
    """The output, and the attention weights if they are wanted.

    Raises:
        ValueError: for a bias, attention dropout, a mask that depends on the query or the head, or
            causal attention of fewer queries than keys.
    """
    if dropout_rate > 0 and not deterministic:
        raise ValueError(
            f"linear attention has no attention weights to drop (dropout_rate={dropout_rate}); set"
            " dropout_rate=0 in the attention layer and put dropout after it"
        )
    if is_causal and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"is_causal with {query.shape[-3]} queries and {key.shape[-3]} keys; when decoding"
            " leave is_causal out, for the cache's mask already hides the future"
        )
    if dtype is not None:
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    options: dict[str, Any] = dict(
        calibration=calibration,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
        feature_map=feature_map,
    )
    output = performer_attention(
        query, key, value, frequencies, implementation=implementation, **options
    )
    return cast(Array, output), attention_weights(
        query, key, frequencies, **options
    ) if weights else None
