"""MLP-Mixer (Tolstikhin et al. 2021), an image model without attention: the task "mixer".

With X the tokens (patches x channels), layer norms over the channels, and MLPs of two layers with a
GELU, eq. 1 of the paper is

    U = X + mlp(norm(X)^T)^T     over the patches, for each channel
    Y = U + mlp(norm(U))         over the channels, for each patch

Reports on attention, layer-wise decay and MFU need functions that this model does not define.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Real

from vit import config as configs
from vit.config import DATA_RULES, choice, number, share
from vit.model import classification


@dataclasses.dataclass(slots=True)
class Model:
    """The MLP-Mixer (Tolstikhin et al. 2021)."""

    patch_size: int = number(16, "Side of a patch in pixels.", 1, 2**14)
    width: int = number(512, "Channels of a patch.", 1, 2**17)
    depth: int = number(8, "Number of blocks.", 1, 2**10)
    patch_dim: int = number(256, "Hidden width of the MLPs over patches.", 1, 2**17)
    channel_dim: int = number(2048, "Hidden width of the MLPs over channels.", 1, 2**17)
    dropout: float = share(0.0, "Dropout rate after each MLP.")
    dtype: str = choice("float32 bfloat16", "Type of activations; parameters are float32.")


@dataclasses.dataclass(slots=True)
class Config(configs.TrainConfig):
    """Settings of a run that classifies images with an MLP-Mixer."""

    task: ClassVar[str] = "mixer"
    model: Model = dataclasses.field(default_factory=Model)
    data: configs.Data = dataclasses.field(default_factory=configs.Data)
    optim: configs.Optim = dataclasses.field(default_factory=configs.Optim)

    @property
    def size(self) -> tuple[int, ...]:
        """Sizes of the model."""
        model = self.model
        return model.width, model.depth, model.patch_dim, model.channel_dim

    @property
    def summary(self) -> str:
        """The model in a line."""
        return f"MLP-Mixer {self.model}"

    def check(self) -> None:
        """Raise ValueError for fields that cannot be combined."""
        configs.hold(self, DATA_RULES | RULES)


RULES: Any = {
    "config.data.image_size must be divisible by config.model.patch_size": lambda c: (
        c.data.image_size % c.model.patch_size == 0
    ),
    "config.seq must be 1 for an MLP over patches": lambda c: c.seq == 1,
}


class Mixer(nnx.Module):
    """Map images (b, size, size, channels), 0 to 255, to logits and {"pooled": their input}."""

    def __init__(self, config: Config, *, num_classes: int, channels: int, rngs: nnx.Rngs):
        model, dtype = config.model, jnp.dtype(config.model.dtype)
        grid, patch = config.data.image_size // model.patch_size, (model.patch_size,) * 2
        self.embed = nnx.Conv(
            channels, model.width, patch, patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List([Block(model, grid**2, rngs) for _ in range(model.depth)])
        self.norm = nnx.LayerNorm(model.width, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.head = nnx.Linear(model.width, num_classes, kernel_init=zeros, rngs=rngs)
        self.eval()

    def __call__(
        self, images: Real[Array, "b height width c"]
    ) -> tuple[Float[Array, "b classes"], dict[str, Array]]:
        """Return logits and intermediates."""
        x = self.embed(images.astype(jnp.float32) / 127.5 - 1)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        pooled = jnp.mean(self.norm(x.astype(jnp.float32)), axis=1)
        return self.head(pooled), {"pooled": pooled}


class Block(nnx.Module):
    """Both steps of eq. 1."""

    def __init__(self, model: Model, patches: int, rngs: nnx.Rngs):
        dtype = jnp.dtype(model.dtype)
        self.norms = nnx.List([nnx.LayerNorm(model.width, dtype=dtype, rngs=rngs) for _ in "UY"])
        self.over_patches = Mlp(patches, model.patch_dim, model, rngs)
        self.over_channels = Mlp(model.width, model.channel_dim, model, rngs)

    def __call__(self, x: Float[Array, "b n width"]) -> Float[Array, "b n width"]:
        """Return Y."""
        x = x + self.over_patches(self.norms[0](x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.over_channels(self.norms[1](x))


class Mlp(nnx.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int, model: Model, rngs: nnx.Rngs):
        dtype = jnp.dtype(model.dtype)
        self.up = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(model.dropout, rngs=rngs)

    def __call__(self, x: Float[Array, "b n width"]) -> Float[Array, "b n width"]:
        """Return the output, of the shape of the input."""
        return self.dropout(self.down(nnx.gelu(self.up(x))))


classification.define(Config, classification.Architecture(Mixer))
