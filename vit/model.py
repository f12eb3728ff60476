"""The Vision Transformer, with exact or random-feature attention.

Dosovitskiy et al. 2021, pre-norm. Its parameters do not depend on the kind of attention or on the
coupling: with the same seed two models differ only in their frequencies, and a model trained with
one kind can be run with the other.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Real

from performer.nnx import PerformerAttention
from vit.config import Config, Size, parse_variant
from vit.task import random_streams as random_streams

INITS = {
    "lecun_normal": (nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()),
    "xavier_uniform": (nnx.initializers.xavier_uniform(), nnx.initializers.normal(1e-6)),
}
"""`config.model.mlp_init`: of kernels and of biases."""


class ViT(nnx.Module):
    """images (b, size, size, channels), 0 to 255 -> (logits (b, num_classes), intermediates).

    Images are bytes or floats. With dtype "bfloat16" so are the activations; parameters, the sums
    of normalisation and attention, and the logits stay float32.

    A new model is in evaluation mode; `model.train()` and `model.eval()` switch dropout, stochastic
    depth and the running statistics of calibrated attention.

    Args:
        config: the sections `model` and `attention` are read, and `data.image_size`.
        num_classes: width of the logits.
        channels: of the images.
        rngs: streams `params`, `dropout`, `frequencies`; see `random_streams`.
    """

    def __init__(self, config: Config, *, num_classes: int, channels: int, rngs: nnx.Rngs):
        size, patch_size = parse_variant(config.model.variant)
        self.pooling, self.remat = config.model.pooling, config.model.remat
        dtype = jnp.dtype(config.model.dtype)
        grid = config.data.image_size // patch_size
        patch = (patch_size, patch_size)
        self.embed = nnx.Conv(
            channels, size.width, patch, patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        if config.model.position == "learned":
            table = 0.02 * jax.random.normal(rngs.params(), (grid**2, size.width))
            self.position = nnx.Param(table)
        else:
            self.position = nnx.Variable(sincos_positions(grid, size.width))
        if self.pooling == "token":
            self.token = nnx.Param(jnp.zeros(size.width))
        self.dropout = nnx.Dropout(config.model.dropout, rngs=rngs)
        rates = np.linspace(0, config.model.drop_path, size.depth).tolist()
        self.blocks = nnx.List([Block(config, size, rngs, rate) for rate in rates])
        self.norm = nnx.LayerNorm(size.width, dtype=jnp.float32, rngs=rngs)
        width = size.width
        self.pre_logits = nnx.Linear(width, width, rngs=rngs) if config.model.pre_logits else None
        self.head = nnx.Linear(
            width,
            num_classes,
            kernel_init=nnx.initializers.zeros_init(),
            bias_init=nnx.initializers.constant(config.model.head_bias),
            rngs=rngs,
        )
        self.eval()

    def __call__(
        self, images: Real[Array, "b height width c"]
    ) -> tuple[Float[Array, "b classes"], dict[str, Array]]:
        """Logits, and by name what passed on the way.

        The intermediates are "embedded", "block00/attention_input" (which the query, key and value
        projections of that block read), "block00/output", ..., "pooled".
        """
        x = self.embed(images.astype(jnp.float32) / 127.5 - 1)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position[...].astype(x.dtype)
        if self.pooling == "token":
            token = self.token[...].astype(x.dtype)
            token = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        x = self.dropout(x)
        intermediates = {"embedded": x}
        apply = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for i, block in enumerate(self.blocks):
            x, attention_input = apply(block, x)
            intermediates[f"block{i:02d}/attention_input"] = attention_input
            intermediates[f"block{i:02d}/output"] = x
        x = self.norm(x)
        pooled = x[:, 0] if self.pooling == "token" else jnp.mean(x, axis=1)
        if self.pre_logits is not None:
            pooled = jnp.tanh(self.pre_logits(pooled))
        intermediates["pooled"] = pooled
        return self.head(pooled), intermediates


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    In training either summand is left out of an example with probability `drop_path`, and divided
    by 1 - drop_path where it stays.
    """

    def __init__(self, config: Config, size: Size, rngs: nnx.Rngs, drop_path: float = 0.0):
        attention = config.attention
        attention_fn = nnx.dot_product_attention
        if attention.kind == "performer":
            attention_fn = PerformerAttention(
                attention.num_features,
                size.head_dim,
                coupling=attention.coupling,
                num_heads=None if attention.share_heads else size.num_heads,
                redraw_every=attention.redraw_every,
                calibration=attention.calibration,
                implementation="pallas" if attention.implementation == "pallas" else None,
                rngs=rngs,
            )
        dtype = jnp.dtype(config.model.dtype)
        self.attention_norm = nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=size.num_heads,
            in_features=size.width,
            kernel_init=nnx.initializers.xavier_uniform(),
            attention_fn=attention_fn,
            decode=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(size.width, dtype=dtype, rngs=rngs)
        kernel, bias = INITS[config.model.mlp_init]
        linear = partial(nnx.Linear, kernel_init=kernel, bias_init=bias, dtype=dtype, rngs=rngs)
        self.mlp_in = linear(size.width, size.mlp_dim)
        self.mlp_out = linear(size.mlp_dim, size.width)
        self.dropout = nnx.Dropout(config.model.dropout, rngs=rngs)
        # Without it there is no stream of keys either: the state is that of models of before.
        stream = rngs if drop_path else None
        self.drop_path = nnx.Dropout(drop_path, broadcast_dims=(1, 2), rngs=stream)

    def __call__(
        self, x: Float[Array, "b s width"]
    ) -> tuple[Float[Array, "b s width"], Float[Array, "b s width"]]:
        """The output of the block, and the input of its attention."""
        attention_input = self.attention_norm(x)
        x = x + self.drop_path(self.dropout(self.attention(attention_input)))
        hidden = jax.nn.gelu(self.mlp_in(self.mlp_norm(x)))
        hidden = self.dropout(hidden)
        return x + self.drop_path(self.dropout(self.mlp_out(hidden))), attention_input


def sincos_positions(grid: int, width: int) -> Float[Array, "positions width"]:
    """Fixed two-dimensional position embedding (Chen et al. 2021), (grid * grid, width).

    Raises:
        ValueError: when the width is not divisible by 4 (sine and cosine of two coordinates).
    """
    if width % 4:
        raise ValueError(f"sincos positions need a width divisible by 4, got {width}")
    y, x = np.mgrid[:grid, :grid].reshape(2, -1, 1)
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    waves = [f(c * frequencies) for c in (x, y) for f in (np.sin, np.cos)]
    return jnp.asarray(np.concatenate(waves, axis=-1), jnp.float32)
