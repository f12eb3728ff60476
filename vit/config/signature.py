"""Flags from a signature: the parameters of a function, with help texts from its docstring.

An annotation is int, float, bool, str, Path, a `Literal` of choices, one of these or None, or a
`Sequence` of them, separated by commas. A parameter without a default is required; one before `/`
is a positional word. `COMMON` has the help texts of parameters that the docstring leaves out.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from absl import flags

from performer.choices import unknown

KINDS: dict[Any, str] = {int: "integer", float: "number", str: "text", Path: "path"}

COMMON = {
    "data_dir": "folder of data (experiments.prepare_data); scikit-learn's and synthetic if none",
    "data_sets": "names of data sets; all if none",
    "graphs": "names of generated graphs or files in data_dir/graphs; those of the paper if none",
    "workdir": "folder of the run",
    "parts": "parts of the experiment",
    "points": "maximum number of training and test points of a data set",
    "splits": "random splits of a data set",
    "draws": "draws of the frequencies",
    "repeats": "repetitions of each measurement",
    "trials": "independent repetitions, each with its own walks",
    "out": "folder of tables and figures",
}
"""Help texts of flags of several experiments."""


def define(
    main: Callable[..., Any],
    quick: Mapping[str, Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
    **names: str,
) -> list[inspect.Parameter]:
    """Define a flag for each parameter that is no positional word, and return all parameters.

    Args:
        main: function to run.
        quick: as in `experiments.common.launch.run`.
        values: flags to add to.
        names: names of flags, by parameter, where they differ.
    """
    help_texts = meanings(main)
    parameters = list(inspect.signature(main, eval_str=True).parameters.values())
    for p in parameters:
        default: Any = None if p.default is p.empty else p.default
        flag = names.get(p.name, p.name)
        if p.annotation is bool:
            flags.DEFINE_bool(flag, default, help_texts[p.name], values)
        elif p.kind is not p.POSITIONAL_ONLY:
            parser: Any = Parser(p.annotation)
            options = dict(serializer=parser, required=p.default is p.empty)
            flags.DEFINE(parser, flag, default, help_texts[p.name], values, **options)
    if quick is not None:
        small = " ".join(f"--{k}={Parser(str).serialize(v)}" for k, v in quick.items())
        flags.DEFINE_bool("quick", False, f"a quick trial: {small}", values)
    return parameters


def given(main: Callable[..., Any], **names: str) -> dict[str, Any]:
    """Return the arguments of a function from the flags of `define`."""
    parameters = inspect.signature(main).parameters
    return {name: flags.FLAGS[names.get(name, name)].value for name in parameters}


class Parser(flags.ArgumentParser):
    """Parser and serialiser of the values of an annotation, for absl."""

    def __init__(self, annotation: Any) -> None:
        if get_origin(annotation) in (types.UnionType, typing.Union):  # a kind or None
            annotation = get_args(annotation)[0]
        self.many = get_origin(annotation) is Sequence
        self.kind = get_args(annotation)[0] if self.many else annotation

    def parse(self, argument: Any) -> Any:
        """Return the value of a text; a default is returned as it is."""
        if not isinstance(argument, str):
            return argument
        if self.many:
            return tuple(self._one(part.strip()) for part in argument.split(",") if part.strip())
        return self._one(argument)

    def _one(self, text: str) -> Any:
        if get_origin(self.kind) is Literal:
            if text not in get_args(self.kind):
                raise ValueError(unknown("value", text, get_args(self.kind)))
            return text
        try:
            if not text and self.kind is Path:  # would be the current folder
                raise ValueError
            return self.kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {KINDS[self.kind]}") from None

    def serialize(self, value: Any) -> str:
        """Return the value as typed on a command line."""
        return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def meanings(main: Callable[..., Any]) -> dict[str, str]:
    """Return the help text of each parameter from the docstring's "Args:", or from `COMMON`."""
    section = (inspect.getdoc(main) or "").partition("\nArgs:\n")[2].split("\n\n")[0]
    lines = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    texts = COMMON | {name: " ".join(text.split()).rstrip(".") for name, text in lines}
    return {name: texts.get(name, "") for name in inspect.signature(main).parameters}
