"""A decoder of characters: pre-norm blocks with rotary positions (Su et al. 2021), no biases.

Its attention is that of the ViT: `config.attention` chooses it, and `vit.convert` replaces it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from performer import attention
from performer.nnx import PerformerAttention
from vit import config as configs
from vit.data import Batch
from vit.model import attention_of
from vit.task import Triple

BASE = 10_000.0
"""Characters of the longest wave of a rotation, over 2 pi."""


def rotated(x: Float[Array, "b t n h"], place: Int[Array, " t"]) -> Float[Array, "b t n h"]:
    """Turn each pair of coordinates (i, i + h / 2) by place / BASE^(2 i / h)."""
    half = x.shape[-1] // 2
    angle = place[:, None] / BASE ** (jnp.arange(half) / half)
    cosine, sine = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


class Cache(NamedTuple):
    """All keys and values so far, with room for more."""

    key: Float[Array, "b s n h"]
    value: Float[Array, "b s n h"]
    position: Int[Array, ""]


class Attention(nnx.MultiHeadAttention):
    """Flax's layer, causal, with rotary positions; it reads a text also piece by piece."""

    def __init__(self, config: Any, block: configs.Block, *, rngs: nnx.Rngs):
        super().__init__(
            num_heads=config.model.size.num_heads,
            in_features=config.model.size.width,
            use_bias=False,
            attention_fn=attention_of(config, block, rngs),
            decode=False,
            rngs=rngs,
        )

    def projected(self, x: Float[Array, "b t w"], place: Int[Array, " t"]) -> Triple:
        """Return queries and keys, rotated, and values."""
        return rotated(self.query(x), place), rotated(self.key(x), place), self.value(x)

    def __call__(self, x: Float[Array, "b t w"], place: Int[Array, " t"]) -> Float[Array, "b t w"]:
        """The output of a whole text."""
        return self.out(self.attention_fn(*self.projected(x, place), is_causal=True))

    def empty(self, length: int) -> Any:
        """State before a text: of exact attention a cache with room for `length` tokens."""
        if isinstance(self.attention_fn, PerformerAttention):
            return None  # the first call makes the state
        none = jnp.zeros((1, length, self.num_heads, self.head_dim))
        return Cache(none, none, jnp.int32(0))

    def stream(
        self, x: Float[Array, "b t w"], place: Int[Array, " t"], state: Any
    ) -> tuple[Float[Array, "b t w"], Any]:
        """Return the output after earlier tokens, and the state after these.

        The state of random features has a constant size.
        """
        query, key, value = self.projected(x, place)
        if isinstance(self.attention_fn, PerformerAttention):
            layer = self.attention_fn
            features, options = layer.features, layer.options
            options["bias"] = layer.bias
            output, state = attention.stream(query, key, value, features, state, **options)
            return self.out(output), state
        start = (0, state.position, 0, 0)
        keys = jax.lax.dynamic_update_slice(state.key, key, start)
        values = jax.lax.dynamic_update_slice(state.value, value, start)
        mask = (jnp.arange(keys.shape[1]) <= place[:, None])[None, None]
        output = jax.nn.dot_product_attention(query, keys, values, mask=mask)
        return self.out(output), Cache(keys, values, state.position + query.shape[1])


class Block(nnx.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, config: Any, block: configs.Block, *, rngs: nnx.Rngs):
        size = config.model.size
        self.norms = nnx.List([nnx.RMSNorm(size.width, rngs=rngs) for _ in range(2)])
        self.attention = Attention(config, block, rngs=rngs)
        self.up = nnx.Linear(size.width, size.mlp_dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(size.mlp_dim, size.width, use_bias=False, rngs=rngs)

    def __call__(self, x: Array, attend: Callable[[Attention, Array], Array]) -> Array:
        """The output, with `attend` for the attention (layer, its input) -> its output."""
        x = x + attend(self.attention, self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """Characters (b, t) -> logits (b, t, characters) of the next ones.

    Args:
        config: its sections `model` and `attention`.
        characters: number of characters.
        rngs: streams params and frequencies.
    """

    def __init__(self, config: Any, *, characters: int, rngs: nnx.Rngs):
        size = config.model.size
        self.embed = nnx.Embed(characters, size.width, rngs=rngs)
        blocks = [Block(config, block, rngs=rngs) for block in configs.blocks(config)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, characters, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t c"]:
        """Logits of a whole text."""
        place = jnp.arange(tokens.shape[1])
        return self._logits(tokens, lambda layer, x: layer(x, place))

    def stream(
        self, tokens: Int[Array, "b t"], position: Int[Array, ""], states: Sequence[Any]
    ) -> tuple[Float[Array, "b t c"], list[Any]]:
        """Return logits, and the states after these tokens.

        Args:
            tokens: tokens that follow those of the states.
            position: number of tokens before.
            states: states of the layers, at first `empty`.
        """
        place, given, after = position + jnp.arange(tokens.shape[1]), iter(states), []

        def attend(layer: Attention, x: Array) -> Array:
            y, state = layer.stream(x, place, next(given))
            after.append(state)
            return y

        return self._logits(tokens, attend), after

    def projections(self, tokens: Int[Array, "b t"]) -> list[Triple]:
        """Return queries, keys and values of each layer."""
        place, projected = jnp.arange(tokens.shape[1]), []

        def attend(layer: Attention, x: Array) -> Array:
            projected.append(layer.projected(x, place))
            return layer(x, place)

        self._logits(tokens, attend)
        return projected

    def empty(self, length: int) -> list[Any]:
        """Return the states before a text; exact attention has room for `length` tokens."""
        return [block.attention.empty(length) for block in self.blocks]

    def _logits(self, tokens: Array, attend: Callable[[Attention, Array], Array]) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def losses(model: Decoder, batch: Batch) -> Float[Array, " b"]:
    """Return the mean cross entropy of each next character over a window, in nats."""
    return jnp.mean(cross_entropies(model, batch), axis=-1)


def cross_entropies(model: Decoder, batch: Batch) -> Float[Array, "b t"]:
    """Return the cross entropy of each next character, in nats."""
    tokens = batch["tokens"]
    logits, following = model(tokens[:, :-1]), tokens[:, 1:]
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
