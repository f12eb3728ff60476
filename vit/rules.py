"""What must hold of the fields of a configuration, each by itself and several together.

A rule is a predicate and the words for it, so that one table serves checks, messages and tests.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

import performer
from performer.choices import unknown
from vit.fields import TYPES, Config, Model, Size, exact_layers, flatten, parse_variant, restarts

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}

LARGEST = 2**31 - 1
"""Of an integer: seeds, steps and labels are int32 on the devices."""

TOKENS = 2**20
"""The most patches of an image: more than any attention, of however few features, has room for."""

CHOICES = {
    "model.pooling": ("token", "mean", "attention", "token+mean", "token+register"),
    "model.activation": ("gelu_tanh", "gelu", "quick_gelu", "swiglu"),
    "model.final_norm": ("before", "after", "none"),
    "model.position": ("learned", "sincos"),
    "model.dtype": ("float32", "bfloat16"),
    "model.mlp_init": ("lecun_normal", "xavier_uniform"),
    "optim.loss": ("softmax", "sigmoid"),
    "attention.kind": ("performer", "softmax"),
    "attention.implementation": ("xla", "pallas"),
    "data.crop": ("center", "inception"),
}


class Rule(NamedTuple):
    """What must hold of the values of fields, and how that is said."""

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    message: str


def _size(variant: str, width: int, num_heads: int = 0) -> Size:
    return Model(variant, width=width, num_heads=num_heads).size


def _rising(numbers: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


# NaN fails them all: every comparison with it is false.
RANGES = (
    Rule(
        (
            "model.dropout",
            "model.drop_path",
            "optim.label_smoothing",
            "optim.ema",
            "optim.b2",
        ),
        lambda share: 0 <= share < 1,
        "must be a number from 0 to below 1",
    ),
    Rule(
        ("model.registers",),
        lambda count: 0 <= count <= 2**10,
        f"must be an integer from 0 to {2**10}",
    ),
    Rule(
        ("model.layer_scale",),
        lambda factor: 0 <= factor <= 10,
        "must be a number from 0 to 10",
    ),
    Rule(
        ("model.epsilon",),
        lambda epsilon: 1e-12 <= epsilon <= 0.1,
        "must be a number from 1e-12 to 0.1",
    ),
    Rule(
        ("model.head_bias",),
        lambda bias: -100 <= bias <= 100,
        "must be a number from -100 to 100",
    ),
    Rule(
        ("model.width", "model.mlp_dim"),
        lambda count: 0 <= count <= 2**17,
        f"must be an integer from 1 to {2**17}, or 0 (the variant's)",
    ),
    Rule(
        ("model.depth", "model.num_heads"),
        lambda count: 0 <= count <= 2**10,
        f"must be an integer from 1 to {2**10}, or 0 (the variant's)",
    ),
    Rule(
        ("attention.num_features",),
        lambda m: 1 <= m <= 2**16,
        f"must be an integer from 1 to {2**16}",
    ),
    Rule(
        (
            "data.batch_size",
            "optim.accumulate",
            "fsdp",
            "log_every",
            "eval_every",
            "checkpoint_every",
        ),
        lambda count: 1 <= count <= LARGEST,
        f"must be an integer from 1 to {LARGEST}",
    ),
    Rule(
        (
            "attention.redraw_every",
            "attention.exact_window",
            "data.max_bad_records",
            "optim.warmup_steps",
            "optim.constant_steps",
            "optim.skip_nonfinite",
            "keep_every",
            "seed",
        ),
        lambda count: 0 <= count <= LARGEST,
        f"must be an integer from 0 to {LARGEST}",
    ),
    Rule(
        ("attention.exact_layers",),
        lambda text: _rising([-1, *exact_layers(text)]),
        'must be rising numbers of blocks with commas between, as "0,3", or nothing',
    ),
    Rule(
        ("data.image_size",),
        lambda pixels: 1 <= pixels <= 2**14,
        f"must be an integer from 1 to {2**14}",
    ),
    Rule(
        ("data.eval_resize",),
        lambda pixels: 0 <= pixels <= 2**16,
        f"must be an integer from 0 to {2**16}",
    ),
    Rule(
        ("data.max_shift",),
        lambda pixels: 0 <= pixels < 2**14,
        "must be an integer from 0 to below config.data.image_size",
    ),
    Rule(
        ("data.randaugment_layers",),
        lambda layers: 0 <= layers <= 20,
        "must be an integer from 0 to 20",
    ),
    Rule(
        ("data.randaugment_magnitude",),
        lambda magnitude: 0 <= magnitude <= 30,
        "must be a number from 0 to 30",
    ),
    Rule(
        ("data.mixup", "data.cutmix"),
        lambda alpha: alpha == 0 or 1e-3 <= alpha <= 1e3,
        "must be 0, or a number from 0.001 to 1000",
    ),
    Rule(
        ("data.erase",),
        lambda share: 0 <= share <= 1,
        "must be a number from 0 to 1",
    ),
    Rule(
        ("data.num_workers",),
        lambda workers: -1 <= workers <= 1024,
        "must be an integer from -1 to 1024",
    ),
    Rule(
        ("optim.learning_rate", "optim.final_learning_rate"),
        lambda rate: 0 <= rate <= 10,
        "must be a number from 0 to 10",
    ),
    Rule(
        ("optim.weight_decay",),
        lambda decay: 0 <= decay <= 1e3,
        "must be a number from 0 to 1000",
    ),
    Rule(
        ("optim.layer_decay",),
        lambda decay: 1e-3 <= decay <= 1,
        "must be a number from 0.001 to 1",
    ),
    Rule(
        ("optim.clip_norm",),
        lambda norm: norm == 0 or 1e-6 <= norm <= 1e6,
        "must be 0 (gradients are not clipped), or a number from 1e-06 to 1e+06",
    ),
    Rule(
        ("num_epochs",),
        lambda epochs: 0 < epochs <= 1e6,
        "must be a number above 0 and at most 1e+06",
    ),
    Rule(
        ("restarts",),
        lambda text: _rising([0.0, *restarts(text)]),
        'must be rising numbers of epochs with commas between, as "10,30", or nothing',
    ),
)
"""Each field by itself."""

RELATIONS = (
    Rule(
        ("model.variant", "model.width", "model.num_heads"),
        lambda *fields: _size(*fields).width % _size(*fields).num_heads == 0,
        "the width must be divisible by the number of heads (0: the variant's)",
    ),
    Rule(
        ("model.variant", "model.width", "model.position"),
        lambda variant, width, position: (
            position != "sincos" or _size(variant, width).width % 4 == 0
        ),
        "fixed positions need a width divisible by 4: sine and cosine of two coordinates",
    ),
    Rule(
        ("model.pooling", "model.registers"),
        lambda pooling, registers: pooling != "token+register" or registers > 0,
        "the head reads a register: there must be one",
    ),
    Rule(
        ("model.pooling", "model.final_norm"),
        lambda pooling, norm: "+" not in pooling or norm != "after",
        "the norm of two tokens side by side must be before pooling",
    ),
    Rule(
        ("model.variant", "model.depth", "attention.exact_layers"),
        lambda variant, depth, text: (
            max(exact_layers(text), default=0) < (depth or parse_variant(variant)[0].depth)
        ),
        "there are fewer blocks; they are counted from 0",
    ),
    Rule(
        ("attention.exact_window", "attention.implementation"),
        lambda window, implementation: window == 0 or implementation == "xla",
        "the kernels have no window: one of the two",
    ),
    Rule(
        ("model.variant", "data.image_size"),
        lambda variant, pixels: pixels % parse_variant(variant)[1] == 0,
        "the image size is not divisible by the patch size, which follows the slash",
    ),
    Rule(
        ("model.variant", "data.image_size"),
        lambda variant, pixels: (pixels // parse_variant(variant)[1]) ** 2 <= TOKENS,
        f"an image has at most {TOKENS} patches: take larger ones",
    ),
    Rule(
        ("data.eval_resize", "data.image_size"),
        lambda resize, pixels: resize == 0 or pixels <= resize <= 4 * pixels,
        "the first must be 0, or from the second to four times as much",
    ),
    Rule(
        ("data.max_shift", "data.image_size"),
        lambda shift, pixels: shift < pixels,
        "the first must be smaller than the second: the image would be shifted away",
    ),
    Rule(
        ("data.batch_size", "optim.accumulate"),
        lambda size, parts: size % parts == 0,
        "the batch size is not divisible by the number of parts",
    ),
    Rule(
        ("optim.final_learning_rate", "optim.learning_rate"),
        lambda final, peak: final <= peak,
        "the rate falls to the first: it must be at most the second",
    ),
    Rule(
        ("optim.learning_rate", "optim.weight_decay"),
        lambda rate, decay: rate * decay < 1,
        "their product, the share of a weight that a step takes away, must be below 1",
    ),
    Rule(
        ("restarts", "num_epochs"),
        lambda text, epochs: max(restarts(text), default=0.0) < epochs,
        "the last restart must be before the end of the run",
    ),
    Rule(
        ("eval_every", "log_every"),
        lambda every, log: every % log == 0,
        "the first is not a multiple of the second",
    ),
    Rule(
        ("checkpoint_every", "log_every"),
        lambda every, log: every % log == 0,
        "the first is not a multiple of the second",
    ),
    Rule(
        ("keep_every", "checkpoint_every"),
        lambda kept, every: kept % every == 0,
        "the first is not a multiple of the second",
    ),
)
"""Fields together; each is in its range."""


def validate(config: Config) -> None:
    """Raises ValueError naming fields, values and what they may be, before any work starts."""
    check_types(config)
    flat = flatten(config)
    for field, choices in CHOICES.items():
        if flat[field] not in choices:
            raise ValueError(unknown(f"config.{field}", flat[field], choices))
    parse_variant(config.model.variant)
    each = (rule._replace(fields=(field,)) for rule in RANGES for field in rule.fields)
    for fields, holds, message in (*each, *RELATIONS):
        if not holds(*(flat[field] for field in fields)):
            given = ", ".join(f"config.{field}={flat[field]!r}" for field in fields)
            raise ValueError(f"{given}: {message}")
    attention = config.attention
    given = f"config.attention.calibration={attention.calibration!r}"
    try:
        performer.calibration.parts(attention.calibration)
        given = f"config.attention.coupling={attention.coupling!r}"
        if attention.coupling == "softmax":
            raise ValueError("no coupling: did you mean config.attention.kind=softmax?")
        coupling = performer.couplings.get(attention.coupling)
        given += f", config.attention.num_features={attention.num_features}"
        jax.eval_shape(
            lambda key: coupling(key, attention.num_features, config.model.size.head_dim),
            jax.random.key(0),
        )
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None


def check_types(config: Config) -> None:
    """Raises ValueError for a field that has another type than its declaration says."""
    for name, kind in typing.get_type_hints(Config).items():
        section = getattr(config, name)
        if dataclasses.is_dataclass(kind) and type(section) is not kind:
            raise ValueError(f"config.{name}={section!r}: must be a vit.config.{name.title()}")
    for field, value in flatten(config).items():
        kinds = (int, float) if TYPES[field] is float else TYPES[field]
        if not isinstance(value, kinds) or (isinstance(value, bool) and TYPES[field] is not bool):
            raise ValueError(f"config.{field}={value!r}: {allowed(field)}")


def allowed(field: str) -> str:
    """What a field may be, in words."""
    if field in CHOICES:
        return f"must be one of {', '.join(CHOICES[field])}"
    messages = [rule.message for rule in RANGES if field in rule.fields]
    return messages[0] if messages else "must be " + WORDS[TYPES[field]]
