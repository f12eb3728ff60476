"""Drop-in attention for Flax linen; `performer.linearize` converts trained modules."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import Bias, Features
from performer.attention.dropin import attention_fn
from performer.choices import optional
from performer.typing import Coupling

with optional():
    from flax import linen


class PerformerAttention(linen.Module):
    """FAVOR+ as the `attention_fn` of `linen.MultiHeadDotProductAttention`.

    `init` draws the frequencies (n, m, h), with one draw for each head of the keys, from the stream
    "frequencies", or from "params" if that is the only one. They are the collection "frequencies"
    of the variables: saved with the parameters, not trained. Pass the collection to `apply`.

    An instance created in a compact method belongs to one layer. `linen.scan` and `linen.vmap` over
    layers need `variable_axes={"params": 0, "frequencies": 0}`.

    Args:
        num_features: m, number of frequencies per head; 0 for the pairs of an exact window alone.
        coupling: name of a coupling, as of `performer.couplings.get`, or a coupling.
        is_causal: query i attends to the keys up to i; linen's layer has no argument for it.
        features: constant fields of `performer.Features`, such as `calibration`, `feature_map` and
            `exact`.
        options: constant keywords of `performer.performer_attention`, such as `bias` and `scale`. A
            window and a decay require self attention, with or without a decoding cache.

    Raises:
        ValueError: for an unknown coupling or sizes that it does not admit, at `init`, or for
            variables without the collection.

    Example:
        >>> layer = linen.MultiHeadDotProductAttention(12, attention_fn=PerformerAttention(128))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> variables["frequencies"]["attention_fn"]["frequencies"].shape
        (12, 128, 64)
        >>> output = layer.apply(variables, x)

        In training, replace the array of a layer with `couplings.redraw(...)` for new draws, with a
        key of its own for each layer.
    """

    num_features: int
    coupling: str | Coupling = couplings.DEFAULT
    is_causal: bool = False
    features: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @linen.compact
    def __call__(
        self,
        query: Float[Array, "*b t n h"],
        key: Float[Array, "*b s n h"],
        value: Float[Array, "*b s n v"],
        *,
        mask: ArrayLike | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        module: linen.Module | None = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Float[Array, "*b t n v"]:
        """Attend, with the arguments of `performer_attention_fn`."""
        num_heads, head_dim = key.shape[-2:]

        def draw() -> Array:
            random_key = self.make_rng("frequencies")
            return couplings.draw(random_key, self.coupling, self.num_features, head_dim, num_heads)

        frequencies = None
        if self.num_features:
            name = "frequencies"
            if not (self.has_variable(name, name) or self.is_mutable_collection(name)):
                raise ValueError(
                    "the variables have no collection 'frequencies': pass it to apply with the"
                    ' parameters, as {"params": ..., "frequencies": variables["frequencies"],'
                    ' "cache": ...}, and save it with them'
                )
            frequencies = self.variable(name, name, draw).value
        return performer_attention_fn(
            query,
            key,
            value,
            features=Features(frequencies, coupling=self.coupling, **self.features),
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            module=module,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            is_causal=self.is_causal,
            own_bias=self.options.get("bias"),
            **{name: x for name, x in self.options.items() if name != "bias"},
        )


def performer_attention_fn(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s n h"],
    value: Float[Array, "*b s n v"],
    *,
    features: Features | Float[Array, "*n m h"],
    bias: Any = None,
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
    own_bias: Bias | None = None,
    **options: Any,
) -> Float[Array, "*b t n v"]:
    """FAVOR+ as the `attention_fn` of `linen.MultiHeadDotProductAttention`.

    Give the features and options by `functools.partial`. `PerformerAttention` draws and keeps
    them. What linear attention cannot compute is an error.

    linen passes only keywords of a function's signature, so all of them are named here.

    Args:
        query: (..., t, n, h).
        key: (..., s, n, h).
        value: (..., s, n, v).
        features: `performer.Features`, or frequencies (m, h) or (n, m, h).
        bias: None or a `performer.Bias`; not an array.
        mask: mask of keys, broadcasting to (..., 1, 1, s). For linen's dense causal masks pass
            is_causal=True instead.
        broadcast_dropout: ignored.
        dropout_rng: ignored.
        dropout_rate: must be 0 unless deterministic.
        deterministic: no dropout.
        dtype: dtype of the computation; by default the dtype of the inputs.
        precision: ignored; products are always exact.
        module: module that sows the estimated attention matrix as `attention_weights`, in quadratic
            time (the layer's `sow_weights=True`).
        force_fp32_for_softmax: ignored; it is always float32.
        qk_attn_weights_einsum: must be None.
        attn_weights_value_einsum: must be None.
        is_causal: query i attends to the keys up to i.
        own_bias: a constant bias, added to `bias`.
        options: keywords of `performer.performer_attention`, such as `scale`. A window and a decay
            require self attention, with or without a decoding cache.

    Returns:
        (..., t, n, v).

    Raises:
        ValueError: for what linear attention cannot compute; the message has the fix.

    Example:
        >>> features = performer.Features.draw(jax.random.key(0), "pm", 128, 64, 12)
        >>> attention_fn = partial(performer_attention_fn, features=features)
        >>> layer = linen.MultiHeadDotProductAttention(12, attention_fn=attention_fn)
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
        features,
        mask=mask,
        bias=bias,
        own_bias=own_bias,
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
