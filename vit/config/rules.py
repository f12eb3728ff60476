"""Rules for a config: the range of each field, and conditions on several fields."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from performer.choices import unknown
from vit.config.base import TrainConfig, fields, flag_types, flatten, sections

TRAINER_RULES: dict[str, Callable[[Any], bool]] = {
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
"""Conditions on several fields of the trainer, by message."""


def validate(config: TrainConfig) -> None:
    """Raise ValueError that names fields, values and what is allowed, before any work starts."""
    check_fields(config)
    hold(config, TRAINER_RULES)
    config.check()


def hold(config: TrainConfig, rules: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raise ValueError for the first rule that does not hold.

    Args:
        config: the config.
        rules: conditions by message; each name of a field in a message is followed by its value.
    """
    flat = flatten(config)
    for message, holds in rules.items():
        if not holds(config):
            raise ValueError(
                re.sub(r"config\.([\w.]+)", lambda x: f"{x[0]} ({flat[x[1]]!r})", message)
            )


def check_fields(config: TrainConfig) -> None:
    """Raise ValueError for a field of another type than declared, or out of its range."""
    kind = type(config)
    for name, part in sections(kind).items():
        if type(section := getattr(config, name)) is not part:
            raise ValueError(f"config.{name}={section!r}: must be a vit.config.{part.__name__}")
    for name, value in flatten(config).items():
        if name in flag_types(kind):
            _check_value(f"config.{name}", value, kind, name)
        else:
            _check_records(name, value, kind)


def _check_records(name: str, value: Any, kind: type[TrainConfig]) -> None:
    """Raise ValueError for a tuple of other records, or with values that the section refuses."""
    record = fields(kind)[name].metadata["records"]
    if type(value) is not tuple or any(type(each) is not record for each in value):
        raise ValueError(f"config.{name}={value!r}: {allowed(name, kind)}")
    for number, each in enumerate(value):
        for own, x in each._asdict().items():
            if (field := f"{name.partition('.')[0]}.{own}") in flag_types(kind):
                _check_value(f"config.{name}[{number}].{own}", x, kind, field)


def _check_value(name: str, value: Any, kind: type[TrainConfig], field: str) -> None:
    """Raise ValueError, with the name, for a value that the field does not admit."""
    declared = flag_types(kind)[field]
    kinds = (int, float) if declared is float else declared
    is_other_bool = isinstance(value, bool) and declared is not bool
    metadata = fields(kind)[field].metadata
    holds = metadata.get("holds", lambda _: True)
    if not isinstance(value, kinds) or is_other_bool or not holds(value):
        raise ValueError(f"{name}={value!r}: {allowed(field, kind)}")
    if value not in metadata.get("choices", [value]):
        raise ValueError(unknown(name, str(value), metadata["choices"]))


def allowed(field: str, kind: type[TrainConfig]) -> str:
    """Return the range of a field in words: "must be a number from 0 to 10"."""
    return fields(kind)[field].metadata["allowed"]
