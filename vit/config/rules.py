"""Rules for a config: the range of each field, and conditions on several fields."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import performer
from performer.choices import unknown
from vit.config.fields import (
    BLOCKS,
    FIELDS,
    SECTIONS,
    TYPES,
    Block,
    Config,
    blocks,
    exact,
    flatten,
    parse_variant,
)

RULES: dict[str, Callable[[Config], bool]] = {
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
    "config.attention.exact_window must be positive if config.attention.num_features is 0": (
        lambda c: all(block.num_features or block.exact_window for block in blocks(c))
    ),
    "config.attention.exact_window must be 0 with config.attention.implementation": lambda c: (
        c.attention.implementation != "pallas" or not any(block.exact_window for block in blocks(c))
    ),
    "config.data.image_size must be divisible by the patch of config.model.variant": lambda c: (
        c.data.image_size % c.model.patch_size == 0
    ),
    "config.seq must divide the number of tokens, with class token and registers": lambda c: (
        ((c.data.image_size // c.model.patch_size) ** 2 + c.model.num_prefix) % c.seq == 0
    ),
    "config.seq must be 1 with config.attention.exact_window, config.attention.exact_keys and"
    " config.attention.exact_rows": lambda c: (
        c.seq == 1 or not any(any(exact(c, block)) for block in blocks(c))
    ),
    "config.data.eval_resize must be 0, or one to four times config.data.image_size": lambda c: (
        not c.data.eval_resize or 1 <= c.data.eval_resize / c.data.image_size <= 4
    ),
    "config.data.max_shift must be smaller than config.data.image_size": lambda c: (
        c.data.max_shift < c.data.image_size
    ),
    "config.data.batch_size must be divisible by config.optim.accumulate": lambda c: (
        c.data.batch_size % c.optim.accumulate == 0
    ),
    "config.optim.final_learning_rate must be at most config.optim.learning_rate": lambda c: (
        c.optim.final_learning_rate <= c.optim.learning_rate
    ),
    "config.optim.learning_rate times config.optim.weight_decay must be below 1": lambda c: (
        c.optim.learning_rate * c.optim.weight_decay < 1
    ),
    "config.eval_every must be a multiple of config.log_every": lambda c: (
        c.eval_every % c.log_every == 0
    ),
    "config.checkpoint_every must be a multiple of config.log_every": lambda c: (
        c.checkpoint_every % c.log_every == 0
    ),
    "config.keep_every must be a multiple of config.checkpoint_every": lambda c: (
        c.keep_every % c.checkpoint_every == 0
    ),
}
"""Conditions on several fields, by message; each name in a message is followed by its value."""


def validate(config: Config) -> None:
    """Raise ValueError that names fields, values and what is allowed, before any work starts."""
    check_fields(config)
    parse_variant(config.model.variant)
    flat, attention = flatten(config), config.attention
    for message, holds in RULES.items():
        if not holds(config):
            raise ValueError(
                re.sub(r"config\.([\w.]+)", lambda x: f"{x[0]} ({flat[x[1]]!r})", message)
            )
    try:
        for block in dict.fromkeys(blocks(config)):
            parts = performer.calibration.parts(block.calibration)
            feature_map = performer.features.get(attention.feature_map)
            if parts and not feature_map.exponential:
                raise ValueError(
                    "a calibration requires the feature map positive; for other maps give"
                    " --config.attention.calibration=none"
                )
            if any(exact(config, block)) and not feature_map.estimates_softmax:
                raise ValueError("exact pairs require a feature map that estimates softmax")
            draw = partial(performer.couplings.draw, coupling=attention.coupling)
            sizes = dict(num_features=block.num_features, head_dim=config.model.size.head_dim)
            if block.num_features:
                jax.eval_shape(partial(draw, **sizes), jax.random.key(0))
    except ValueError as error:
        fields = ("calibration", "coupling", "feature_map", "num_features")
        fields = [x for x in fields if str(error).startswith(f"unknown {x} ")] or fields
        names = [f"attention.{name}" for name in fields]
        names += [BLOCKS] * bool(attention.blocks)
        given = ", ".join(f"config.{name}={flat[name]!r}" for name in names)
        raise ValueError(f"{given}: {error}") from error


def check_fields(config: Config) -> None:
    """Raise ValueError for a field of another type than declared, or out of its range."""
    for name, kind in SECTIONS.items():
        if type(section := getattr(config, name)) is not kind:
            raise ValueError(f"config.{name}={section!r}: must be a vit.config.{name.title()}")
    values, given = flatten(config), config.attention.blocks
    if type(given) is not tuple or any(type(block) is not Block for block in given):
        raise ValueError(f"config.{BLOCKS}={given!r}: {allowed(BLOCKS)}")
    for field in TYPES:
        _check_value(f"config.{field}", values[field], field)
    for number, block in enumerate(given):
        for name, value in block._asdict().items():
            if f"attention.{name}" in TYPES:
                _check_value(f"config.{BLOCKS}[{number}].{name}", value, f"attention.{name}")


def _check_value(name: str, value: Any, field: str) -> None:
    """Raise ValueError, with the name, for a value that the field does not admit."""
    kinds = (int, float) if TYPES[field] is float else TYPES[field]
    is_other_bool = isinstance(value, bool) and TYPES[field] is not bool
    metadata = FIELDS[field].metadata
    holds = metadata.get("holds", lambda _: True)
    if not isinstance(value, kinds) or is_other_bool or not holds(value):
        raise ValueError(f"{name}={value!r}: {allowed(field)}")
    if value not in metadata.get("choices", [value]):
        raise ValueError(unknown(name, str(value), metadata["choices"]))


def allowed(field: str) -> str:
    """Return the range of a field in words: "must be a number from 0 to 10"."""
    return FIELDS[field].metadata["allowed"]
