"""Drop-in attention for Flax linen; `performer.linearize` converts trained modules."""

from typing import Any

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer.attention.dropin import attention_fn
from performer.choices import extra

with extra("flax"):
    from flax import linen


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

    linen passes only keywords of a function's signature, so all of them are named here. Give the
    frequencies and options by `functools.partial`; a variable of your module keeps the frequencies
    in the checkpoint, untrained. What linear attention cannot compute is an error.

    Args:
        query: (..., t, n, h).
        key: (..., s, n, h).
        value: (..., s, n, v).
        frequencies: (m, h), or (n, m, h) with one draw for each head.
        bias: must be None.
        mask: mask of keys, broadcasting to (..., 1, 1, s). For linen's dense causal masks pass
            is_causal=True instead.
        broadcast_dropout: ignored.
        dropout_rng: ignored.
        dropout_rate: must be 0 unless deterministic.
        deterministic: no dropout.
        dtype: dtype of the computation; that of the inputs if None.
        precision: ignored; products are always exact.
        module: module that sows the estimated attention matrix as `attention_weights`, in quadratic
            time (the layer's `sow_weights=True`).
        force_fp32_for_softmax: ignored; it is always float32.
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        is_causal: query i attends to the keys up to i.
        options: keywords of `performer.performer_attention`, such as `calibration` and
            `feature_map`. `exact_window`, `exact_first` and `alibi_slopes` require self attention,
            with or without a decoding cache.

    Returns:
        (..., t, n, v).

    Raises:
        ValueError: for what linear attention cannot compute; the message has the fix.

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

        In training, assign `couplings.redraw(...)` to `frequencies.value` for new draws.
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
        return_weights=module is not None,
        **options,
    )
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    return output
