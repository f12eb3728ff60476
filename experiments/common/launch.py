"""How experiments start: the flags of a command are the parameters of its `main`.

    def main(data_sets: Sequence[str] = (), draws: int = 100, out: Path = Path("results")) -> None:
        \"\"\"Print the table.

        Args:
            draws: of each pair of ensembles.
        \"\"\"

    if __name__ == "__main__":
        launch.run(main)

takes `--data_sets=a,b --draws=10`. An annotation is int, float, bool, str, Path, a `Literal` of
choices, one of these or None, or a `Sequence` of them, with commas between. A parameter without a
default must be given; one before `/` is a word without dashes; `*others` are all flags that are not
those of `main`. A parameter that the docstring leaves out has its meaning in `COMMON`. Tables in
the folder --out get a run.json that says what made them.
"""

import inspect
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from absl import flags

from experiments.common import provenance
from performer.choices import unknown
from vit.config.arguments import launch

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


def run(main: Callable[..., Any], quick: Mapping[str, Any] | None = None) -> None:
    """Parse the command line and call `main`; `vit.config.arguments.launch` reports failures.

    Args:
        main: its parameters are the flags.
        quick: values that `--quick` gives to flags that are not set, to see that all runs. The
            tables are then in a folder `quick` of --out.
    """
    parameters = define(main, quick)
    words = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    others = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    def call(argv: list[str]) -> None:
        given: list[Any] = argv[1:]
        if not others:
            if len(given) != len(words):
                wanted = " ".join(f"{{{'|'.join(get_args(p.annotation))}}}" for p in words)
                raise ValueError(f"{' '.join(given) or 'no word'}: give {wanted}")
            given = [Parser(p.annotation).parse(x) for p, x in zip(words, given, strict=True)]
        values: dict[str, Any] = {name: flags.FLAGS[name].value for name in named}
        if quick is not None and flags.FLAGS["quick"].value:
            values |= {k: v for k, v in quick.items() if not flags.FLAGS[k].present}
            values["out"] /= "quick"
        start = time.monotonic()
        main(*given, **values)
        if isinstance(values.get("out"), Path):
            provenance.record(values["out"], time.monotonic() - start)

    flags.FLAGS.set_gnu_getopt(True)  # flags may stand behind a word
    launch(call, words=bool(words), others=others)


def define(
    main: Callable[..., Any],
    quick: Mapping[str, Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
) -> list[inspect.Parameter]:
    """Define a flag for each parameter that is no word, and return all parameters."""
    told = meanings(main)
    parameters = list(inspect.signature(main, eval_str=True).parameters.values())
    for p in parameters:
        default: Any = None if p.default is p.empty else p.default
        if p.annotation is bool:
            flags.DEFINE_bool(p.name, default, told[p.name], values)
        elif p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            parser: Any = Parser(p.annotation)
            required = p.default is p.empty
            flags.DEFINE(
                parser, p.name, default, told[p.name], values, serializer=parser, required=required
            )
    if quick is not None:
        said = " ".join(f"--{k}={Parser(str).serialize(v)}" for k, v in quick.items())
        flags.DEFINE_bool("quick", False, f"little, to see that it runs: {said}", values)
    return parameters


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


def at_least(least: float, **values: float) -> None:
    """Raise ValueError for a flag below its least value."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"--{name}={value} must be at least {least:g}")
