"""The fields of a config, with the meaning and the range of each.

The sections have slots: an assignment to a field that does not exist raises AttributeError.
"""

import copy
import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import performer
from performer.attention import Exact
from performer.choices import unknown

LARGEST = 2**31 - 1
"""Largest integer: seeds, steps and labels are int32 on the devices."""

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


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


def _field(default: Any, help: str, allowed: str = "", **metadata: Any) -> Any:
    """Return a field of a section; `allowed` describes the predicate `holds` of its metadata.

    NaN is in no range, because every comparison with it is false.
    """
    kind = WORDS[type(default)]
    metadata |= {"help": " ".join(help.split()), "allowed": f"must be {allowed or kind}"}
    return dataclasses.field(default=default, metadata=metadata)


def _choice(words: str, help: str) -> Any:
    """Return a field that is one of the words; the first is the default."""
    choices = tuple(words.split())
    return _field(choices[0], help, f"one of {', '.join(choices)}", choices=choices)


def _number(default: float, help: str, low: float, high: float, zero: str = "") -> Any:
    """Return a number or integer from `low` to `high`, or 0 if `zero` describes its meaning."""
    style = "g" if isinstance(default, float) else ""
    allowed = f"{WORDS[type(default)]} from {low:{style}} to {high:{style}}"
    allowed = f"0 ({zero}), or {allowed}" if zero else allowed
    return _field(default, help, allowed, holds=lambda x: low <= x <= high or (zero and x == 0))


def _count(default: int, help: str, low: int = 0) -> Any:
    return _number(default, help, low, LARGEST)


def _share(default: float, help: str) -> Any:
    return _field(default, help, "a number from 0 to below 1", holds=lambda x: 0 <= x < 1)


@dataclasses.dataclass(slots=True)
class Model:
    """The Vision Transformer (Dosovitskiy et al. 2021)."""

    variant: str = _field("B/16", "Size (XS, Ti, S, B or L) and patch size in pixels.")
    width: int = _number(0, "Width of a token, divisible by num_heads.", 1, 2**17, "the variant's")
    depth: int = _number(0, "Number of blocks.", 1, 2**10, "the variant's")
    num_heads: int = _number(0, "Number of attention heads.", 1, 2**10, "the variant's")
    mlp_dim: int = _number(0, "Hidden width of the MLP.", 1, 2**17, "the variant's")
    pooling: str = _choice(
        "token mean attention token+mean token+register",
        """Input of the head: "token" (class token), "mean" (mean over patches), "attention" (one
        learned query attends to the patches, then an MLP: Zhai et al. 2022), "token+mean" (both,
        concatenated: DINOv2) or "token+register" (with the first register: distilled DeiT).""",
    )
    registers: int = _number(
        0, "Register tokens (Darcet et al. 2024) after the class token.", 0, 2**10
    )
    position: str = _choice("learned sincos", 'Position embedding; "sincos" is fixed, in two axes.')
    dropout: float = _share(0.0, "Dropout rate after embedding, attention and each MLP layer.")
    drop_path: float = _share(
        0.0, "Stochastic depth (Huang et al. 2016): rate of the last block, rising linearly from 0."
    )
    layer_scale: float = _number(
        0.0, "Initial factor of each channel (LayerScale, Touvron et al. 2021); 0: none.", 0, 10
    )
    activation: str = _choice(
        "gelu_tanh gelu quick_gelu swiglu",
        """Activation of the MLP; "quick_gelu" is x sigmoid(1.702 x), "swiglu" SiLU of one half of
        the hidden units times the other half.""",
    )
    epsilon: float = _number(1e-6, "Constant added to the variance by layer norms.", 1e-12, 0.1)
    embed_norm: bool = _field(False, "Layer norm before the first block (CLIP).")
    final_norm: str = _choice("before after none", "Position of the last norm relative to pooling.")
    dtype: str = _choice(
        "float32 bfloat16",
        "Type of activations; parameters, logits, sums of norms and attention are float32.",
    )
    mlp_init: str = _choice(
        "lecun_normal xavier_uniform",
        """Initial kernels of the MLP; "xavier_uniform" comes with biases from N(0, 1e-6), as in
        scenic, big_vision and vision_transformer.""",
    )
    pre_logits: bool = _field(
        False, "Linear layer and tanh before the head (Dosovitskiy et al. 2021)."
    )
    head_bias: float = _number(
        0.0, "Initial bias of the classes; negative values suit a sigmoid loss.", -100, 100
    )
    remat: bool = _field(False, "Recompute activations in the backward pass to save memory.")

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


class Block(NamedTuple):
    """Attention of one block: a row of `config.attention.blocks`.

    Except for `transferred` the fields are those of `Attention` with the same name.
    """

    kind: str = "performer"
    num_features: int = 128
    calibration: str = "none"
    exact_window: int = 0
    exact_keys: int = 0
    exact_rows: int = 0
    transferred: bool = False
    """Features are learned by attention transfer, whose parameters the layer holds."""

    @property
    def text(self) -> str:
        """The sizes that are not 0: "m = 64, exact_keys = 16", or "softmax attention"."""
        if self.kind == "softmax":
            return "softmax attention"
        sizes = {"m": self.num_features} | {
            name: x for name, x in self._asdict().items() if name.startswith("exact_")
        }
        return ", ".join(f"{name} = {x}" for name, x in sizes.items() if x)


@dataclasses.dataclass(slots=True)
class Attention:
    """Attention of the blocks; all kinds have the same parameters."""

    kind: str = _choice("performer softmax", '"performer" (random features) or "softmax" (exact).')
    coupling: str = _field(
        performer.couplings.DEFAULT,
        "Coupling of the frequencies.",
        f"one of {', '.join(performer.couplings.names())}, or DIRECTIONS*NORMS of two of them",
    )
    feature_map: str = _choice(
        " ".join(performer.features.MAPS),
        """Map of queries and keys. All but "positive" are for comparison: they train without
        calibration, and "relu" and "elu+1", which do not estimate softmax, without exact pairs.""",
    )
    num_features: int = _number(
        *(128, "Random features m, the frequencies of a head.", 1, 2**16),
        "the pairs of `exact_window` alone",
    )
    share_heads: bool = _field(False, "Share one draw of frequencies among the heads of a layer.")
    calibration: str = _field(
        "none",
        "Calibration of the features by running statistics of queries and keys.",
        f"{', '.join(performer.calibration.METHODS)}, or their parts joined by +",
    )
    redraw_every: int = _count(0, "Training steps between draws of the frequencies; 0: one draw.")
    implementation: str = _choice(
        "auto blocked pallas",
        """Implementation of `performer_attention`: "auto" for kernels on an NVIDIA GPU where they
        support the call, "blocked" by XLA, or "pallas", kernels for GPU and (not yet run) TPU.""",
    )
    exact_window: int = _count(
        0,
        """Tokens of a window; 0 for none. A query attends exactly to its own window, to both
        neighbours, and to class token and registers. Patches are in the order of a Z-order curve,
        so a window is roughly a square of the image.""",
    )
    exact_keys: int = _count(
        0, "Keys of a head that are exact for all queries, those with the largest weights."
    )
    exact_rows: int = _count(0, "First tokens whose attention is exact: 1 for a class token.")
    blocks: tuple[Block, ...] = dataclasses.field(
        default=(),
        metadata={
            "help": """Attention of each block, in place of the fields above: `Block` records, in a
            config file. `vit.convert` writes what it has chosen for each layer.""",
            "allowed": "must be a tuple of vit.config.Block, one for each block, or ()",
        },
    )


@dataclasses.dataclass(slots=True)
class Data:
    """Data set and input pipeline."""

    name: str = _field(
        "digits",
        """"digits" (1,797 images of scikit-learn) or a TFDS data set in `dir`; empty for a run of
        `vit.pretrained` without data.""",
    )
    dir: str = _field("", "Folder of TFDS data sets: --out of `vit.prepare`, or TFDS's data_dir.")
    train_split: str = _field(
        "train", 'Training split, as "train", "train[:90%]" or "train+validation".'
    )
    eval_split: str = _field(
        "test", "Evaluation split, in the same notation, without records of training."
    )
    image_size: int = _number(8, "Side of the model's input in pixels.", 1, 2**14)
    eval_resize: int = _number(
        0, "Size before the centre crop of evaluation, by `eval_crop`; 0: `image_size`.", 0, 2**16
    )
    eval_crop: str = _choice(
        "center squash",
        """Resizing in evaluation and prediction: "center" makes the shorter side `eval_resize`,
        "squash" makes both sides `eval_resize`, whatever their ratio, as transformers does for ViT,
        DeiT and SigLIP.""",
    )
    crop: str = _choice(
        "center inception",
        """Crop of training images: "center" as in evaluation, or "inception" (a random 8% to 100%
        of the area, sides 3:4 to 4:3, Szegedy et al. 2015).""",
    )
    max_shift: int = _number(0, "Largest random shift of training images in pixels.", 0, 2**14 - 1)
    flip: bool = _field(False, "Mirror training images with probability 1/2.")
    randaugment_layers: int = _number(
        0, "RandAugment (Cubuk et al. 2020): random operations per training image.", 0, 20
    )
    randaugment_magnitude: float = _number(
        10.0,
        "Strength of RandAugment: three times the value of AugReg, big_vision and timm.",
        0,
        30,
    )
    mixup: float = _number(
        0.0, "Alpha of mixup (Zhang et al. 2018) of images of a batch.", 1e-3, 1e3, "no mixup"
    )
    cutmix: float = _number(
        0.0,
        """Alpha of CutMix (Yun et al. 2019): rectangles of other images. With mixup also, a batch
        has one of the two, with probability 1/2.""",
        *(1e-3, 1e3, "no CutMix"),
    )
    erase: float = _number(
        0.0, "Probability of random erasing (Zhong et al. 2020) of 2% to a third of an image.", 0, 1
    )
    batch_size: int = _count(128, "Images per step, over all devices and hosts.", 1)
    num_workers: int = _number(
        0,
        """Processes per host that read and augment; 0: threads of the main process; -1: all cores
        but one, as many as /dev/shm allows.""",
        *(-1, 1024),
    )


@dataclasses.dataclass(slots=True)
class Optim:
    """AdamW with linear warm-up, a constant stretch and cosine decay of the learning rate."""

    loss: str = _choice(
        "softmax sigmoid",
        """"softmax" cross entropy, or the sum of binary cross entropies of the classes (Beyer et
        al. 2020), whose probabilities need not sum to one.""",
    )
    learning_rate: float = _number(1e-3, "Peak learning rate.", 0, 10)
    final_learning_rate: float = _number(1e-5, "Learning rate at the end of the run.", 0, 10)
    warmup_steps: float = _number(
        0.1, "Linear warm-up from 0: its share of the run if below 1, else its steps.", 0, LARGEST
    )
    constant_steps: float = _number(
        0.0, "The peak rate after the warm-up, as a share or as steps alike.", 0, LARGEST
    )
    weight_decay: float = _number(
        1e-4,
        """Decoupled weight decay of the kernels of linear maps, multiplied by the learning rate, as
        in DeiT and AugReg; big_vision's `wd` is this times `lr`.""",
        *(0, 1e3),
    )
    b2: float = _share(0.999, "Adam's b2; 0.95 to 0.99 recovers faster from large gradients.")
    clip_norm: float = _number(1.0, "Maximum global norm of gradients.", 1e-6, 1e6, "no clipping")
    label_smoothing: float = _share(
        0.0, "Share of labels spread over all classes (Szegedy et al. 2016)."
    )
    accumulate: int = _count(
        1,
        """Parts of a batch with accumulated gradients, to save memory. The running moments of
        calibrated attention advance with each part.""",
        1,
    )
    ema: float = _share(0.0, "Decay of the running mean of the parameters for evaluation; 0: none.")
    layer_decay: float = _number(
        1.0,
        """Factor of learning rate and weight decay for each layer between a parameter and the head
        (Bao et al. 2022), for fine-tuning.""",
        *(1e-3, 1),
    )


@dataclasses.dataclass(slots=True)
class Config:
    """Settings of a run."""

    model: Model = dataclasses.field(default_factory=Model)
    attention: Attention = dataclasses.field(default_factory=Attention)
    data: Data = dataclasses.field(default_factory=Data)
    optim: Optim = dataclasses.field(default_factory=Optim)
    seed: int = _count(0, "Seed of parameters, frequencies, data order, augmentation and dropout.")
    num_epochs: float = _field(
        10.0,
        """Passes over the training split, each of as many steps as it has whole batches; need not
        be an integer.""",
        "a number above 0 and at most 1e+06",
        holds=lambda epochs: 0 < epochs <= 1e6,
    )
    fsdp: int = _count(
        1,
        """Devices that share one copy of the parameters and the optimiser's moments (fully sharded
        data parallelism). The batch is split over all devices, divided by seq.""",
        1,
    )
    seq: int = _count(
        1,
        """Devices that share the tokens of an image, for images of many tokens. Random features
        exchange m (head_dim + 2) numbers for each head, whatever the number of tokens.""",
        1,
    )
    log_every: int = _count(10, "Steps between lines of metrics.jsonl.", 1)
    eval_every: int = _count(100, "Steps between evaluations.", 1)
    checkpoint_every: int = _count(
        100, "Steps between checkpoints; the last two and the best are kept.", 1
    )
    keep_every: int = _count(0, "Steps between checkpoints that are never deleted; 0: none.")

    def overridden(self, values: dict[str, Any]) -> "Config":
        """Return the config with the values of flags; `recipe.Derived` derives the others again."""
        return with_values(self, values)


SECTIONS: dict[str, Any] = {
    field.name: field.type
    for field in dataclasses.fields(Config)  # pyright: ignore[reportArgumentType]
    if dataclasses.is_dataclass(field.type)
}
FIELDS: dict[str, dataclasses.Field] = {
    f"{prefix}{field.name}": field
    for prefix, section in [*((f"{name}.", kind) for name, kind in SECTIONS.items()), ("", Config)]
    for field in dataclasses.fields(section)
    if field.name not in SECTIONS
}
BLOCKS = "attention.blocks"
"""The field that no flag sets: its value is a table."""
TYPES: dict[str, Any] = {name: field.type for name, field in FIELDS.items() if name != BLOCKS}
"""Types of the other fields, which are numbers, words and switches."""


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


def blocks(config: Config) -> tuple[Block, ...]:
    """Return the attention of each block: the records of the config, or its one for all."""
    attention = config.attention
    shared = {name: getattr(attention, name) for name in Block._fields if hasattr(attention, name)}
    same = Block(**shared)
    return attention.blocks or (same,) * config.model.size.depth


def exact(config: Config, block: Block) -> Exact:
    """Return the exact pairs of a block; with a window also class token and registers are exact."""
    first = config.model.num_prefix if block.exact_window else 0
    return Exact(block.exact_window, first, block.exact_keys, block.exact_rows)


def flatten(config: Config) -> dict[str, Any]:
    """Return all fields with their values, as {"attention.coupling": "pm", ...}."""
    return {name: operator.attrgetter(name)(config) for name in FIELDS}


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy with other values of some fields, as {"attention.coupling": "pm"}."""
    new = copy.deepcopy(config)
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        setattr(getattr(new, section) if section else new, field, value)
    return new
