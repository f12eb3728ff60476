"""The configuration of a run: its fields, their ranges, and the file that keeps them.

A config file (`experiments/configs/*.py`) defines `get_config() -> Config`; a flag overrides one
field, as in `--config.attention.coupling=pm`. A field carries its help text and its range;
`RULES` are conditions on several. `validate` checks both before any work starts.
"""

import copy
import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

import performer
from performer.choices import unknown
from vit.run import bounded, files

LARGEST = 2**31 - 1
"""Largest integer: seeds, steps and labels are int32 on the devices."""

TOKENS = 2**20
"""Largest number of patches of an image: more do not fit into memory with any attention."""

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


class Size(NamedTuple):
    """Numbers of a variant of the model."""

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


# Fields: each is given its default and its help text. NaN is in no range: every comparison with it
# is false.


def _field(default: Any, help: str, allowed: str = "", **metadata: Any) -> Any:
    """Return a field of a section; `allowed` describes the predicate `holds` of its metadata."""
    kind = WORDS[type(default)]
    metadata |= {"help": " ".join(help.split()), "allowed": f"must be {allowed or kind}"}
    return dataclasses.field(default=default, metadata=metadata)


def _choice(words: str, help: str) -> Any:
    """Return a field that is one of the words; the first is the default."""
    choices = tuple(words.split())
    return _field(choices[0], help, f"one of {', '.join(choices)}", choices=choices)


def _number(default: float, help: str, low: float, high: float, zero: str = "") -> Any:
    """Return a number or integer from `low` to `high`, or 0 where `zero` gives its meaning."""
    style = "g" if isinstance(default, float) else ""
    allowed = f"{WORDS[type(default)]} from {low:{style}} to {high:{style}}"
    allowed = f"0 ({zero}), or {allowed}" if zero else allowed
    return _field(default, help, allowed, holds=lambda x: low <= x <= high or (zero and x == 0))


def _count(default: int, help: str, low: int = 0) -> Any:
    return _number(default, help, low, LARGEST)


def _share(default: float, help: str) -> Any:
    return _field(default, help, "a number from 0 to below 1", holds=lambda x: 0 <= x < 1)


@dataclasses.dataclass
class Model:
    """The Vision Transformer (Dosovitskiy et al. 2021)."""

    variant: str = _field("B/16", 'A row of `SIZES`, "/", the patch size in pixels, as in "Ti/2".')
    width: int = _number(
        0, "Width of a token, divisible by the number of heads.", 1, 2**17, "the variant's"
    )
    depth: int = _number(0, "Number of blocks.", 1, 2**10, "the variant's")
    num_heads: int = _number(0, "Heads of attention.", 1, 2**10, "the variant's")
    mlp_dim: int = _number(0, "Width inside the MLP.", 1, 2**17, "the variant's")
    pooling: str = _choice(
        "token mean attention token+mean token+register",
        """Input of the head: "token" (a class token), "mean" (the mean over patches), "attention"
        (one learned query attends to the patches, and an MLP follows: Zhai et al. 2022), or two
        side by side: "token+mean" (DINOv2), "token+register" (the first register: distilled
        DeiT).""",
    )
    registers: int = _number(
        0, "Register tokens after the class token (Darcet et al. 2024).", 0, 2**10
    )
    position: str = _choice(
        "learned sincos", 'Position embedding: "learned" or "sincos" (fixed, two-dimensional).'
    )
    dropout: float = _share(
        0.0, "Dropout rate after the embedding, the attention and each MLP layer."
    )
    drop_path: float = _share(
        0.0,
        """Stochastic depth (Huang et al. 2016): probability with which the last block leaves out
        what attention or MLP add to an example. It rises linearly from 0 in the first block.""",
    )
    layer_scale: float = _number(
        0.0,
        """Initial value of a learned factor for each channel of what attention and MLP add
        (LayerScale, Touvron et al. 2021); 0 disables it.""",
        *(0, 10),
    )
    activation: str = _choice(
        "gelu_tanh gelu quick_gelu swiglu",
        """Activation of the MLP: "gelu_tanh" (GELU, approximated), "gelu" (exact), "quick_gelu"
        (x times the sigmoid of 1.702 x), or "swiglu" (SiLU of one half of the hidden units times
        the other half).""",
    )
    epsilon: float = _number(1e-6, "Added to the variance by layer norms.", 1e-12, 0.1)
    embed_norm: bool = _field(False, "A layer norm before the first block (CLIP).")
    final_norm: str = _choice(
        "before after none",
        'Place of the last layer norm: "before" pooling, "after" it, or "none".',
    )
    dtype: str = _choice(
        "float32 bfloat16",
        """Type of the arithmetic. Parameters, the sums of normalisation and attention, and the
        logits are float32 in either case.""",
    )
    mlp_init: str = _choice(
        "lecun_normal xavier_uniform",
        """Initial values of the MLP's kernels: "lecun_normal", or "xavier_uniform" with biases
        from N(0, 1e-6), as in scenic, big_vision and vision_transformer.""",
    )
    pre_logits: bool = _field(
        False,
        "A linear layer of the model's width and tanh before the head (Dosovitskiy et al. 2021).",
    )
    head_bias: float = _number(
        0.0,
        "Initial bias of each class; with a sigmoid loss a negative one makes classes unlikely.",
        *(-100, 100),
    )
    remat: bool = _field(
        False, "Recompute the activations of each block in the backward pass, to save memory."
    )

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
        """Side of a patch in pixels: the number after the variant's slash."""
        return parse_variant(self.variant)[1]


@dataclasses.dataclass
class Attention:
    """Attention of the blocks. The parameters are the same for all kinds."""

    kind: str = _choice("performer softmax", '"performer" (random features) or "softmax" (exact).')
    coupling: str = _field(
        performer.couplings.DEFAULT, "Name of a coupling, as of `performer.couplings.get`."
    )
    num_features: int = _number(
        128, "Number of random features m, frequencies of a head.", 1, 2**16
    )
    share_heads: bool = _field(
        False, "One draw of frequencies for all heads of a layer, instead of one for each head."
    )
    calibration: str = _field(
        "none",
        """"none", "shift", "shift+scale" or "full": running statistics, as in
        `performer.calibration`.""",
    )
    redraw_every: int = _count(
        0, "Steps between new draws of the frequencies in training; 0 keeps the first ones."
    )
    exact_layers: str = _field(
        "",
        'Blocks, counted from 0, as "0,3", whose attention is exact whatever `kind` is.',
        'rising numbers of blocks with commas between, as "0,3", or nothing',
        holds=lambda text: _rising([-1, *exact_layers(text)]),
    )
    implementation: str = _choice(
        "xla pallas",
        '"xla", or "pallas" for the kernels for TPU (compiled and counted, not yet run).',
    )
    exact_window: int = _count(
        0,
        """Tokens of a chunk: keys of a query's own chunk and of both neighbours are exact for it,
        and class token and registers are exact for all. Patches are then in the order of a Z-order
        curve, so that a chunk is nearly a square of the picture. 0: no window.""",
    )
    transferred: bool = _field(
        False, "Features learned beside a window by attention transfer: `vit.convert` sets it."
    )


@dataclasses.dataclass
class Data:
    """The data set and how it is read."""

    name: str = _field(
        "digits",
        """"digits" (1,797 images that come with scikit-learn) or a TFDS data set in `dir`; empty
        for a run without data, as `vit.pretrained` makes.""",
    )
    dir: str = _field(
        "", "Folder of TFDS data sets: the --out of `vit.prepare`, or TFDS's own data_dir."
    )
    train_split: str = _field(
        "train", 'Training split, a part as "train[:90%]", or several with "+" between.'
    )
    eval_split: str = _field("test", "Evaluation split, in the same words.")
    image_size: int = _number(8, "Side of the model's input in pixels.", 1, 2**14)
    eval_resize: int = _number(
        0,
        "Evaluation resizes the shorter side to this and takes the centre; 0: to image_size.",
        *(0, 2**16),
    )
    crop: str = _choice(
        "center inception",
        """Crop of training images: "center", as in evaluation, or "inception", a random part of
        the image (8% to 100% of its area, sides 3:4 to 4:3, Szegedy et al. 2015).""",
    )
    max_shift: int = _number(
        0, "Largest random shift of a training image in pixels; zeros move in.", 0, 2**14 - 1
    )
    flip: bool = _field(False, "Mirror training images left to right with probability 1/2.")
    randaugment_layers: int = _number(
        0, "Random operations on a training image (Cubuk et al. 2020); 0: none.", 0, 20
    )
    randaugment_magnitude: float = _number(
        10.0,
        """Strength of these operations. Magnitudes of AugReg, big_vision and timm (DeiT's m9) go
        to 10: take three times theirs.""",
        *(0, 30),
    )
    mixup: float = _number(
        0.0,
        """Alpha of mixup (Zhang et al. 2018): each batch is blended with itself in another order,
        by a share from Beta(alpha, alpha).""",
        *(1e-3, 1e3, "no mixup"),
    )
    cutmix: float = _number(
        0.0,
        """Alpha of CutMix (Yun et al. 2019): a rectangle of each image comes from another one, its
        share of the area from Beta(alpha, alpha). With mixup, too, each batch has one of the two,
        drawn with probability 1/2.""",
        *(1e-3, 1e3, "no CutMix"),
    )
    erase: float = _number(
        0.0,
        """Probability of random erasing (Zhong et al. 2020): a rectangle of 2% to a third of a
        training image becomes random pixels.""",
        *(0, 1),
    )
    batch_size: int = _count(128, "Images of a step, over all devices and hosts.", 1)
    num_workers: int = _number(
        0,
        """Processes of each host that read and augment; 0 reads in threads of the main process, -1
        takes one for each core but one, as far as /dev/shm has room for their batches.""",
        *(-1, 1024),
    )
    max_bad_records: int = _count(
        10, "Undecodable records that are left out and counted; more stop the run."
    )


@dataclasses.dataclass
class Optim:
    """AdamW; the rate rises linearly, stays, and falls as a half cosine to the end of the run."""

    loss: str = _choice(
        "softmax sigmoid",
        """"softmax": cross entropy of the classes. "sigmoid": the sum over the classes of the cross
        entropies of a sigmoid each (Beyer et al. 2020); probabilities need not sum to one.""",
    )
    learning_rate: float = _number(1e-3, "Peak learning rate.", 0, 10)
    final_learning_rate: float = _number(1e-5, "Learning rate at the end of the run.", 0, 10)
    warmup_steps: int = _count(100, "Steps of linear warm-up from 0.")
    constant_steps: int = _count(0, "Steps at the peak rate after the warm-up.")
    weight_decay: float = _number(
        1e-4,
        """Decoupled weight decay, times the rate, on matrices only: biases, norms, the class token
        and positions are exempt. DeiT and AugReg's paper count so; big_vision's `wd` is this times
        `lr`.""",
        *(0, 1e3),
    )
    b2: float = _share(
        0.999,
        """Decay of Adam's mean of squared gradients; 0.95 to 0.99 recovers sooner from large
        gradients.""",
    )
    clip_norm: float = _number(
        1.0, "Largest global norm of the gradients.", *(1e-6, 1e6, "gradients are not clipped")
    )
    skip_nonfinite: int = _count(
        0,
        """Steps in a row that may be skipped where loss or gradients are not finite; parameters
        and moments stay as they were. One more ends the run.""",
    )
    label_smoothing: float = _share(
        0.0, "Share of the label that goes to all classes alike (Szegedy et al. 2016)."
    )
    accumulate: int = _count(
        1, "Parts in which a batch goes through the model one after another, to save memory.", 1
    )
    ema: float = _share(
        0.0, "Decay of the running mean of the parameters, which evaluation then uses; 0: none."
    )
    layer_decay: float = _number(
        1.0,
        """Layer-wise decay for fine-tuning (Bao et al. 2022): rate and weight decay are multiplied
        by this once for each layer between a parameter and the head; 1 treats all layers alike.""",
        *(1e-3, 1),
    )


@dataclasses.dataclass
class Config:
    """One run."""

    model: Model = dataclasses.field(default_factory=Model)
    attention: Attention = dataclasses.field(default_factory=Attention)
    data: Data = dataclasses.field(default_factory=Data)
    optim: Optim = dataclasses.field(default_factory=Optim)
    seed: int = _count(
        0, "Seed of parameters, frequencies, order of the data, augmentations and dropout."
    )
    num_epochs: float = _field(
        10.0,
        "Passes over the training split; parts of an epoch, too.",
        "a number above 0 and at most 1e+06",
        holds=lambda epochs: 0 < epochs <= 1e6,
    )
    restarts: str = _field(
        "",
        """Epochs, as "10,30", at which the rate rises again by a warm-up of its own, stays, and
        falls until the next one or the end of the run (Loshchilov & Hutter 2017); `--extend` adds
        one.""",
        'rising numbers of epochs with commas between, as "10,30", or nothing',
        holds=lambda text: _rising([0.0, *restarts(text)]),
    )
    fsdp: int = _count(
        1,
        """Devices that share one copy of the parameters and the optimiser's moments, each holding
        a part; the batch is split over all devices in any case.""",
        1,
    )
    log_every: int = _count(10, "Steps between lines of metrics.jsonl.", 1)
    eval_every: int = _count(100, "Steps between evaluations.", 1)
    checkpoint_every: int = _count(
        100, "Steps between checkpoints; the last two are kept, and that of the best evaluation.", 1
    )
    keep_every: int = _count(0, "Steps between checkpoints that are kept for good; 0: none.")


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
TYPES: dict[str, Any] = {name: field.type for name, field in FIELDS.items()}
MEANINGS: dict[str, str] = {name: field.metadata["help"] for name, field in FIELDS.items()}
"""Help texts."""
CHOICES: dict[str, tuple[str, ...]] = {
    name: field.metadata["choices"] for name, field in FIELDS.items() if "choices" in field.metadata
}


def _rising(numbers: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def _calibration_exists(c: Config) -> bool:
    return bool(performer.calibration.parts(c.attention.calibration) or True)


def _coupling_fits(c: Config) -> bool:
    if c.attention.coupling == "softmax":
        raise ValueError("no coupling: did you mean config.attention.kind=softmax?")
    draw = performer.couplings.get(c.attention.coupling)
    m, d = c.attention.num_features, c.model.size.head_dim
    return bool(jax.eval_shape(lambda key: draw(key, m, d), jax.random.key(0)))


RULES = [
    (
        "model.variant model.width model.num_heads",
        lambda c: c.model.size.width % c.model.size.num_heads == 0,
        "the width must be divisible by the number of heads (0: the variant's)",
    ),
    (
        "model.variant model.width model.position",
        lambda c: c.model.position != "sincos" or c.model.size.width % 4 == 0,
        "fixed positions need a width divisible by 4: sine and cosine of two coordinates",
    ),
    (
        "model.pooling model.registers",
        lambda c: c.model.pooling != "token+register" or c.model.registers > 0,
        "the head reads a register: there must be one",
    ),
    (
        "model.pooling model.final_norm",
        lambda c: "+" not in c.model.pooling or c.model.final_norm != "after",
        "the norm of two tokens side by side must be before pooling",
    ),
    (
        "model.variant model.depth attention.exact_layers",
        lambda c: max(exact_layers(c.attention.exact_layers), default=0) < c.model.size.depth,
        "there are fewer blocks; they are counted from 0",
    ),
    (
        "attention.exact_window attention.implementation",
        lambda c: c.attention.exact_window == 0 or c.attention.implementation == "xla",
        "the kernels have no window: one of the two",
    ),
    (
        "model.variant data.image_size",
        lambda c: c.data.image_size % c.model.patch_size == 0,
        "the image size is not divisible by the patch size, which follows the slash",
    ),
    (
        "model.variant data.image_size",
        lambda c: (c.data.image_size // c.model.patch_size) ** 2 <= TOKENS,
        f"an image has at most {TOKENS} patches: take larger ones",
    ),
    (
        "data.eval_resize data.image_size",
        lambda c: not c.data.eval_resize or 1 <= c.data.eval_resize / c.data.image_size <= 4,
        "the first must be 0, or from the second to four times as much",
    ),
    (
        "data.max_shift data.image_size",
        lambda c: c.data.max_shift < c.data.image_size,
        "the first must be smaller than the second: the image would be shifted away",
    ),
    (
        "data.batch_size optim.accumulate",
        lambda c: c.data.batch_size % c.optim.accumulate == 0,
        "the batch size is not divisible by the number of parts",
    ),
    (
        "optim.final_learning_rate optim.learning_rate",
        lambda c: c.optim.final_learning_rate <= c.optim.learning_rate,
        "the rate falls to the first: it must be at most the second",
    ),
    (
        "optim.learning_rate optim.weight_decay",
        lambda c: c.optim.learning_rate * c.optim.weight_decay < 1,
        "their product, the share of a weight that a step takes away, must be below 1",
    ),
    (
        "restarts num_epochs",
        lambda c: max(restarts(c.restarts), default=0.0) < c.num_epochs,
        "the last restart must be before the end of the run",
    ),
    *(
        (
            f"{longer} {shorter}",
            lambda c, a=longer, b=shorter: getattr(c, a) % getattr(c, b) == 0,
            "the first must be a multiple of the second",
        )
        for longer, shorter in [
            ("eval_every", "log_every"),
            ("checkpoint_every", "log_every"),
            ("keep_every", "checkpoint_every"),
        ]
    ),
    ("attention.calibration", _calibration_exists, ""),
    ("attention.coupling attention.num_features", _coupling_fits, ""),
]
"""Fields that are each in their range, a condition on them, which may raise, and a message."""


def validate(config: Config) -> None:
    """Raise ValueError that names fields, values and what they may be, before any work starts."""
    check_types(config)
    flat = flatten(config)
    for field, choices in CHOICES.items():
        if flat[field] not in choices:
            raise ValueError(unknown(f"config.{field}", flat[field], choices))
    parse_variant(config.model.variant)
    for field, value in flat.items():
        holds = FIELDS[field].metadata.get("holds")
        if holds and not holds(value):
            raise ValueError(f"config.{field}={flat[field]!r}: {allowed(field)}")
    for fields, holds, message in RULES:
        given = ", ".join(f"config.{field}={flat[field]!r}" for field in fields.split())
        try:
            if holds(config):
                continue
        except ValueError as error:  # of a coupling or a calibration
            message = str(error)
        raise ValueError(f"{given}: {message}")


def check_types(config: Config) -> None:
    """Raise ValueError for a field that has another type than its declaration says."""
    for name, kind in SECTIONS.items():
        if type(section := getattr(config, name)) is not kind:
            raise ValueError(f"config.{name}={section!r}: must be a vit.config.{name.title()}")
    for field, value in flatten(config).items():
        kinds = (int, float) if TYPES[field] is float else TYPES[field]
        if not isinstance(value, kinds) or (isinstance(value, bool) and TYPES[field] is not bool):
            raise ValueError(f"config.{field}={value!r}: {allowed(field)}")


def allowed(field: str) -> str:
    """Return what a field may be, in words: "must be a number from 0 to 10"."""
    return FIELDS[field].metadata["allowed"]


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
    """Return the numbers of "10,30"; NaN for another text."""
    try:
        return tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        return (math.nan,)


def exact_layers(text: str) -> tuple[int, ...]:
    """Return the numbers of "0,3"; -1 for another text."""
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        return (-1,)


def flatten(config: Config) -> dict[str, Any]:
    """Return {"attention.coupling": "pm", ...}: every field with its value."""
    return {name: operator.attrgetter(name)(config) for name in FIELDS}


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return a copy in which the fields {"attention.coupling": "pm", ...} have other values."""
    new = copy.deepcopy(config)
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        setattr(getattr(new, section) if section else new, field, value)
    return new


def parse(name: str, text: str, like: Any) -> Any:
    """Return the value of a flag, in the type of `like`; ValueError when the text is none."""
    words = {"true": True, "false": False}
    try:
        return words[text.lower()] if isinstance(like, bool) else type(like)(text)
    except (KeyError, ValueError):
        raise ValueError(f"config.{name}={text}: {allowed(name)}") from None


def save(config: Config, path: Path) -> None:
    """Write the config as JSON, in one piece."""
    files.write(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def load(path: Path) -> Config:
    """Read what `save` wrote.

    Raises:
        ValueError: when the file is no config of this version; the message names the fields.
    """
    try:
        values = json.loads(bounded.content(path))
        sections = {name: kind(**values[name]) for name, kind in SECTIONS.items() if name in values}
        config = Config(**(values | sections))
        check_types(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error
    return config


def of_run(workdir: Path) -> Config:
    """Return the config of the run in that folder.

    Raises:
        ValueError: when the folder holds no run, or one of another version.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no run (no config.json); train one with vit.train")
    return load(path)


PLACEMENT = (
    "data.dir",
    "data.num_workers",
    "data.max_bad_records",
    "optim.skip_nonfinite",
    "fsdp",
    "checkpoint_every",
    "keep_every",
)
"""Fields that say where and how a run is computed, not what: a resumed run may change them."""


def differences(old: Config, new: Config) -> list[str]:
    """Return a line for every field that makes another run: "seed: 0 -> 1"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in PLACEMENT
    ]
