"""Tasks by name: the class of their config, and the function that opens their data.

The module of a task calls `define` when it is imported. The tasks of this package are modules of
`vit.model`, named by them; others are imported by `--task`.
"""

import importlib
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from vit.config.base import TrainConfig


class Definition(NamedTuple):
    """A task before its data are opened."""

    config: type[TrainConfig]
    """Class of its config, which declares the sections, and the name in `task`."""
    open: Callable[..., Any]
    """(config, content of the run's `task.json`, data set or None) -> data set and
    `vit.task.Task`. The content is {} for a new run; a data set that is given is not read."""
    sized: Callable[..., Any] | None = None
    """(config, numbers, is_absent) -> data set of these sizes without examples for a dry run, or
    None to open the data; None if they are always opened."""


TASKS: dict[str, Definition] = {}
"""Tasks whose modules are imported."""


def define(
    config: type[TrainConfig],
    open: Callable[..., Any],
    sized: Callable[..., Any] | None = None,
) -> None:
    """Add a task, with the fields of `Definition`; one of the same name is replaced."""
    TASKS[config.task] = Definition(config, open, sized)


def definition(name: str) -> Definition:
    """Return the definition of a task.

    Raises:
        ValueError: if no imported module defines it; the message shows how to import it.
    """
    if name not in TASKS and name.isidentifier() and find_spec(f"vit.model.{name}"):
        importlib.import_module(f"vit.model.{name}")
    if name not in TASKS:
        raise ValueError(
            f"the task {name!r} is not defined: give --task=MODULE or --task=FILE.py that defines"
            f" it, for example --task={name.replace(' ', '_') or 'my_task.py'}"
        )
    return TASKS[name]


def use(module: str) -> None:
    """Import a module, or run a file, that defines a task; nothing for an empty name.

    Raises:
        ValueError: if there is no such module, or it defines no task.
    """
    if not module:
        return
    before = {*TASKS.values()}
    try:
        if Path(module).is_file():
            runpy.run_path(module)
        else:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"--task={module}: {error}; give a module or a file") from error
    names = {each.config.__module__ for each in TASKS.values()}
    if {*TASKS.values()} == before and not any(name.startswith(module) for name in names):
        raise ValueError(f"--task={module} defines no task (vit.config.define)")
