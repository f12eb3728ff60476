"""Configs in files: bundled ones, those of runs, and their differences."""

import dataclasses
import inspect
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from performer.choices import unknown
from vit.config.base import TrainConfig, fields, flatten, placement, sections
from vit.config.cli import command
from vit.config.images import SIZES
from vit.config.rules import check_fields
from vit.config.tasks import definition
from vit.storage import files

BUNDLED = Path(__file__).parents[1] / "configs"


def bundled_path(name: str) -> Path:
    """Return the file of a bundled config, or the path of an existing file as it is.

    Raises:
        ValueError: for neither; the message lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    paths = {path.stem: path for path in sorted(BUNDLED.glob("[a-z]*.py"))}
    if name not in paths:
        raise ValueError(f"{unknown('config', name, paths)}; and no such file exists")
    return paths[name]


def bundled(name: str) -> Any:
    """Return the config of a file, of any task.

    In "my_images:data/photos" the argument of `get_config` follows the colon.

    Raises:
        ValueError: as `bundled_path`, as the file, or if it returns no config, takes no such
            argument, ends the program or changes the sizes of the variants.
    """
    stem, *argument = name.split(":", 1)
    path, sizes = bundled_path(stem), dict(SIZES)
    try:
        defined = runpy.run_path(str(path))
        if "get_config" not in defined:
            raise ValueError(f"{stem} defines no get_config(), which returns a vit.config.Config")
        _check_argument(defined["get_config"], stem, argument)
        config = defined["get_config"](*argument)
    except SystemExit as error:
        raise ValueError(f"{stem} ends the program: sys.exit({error.code!r})") from error
    if sizes != SIZES:
        SIZES.clear()
        SIZES.update(sizes)
        raise ValueError(
            f"{stem} changes vit.config.SIZES, so its variants would mean other models elsewhere:"
            " set config.model.width, depth, num_heads and mlp_dim instead"
        )
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise ValueError(f"get_config() must return a vit.config.Config, it returned a {kind}")
    return config


def _check_argument(get_config: Callable[..., Any], stem: str, argument: list[str]) -> None:
    """Raise ValueError if the function does not take what follows the colon."""
    try:
        inspect.signature(get_config).bind(*argument)
    except TypeError as error:
        given = f"{stem}:{argument[0]} gives get_config() {argument[0]!r}" if argument else stem
        fix = f"give --config={stem}" if argument else f"give --config={stem}:ARGUMENT"
        raise ValueError(f"{given}: {error}; {fix}") from error


def save(config: TrainConfig, path: Path) -> None:
    """Write the name of the task and the config as JSON, atomically."""
    values: dict[str, Any] = {"task": config.task}
    values |= {name: dataclasses.asdict(getattr(config, name)) for name in sections(type(config))}
    for name, value in flatten(config).items():
        section, _, own = name.rpartition(".")
        if "records" in fields(type(config))[name].metadata:
            values[section][own] = [record._asdict() for record in value]
        elif not section:
            values[own] = value
    files.write(path, json.dumps(values, indent=2) + "\n")


def load(path: Path) -> Any:
    """Read a config that `save` wrote.

    Raises:
        ValueError: if the task is not defined, or the file is no config of this version; the
            message names the field.
    """
    try:
        values = files.parse_json(path.read_bytes(), object_pairs_hook=_unique)
        name = str(values.pop("task"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error
    try:
        kind = definition(name).config
    except ValueError as error:
        raise ValueError(f"{path.parent} holds a run of another task: {error}") from error
    try:
        config = _of_values(kind, values)
        check_fields(config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error
    return config


def _of_values(kind: type[TrainConfig], values: dict[str, Any]) -> TrainConfig:
    """Return the config of the values of a file, whose lists of records become tuples."""
    for name, field in fields(kind).items():
        section, _, own = name.rpartition(".")
        if (record := field.metadata.get("records")) and own in values.get(section, {}):
            values[section][own] = tuple(record(**each) for each in values[section][own])
    given = sections(kind).items()
    return kind(**(values | {name: part(**values[name]) for name, part in given if name in values}))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON; ValueError for a key that occurs twice."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} occurs {names.count(twice[0])} times")
    return dict(pairs)


def of_run(workdir: Path) -> Any:
    """Return the config of the run in a folder.

    Raises:
        ValueError: if the folder contains no run, or one of another version.
    """
    path = workdir / "config.json"
    if not path.exists():
        train = command("train", config="CONFIG", workdir=workdir)
        raise ValueError(f"{workdir} holds no run (no config.json); train one with {train}")
    return load(path)


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Return a line for each field that makes another run, as "seed: 0 -> 1"."""
    if old.task != new.task:
        return [f"task: {old.task!r} -> {new.task!r}"]
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in placement(type(old))
    ]
