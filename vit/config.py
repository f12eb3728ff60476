"""The configuration of a run: typed dataclasses, every number visible.

A config file (`experiments/configs/*.py`) defines `get_config() -> Config`; a flag overrides one
field, as in `--config.attention.coupling=pm`. `validate` checks a config before any work starts.
"""

import dataclasses
import json
import sys
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app

import performer
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
    pooling: str = "token"
    """What the head reads: "token" (a class token) or "mean" (the mean over patches)."""
    position: str = "learned"
    """Position embedding: "learned" or "sincos" (fixed, two-dimensional)."""
    dropout: float = 0.0
    """Dropout rate after the embedding, the attention and each MLP layer."""
    dtype: str = "float32"
    """Of the arithmetic: "float32" or "bfloat16". Parameters, the sums of normalisation and
    attention, and the logits are float32 in either case."""
    remat: bool = False
    """Compute the inside of each block again in the backward pass, instead of keeping it."""


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


@dataclasses.dataclass
class Data:
    """The data set and how it is read."""

    name: str = "digits"
    """"digits" (1,797 images that come with scikit-learn) or a TFDS data set in `dir`."""
    dir: str = ""
    """Where TFDS data sets lie: the --out of `vit.prepare`, or TFDS's own data_dir."""
    train_split: str = "train"
    eval_split: str = "test"
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
    """Their strength, 0 to 30."""
    mixup: float = 0.0
    """Alpha of mixup (Zhang et al. 2018): each batch is blended with itself in another order, by a
    share from Beta(alpha, alpha); 0: not."""
    batch_size: int = 128
    """Images of a step, over all devices and hosts."""
    num_workers: int = 0
    """Processes of each host that read and augment; 0 reads in threads of the main process."""
    max_bad_records: int = 10
    """Records that cannot be decoded are left out, and counted; more than this stop the run."""


@dataclasses.dataclass
class Optim:
    """AdamW; the rate rises linearly, stays, and falls as a half cosine to the end of the run."""

    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 100
    constant_steps: int = 0
    weight_decay: float = 1e-4
    """Decoupled, on matrices only: biases, norms, the class token and positions are exempt."""
    clip_norm: float = 1.0
    """Gradients are clipped to this global norm; 0: not."""
    label_smoothing: float = 0.0
    accumulate: int = 1
    """Parts in which a batch goes through the model one after another, to save memory."""
    ema: float = 0.0
    """Decay of the running mean of the parameters, which evaluation then uses; 0: none."""


@dataclasses.dataclass
class Config:
    """One run."""

    model: Model = dataclasses.field(default_factory=Model)
    attention: Attention = dataclasses.field(default_factory=Attention)
    data: Data = dataclasses.field(default_factory=Data)
    optim: Optim = dataclasses.field(default_factory=Optim)
    seed: int = 0
    num_epochs: float = 10.0
    fsdp: int = 1
    """Devices that share one copy of the parameters and the optimiser's moments, each holding a
    part; the batch is split over all devices in any case."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 100
    """Steps between evaluations."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last two are kept."""


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flag parser, where a mistyped `--config.` flag becomes a usage error with choices."""
    try:
        return app.parse_flags_with_usage(list(argv))
    except KeyError:
        names = [f"--config.{name}" for name in flatten(Config())]
        for argument in argv[1:]:
            name = argument.split("=")[0]
            if name.startswith("--config.") and name not in names:
                sys.exit(unknown("flag", name, names))
        raise


def from_flag(flag: Any) -> Config:
    """The value of a `config_flags.DEFINE_config_file` flag, a `Config`; exits where it is none."""
    try:
        _ = flag.value.seed  # a file that could not be read raises only now
    except (OSError, AttributeError) as error:
        sys.exit(f"--config: {error}")
    return flag.value


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


def validate(config: Config) -> None:
    """Raises ValueError naming the field, its value and the choices, before any work starts."""
    _choice("config.model.pooling", config.model.pooling, ("token", "mean"))
    _choice("config.model.position", config.model.position, ("learned", "sincos"))
    _choice("config.model.dtype", config.model.dtype, ("float32", "bfloat16"))
    _choice("config.data.crop", config.data.crop, ("center", "inception"))
    _choice("config.attention.kind", config.attention.kind, ("performer", "softmax"))
    size, patch_size = parse_variant(config.model.variant)
    for name, value in flatten(config).items():
        if isinstance(value, int | float) and not value >= 0:
            raise ValueError(f"config.{name} must not be negative, got {value}")
    for name in (
        "data.batch_size",
        "data.image_size",
        "optim.accumulate",
        "fsdp",
        "log_every",
        "eval_every",
        "checkpoint_every",
    ):
        if flatten(config)[name] < 1:
            raise ValueError(f"config.{name} must be at least 1, got {flatten(config)[name]}")
    for name in ("eval_every", "checkpoint_every"):
        if flatten(config)[name] % config.log_every:
            raise ValueError(
                f"config.{name}={flatten(config)[name]} is not a multiple of"
                f" config.log_every={config.log_every}"
            )
    for name in ("model.dropout", "optim.label_smoothing", "optim.ema"):
        if flatten(config)[name] >= 1:
            raise ValueError(f"config.{name} must be below 1, got {flatten(config)[name]}")
    data = config.data
    if data.randaugment_magnitude > 30:
        raise ValueError(
            "config.data.randaugment_magnitude must be at most 30, got"
            f" {data.randaugment_magnitude}"
        )
    if data.eval_resize and data.eval_resize < data.image_size:
        raise ValueError(
            f"config.data.eval_resize={data.eval_resize} is smaller than"
            f" config.data.image_size={data.image_size}"
        )
    if data.batch_size % config.optim.accumulate:
        raise ValueError(
            f"config.data.batch_size={data.batch_size} is not divisible by"
            f" config.optim.accumulate={config.optim.accumulate}"
        )
    if config.data.image_size % patch_size:
        raise ValueError(
            f"config.data.image_size={config.data.image_size} is not divisible by the patch size"
            f" {patch_size} of config.model.variant={config.model.variant!r}"
        )
    attention = config.attention
    try:
        performer.calibration.parts(attention.calibration)
        coupling = performer.couplings.get(attention.coupling)
        jax.eval_shape(
            lambda key: coupling(key, attention.num_features, size.head_dim), jax.random.key(0)
        )
    except ValueError as error:
        raise ValueError(f"config.attention: {error}") from None


def flatten(config: Config) -> dict[str, Any]:
    """{"attention.coupling": "pm", ...}: every field with its value."""
    flat = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": leaf for field, leaf in value.items()}
        else:
            flat[name] = value
    return flat


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy in which the fields {"attention.coupling": "pm", ...} have other values."""
    new = dataclasses.replace(config)
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        if section:
            part = dataclasses.replace(getattr(new, section), **{field: value})
            new = dataclasses.replace(new, **{section: part})
        else:
            new = dataclasses.replace(new, **{field: value})
    return new


def parse(name: str, text: str, like: Any) -> Any:
    """A value in the type of `like`, from a flag.

    Raises:
        ValueError: when the text is none.
    """
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"config.{name}={text}: give true or false")
        return text.lower() == "true"
    try:
        return type(like)(text)
    except ValueError:
        raise ValueError(f"config.{name}={text} is no {type(like).__name__}") from None


def save(config: Config, path: Path) -> None:
    """Writes the config as JSON, in one piece."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    temporary.replace(path)


def load(path: Path) -> Config:
    """Reads what `save` wrote.

    Raises:
        ValueError: when the file is no config of this version; the message names the fields.
    """
    try:
        return from_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error


def from_dict(values: dict[str, Any]) -> Config:
    """What `dataclasses.asdict` made of a config."""
    sections = typing.get_type_hints(Config)
    return Config(
        **{
            name: sections[name](**value) if isinstance(value, dict) else value
            for name, value in values.items()
        }
    )


def of_run(workdir: Path) -> Config:
    """The config of the run in that folder.

    Raises:
        ValueError: when the folder holds no run, or one of another version.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no run (no config.json); train one with vit.train")
    return load(path)


PLACEMENT = ("data.dir", "data.num_workers", "data.max_bad_records", "fsdp", "checkpoint_every")
"""Fields that say where and how a run is computed, not what: a resumed run may change them."""


def differences(old: Config, new: Config) -> list[str]:
    """One line for every field that makes another run: "attention.coupling: 'orf' -> 'pm'"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in PLACEMENT
    ]


def _choice(field: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(unknown(field, value, choices))
