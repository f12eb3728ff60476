"""Command line of a program: its flags, the fields of its config, and one-line errors.

A program defines absl flags and, if it has a config, the flag `config` of ml_collections;
`launch(main)` starts it. An unknown flag or value is an error.
"""

import difflib
import itertools
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from vit.config import FIELDS, TYPES, Config, allowed, bundled, flatten
from vit.run.safety import lasting

LIBRARIES = ("absl", "jax", "orbax", "tensorflow", "grain", "array_record", "etils", "tensorstore")
"""Packages whose own flags are accepted but not listed."""
HEADING = "Fields of the config, each set by a flag:"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell (128 + SIGINT)."""


def launch(main: Callable[[list[str]], object], *, words: bool = False) -> None:
    """Start a program: parse its flags, call `main`, and report a failure in one line.

    ValueError (bad input), FloatingPointError (divergence) and OSError end the program with exit
    code 1, Ctrl-C with 130. A closed pipe does not end it (`vit.run.safety.lasting`).

    Args:
        main: function of the program's name and its positional words.
        words: as in `parse_flags`.
    """
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)

    def guarded(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            main(argv)
        except (ValueError, FloatingPointError, OSError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)

    app.run(guarded, flags_parser=partial(parse_flags, words=words))


def parse_flags(
    argv: Sequence[str],
    values: flags.FlagValues = flags.FLAGS,
    *,
    words: bool = False,
) -> list[str]:
    """Parse flags as absl does; an error ends the program with one line.

    `--help` prints all flags and the fields of the config. `--config=NAME` finds a bundled config.

    Args:
        argv: name of the program and its arguments.
        values: flags to set.
        words: accept positional words, as names of files.

    Returns:
        The name of the program and its positional words.
    """
    argv = list(argv)
    if {"-h", "--help"} & set(argv[1:]):
        print(help_text(values, argv[0]))
        sys.exit(0)
    if "config" in values:
        argv = [argv[0], *_with_path(argv[1:], values)]
    try:
        program, *rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        sys.exit(_unknown(error.flagname, values))
    except flags.Error as error:
        sys.exit(_flag_error(str(error), values))
    except Exception as error:  # a config file may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        sys.exit(f"--config: {type(error).__name__}: {_one_line(str(error))} ({where})")
    if rest and not words:
        meant = f"did you mean {nearest(rest[0], values)!r}?" if "=" in rest[0] else "see --help"
        sys.exit(f"{rest[0]!r} is no flag: {meant}")
    for name, flag in own_flags(values).items():
        if flag.present and flag.default != "" and flag.value == "":
            sys.exit(f"--{name}= is empty: leave it out, or give a value")
    return [program, *rest]


def chosen_config(values: flags.FlagValues = flags.FLAGS) -> Config:
    """Return the config of the flag `--config`, overridden by the flags of its fields.

    The program ends without a valid config file.

    Raises:
        ValueError: as `Config.overridden`.
    """
    flag: Any = values["config"]
    try:
        getattr(flag.value, "seed", None)  # an unreadable file raises only here
    except OSError as error:
        sys.exit(f"--config: {_one_line(str(error))}")
    if not isinstance(flag.value, Config):
        kind = type(flag.value).__name__
        sys.exit(f"--config: get_config() must return a vit.config.Config, it returned a {kind}")
    return flag.value.overridden(config_flags.get_override_values(flag))


def nearest(argument: str, values: flags.FlagValues) -> str:
    """Return the flag or field of the config with the nearest name, with the argument's value."""
    name, equals, value = argument.partition("=")
    known = {flag: f"--{flag}" for flag in own_flags(values)}
    if "config" in values:
        fields = {f"config.{field}": f"--config.{field}" for field in TYPES}
        known |= fields | {field.split(".")[-1]: f"--config.{field}" for field in TYPES} | known
    word = name.lstrip("-").lower().replace("-", "_")
    last = word.split(".")[-1]
    word = last if word not in known and last in known else word
    return known[difflib.get_close_matches(word, known, n=1, cutoff=0)[0]] + equals + value


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
        given = "" if default in ("", "None") else f"; default {default}"
        lines += _row(shown, f"{flag.help}{given}")
    if "config" in values:
        lines += ["", HEADING]
        section = None
        for field, value in flatten(Config()).items():
            if field.rpartition(".")[0] != section:
                section = field.rpartition(".")[0]
                lines.append("")
            text = f"{FIELDS[field].metadata['help']} It {allowed(field)}."
            lines += _row(f"--config.{field}={value}", text)
    return "\n".join(lines)


def _row(flag: str, text: str) -> list[str]:
    """Return a flag, and its help text below it."""
    indent = " " * 8
    return [
        f"  {flag}",
        *textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent),
    ]


def _with_path(arguments: list[str], values: flags.FlagValues) -> list[str]:
    """Return the arguments with the name of a bundled config replaced by its path.

    An unknown field ends the program before the config file is run.
    """
    found = []
    for before, argument in itertools.pairwise(["", *arguments]):
        override = re.match(r"--?(?:no)?(config\.[^=]*)", argument)
        if override and override[1].removeprefix("config.") not in TYPES:
            sys.exit(_unknown(override[1], values))
        flag = "" if before in ("-config", "--config") else "--?config="
        given = re.fullmatch(f"({flag})([^:]*)(.*)", argument, re.DOTALL)
        try:
            found.append(f"{given[1]}{bundled.path(given[2])}{given[3]}" if given else argument)
        except ValueError as error:
            sys.exit(f"--config: {error}")
    return found


def _unknown(name: str, values: flags.FlagValues) -> str:
    if name.startswith("config.") and name.removeprefix("config.") in TYPES:
        return f"--{name} is a field of a config: give --config=NAME, too"
    return (
        f"unknown flag '--{name}'; did you mean {nearest(name, values)!r}? --help lists all flags"
    )


def _flag_error(message: str, values: flags.FlagValues) -> str:
    """Return absl's message as one line, with the allowed values of the flag or field."""
    given = re.match(r"flag --(config\.([\w.]+)=.*?): ", message, re.DOTALL)
    if given and given[2] in TYPES:
        return f"{_one_line(given[1])}: {allowed(given[2])}"
    if missing := re.match(r"flag --(\w+)=None: ", message):
        return f"--{missing[1]} is missing: {values[missing[1]].help}"
    first, *between = message.strip().splitlines()  # a whole traceback for a config file
    if "Error whilst parsing config file" in first:
        first = "--config:"
    return _one_line(" ".join([first, *between[-1:]]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
