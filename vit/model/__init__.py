"""Vision Transformer with exact or random-feature attention (Dosovitskiy et al. 2021, pre-norm).

Its parameters do not depend on the kind of attention or on the coupling: with the same seed two
models differ only in their frequencies, and a model trained with one kind runs with the other. A
mask adds parameters of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Real

from performer.nnx import PerformerAttention
from vit import config as configs
from vit.config import Config
from vit.task import random_streams as random_streams

INITS = {
    "lecun_normal": (nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()),
    "xavier_uniform": (nnx.initializers.xavier_uniform(), nnx.initializers.normal(1e-6)),
}
"""Initialisers of kernels and biases, by `config.model.mlp_init`."""


def swiglu(x: Float[Array, "*b twice"]) -> Float[Array, "*b half"]:
    """Return SiLU of the first half of the channels times the second half (Shazeer 2020)."""
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


ACTIVATIONS = {
    "gelu_tanh": jax.nn.gelu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "swiglu": swiglu,
}
"""Activations of the MLP, by `config.model.activation`."""


class ViT(nnx.Module):
    """Map images (b, size, size, channels), 0 to 255, to (logits (b, num_classes), intermediates).

    Images are uint8 or float. Activations have `config.model.dtype`; parameters, logits and the
    sums of normalisation and attention are float32.

    A new model is in evaluation mode; `model.train()` and `model.eval()` switch dropout, stochastic
    depth and the running statistics of calibrated attention.

    Args:
        config: config with the sections `model` and `attention`, and `data.image_size`.
        num_classes: number of logits.
        channels: channels of the images.
        rngs: streams `params`, `dropout` and `frequencies`, as from `random_streams`.
    """

    def __init__(self, config: Config, *, num_classes: int, channels: int, rngs: nnx.Rngs):
        model, size, patch_size = config.model, config.model.size, config.model.patch_size
        self.pooling, self.remat, self.final_norm = model.pooling, model.remat, model.final_norm
        self.has_token, self.num_prefix = "token" in model.pooling, model.num_prefix
        dtype = jnp.dtype(model.dtype)
        grid = config.data.image_size // patch_size
        records = configs.blocks(config)
        self.grid, self.has_window = grid, any(block.exact_window for block in records)
        patch = (patch_size, patch_size)
        self.embed = nnx.Conv(
            channels, size.width, patch, patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        if model.position == "learned":
            table = 0.02 * jax.random.normal(rngs.params(), (grid**2, size.width))
            self.position = nnx.Param(table)
        else:
            self.position = nnx.Variable(sincos_positions(grid, size.width))
        if self.has_token:
            self.token = nnx.Param(jnp.zeros(size.width))
        if model.registers:
            registers = 0.02 * jax.random.normal(rngs.params(), (model.registers, size.width))
            self.registers = nnx.Param(registers)
        self.dropout = nnx.Dropout(model.dropout, rngs=rngs)
        norm = partial(nnx.LayerNorm, size.width, epsilon=model.epsilon, rngs=rngs)
        self.embed_norm = norm(dtype=dtype) if model.embed_norm else None
        rates = np.linspace(0, model.drop_path, size.depth).tolist()
        blocks = [Block(config, *each, rngs) for each in zip(records, rates, strict=True)]
        self.blocks = nnx.List(blocks)
        self.norm = None if model.final_norm == "none" else norm(dtype=jnp.float32)
        self.pool = AttentionPooling(config, rngs) if self.pooling == "attention" else None
        width = size.width * (1 + ("+" in self.pooling))
        self.pre_logits = nnx.Linear(width, size.width, rngs=rngs) if model.pre_logits else None
        self.head = nnx.Linear(
            size.width if model.pre_logits else width,
            num_classes,
            kernel_init=nnx.initializers.zeros_init(),
            bias_init=nnx.initializers.constant(model.head_bias),
            rngs=rngs,
        )
        self.eval()

    def __call__(
        self, images: Real[Array, "b height width c"]
    ) -> tuple[Float[Array, "b classes"], dict[str, Array]]:
        """Return logits, and the intermediates by name.

        The intermediates are "embedded", "block00/attention_input" (input of the query, key and
        value projections of that block), "block00/output", ..., "pooled". The tokens are class
        token, registers, and the patches in their `order`.
        """
        x = self.embed(images.astype(jnp.float32) / 127.5 - 1)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position[...].astype(x.dtype)
        if self.has_window:
            x = x[:, self.order]
        x = self.dropout(split(self.with_prefix(x)))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        intermediates = {"embedded": x}
        apply = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for i, block in enumerate(self.blocks):
            x, attention_input = apply(block, split(x))
            intermediates[f"block{i:02d}/attention_input"] = attention_input
            intermediates[f"block{i:02d}/output"] = x
        pooled = self.pooled(self.norm(x) if self.norm and self.final_norm == "before" else x)
        if self.norm and self.final_norm == "after":
            pooled = self.norm(pooled)
        if self.pre_logits is not None:
            pooled = jnp.tanh(self.pre_logits(pooled))
        intermediates["pooled"] = pooled
        return self.head(pooled), intermediates

    @property
    def order(self) -> Int[np.ndarray, " patches"]:
        """Row-major index of each patch, in the order of the tokens."""
        return z_order(self.grid, self.grid) if self.has_window else np.arange(self.grid**2)

    def with_prefix(self, patches: Float[Array, "b n width"]) -> Float[Array, "b s width"]:
        """Return class token and registers, then the patches."""
        rows = [self.token[...][None]] if self.has_token else []
        rows += [self.registers[...]] if self.num_prefix > self.has_token else []
        b, dtype = patches.shape[0], patches.dtype
        prefix = [jnp.broadcast_to(x.astype(dtype), (b, *x.shape)) for x in rows]
        return jnp.concatenate([*prefix, patches], axis=1) if prefix else patches

    def pooled(self, x: Float[Array, "b s width"]) -> Float[Array, "b pooled"]:
        """Return the input of the head, by `config.model.pooling`."""
        patches = x[:, self.num_prefix :] if self.num_prefix else x
        if self.pool is not None:
            return self.pool(patches)
        if self.pooling == "token+register":
            return jnp.concatenate([x[:, 0], x[:, 1]], axis=-1)
        pooled = [x[:, 0]] if self.has_token else []
        pooled += [jnp.mean(patches, axis=1)] if "mean" in self.pooling else []
        return jnp.concatenate(pooled, axis=-1) if pooled[1:] else pooled[0]


def split(x: Float[Array, "b s width"]) -> Float[Array, "b s width"]:
    """Split tokens over the axis "seq" of the mesh in context, if it has one."""
    if jax.sharding.get_abstract_mesh().shape.get("seq", 1) == 1:
        return x
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(free, "seq", free))


def multi_head(
    config: Config, rngs: nnx.Rngs, attention_fn: Callable[..., Array] = nnx.dot_product_attention
) -> nnx.MultiHeadAttention:
    """A layer of attention."""
    return nnx.MultiHeadAttention(
        num_heads=config.model.size.num_heads,
        in_features=config.model.size.width,
        kernel_init=nnx.initializers.xavier_uniform(),
        attention_fn=attention_fn,
        decode=False,
        dtype=jnp.dtype(config.model.dtype),
        rngs=rngs,
    )


def mlp(config: Config, rngs: nnx.Rngs) -> tuple[nnx.Linear, nnx.Linear]:
    """Both layers of an MLP; SwiGLU halves the channels between them."""
    size, kernel_and_bias = config.model.size, INITS[config.model.mlp_init]
    inits = dict(zip(("kernel_init", "bias_init"), kernel_and_bias, strict=True))
    linear = partial(nnx.Linear, **inits, dtype=jnp.dtype(config.model.dtype), rngs=rngs)
    hidden = size.mlp_dim * (1 + (config.model.activation == "swiglu"))
    return linear(size.width, hidden), linear(size.mlp_dim, size.width)


def attention_of(config: Any, block: configs.Block, rngs: nnx.Rngs) -> Callable[..., Array]:
    """Return the `attention_fn` of a block: Flax's exact attention, or random features."""
    if block.kind == "softmax":
        return nnx.dot_product_attention
    attention, size = config.attention, config.model.size
    return PerformerAttention(
        block.num_features,
        size.head_dim,
        coupling=attention.coupling,
        num_heads=None if attention.share_heads else size.num_heads,
        redraw_every=attention.redraw_every,
        calibration=block.calibration,
        feature_map=attention.feature_map,
        implementation=None if attention.implementation == "auto" else attention.implementation,
        exact=configs.exact(config, block),
        split="seq",
        transferred=block.transferred,
        rngs=rngs,
    )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    In training either summand of an example is dropped with probability `drop_path`, and otherwise
    divided by 1 - drop_path.
    """

    def __init__(self, config: Config, record: configs.Block, drop_path: float, rngs: nnx.Rngs):
        model, width = config.model, config.model.size.width
        attention_fn = attention_of(config, record, rngs)
        dtype = jnp.dtype(model.dtype)
        norm = partial(nnx.LayerNorm, width, epsilon=model.epsilon, dtype=dtype, rngs=rngs)
        self.attention_norm = norm()
        self.attention = multi_head(config, rngs, attention_fn)
        self.mlp_norm = norm()
        self.activation = model.activation
        self.mlp_in, self.mlp_out = mlp(config, rngs)
        if model.layer_scale:
            factors = jnp.full(width, model.layer_scale)
            self.attention_scale, self.mlp_scale = nnx.Param(factors), nnx.Param(factors)
        self.has_scale = model.layer_scale > 0
        self.dropout = nnx.Dropout(model.dropout, rngs=rngs)
        # Without a rate no stream of keys: it would change the state of saved models.
        stream = rngs if drop_path else None
        self.drop_path = nnx.Dropout(drop_path, broadcast_dims=(1, 2), rngs=stream)

    def __call__(
        self, x: Float[Array, "b s width"]
    ) -> tuple[Float[Array, "b s width"], Float[Array, "b s width"]]:
        """Return the output of the block and the input of its attention."""
        attention_input = self.attention_norm(x)
        added = self.dropout(self.attention(attention_input))
        if self.has_scale:
            added = added * self.attention_scale[...].astype(added.dtype)
        x = x + self.drop_path(added)
        hidden = ACTIVATIONS[self.activation](self.mlp_in(self.mlp_norm(x)))
        added = self.dropout(self.mlp_out(self.dropout(hidden)))
        if self.has_scale:
            added = added * self.mlp_scale[...].astype(added.dtype)
        return x + self.drop_path(added), attention_input


class AttentionPooling(nnx.Module):
    """y + mlp(norm(y)), y the attention of one learned query over the patches (Zhai et al. 2022).

    This attention is always exact; its cost is linear in the number of patches.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        model, width = config.model, config.model.size.width
        self.activation = model.activation
        self.query = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, width)))
        self.attention = multi_head(config, rngs)
        dtype = jnp.dtype(model.dtype)
        self.norm = nnx.LayerNorm(width, epsilon=model.epsilon, dtype=dtype, rngs=rngs)
        self.mlp_in, self.mlp_out = mlp(config, rngs)

    def __call__(self, x: Float[Array, "b s width"]) -> Float[Array, "b width"]:
        """Return one vector per image."""
        query = jnp.broadcast_to(self.query[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        y = self.attention(query, x, x)
        return (y + self.mlp_out(ACTIVATIONS[self.activation](self.mlp_in(self.norm(y)))))[:, 0]


def z_order(rows: int, columns: int) -> Int[np.ndarray, " places"]:
    """Return the row-major indices of a grid in the order of a Z-order curve (Morton 1966).

    The key of a position interleaves the bits of its row and column. If 4^k divides i, the 4^k
    positions from the i-th on form a square of side 2^k (if it lies within the grid).

    >>> z_order(4, 4).reshape(4, 4)
    array([[ 0,  1,  4,  5],
           [ 2,  3,  6,  7],
           [ 8,  9, 12, 13],
           [10, 11, 14, 15]])
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    bits = range(max(rows, columns).bit_length())
    return np.argsort(sum((row >> i & 1) * 2 * 4**i + (column >> i & 1) * 4**i for i in bits))


def sincos_positions(grid: int, width: int) -> Float[Array, "positions width"]:
    """Return the fixed two-dimensional position embedding of Chen et al. 2021.

    Raises:
        ValueError: when the width is not divisible by 4 (sine and cosine of two coordinates).
    """
    if width % 4:
        raise ValueError(f"sincos positions need a width divisible by 4, got {width}")
    y, x = np.mgrid[:grid, :grid].reshape(2, -1, 1)
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    waves = [f(c * frequencies) for c in (x, y) for f in (np.sin, np.cos)]
    return jnp.asarray(np.concatenate(waves, axis=-1), jnp.float32)
