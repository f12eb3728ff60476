"""Configs in files: bundled ones, those of runs, and their differences."""

import dataclasses
import inspect
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from performer.choices import unknown
from vit.config.cli import command
from vit.config.fields import SECTIONS, SIZES, Block, Config, blocks, flatten
from vit.config.rules import check_fields
from vit.run import files

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


def bundled(name: str) -> Config:
    """Return the config of a file; in "my_images:data/photos" the argument follows the colon.

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
    if not isinstance(config, Config):
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


def save(config: Config, path: Path) -> None:
    """Write the config as JSON, atomically."""
    values = dataclasses.asdict(config)
    values["attention"]["blocks"] = [block._asdict() for block in config.attention.blocks]
    files.write(path, json.dumps(values, indent=2) + "\n")


def load(path: Path) -> Config:
    """Read a config that `save` wrote.

    Raises:
        ValueError: if the file is no config of this version; the message names the field.
    """
    try:
        values = files.parsed(path.read_bytes(), object_pairs_hook=_unique)
        attention = values.get("attention", {})
        if attention.get("implementation") == "xla":  # its earlier name
            attention["implementation"] = "blocked"
        if attention.get("mask") == "none":  # an earlier field, of masks without a gain
            del attention["mask"]
        earlier = [attention.pop(name, unset) for name, unset in EARLIER.items()]
        attention["blocks"] = tuple(Block(**block) for block in attention.get("blocks", ()))
        sections = {name: kind(**values[name]) for name, kind in SECTIONS.items() if name in values}
        config = Config(**(values | sections))
        if earlier != [*EARLIER.values()]:
            config.attention.blocks = _of_earlier(config, *earlier)
        check_fields(config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a config of this version: {error}") from error
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON; ValueError for a key that occurs twice."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} occurs {names.count(twice[0])} times")
    return dict(pairs)


EARLIER = {"sizes": "", "exact_layers": "", "transferred": False}
"""Earlier fields of the section `attention`, and their defaults."""


def _of_earlier(config: Config, sizes: str, exact: str, transferred: bool) -> tuple[Block, ...]:
    """Return the blocks of earlier fields: sizes "64+16+1,...", exact blocks "0,3".

    Raises:
        ValueError: if the sizes are not three numbers for each block, the exact blocks not
            increasing numbers of blocks, or `transferred` not true or false.
    """
    depth, names = config.model.size.depth, ("num_features", "exact_keys", "exact_rows")
    numbers = [[int(x) for x in each.split("+")] for each in sizes.split(",")] if sizes else []
    if sizes and [len(each) for each in numbers] != [len(names)] * depth:
        raise ValueError(f"attention.sizes={sizes!r} must have M+KEYS+ROWS for each of {depth}")
    layers = [int(x) for x in exact.split(",")] if exact else []
    if layers != sorted({*layers} & {*range(depth)}):
        raise ValueError(f"attention.exact_layers={exact!r} must increase from 0 to {depth - 1}")
    if not isinstance(transferred, bool):
        raise ValueError(f"attention.transferred={transferred!r} must be true or false")
    new = [block._replace(transferred=transferred) for block in blocks(config)]
    for i, each in enumerate(numbers):
        changes: Any = dict(zip(names, each, strict=True))
        new[i] = new[i]._replace(**changes)
    for i in layers:
        new[i] = new[i]._replace(kind="softmax")
    return tuple(new)


def of_run(workdir: Path) -> Config:
    """Return the config of the run in a folder.

    Raises:
        ValueError: if the folder contains no run, or one of another version.
    """
    path = workdir / "config.json"
    if not path.exists():
        train = command("train", config="CONFIG", workdir=workdir)
        raise ValueError(f"{workdir} holds no run (no config.json); train one with {train}")
    return load(path)


PLACEMENT = (
    "data.dir",
    "data.num_workers",
    "fsdp",
    "seq",
    "checkpoint_every",
    "keep_every",
)
"""Fields that do not change what a run computes: a resumed run may have others."""


def differences(old: Config, new: Config) -> list[str]:
    """Return a line for each field that makes another run, as "seed: 0 -> 1"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if before[name] != after[name] and name not in PLACEMENT
    ]
