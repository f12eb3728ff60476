"""Random-feature attention (FAVOR+) in linear time and memory, exactly normalised.

With positive features the estimate of softmax attention is itself two softmax attentions through
m landmarks. With logits l_j(k) = w_j.k - |k|^2 / 2:

    each feature attends over the keys   c_j = max_k l_j(k),  s_j = sum_k e^{l_j(k) - c_j},
                                         z_j = sum_k e^{l_j(k) - c_j} v(k)
    each query attends over the features a_j = e^{w_j.q + c_j - max_j(w_j.q + c_j)}
                                         output = sum_j a_j z_j / sum_j a_j s_j

The factors e^{c_j} cancel exactly, and so do |q|^2 / 2 and the row maximum: no epsilon is added,
the denominator is at least 1, nothing overflows. (Choromanski et al. 2021 add an epsilon after one
global maximum, which changes the estimate.) Of the keys the queries see the state (c, s, z) alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float


class State(NamedTuple):
    """What the queries see of the keys, per batch entry and head, in float32."""

    maximum: Float[Array, "b n m"]
    normaliser: Float[Array, "b n m"]
    numerator: Float[Array, "b n m v"]


def performer_attention(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s n h"],
    value: Float[Array, "*b s n v"],
    frequencies: Float[Array, "*n m h"],
    *,
    mask: ArrayLike | None = None,
    scale: float | None = None,
) -> Float[Array, "*b t n v"]:
    """FAVOR+ attention: an estimate of softmax(scale q k^T) v, bidirectional, in O((t + s) m).

    The shapes are those of `jax.nn.dot_product_attention`. As m grows the result converges to it;
    for any m the rows of the estimated attention matrix are non-negative and sum to 1.

    Args:
        query: (b, t, n, h) or (t, n, h); float32, bfloat16 or float16, like `key` and `value`.
        key: (b, s, n, h) or (s, n, h).
        value: (b, s, n, v) or (s, n, v).
        frequencies: (m, h), shared by the heads, or (n, m, h), one draw per head. Rows are
            N(0, I_h): the draw of a coupling.
        mask: which keys exist, True or non-zero where they do; anything that broadcasts to
            (b, 1, 1, s). A masked key leaves the numerator, the normaliser and the maximum, and a
            query without any key returns 0.
        scale: the factor on q.k; 1 / sqrt(h) if None.

    Returns:
        (b, t, n, v) or (t, n, v), in the dtype of `value`. Logits, maxima, normaliser and state are
        float32 whatever the inputs are.

    Raises:
        ValueError: when shapes do not fit together, or for a mask that depends on the query or the
            head, which linear attention cannot honour; the message names the sizes.

    Example:
        >>> frequencies = performer.couplings.get("pm")(jax.random.key(0), 128, 64)
        >>> output = performer_attention(query, key, value, frequencies)
    """
    if query.ndim == 3:
        output = performer_attention(
            query[None], key[None], value[None], frequencies, mask=mask, scale=scale
        )
        return output[0]
    _check_shapes(query, key, value, frequencies)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    # q.k * scale = (q sqrt(scale)).(k sqrt(scale)); the root goes into W, once.
    frequencies = jnp.broadcast_to(frequencies, (query.shape[2], *frequencies.shape[-2:]))
    frequencies = (frequencies * scale**0.5).astype(query.dtype)
    state = _attend_to_keys(key, value, frequencies, scale, _key_mask(mask, key))
    return _attend_to_features(query, frequencies, state).astype(value.dtype)


def _attend_to_keys(
    key: Float[Array, "b s n h"],
    value: Float[Array, "b s n v"],
    frequencies: Float[Array, "n m h"],
    scale: float,
    mask: Bool[Array, "b s"] | None,
) -> State:
    """Every feature attends over the keys: (c, s, z)."""
    squared_norm = jnp.sum(key.astype(jnp.float32) ** 2, axis=-1)
    logits = _project(key, frequencies) - scale / 2 * squared_norm.swapaxes(1, 2)[:, :, None]
    if mask is not None:
        logits = jnp.where(mask[:, None, None], logits, -jnp.inf)
    # The maximum cancels, so its gradient is zero; where no key exists it would be -inf.
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    finite = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(logits - finite[..., None])
    numerator = jnp.einsum(
        "bnms,bsnv->bnmv",
        weights.astype(value.dtype),
        value,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return State(maximum, jnp.sum(weights, axis=-1), numerator)


def _attend_to_features(
    query: Float[Array, "b t n h"], frequencies: Float[Array, "n m h"], state: State
) -> Float[Array, "b t n v"]:
    """Every query attends over the features: sum_j a_j z_j / sum_j a_j s_j."""
    logits = _project(query, frequencies) + state.maximum[..., None]
    row_maximum = jax.lax.stop_gradient(jnp.max(logits, axis=2, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(row_maximum), 0.0, row_maximum))
    numerator, denominator = (
        jnp.einsum(f"bnmt,{keys}", weights, x, precision="highest")
        for keys, x in [("bnmv->btnv", state.numerator), ("bnm->btn", state.normaliser)]
    )
    return numerator / jnp.where(denominator == 0, 1.0, denominator)[..., None]


def _project(
    x: Float[Array, "b s n h"], frequencies: Float[Array, "n m h"]
) -> Float[Array, "b n m s"]:
    """w_j.x in float32, exact products whatever the backend's default precision is."""
    return jnp.einsum(
        "bsnh,nmh->bnms",
        x,
        frequencies,
        precision="highest",
        preferred_element_type=jnp.float32,
    )


def _key_mask(mask: ArrayLike | None, key: Float[Array, "b s n h"]) -> Bool[Array, "b s"] | None:
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    b, s = key.shape[:2]
    shape = (1,) * (4 - mask.ndim) + mask.shape
    if len(shape) != 4 or shape[1:3] != (1, 1) or shape[0] not in (1, b) or shape[3] not in (1, s):
        raise ValueError(
            f"mask has shape {mask.shape}; linear attention honours masks over keys only, of a"
            f" shape that broadcasts to (batch, 1, 1, keys) = ({b}, 1, 1, {s}). For a mask that"
            " differs between queries or heads use exact attention (jax.nn.dot_product_attention)"
        )
    return jnp.broadcast_to(mask.reshape(shape)[:, 0, 0] != 0, (b, s))


def _check_shapes(query: Array, key: Array, value: Array, frequencies: Array) -> None:
    n, h = query.shape[2:]
    if key.shape[2:] != (n, h) or key.shape[0] != query.shape[0]:
        raise ValueError(
            f"query has shape {query.shape} but key has {key.shape}: batch, heads and head_dim must"
            " be the same"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key has shape {key.shape} but value has {value.shape}: batch, length and heads must"
            " be the same"
        )
    if frequencies.shape[-1] != h:
        raise ValueError(
            f"frequencies have head_dim {frequencies.shape[-1]} but query and key have head_dim {h}"
        )
    if frequencies.ndim not in (2, 3) or (frequencies.ndim == 3 and frequencies.shape[0] != n):
        raise ValueError(
            f"frequencies have shape {frequencies.shape}; expected (m, {h}), or ({n}, m, {h}) with"
            f" one draw for each of the {n} heads"
        )
