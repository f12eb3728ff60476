"""Command line of a program: its flags are the parameters of its `main`.

    def main(workdir: Path, config: Config | None = None, draws: int = 10) -> None:
        \"\"\"Run the command.

        Args:
            workdir: folder of the run.
            config: bundled config or file with get_config().
            draws: number of draws.
        \"\"\"

    if __name__ == "__main__":
        arguments.run(main)

The annotation of a parameter is int, float, bool, str, Path, a `Literal` of choices, one of these
or None, a `Sequence` of them, separated by commas, or `list[str]`, a flag that may be repeated. A
NamedTuple is a group of flags. `config` stands for `--config` and a flag for each field of the
config that it names, which is read before the other flags.
A parameter without a default is required; one before `/` and `*names` are positional words. Help
texts come from the docstring; `COMMON` has those of parameters that it leaves out. An unknown
flag or value is an error of one line.
"""

import difflib
import inspect
import re
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from absl import app, flags, logging

from performer.choices import NEAR, unknown
from vit.config import Config, allowed, bundled, fields, flag_types, flatten
from vit.storage import buckets
from vit.storage.compilation import keep_programs
from vit.storage.streams import without_broken_pipe

LIBRARIES = ("absl", "jax", "orbax", "tensorflow", "grain", "array_record", "etils", "tensorstore")
"""Packages whose own flags are accepted but not listed."""
HEADING = "Fields of the config, each set by a flag:"


def run(main: Callable[..., object], quick: Mapping[str, Any] | None = None) -> None:
    """Start a program: parse its flags, call `main`, and report a failure in one line.

    ValueError (bad input), FloatingPointError (divergence) and OSError end the program with exit
    code 1, Ctrl-C with 130. A broken pipe does not end it (`vit.storage.streams`).

    Args:
        main: its parameters are the flags.
        quick: values of flags under `--quick`, a short trial run; its tables are written to the
            folder `quick` of --out.
    """
    sys.stdout, sys.stderr = without_broken_pipe(sys.stdout), without_broken_pipe(sys.stderr)
    parameters = define(main, quick)
    words = any(p.kind in WORDS for p in parameters)

    def guarded(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            positional, named = given(parameters, argv[1:], quick)
            keep_programs()
            main(*positional, **named)
        except (ValueError, FloatingPointError, OSError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)  # 128 + SIGINT, as of a shell

    flags.FLAGS.set_gnu_getopt(True)  # flags may stand behind a word
    app.run(guarded, flags_parser=partial(parse_flags, words=words))


def parse_flags(
    argv: Sequence[str],
    values: flags.FlagValues = flags.FLAGS,
    *,
    words: bool = False,
) -> list[str]:
    """Parse flags as absl does; an error ends the program with one line.

    `--help` prints all flags and the fields of the config. --no-header is --no_header.

    Args:
        argv: name of the program and its arguments.
        values: flags to set.
        words: accept positional words, as names of files.

    Returns:
        The name of the program and its positional words.
    """
    argv = [re.sub("^--[^=]+", lambda flag: _underscored(flag[0]), word) for word in argv]
    if "config" in values:
        argv = _with_fields(argv, values)
    if {"-h", "--help"} & set(argv[1:]):
        print(help_text(values, argv[0]))
        sys.exit(0)
    try:
        program, *rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        meant = nearest(error.flagname, values)
        question = f"; did you mean {meant!r}?" if meant else "."
        is_field = error.flagname.startswith("config.") and _kind(values) is not Config
        owner = f" of the task {_kind(values).task!r}" if is_field else ""
        sys.exit(f"unknown flag '--{error.flagname}'{owner}{question} --help lists all flags")
    except flags.Error as error:
        sys.exit(_flag_error(str(error), values))
    if rest and not words:
        meant = nearest(rest[0], values) if "=" in rest[0] else None
        hint = f"did you mean {meant!r}?" if meant else "see --help"
        sys.exit(f"{rest[0]!r} is no flag: {hint}")
    for name, flag in own_flags(values).items():
        if flag.present and flag.default != "" and flag.value == "":
            sys.exit(f"--{name}= is empty: leave it out, or give a value")
    return [program, *rest]


def _underscored(flag: str) -> str:
    return "--" + flag[2:].replace("-", "_")


def _with_fields(argv: list[str], values: flags.FlagValues) -> list[str]:
    """Read the config that the arguments name, define the flags of its fields; return the others.

    Without one these are the fields of image classification.
    """
    named = [i for i, word in enumerate(argv) if re.fullmatch("--?config(=.*)?", word, re.DOTALL)]
    for place in reversed(named):
        flag, equals, name = argv[place].partition("=")
        words = 1 if equals else 2
        name = name if equals else "".join(argv[place + 1 : place + 2])
        argv = argv[:place] + argv[place + words :]
        if not name:
            sys.exit(f"{flag}= is empty: leave it out, or give a value")
        if not values["config"].present:  # the last one counts
            values["config"].value = _read(name)
            values["config"].present = 1
    for field, kind in flag_types(_kind(values)).items():
        if kind is bool:
            flags.DEFINE_bool(f"config.{field}", None, "", values)
        else:
            flags.DEFINE(Parser(kind), f"config.{field}", None, "", values)
    return argv


def _read(name: str) -> Any:
    """Return the config of that name; end the program if there is none."""
    try:
        return bundled(name)
    except Exception as error:  # a config file may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(place.filename).name}, line {place.lineno})"
        where = "" if isinstance(error, ValueError | OSError) else where
        sys.exit(f"--config: {type(error).__name__}: {_one_line(str(error))}{where}")


def _kind(values: flags.FlagValues) -> Any:
    """Return the class of the config that was given."""
    return Config if values["config"].value is None else type(values["config"].value)


def chosen_config(values: flags.FlagValues = flags.FLAGS) -> Any:
    """Return the config of the flag `--config`, overridden by the flags of its fields; or None.

    Raises:
        ValueError: as `TrainConfig.overridden`, or for a field without `--config`.
    """
    config = values["config"].value
    all_flags = {field: values[f"config.{field}"] for field in flag_types(_kind(values))}
    given = {field: flag.value for field, flag in all_flags.items() if flag.present}
    if config is None and given:
        raise ValueError(f"--config.{next(iter(given))} is a field of a config: give --config=NAME")
    return None if config is None else config.overridden(given)


def nearest(argument: str, values: flags.FlagValues) -> str | None:
    """Return the flag or field of the config with a near name, with the argument's value."""
    name, equals, value = argument.partition("=")
    known = {flag: f"--{flag}" for flag in own_flags(values)}
    if "config" in values:
        names = list(flag_types(_kind(values)))
        full = {f"config.{field}": f"--config.{field}" for field in names}
        ends = {field.split(".")[-1]: f"--config.{field}" for field in names}
        parts = {x.split(".")[0]: f"--config.{x}" for x in reversed(names) if "." in x}
        known = parts | full | ends | known  # a section stands for its first field
    word = name.lstrip("-").lower().replace("-", "_")
    last = word.split(".")[-1]
    word = last if word not in known and last in known else word
    initials = {"".join(x[:1] for x in each.split("_")): each for each in known if "_" in each}
    word = word if word in known else initials.get(last, word)  # lr: learning_rate
    near = difflib.get_close_matches(word, known, n=1, cutoff=NEAR)
    return known[near[0]] + equals + value if near else None


def own_flags(values: flags.FlagValues) -> dict[str, flags.Flag]:
    """Return the flags that are neither a library's nor fields of a config."""
    return {
        flag.name: flag
        for module, defined in sorted(values.flags_by_module_dict().items())
        if not module.startswith(LIBRARIES)
        for flag in defined
        if not flag.name.startswith("config.")
    }


def help_text(values: flags.FlagValues, program: str = "") -> str:
    """Return the docstring of the program, its flags and the fields of its config."""
    lines = [(sys.modules["__main__"].__doc__ or Path(program).stem).strip(), "", "Flags:", ""]
    for name, flag in own_flags(values).items():
        default = "" if flag.boolean else (flag.default_as_str or "").strip("'")
        shown = f"--[no]{name}" if flag.boolean else f"--{name}"
        given = "" if default in ("", "None", "[]") else f"; default {default}"
        words = str(flag.help).partition(";\n")[0]  # absl adds to flags that may be repeated
        lines += _row(shown, f"{words}{given}")
    if "config" in values:
        lines += ["", HEADING]
        kind, section = _kind(values), None
        defaults = flatten(values["config"].value or kind())
        for field in flag_types(kind):
            if field.rpartition(".")[0] != section:
                section = field.rpartition(".")[0]
                lines.append("")
            text = f"{fields(kind)[field].metadata['help']} It {allowed(field, kind)}."
            lines += _row(f"--config.{field}={defaults[field]}", text)
    return "\n".join(lines)


def _row(flag: str, text: str) -> list[str]:
    """Return a flag, and its help text below it."""
    indent = " " * 8
    return [
        f"  {flag}",
        *textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent),
    ]


def _flag_error(message: str, values: flags.FlagValues) -> str:
    """Return absl's message as one line, with the allowed values of the flag or field."""
    given = re.match(r"flag --(config\.([\w.]+)=.*?): ", message, re.DOTALL)
    if given and "config" in values and given[2] in flag_types(_kind(values)):
        return f"{_one_line(given[1])}: {allowed(given[2], _kind(values))}"
    if missing := re.match(r"flag --(\w+)=None: ", message):
        return f"--{missing[1]} is missing: {values[missing[1]].help}"
    return _one_line(message)


def _one_line(text: str) -> str:
    return " ".join(text.split())


_BOOLS = {"true": True, "false": False}
KINDS = {int: "integer", float: "number", str: "text", Path: "path", bool: "true or false"}

COMMON = {
    "data_dir": "folder of data; scikit-learn's and synthetic if none",
    "data_sets": "names of data sets; all if none",
    "graphs": "names of generated graphs or files in data_dir/graphs; the paper's if none",
    "workdir": "folder of the run",
    "task": "module or file that defines the task of the run, if it is not one of vit",
    "step": "step of the checkpoint, or best; the newest if none",
    "config": "bundled config or file with get_config()",
    "parts": "parts of the experiment",
    "points": "maximum number of training and test points of a data set",
    "splits": "random splits of a data set",
    "draws": "draws of the frequencies",
    "repeats": "repetitions of each measurement",
    "trials": "independent repetitions, each with its own walks",
    "out": "folder of tables and figures",
}
"""Help texts of flags of several experiments."""


WORDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def define(
    main: Callable[..., Any],
    quick: Mapping[str, Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
) -> list[inspect.Parameter]:
    """Define the flags of a function, as `run`, and return its parameters."""
    help_texts = meanings(main)
    parameters = list(inspect.signature(main, eval_str=True).parameters.values())
    for p in parameters:
        if p.name == "config":
            flags.DEFINE_string("config", None, help_texts[p.name], values)
        elif hasattr(p.annotation, "_fields"):
            define(p.annotation, None, values)
        elif p.kind not in WORDS:
            _define(p, help_texts[p.name], values)
    if quick is not None:
        small = " ".join(f"--{k}={Parser(str).serialize(v)}" for k, v in quick.items())
        flags.DEFINE_bool("quick", False, f"a quick trial: {small}", values)
    return parameters


def _define(p: inspect.Parameter, text: str, values: flags.FlagValues) -> None:
    default: Any = None if p.default is p.empty else p.default
    if p.annotation is bool:
        flags.DEFINE_bool(p.name, default, text, values)
    elif get_origin(p.annotation) is list:
        flags.DEFINE_multi_string(p.name, default, text, values)
    else:
        parser: Any = Parser(p.annotation)
        options = dict(serializer=parser, required=p.default is p.empty)
        flags.DEFINE(parser, p.name, default, text, values, **options)


def given(
    parameters: Sequence[inspect.Parameter],
    words: Sequence[str] = (),
    quick: Mapping[str, Any] | None = None,
    values: flags.FlagValues = flags.FLAGS,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments of a function from words and flags.

    Raises:
        ValueError: for another number of words, or as `chosen_config`.
    """
    positional = [p for p in parameters if p.kind in WORDS]
    named: dict[str, Any] = {}
    for p in (p for p in parameters if p.kind not in WORDS):
        if p.name == "config":
            named[p.name] = chosen_config(values)
        elif hasattr(p.annotation, "_fields"):
            named[p.name] = p.annotation(*(values[name].value for name in p.annotation._fields))
        else:
            named[p.name] = values[p.name].value
    if quick is not None and values["quick"].value:
        named |= {name: x for name, x in quick.items() if not values[name].present}
        named["out"] /= "quick"
    if [p.kind for p in positional] == [inspect.Parameter.VAR_POSITIONAL]:
        positional *= len(words)
    if len(words) != len(positional):
        expected = " ".join(f"{{{'|'.join(get_args(p.annotation))}}}" for p in positional)
        raise ValueError(f"{' '.join(words) or 'no word'}: give {expected}")
    parsed = (Parser(p.annotation).parse(x) for p, x in zip(positional, words, strict=True))
    return list(parsed), named


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
        if self.kind is Path and text:  # an empty one would be the current folder
            return buckets.path(text)
        try:
            if self.kind is Path:
                raise ValueError
            return _BOOLS[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
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
