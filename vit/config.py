"""The configuration of a run: its fields, what must hold of them, and the file that keeps them.

A config file (`experiments/configs/*.py`) defines `get_config() -> Config`; a flag overrides one
field, as in `--config.attention.coupling=pm`. `validate` checks a config before any work starts.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from vit import bounded, files
from vit.fields import SIZES as SIZES
from vit.fields import TYPES as TYPES
from vit.fields import Attention as Attention
from vit.fields import Config as Config
from vit.fields import Data as Data
from vit.fields import Model as Model
from vit.fields import Optim as Optim
from vit.fields import Size as Size
from vit.fields import cycles as cycles
from vit.fields import exact_layers as exact_layers
from vit.fields import flatten as flatten
from vit.fields import meanings as meanings
from vit.fields import restarts as restarts
from vit.rules import CHOICES as CHOICES
from vit.rules import LARGEST as LARGEST
from vit.rules import WORDS as WORDS
from vit.rules import allowed as allowed
from vit.rules import check_types
from vit.rules import validate as validate


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
            raise ValueError(f"config.{name}={text}: {allowed(name)}")
        return text.lower() == "true"
    try:
        return type(like)(text)
    except ValueError:
        raise ValueError(f"config.{name}={text}: {allowed(name)}") from None


def save(config: Config, path: Path) -> None:
    """Writes the config as JSON, in one piece."""
    files.write(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def load(path: Path) -> Config:
    """Reads what `save` wrote.

    Raises:
        ValueError: when the file is no config of this version; the message names the fields.
    """
    try:
        return from_dict(json.loads(bounded.content(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error


def from_dict(values: dict[str, Any]) -> Config:
    """What `dataclasses.asdict` made of a config.

    Raises:
        ValueError, ...: for a field that there is not, or a value of another type.
    """
    sections = typing.get_type_hints(Config)
    config = Config(
        **{
            name: sections[name](**value) if dataclasses.is_dataclass(sections[name]) else value
            for name, value in values.items()
        }
    )
    check_types(config)
    return config


def of_run(workdir: Path) -> Config:
    """The config of the run in that folder.

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
    """One line for every field that makes another run: "attention.coupling: 'orf' -> 'pm'"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in PLACEMENT
    ]
