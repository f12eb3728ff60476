"""The fields of a run's configuration: typed dataclasses, every number visible.

What must hold of their values is in `vit.rules`; a user finds all of it in `vit.config`.
"""

import ast
import dataclasses
import inspect
import itertools
import math
import sys
import typing
from typing import Any, NamedTuple

from performer.choices import unknown


class Size(NamedTuple):
    """The numbers that a variant's name stands for."""

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


@dataclasses.dataclass
class Model:
    """The Vision Transformer (Dosovitskiy et al. 2021)."""

    variant: str = "B/16"
    """A row of `SIZES`, "/", the patch size in pixels, as in "Ti/2"."""
    width: int = 0
    """Of a token, divisible by the number of heads; 0: as the variant's row says, so below."""
    depth: int = 0
    """Blocks, one after another; 0: the variant's."""
    num_heads: int = 0
    """Of attention; 0: the variant's."""
    mlp_dim: int = 0
    """Width inside the MLP; 0: the variant's."""
    pooling: str = "token"
    """What the head reads: "token" (a class token), "mean" (the mean over patches), "attention"
    (what one learned query reads of the patches, and an MLP: Zhai et al. 2022), or two side by
    side: "token+mean" (DINOv2), "token+register" (the first register: distilled DeiT)."""
    registers: int = 0
    """Tokens without a place in the picture (Darcet et al. 2024), after the class token."""
    position: str = "learned"
    """Position embedding: "learned" or "sincos" (fixed, two-dimensional)."""
    dropout: float = 0.0
    """Dropout rate after the embedding, the attention and each MLP layer."""
    drop_path: float = 0.0
    """Stochastic depth (Huang et al. 2016): what attention or MLP add to an example is left out
    with a probability that rises linearly from 0 in the first block to this in the last."""
    layer_scale: float = 0.0
    """What attention and MLP add is multiplied by a learned factor for each channel, this one at
    first (LayerScale, Touvron et al. 2021); 0: not."""
    activation: str = "gelu_tanh"
    """Of the MLP: "gelu_tanh" (GELU, approximated), "gelu" (exact), "quick_gelu" (x times the
    sigmoid of 1.702 x), or "swiglu" (SiLU of one half of the inside times the other half)."""
    epsilon: float = 1e-6
    """Added to the variance by layer norms."""
    embed_norm: bool = False
    """A layer norm before the first block (CLIP)."""
    final_norm: str = "before"
    """The last layer norm: "before" pooling, "after" it, or "none"."""
    dtype: str = "float32"
    """Of the arithmetic: "float32" or "bfloat16". Parameters, the sums of normalisation and
    attention, and the logits are float32 in either case."""
    mlp_init: str = "lecun_normal"
    """Of the MLP's kernels: "lecun_normal", or "xavier_uniform" with biases from N(0, 1e-6), as in
    scenic, big_vision and vision_transformer."""
    pre_logits: bool = False
    """Before the head a linear layer of the model's width and tanh (Dosovitskiy et al. 2021)."""
    head_bias: float = 0.0
    """The first bias of each class: for a sigmoid loss one at which it is unlikely."""
    remat: bool = False
    """Compute the inside of each block again in the backward pass, instead of keeping it."""

    @property
    def size(self) -> Size:
        """The variant's row of `SIZES`, and in it the fields that are not 0.

        >>> Model("Ti/2", depth=3).size
        Size(width=192, depth=3, num_heads=3, mlp_dim=768)
        """
        own = {name: getattr(self, name) for name in Size._fields if getattr(self, name)}
        return parse_variant(self.variant)[0]._replace(**own)

    @property
    def num_prefix(self) -> int:
        """Tokens before the patches: class token and registers."""
        return ("token" in self.pooling) + self.registers

    @property
    def patch_size(self) -> int:
        """In pixels: what follows the variant's slash."""
        return parse_variant(self.variant)[1]


@dataclasses.dataclass
class Attention:
    """What stands between queries, keys and values. The parameters are the same for all kinds."""

    kind: str = "performer"
    """"performer" (random features) or "softmax" (exact)."""
    coupling: str = "pm-antithetic"
    """A name that `performer.couplings.get` knows."""
    num_features: int = 128
    """m, the number of frequencies of a head."""
    share_heads: bool = False
    """One draw of frequencies for all heads of a layer, instead of one for each head."""
    calibration: str = "none"
    """"none", "shift", "shift+scale" or "full": running statistics, see `performer.calibration`."""
    redraw_every: int = 0
    """Steps between new draws of the frequencies in training; 0 keeps the first ones."""
    exact_layers: str = ""
    """Blocks, counted from 0, as "0,3", whose attention is exact whatever `kind` says."""
    implementation: str = "xla"
    """"xla", or "pallas" for the kernels for TPU: compiled and counted, not yet run."""
    exact_window: int = 0
    """So many tokens are a chunk: those of its own and of both neighbours are exact for a query,
    and so are class token and registers for all. Patches are in the order of a Z-order curve then,
    so that a chunk is a square of the picture, or nearly. 0: none."""


@dataclasses.dataclass
class Data:
    """The data set and how it is read."""

    name: str = "digits"
    """"digits" (1,797 images that come with scikit-learn) or a TFDS data set in `dir`; nothing for
    a run without data, as `vit.pretrained` makes."""
    dir: str = ""
    """Where TFDS data sets lie: the --out of `vit.prepare`, or TFDS's own data_dir."""
    train_split: str = "train"
    """What is trained on: a split, a part as "train[:90%]", or several with "+" between."""
    eval_split: str = "test"
    """What is evaluated on, in the same words."""
    image_size: int = 8
    """What the model sees, in pixels on a side."""
    eval_resize: int = 0
    """Evaluation resizes the shorter side to this and takes the centre; 0: to image_size."""
    crop: str = "center"
    """Of training images: "center", as in evaluation, or "inception", a random part of the image
    (8% to 100% of its area, sides 3:4 to 4:3, Szegedy et al. 2015)."""
    max_shift: int = 0
    """Training images are shifted by up to this many pixels in both directions, zeros moving in."""
    flip: bool = False
    """Training images are mirrored left to right, each with probability 1/2."""
    randaugment_layers: int = 0
    """Random operations on a training image, one after another (Cubuk et al. 2020); 0: none."""
    randaugment_magnitude: float = 10.0
    """Their strength, 0 to 30. That of AugReg, big_vision and timm (DeiT's m9) counts to 10: take
    three times theirs."""
    mixup: float = 0.0
    """Alpha of mixup (Zhang et al. 2018): each batch is blended with itself in another order, by a
    share from Beta(alpha, alpha); 0: not."""
    cutmix: float = 0.0
    """Alpha of CutMix (Yun et al. 2019): a rectangle of each image is that of another, its share of
    the area from Beta(alpha, alpha); 0: not. With mixup, too, each batch has one of the two, drawn
    with probability 1/2."""
    erase: float = 0.0
    """Probability of random erasing (Zhong et al. 2020): a rectangle of 2% to a third of a training
    image becomes random pixels."""
    batch_size: int = 128
    """Images of a step, over all devices and hosts."""
    num_workers: int = 0
    """Processes of each host that read and augment; 0 reads in threads of the main process, -1
    takes one for each core but one, as far as /dev/shm has room for their batches."""
    max_bad_records: int = 10
    """Records that cannot be decoded are left out, and counted; more than this stop the run."""


@dataclasses.dataclass
class Optim:
    """AdamW; the rate rises linearly, stays, and falls as a half cosine to the end of the run."""

    loss: str = "softmax"
    """"softmax": cross entropy of the classes. "sigmoid": the sum over the classes of the cross
    entropies of a sigmoid each (Beyer et al. 2020); what is learned needs not sum to one."""
    learning_rate: float = 1e-3
    """The highest one."""
    final_learning_rate: float = 1e-5
    """The last one."""
    warmup_steps: int = 100
    """In which the rate rises from 0."""
    constant_steps: int = 0
    """Then it stays for so many."""
    weight_decay: float = 1e-4
    """Decoupled, times the rate, on matrices only: biases, norms, the class token and positions are
    exempt. DeiT's and that of AugReg's paper are the same; big_vision's `wd` is this times `lr`."""
    b2: float = 0.999
    """Decay of Adam's mean of squared gradients; 0.95 to 0.99 recovers sooner from large ones."""
    clip_norm: float = 1.0
    """Gradients are clipped to this global norm; 0: not."""
    skip_nonfinite: int = 0
    """Steps in a row that are passed over, parameters and moments staying as they were, where loss
    or gradients are not finite; one more ends the run, as the first does with 0."""
    label_smoothing: float = 0.0
    """Share of the label that goes to all classes alike (Szegedy et al. 2016)."""
    accumulate: int = 1
    """Parts in which a batch goes through the model one after another, to save memory."""
    ema: float = 0.0
    """Decay of the running mean of the parameters, which evaluation then uses; 0: none."""
    layer_decay: float = 1.0
    """For fine-tuning (Bao et al. 2022): rate and weight decay are multiplied by this once for each
    layer between a parameter and the head, the embedding being the lowest; 1: all learn alike."""


@dataclasses.dataclass
class Config:
    """One run."""

    model: Model = dataclasses.field(default_factory=Model)
    attention: Attention = dataclasses.field(default_factory=Attention)
    data: Data = dataclasses.field(default_factory=Data)
    optim: Optim = dataclasses.field(default_factory=Optim)
    seed: int = 0
    """Of the parameters, the frequencies, the order of the data, augmentations and dropout."""
    num_epochs: float = 10.0
    """How often the training split is seen; parts of an epoch, too."""
    restarts: str = ""
    """Epochs, as "10,30", at which the rate rises again by a warm-up of its own, stays, and falls
    until the next one or the end of the run (Loshchilov & Hutter 2017); `--extend` adds one."""
    fsdp: int = 1
    """Devices that share one copy of the parameters and the optimiser's moments, each holding a
    part; the batch is split over all devices in any case."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 100
    """Steps between evaluations."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last two are kept, and that of the best evaluation."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps are kept as well; 0: none."""


def _types() -> dict[str, type]:
    """{"attention.coupling": str, ...}: the declared type of every field."""
    types = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            types |= {f"{name}.{k}": v for k, v in typing.get_type_hints(kind).items()}
        else:
            types[name] = kind
    return types


TYPES = _types()


def meanings() -> dict[str, str]:
    """{"attention.coupling": "A name that ...", ...}: what stands below every field here."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    texts: dict[tuple[str, str], str] = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in itertools.pairwise(kind.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(value))):
                    texts[kind.name, name] = " ".join(value.split())
    sections = typing.get_type_hints(Config)
    return {
        field: texts.get((sections[first].__name__ if last else "Config", last or first), "")
        for field in TYPES
        for first, _, last in [field.partition(".")]
    }


def parse_variant(variant: str) -> tuple[Size, int]:
    """("B/16") -> the row B of `SIZES`, and 16.

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


def restarts(text: str) -> tuple[float, ...]:
    """ "10,30" -> the two numbers; NaN for what is none."""
    numbers = []
    for word in text.split(",") if text else ():
        try:
            numbers.append(float(word))
        except ValueError:
            numbers.append(math.nan)
    return tuple(numbers)


def exact_layers(text: str) -> tuple[int, ...]:
    """ "0,3" -> the two numbers; -1 for what is none."""
    return tuple(int(x) if x.isdecimal() else -1 for x in text.split(",")) if text else ()


def cycles(config: Config) -> tuple[float, ...]:
    """Epochs at which the rate has fallen: those of `restarts`, and the end."""
    return (*restarts(config.restarts), config.num_epochs)


def flatten(config: Config) -> dict[str, Any]:
    """{"attention.coupling": "pm", ...}: every field with its value."""
    flat = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": leaf for field, leaf in value.items()}
        else:
            flat[name] = value
    return flat
