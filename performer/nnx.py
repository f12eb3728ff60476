"""Drop-in attention for today's Flax (nnx)."""

from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import couplings
from performer.attention import performer_attention


class Frequencies(nnx.Variable):
    """The frequencies of one attention layer: in the state and the checkpoint, never trained."""


class PerformerAttention(nnx.Module):
    """FAVOR+ as the `attention_fn` of `nnx.MultiHeadAttention`.

    The frequencies are drawn once, from the stream `rngs.frequencies()`: as each layer is given the
    same `rngs`, each layer draws its own. With the stream named (as below) the parameters come out
    the same for every coupling.

    Args:
        num_features: m, the number of frequencies per head.
        head_dim: width of one head's queries and keys.
        coupling: a name that `performer.couplings.get` knows.
        num_heads: with a number, each head has frequencies of its own, drawn independently; with
            None, one draw is shared by all heads.
        rngs: random streams; `frequencies` is used, or the default one.

    Raises:
        ValueError: for an unknown coupling, or sizes that it does not admit.

    Example:
        >>> rngs = nnx.Rngs(params=0, frequencies=1)
        >>> attention_fn = PerformerAttention(128, 64, coupling="pm", num_heads=12, rngs=rngs)
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=12, in_features=768, attention_fn=attention_fn, decode=False, rngs=rngs
        ... )
    """

    def __init__(
        self,
        num_features: int,
        head_dim: int,
        *,
        coupling: str = "pm",
        num_heads: int | None = None,
        rngs: nnx.Rngs,
    ):
        draw = couplings.get(coupling)
        key = rngs.frequencies()
        if num_heads is None:
            frequencies = draw(key, num_features, head_dim)
        else:
            keys = jax.random.split(key, num_heads)
            frequencies = jax.vmap(lambda k: draw(k, num_features, head_dim))(keys)
        self.frequencies = Frequencies(frequencies)

    def __call__(
        self,
        query: Float[Array, "*b t n h"],
        key: Float[Array, "*b s n h"],
        value: Float[Array, "*b s n v"],
        *,
        mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*b t n v"]:
        """The call of `nnx.MultiHeadAttention`; what cannot be honoured is an error.

        `precision` is not used (products are always exact), nor are `dropout_rng` and
        `broadcast_dropout` (there is no dropout).

        Raises:
            ValueError: for a bias, attention dropout, causal attention, sown weights, or a mask
                that depends on the query: none of them exists in linear attention here.
        """
        if bias is not None:
            raise ValueError("linear attention cannot add a bias to q.k; use exact attention")
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"linear attention has no attention weights to drop (dropout_rate={dropout_rate});"
                " set dropout_rate=0 in the attention layer and put dropout after it"
            )
        if is_causal:
            raise ValueError("causal attention is not implemented yet; use exact attention")
        if module is not None:
            raise ValueError("linear attention has no weights to sow; set sow_weights=False")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        return performer_attention(query, key, value, self.frequencies[...], mask=mask)


__all__ = ["Frequencies", "PerformerAttention"]
