"""The config of image classification with a Vision Transformer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from performer.choices import unknown
from vit.config.attention import ATTENTION_RULES, Attention, check_attention, check_new
from vit.config.base import (
    Batches,
    Optimizer,
    TrainConfig,
    choice,
    field,
    number,
    share,
)
from vit.config.rules import hold


class Size(NamedTuple):
    """Sizes of a variant of the model."""

    width: int
    depth: int
    num_heads: int
    mlp_dim: int

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads


SIZES = {
    "XS": Size(width=64, depth=4, num_heads=4, mlp_dim=256),  # ours, for small images on a CPU
    "Ti": Size(width=192, depth=12, num_heads=3, mlp_dim=768),  # Touvron et al. 2021
    "S": Size(width=384, depth=12, num_heads=6, mlp_dim=1536),  # Touvron et al. 2021
    "B": Size(width=768, depth=12, num_heads=12, mlp_dim=3072),  # Dosovitskiy et al. 2021
    "L": Size(width=1024, depth=24, num_heads=16, mlp_dim=4096),  # Dosovitskiy et al. 2021
}


@dataclasses.dataclass(slots=True)
class Model:
    """The Vision Transformer (Dosovitskiy et al. 2021)."""

    variant: str = field("B/16", "Size (XS, Ti, S, B or L) and patch size in pixels.")
    width: int = number(0, "Width of a token, divisible by num_heads.", 1, 2**17, "the variant's")
    depth: int = number(0, "Number of blocks.", 1, 2**10, "the variant's")
    num_heads: int = number(0, "Number of attention heads.", 1, 2**10, "the variant's")
    mlp_dim: int = number(0, "Hidden width of the MLP.", 1, 2**17, "the variant's")
    pooling: str = choice(
        "token mean attention token+mean token+register",
        """Input of the head: "token" (class token), "mean" (mean over patches), "attention" (one
        learned query attends to the patches, then an MLP: Zhai et al. 2022), "token+mean" (both,
        concatenated: DINOv2) or "token+register" (with the first register: distilled DeiT).""",
    )
    registers: int = number(
        0, "Register tokens (Darcet et al. 2024) after the class token.", 0, 2**10
    )
    position: str = choice("learned sincos", 'Position embedding; "sincos" is fixed, in two axes.')
    dropout: float = share(0.0, "Dropout rate after embedding, attention and each MLP layer.")
    drop_path: float = share(
        0.0, "Stochastic depth (Huang et al. 2016): rate of the last block, rising linearly from 0."
    )
    layer_scale: float = number(
        0.0, "Initial factor of each channel (LayerScale, Touvron et al. 2021); 0: none.", 0, 10
    )
    activation: str = choice(
        "gelu_tanh gelu quick_gelu swiglu",
        """Activation of the MLP; "quick_gelu" is x sigmoid(1.702 x), "swiglu" SiLU of one half of
        the hidden units times the other half.""",
    )
    epsilon: float = number(1e-6, "Constant added to the variance by layer norms.", 1e-12, 0.1)
    embed_norm: bool = field(False, "Layer norm before the first block (CLIP).")
    final_norm: str = choice("before after none", "Position of the last norm relative to pooling.")
    dtype: str = choice(
        "float32 bfloat16",
        "Type of activations; parameters, logits, sums of norms and attention are float32.",
    )
    mlp_init: str = choice(
        "lecun_normal xavier_uniform",
        """Initial kernels of the MLP; "xavier_uniform" comes with biases from N(0, 1e-6), as in
        scenic, big_vision and vision_transformer.""",
    )
    pre_logits: bool = field(
        False, "Linear layer and tanh before the head (Dosovitskiy et al. 2021)."
    )
    head_bias: float = number(
        0.0, "Initial bias of the classes; negative values suit a sigmoid loss.", -100, 100
    )
    remat: bool = field(False, "Recompute activations in the backward pass to save memory.")

    @property
    def size(self) -> Size:
        """Row of `SIZES` for the variant, with the fields that are not 0.

        >>> Model("Ti/2", depth=3).size
        Size(width=192, depth=3, num_heads=3, mlp_dim=768)
        """
        given_sizes = {name: getattr(self, name) for name in Size._fields if getattr(self, name)}
        return parse_variant(self.variant)[0]._replace(**given_sizes)

    @property
    def num_prefix(self) -> int:
        """Number of tokens before the patches: class token and registers."""
        return ("token" in self.pooling) + self.registers

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels: the number after the slash of the variant."""
        return parse_variant(self.variant)[1]


@dataclasses.dataclass(slots=True)
class Data(Batches):
    """Data set and input pipeline."""

    name: str = field(
        "digits",
        """"digits" (1,797 images of scikit-learn) or a TFDS data set in `dir`; empty for a run of
        `vit.pretrained` without data.""",
    )
    dir: str = field(
        "",
        "Folder of TFDS data sets: --out of `vit.prepare`, or TFDS's data_dir.",
        is_local=True,
    )
    train_split: str = field(
        "train", 'Training split, as "train", "train[:90%]" or "train+validation".'
    )
    eval_split: str = field(
        "test", "Evaluation split, in the same notation, without records of training."
    )
    image_size: int = number(8, "Side of the model's input in pixels.", 1, 2**14)
    eval_resize: int = number(
        0, "Size before the centre crop of evaluation, by `eval_crop`; 0: `image_size`.", 0, 2**16
    )
    eval_crop: str = choice(
        "center squash",
        """Resizing in evaluation and prediction: "center" makes the shorter side `eval_resize`,
        "squash" makes both sides `eval_resize`, whatever their ratio, as transformers does for ViT,
        DeiT and SigLIP.""",
    )
    crop: str = choice(
        "center inception",
        """Crop of training images: "center" as in evaluation, or "inception" (a random 8% to 100%
        of the area, sides 3:4 to 4:3, Szegedy et al. 2015).""",
    )
    max_shift: int = number(0, "Largest random shift of training images in pixels.", 0, 2**14 - 1)
    flip: bool = field(False, "Mirror training images with probability 1/2.")
    randaugment_layers: int = number(
        0, "RandAugment (Cubuk et al. 2020): random operations per training image.", 0, 20
    )
    randaugment_magnitude: float = number(
        10.0,
        "Strength of RandAugment: three times the value of AugReg, big_vision and timm.",
        0,
        30,
    )
    mixup: float = number(
        0.0, "Alpha of mixup (Zhang et al. 2018) of images of a batch.", 1e-3, 1e3, "no mixup"
    )
    cutmix: float = number(
        0.0,
        """Alpha of CutMix (Yun et al. 2019): rectangles of other images. With mixup also, a batch
        has one of the two, with probability 1/2.""",
        *(1e-3, 1e3, "no CutMix"),
    )
    erase: float = number(
        0.0, "Probability of random erasing (Zhong et al. 2020) of 2% to a third of an image.", 0, 1
    )

    @property
    def split(self) -> str:
        """Name of the evaluation split."""
        return self.eval_split


@dataclasses.dataclass(slots=True)
class Optim(Optimizer):
    """The loss of classes, and the optimiser: warm-up, a constant stretch and cosine decay."""

    loss: str = choice(
        "softmax sigmoid",
        """"softmax" cross entropy, or the sum of binary cross entropies of the classes (Beyer et
        al. 2020), whose probabilities need not sum to one.""",
    )
    label_smoothing: float = share(
        0.0, "Share of labels spread over all classes (Szegedy et al. 2016)."
    )


RULES: dict[str, Callable[["Config"], bool]] = {
    "config.model.width must be divisible by config.model.num_heads; 0 stands for the number of"
    " config.model.variant": lambda c: c.model.size.width % c.model.size.num_heads == 0,
    "config.model.width must be divisible by 4 for config.model.position; 0 stands for the width of"
    " config.model.variant": lambda c: c.model.position != "sincos" or c.model.size.width % 4 == 0,
    "config.model.registers must be at least 1 for config.model.pooling": lambda c: (
        c.model.pooling != "token+register" or c.model.registers > 0
    ),
    "config.model.final_norm must be before for config.model.pooling": lambda c: (
        "+" not in c.model.pooling or c.model.final_norm != "after"
    ),
    "config.attention.blocks must have config.model.depth records, or none; 0 stands for the depth"
    " of config.model.variant": lambda c: len(c.attention.blocks) in (0, c.model.size.depth),
    "config.data.image_size must be divisible by the patch of config.model.variant": lambda c: (
        c.data.image_size % c.model.patch_size == 0
    ),
    "config.seq must divide the number of tokens, with class token and registers": lambda c: (
        ((c.data.image_size // c.model.patch_size) ** 2 + c.model.num_prefix) % c.seq == 0
    ),
}
"""Conditions on several fields, by message."""

DATA_RULES: dict[str, Callable[[Any], bool]] = {
    "config.data.eval_resize must be 0, or one to four times config.data.image_size": lambda c: (
        not c.data.eval_resize or 1 <= c.data.eval_resize / c.data.image_size <= 4
    ),
    "config.data.max_shift must be smaller than config.data.image_size": lambda c: (
        c.data.max_shift < c.data.image_size
    ),
}
"""Conditions on the section `data` of images, for any model."""


@dataclasses.dataclass(slots=True)
class Config(TrainConfig):
    """Settings of a run that classifies images."""

    task: ClassVar[str] = "classification"
    model: Model = dataclasses.field(default_factory=Model)
    attention: Attention = dataclasses.field(default_factory=Attention)
    data: Data = dataclasses.field(default_factory=Data)
    optim: Optim = dataclasses.field(default_factory=Optim)

    @property
    def size(self) -> Size:
        """Sizes of the model."""
        return self.model.size

    @property
    def summary(self) -> str:
        """The model in a line."""
        size = ", ".join(f"{name} {n}" for name, n in self.model.size._asdict().items())
        text = f"ViT {self.model.variant} ({size}), {self.attention.kind} attention"
        if self.attention.kind == "softmax":
            return text
        return f"{text}, {self.attention.coupling}, m = {self.attention.num_features}"

    def check(self) -> None:
        """Raise ValueError for fields that cannot be combined."""
        parse_variant(self.model.variant)
        hold(self, RULES | DATA_RULES | ATTENTION_RULES)
        check_attention(self)

    def check_new(self) -> None:
        """Raise ValueError for features that only another run can give."""
        check_new(self)


def parse_variant(variant: str) -> tuple[Size, int]:
    """Return the row of `SIZES` and the patch size: of "B/16" the row B, and 16.

    Raises:
        ValueError: for an unknown size or a patch size that is no positive integer.
    """
    name, _, patch_size = variant.partition("/")
    if name not in SIZES or not patch_size.isdecimal() or int(patch_size) < 1:
        raise ValueError(
            f"{unknown('config.model.variant', variant, [f'{size}/16' for size in SIZES])}"
            " (any patch size may follow the slash)"
        )
    return SIZES[name], int(patch_size)
