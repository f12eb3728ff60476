"""A transformer of random-feature attention: encoder, decoder, and decoder with cross attention."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from performer.attention import Exact, stream
from performer.attention.values import NOT_EXACT
from performer.nnx.layer import PerformerAttention

WAVES = 10_000.0
"""Positions of the longest wave of a rotation, over 2 pi."""
NEEDS_CONTEXT = "a Transformer with cross=True attends to a context: pass context=encoder(x)"
NO_CONTEXT = "context is read by cross attention (cross=True), in a stream by its first call alone"


def rotated(x: Float[Array, "*b t n h"], positions: Int[Array, " t"]) -> Float[Array, "*b t n h"]:
    """Return x with each pair of coordinates (i, i + h / 2) turned by position / WAVES^(2 i / h).

    Rotary positions (Su et al. 2021): q.k then depends on the distance of query and key.
    """
    half = x.shape[-1] // 2
    waves = np.float32(WAVES) ** -(np.arange(half, dtype=np.float32) / np.float32(half))
    angle = positions[:, None].astype(np.float32) * waves
    cosine, sine = (f(angle)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


class Attention(nnx.MultiHeadAttention):
    """Flax's layer with rotary positions; it reads whole sequences, or one piece by piece."""

    attention_fn: PerformerAttention

    def __call__(self, x: Array, context: Array, positions: Array | None, **pairs: Any) -> Array:
        """The output of whole sequences: x attends to the context."""
        tokens = self._projected(x, context, positions)
        return self.out(self.attention_fn(*tokens, **pairs))

    def stream(
        self, x: Array, context: Array, positions: Array | None, state: Any, **pairs: Any
    ) -> tuple[Array, Any]:
        """Return the output after earlier tokens, and the state after these."""
        query, key, value = self._projected(x, context, positions)
        layer = self.attention_fn
        options: Any = layer.options | {"bias": layer.bias} | pairs
        output, state = stream(query, key, value, layer.features, state, **options)
        return self.out(output), state

    def _projected(self, x: Array, context: Array, positions: Array | None) -> Any:
        query, key = self.query(x), self.key(context)
        if positions is not None:
            query, key = rotated(query, positions), rotated(key, positions)
        return query, key, self.value(context)


class States(NamedTuple):
    """State of a decoder after the tokens that it has read; its size does not depend on them."""

    position: Int[Array, ""]
    """Number of tokens read."""
    layers: list[Any]
    """States of the attention layers, in the order of their calls."""


class Transformer(nnx.Module):
    """Blocks of random-feature attention and MLPs, for an encoder, a decoder, or both.

    Pre-norm blocks (RMSNorm) with rotary positions and without biases, on `PerformerAttention`: the
    frequencies are state, never trained. Time and memory are linear in the number of tokens.

    Args:
        depth: number of blocks.
        width: width of a token.
        num_heads: heads of each attention; width / num_heads must be even.
        num_features: m, features of each head.
        vocab_size: number of different tokens: the input are their numbers (b, t), the output their
            logits (b, t, vocab_size). None for arrays (b, t, width) in and out.
        is_causal: decoder: a token attends to itself and earlier ones.
        cross: each block also attends to the `context` of the call.
        mlp_dim: hidden width of the MLPs; 4 width if None.
        exact: exact pairs of self attention; a decoder of text needs a window.
        dtype: dtype of the computation; parameters are float32.
        rngs: streams `params` and `frequencies`.
        options: further arguments of `PerformerAttention`, such as `coupling`, `calibration`.

    Raises:
        ValueError: for sizes that do not fit, and as `PerformerAttention`.

    Example:
        >>> rngs, near = nnx.Rngs(params=0, frequencies=1), Exact(window=16, first=1)
        >>> encoder = Transformer(6, 64, 2, 32, rngs=rngs)
        >>> options = dict(vocab_size=1000, is_causal=True, cross=True, exact=near)
        >>> decoder = Transformer(6, 64, 2, 32, **options, rngs=rngs)
        >>> logits = decoder(tokens, context=encoder(x), context_mask=exists)
        >>> logits, states = decoder.stream(tokens[:, :1], context=encoder(x))
    """

    def __init__(
        self,
        depth: int,
        width: int,
        num_heads: int,
        num_features: int,
        *,
        vocab_size: int | None = None,
        is_causal: bool = False,
        cross: bool = False,
        mlp_dim: int | None = None,
        exact: Exact = NOT_EXACT,
        dtype: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if width % (2 * num_heads):
            raise ValueError(
                f"width={width} must be a multiple of 2 num_heads = {2 * num_heads}: rotary"
                " positions turn pairs of coordinates"
            )
        linear: Any = dict(use_bias=False, dtype=dtype, rngs=rngs)
        fixed: Any = dict(num_heads=num_heads, rngs=rngs) | options

        def attention(exact: Exact) -> Attention:
            layer = PerformerAttention(num_features, width // num_heads, exact=exact, **fixed)
            return Attention(num_heads, width, attention_fn=layer, decode=False, **linear)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

        def block() -> Any:
            parts: Any = dict(attention=attention(exact), attention_norm=norm())
            if cross:
                parts |= dict(cross=attention(NOT_EXACT), cross_norm=norm())
            up = nnx.Linear(width, mlp_dim or 4 * width, **linear)
            down = nnx.Linear(mlp_dim or 4 * width, width, **linear)
            return nnx.Dict(**parts, mlp=nnx.Sequential(norm(), up, nnx.gelu, down))

        self.is_causal, self.cross = is_causal, cross
        self.blocks = nnx.List([block() for _ in range(depth)])
        self.embed, self.head = nnx.data(None), nnx.data(None)
        self.norm = norm()
        if vocab_size is not None:
            self.embed = nnx.Embed(vocab_size, width, dtype=dtype, rngs=rngs)
            self.head = nnx.Linear(width, vocab_size, **linear)

    def __call__(
        self,
        x: Float[Array, "b t w"] | Int[Array, "b t"],
        *,
        mask: ArrayLike | None = None,
        context: Float[Array, "b s w"] | None = None,
        context_mask: ArrayLike | None = None,
    ) -> Float[Array, "b t v"]:
        """Return arrays (b, t, width), or logits (b, t, vocab_size), of whole sequences.

        Args:
            x: arrays, or numbers of tokens if there is a vocabulary.
            mask: (b, 1, 1, t), tokens that exist; None if all do.
            context: tokens that cross attention reads, such as an encoder's output.
            context_mask: (b, 1, 1, s), tokens of the context that exist.

        Raises:
            ValueError: for a context without `cross`, or none with it.
        """
        if (context is not None) != self.cross:
            raise ValueError(NEEDS_CONTEXT if self.cross else NO_CONTEXT)
        positions, read = jnp.arange(x.shape[1]), cast(Array, context)

        def attend(layer: Attention, y: Array, is_cross: bool) -> Array:
            if is_cross:
                return layer(y, read, None, mask=context_mask)
            return layer(y, y, positions, mask=mask, is_causal=self.is_causal)

        return self._through(x, attend)

    def stream(
        self,
        x: Float[Array, "b t w"] | Int[Array, "b t"],
        states: States | None = None,
        *,
        context: Float[Array, "b s w"] | None = None,
        context_mask: ArrayLike | None = None,
    ) -> tuple[Float[Array, "b t v"], States]:
        """Return the output after earlier tokens, and the states after these, of constant size.

        Calls for consecutive pieces of a sequence, each with the states of the one before, are a
        call for the whole. Evaluation mode (`model.eval()`) is assumed: nothing is measured.

        Args:
            x: the next tokens.
            states: states of the earlier call; None at first.
            context: as in a call; at first only, its sums are in the states.
            context_mask: as in a call.

        Raises:
            ValueError: for a Transformer that is not causal, or a context that is not given first.
        """
        if not self.is_causal:
            raise ValueError("only a Transformer with is_causal=True reads token by token")
        if (context is not None) != (self.cross and states is None):
            raise ValueError(NEEDS_CONTEXT if self.cross and states is None else NO_CONTEXT)
        if states is None:
            states = States(jnp.int32(0), [None] * len(self.blocks) * (1 + self.cross))
        positions = states.position + jnp.arange(x.shape[1], dtype=np.int32)
        before, after = iter(states.layers), []

        def attend(layer: Attention, y: Array, is_cross: bool) -> Array:
            if is_cross:
                read = y[:, :0] if context is None else context
                pairs: Any = dict(mask=context_mask, is_causal=False)
                output, state = layer.stream(y, read, None, next(before), **pairs)
            else:
                output, state = layer.stream(y, y, positions, next(before))
            after.append(state)
            return output

        output = self._through(x, attend)
        return output, States(states.position + len(positions), after)

    def _through(self, x: Array, attend: Callable[[Attention, Array, bool], Array]) -> Array:
        """The blocks, with `attend` for each attention: (layer, its input, is it cross?)."""
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = x + attend(block.attention, block.attention_norm(x), False)
            if self.cross:
                x = x + attend(block.cross, block.cross_norm(x), True)
            x = x + block.mlp(x)
        x = self.norm(x)
        return x if self.head is None else self.head(x)
