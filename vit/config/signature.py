"""Flags by a signature: the parameters of a function, with their meanings from its docstring.

An annotation is int, float, bool, str, Path, a `Literal` of choices, one of these or None, or a
`Sequence` of them, with commas between. A parameter without a default must be given; one before `/`
is a word without dashes. A parameter that the docstring leaves out has its meaning in `COMMON`.
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
    "data_dir": "folder of data (experiments.prepare_data); scikit-learn's and made-up if none",
    "data_sets": "names; all there are if none is given",
    "graphs": "names, of generated ones and of files in data_dir/graphs; those of the paper",
    "workdir": "folder of the run",
    "parts": "parts of the experiment",
    "points": "training and test points of a data set, at most",
    "splits": "random splits of a data set",
    "draws": "draws of the frequencies",
    "repeats": "repetitions of each measurement",
    "out": "folder of tables and figures",
}
"""Meanings of flags that several experiments have."""


def define(
    main: Callable[..., Any],
    quick: Mapping[str, Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
    **names: str,
) -> list[inspect.Parameter]:
    """Define a flag for each parameter that is no word, and return all parameters.

    Args:
        main: the function.
        quick: as `experiments.common.launch.run`.
        values: of the flags.
        names: of flags, by the parameters that are called otherwise.
    """
    told = meanings(main)
    parameters = list(inspect.signature(main, eval_str=True).parameters.values())
    for p in parameters:
        default: Any = None if p.default is p.empty else p.default
        flag = names.get(p.name, p.name)
        if p.annotation is bool:
            flags.DEFINE_bool(flag, default, told[p.name], values)
        elif p.kind is not p.POSITIONAL_ONLY:
            parser: Any = Parser(p.annotation)
            required = p.default is p.empty
            flags.DEFINE(
                parser, flag, default, told[p.name], values, serializer=parser, required=required
            )
    if quick is not None:
        said = " ".join(f"--{k}={Parser(str).serialize(v)}" for k, v in quick.items())
        flags.DEFINE_bool("quick", False, f"little, to see that it runs: {said}", values)
    return parameters


def given(main: Callable[..., Any], **names: str) -> dict[str, Any]:
    """Return the arguments of a function by the flags that `define` made."""
    parameters = inspect.signature(main).parameters
    return {name: flags.FLAGS[names.get(name, name)].value for name in parameters}


class Parser(flags.ArgumentParser):
    """Text -> a value of an annotation, for absl; also the way back."""

    def __init__(self, annotation: Any) -> None:
        if get_origin(annotation) in (types.UnionType, typing.Union):  # of a kind and None
            annotation = get_args(annotation)[0]
        self.many = get_origin(annotation) is Sequence
        self.kind = get_args(annotation)[0] if self.many else annotation

    def parse(self, argument: Any) -> Any:
        """Return the value, or ValueError with what it may be; a default stays as it is."""
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
            if not text and self.kind is Path:  # which would be the current folder
                raise ValueError
            return self.kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {KINDS[self.kind]}") from None

    def serialize(self, value: Any) -> str:
        """Return the value as it would be typed."""
        return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def meanings(main: Callable[..., Any]) -> dict[str, str]:
    """Return the meaning of each parameter: by the docstring, below "Args:", or by `COMMON`."""
    section = (inspect.getdoc(main) or "").partition("\nArgs:\n")[2].split("\n\n")[0]
    lines = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    told = COMMON | {name: " ".join(text.split()).rstrip(".") for name, text in lines}
    return {name: told.get(name, "") for name in inspect.signature(main).parameters}
