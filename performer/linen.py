"""Drop-in attention for Flax linen; `performer.linearize` converts modules that are trained."""

from typing import Any

from flax import linen
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention._dropin import attention_fn

__all__ = ["performer_attention_fn"]


def performer_attention_fn(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s n h"],
    value: Float[Array, "*b s n v"],
    *,
    frequencies: Float[Array, "*n m h"],
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: linen.Module | None = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **options: Any,
) -> Float[Array, "*b t n v"]:
    """FAVOR+ as the `attention_fn` of `linen.MultiHeadDotProductAttention`.

    linen passes only keywords that are named in a function's signature, so all of its keywords are
    named here; what cannot be honoured is an error. The frequencies and the options are given by
    `functools.partial`, the former from a variable of your module: in the checkpoint, and not
    trained.

    Args:
        query: (..., t, n, h).
        key: (..., s, n, h).
        value: (..., s, n, v).
        frequencies: (m, h), or (n, m, h) with one draw for each head.
        bias: must be None.
        mask: over keys only, broadcasting to (..., 1, 1, s), bool or float. linen's dense causal
            masks cannot be told from others: pass is_causal=True (by `partial`) instead.
        broadcast_dropout: not used.
        dropout_rng: not used.
        dropout_rate: must be 0 unless deterministic.
        deterministic: no dropout.
        dtype: of the computation; that of the inputs if None.
        precision: not used; products are always exact.
        module: with the layer's `sow_weights=True`, where the estimated attention matrix is sown as
            `attention_weights`, in quadratic time.
        force_fp32_for_softmax: not used; it is always in float32.
        qk_attn_weights_einsum: must be None, there is no such product.
        attn_weights_value_einsum: must be None, likewise.
        is_causal: query i sees the keys up to i.
        options: keywords of `performer.performer_attention`, as `calibration` and `feature_map`;
            `exact_window`, `exact_first` and `alibi_slopes` are for self attention, with a cache
            for decoding or without.

    Returns:
        (..., t, n, v).

    Raises:
        ValueError: for what linear attention cannot honour; the message names the fix.

    Example:
        >>> class Layer(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         frequencies = self.variable(
        ...             "frequencies",
        ...             "frequencies",
        ...             lambda: couplings.draw(self.make_rng("frequencies"), "pm", 128, 64, 12),
        ...         )
        ...         attention_fn = partial(performer_attention_fn, frequencies=frequencies.value)
        ...         return linen.MultiHeadDotProductAttention(12, attention_fn=attention_fn)(x)

        `couplings.redraw(...)`, assigned to `frequencies.value` in training, draws new ones.
    """
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise ValueError(
            "linear attention has no products of queries with keys, or of weights with values;"
            " leave out qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls"
        )
    output, weights = attention_fn(
        query,
        key,
        value,
        frequencies,
        mask=mask,
        bias=bias,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dtype=dtype,
        is_causal=is_causal,
        weights=module is not None,
        **options,
    )
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    return output
