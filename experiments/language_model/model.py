"""A decoder of characters: pre-norm blocks with rotary positions (Su et al. 2021), no biases.

Its attention is a module that stands alone, so that another can take its place with all parameters
as they are: `attention.Softmax` or `attention.Hybrid`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.language_model import attention
from vit.config import Config, Size
from vit.data import Batch
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


class Attention(nnx.Module):
    """Projections around an `attention_fn`, which can be exchanged."""

    def __init__(self, size: Size, attention_fn: attention.AttentionFn, *, rngs: nnx.Rngs):
        def linear() -> nnx.Linear:
            return nnx.Linear(size.width, size.width, use_bias=False, rngs=rngs)

        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()
        self.num_heads, self.attention_fn = size.num_heads, attention_fn

    def projected(self, x: Float[Array, "b t w"], place: Int[Array, " t"]) -> Triple:
        """Return queries and keys, rotated, and values."""
        query, key, value = (
            layer(x).reshape(*x.shape[:2], self.num_heads, -1)
            for layer in (self.query, self.key, self.value)
        )
        return rotated(query, place), rotated(key, place), value

    def __call__(self, x: Float[Array, "b t w"], place: Int[Array, " t"]) -> Float[Array, "b t w"]:
        """The output of a whole text."""
        return self.out(self.attention_fn(*self.projected(x, place)).reshape(x.shape))

    def stream(self, x: Array, place: Array, state: Any) -> tuple[Array, Any]:
        """Return the output after earlier tokens, and the state after these."""
        y, state = self.attention_fn.stream(*self.projected(x, place), state)
        return self.out(y.reshape(x.shape)), state


class Block(nnx.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, size: Size, attention_fn: attention.AttentionFn, *, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(size.width, rngs=rngs) for _ in range(2)])
        self.attention = Attention(size, attention_fn, rngs=rngs)
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

    def __init__(self, config: Config, *, characters: int, rngs: nnx.Rngs):
        size = config.model.size
        self.embed = nnx.Embed(characters, size.width, rngs=rngs)
        self.blocks = nnx.List()
        for _ in range(size.depth):
            own = attention.of_config(config, rngs=rngs)
            self.blocks.append(Block(size, own, rngs=rngs))
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
        place, found = jnp.arange(tokens.shape[1]), []

        def attend(layer: Attention, x: Array) -> Array:
            found.append(layer.projected(x, place))
            return layer(x, place)

        self._logits(tokens, attend)
        return found

    def empty(self, length: int) -> list[Any]:
        """Return the states before a text; exact attention has room for `length` tokens."""
        heads = self.blocks[0].attention.num_heads
        shape = 1, length, heads, self.head.in_features // heads
        return [block.attention.attention_fn.empty(shape) for block in self.blocks]

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
