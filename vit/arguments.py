"""The command line of a program: its flags, the fields of its config, and how it fails.

A program defines absl's flags and, if it takes a config, ml_collections' flag `config`;
`launch(main)` starts it. An unknown flag or value is an error, never ignored.
"""

import difflib
import itertools
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from vit import bundled
from vit.config import CHOICES, MEANINGS, TYPES, WORDS, Config, allowed, flatten
from vit.safety import lasting

OTHER_NAMES = {
    "lr": "optim.learning_rate",
    "base_lr": "optim.learning_rate",
    "min_lr": "optim.final_learning_rate",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "clip": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "smoothing": "optim.label_smoothing",
    "gradient_accumulation_steps": "optim.accumulate",
    "epochs": "num_epochs",
    "steps": "num_epochs",
    "num_steps": "num_epochs",
    "max_steps": "num_epochs",
    "bs": "data.batch_size",
    "batch": "data.batch_size",
    "workers": "data.num_workers",
    "dataset": "data.name",
    "data_dir": "data.dir",
    "data_path": "data.dir",
    "resolution": "data.image_size",
    "img_size": "data.image_size",
    "augment": "data.randaugment_layers",
    "arch": "model.variant",
    "size": "model.variant",
    "layers": "model.depth",
    "heads": "model.num_heads",
    "patch_size": "model.variant",
    "patch": "model.variant",
    "precision": "model.dtype",
    "bf16": "model.dtype",
    "pool": "model.pooling",
    "checkpointing": "model.remat",
    "features": "attention.num_features",
    "m": "attention.num_features",
    "redraw": "attention.redraw_every",
    "softmax": "attention.kind",
    "random_seed": "seed",
    "save_every": "checkpoint_every",
    "log_interval": "log_every",
}
"""What fields are called elsewhere."""

LIBRARIES = ("absl", "jax", "orbax", "tensorflow", "grain", "array_record", "etils", "tensorstore")
"""That define flags of their own, which are taken but not listed."""
COLUMN = 44
"""Where the meaning of a flag begins in `--help`."""
FIELDS = "Fields of the config, each set by a flag:"
HELP = {"-h", "--h", "--help", "-help"}
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell's (128 + SIGINT)."""


def launch(
    main: Callable[[list[str]], object], *, words: bool = False, others: bool = False
) -> None:
    """Start a program: parse its flags, call `main`, and report a failure in one line.

    ValueError (bad input), FloatingPointError (a run diverged) and OSError end the program with
    exit code 1, Ctrl-C with 130. Output outlives its reader (`vit.safety.lasting`).

    Args:
        main: function of the program's name and its words.
        words: as `parse_flags`.
        others: likewise.
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

    app.run(guarded, flags_parser=partial(parse_flags, words=words, others=others))


def parse_flags(
    argv: Sequence[str],
    values: flags.FlagValues = flags.FLAGS,
    *,
    words: bool = False,
    others: bool = False,
) -> list[str]:
    """absl's flag parser; what it cannot take ends the program with one line.

    `--help` prints all flags and the fields of the config. `--config=NAME` finds a bundled config.

    Args:
        argv: the name of the program and its arguments.
        values: the flags.
        words: whether words that belong to no flag are taken, as names of files are.
        others: whether flags of another program are taken, too.

    Returns:
        The name of the program, these words and flags.
    """
    argv = list(argv)
    if HELP & set(argv[1:]):
        print(help_text(values, argv[0]))
        sys.exit(0)
    if "config" in values:
        _check_fields(argv, values)
        argv = _with_path(argv)
    try:
        program, *rest = values(argv, known_only=others)
    except flags.UnrecognizedFlagError as error:
        sys.exit(_unknown(error.flagname, values))
    except flags.Error as error:
        sys.exit(_flag_error(str(error), values))
    except Exception as error:  # a config file is a program: it may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        sys.exit(f"--config: {type(error).__name__}: {_one_line(str(error))} ({where})")
    if rest and not (words or others):
        name, equals, value = rest[0].partition("=")
        meant = (
            f"did you mean '{nearest(name, values)}={value}'?" if equals else "--help lists them"
        )
        sys.exit(f"{rest[0]!r} is no flag: {meant}")
    for name, flag in own_flags(values).items():
        if flag.present and flag.default != "" and flag.value == "":
            sys.exit(f"--{name}= is empty: leave it out, or say what it is")
    return [program, *rest]


def from_flag(flag: Any) -> Config:
    """The value of a `config_flags.DEFINE_config_file` flag, a `Config`; exits where it is none."""
    try:
        getattr(flag.value, "seed", None)  # a file that could not be read raises only now
    except OSError as error:
        sys.exit(f"--config: {_one_line(str(error))}")
    if not isinstance(flag.value, Config):
        kind = type(flag.value).__name__
        sys.exit(f"--config: get_config() must return a vit.config.Config, it returned a {kind}")
    return flag.value


def nearest(name: str, values: flags.FlagValues) -> str:
    """The flag that is probably meant: by what it is called elsewhere, else by its spelling."""
    known = {flag: f"--{flag}" for flag in own_flags(values)}
    word = name.lstrip("-").lower().replace("-", "_")
    if own := difflib.get_close_matches(word, known, n=1, cutoff=0.85):
        return known[own[0]]
    if "config" in values:
        fields = {f"config.{field}": f"--config.{field}" for field in TYPES}
        short = {field.split(".")[-1]: f"--config.{field}" for field in TYPES}
        others = {other: f"--config.{field}" for other, field in OTHER_NAMES.items()}
        known = others | short | fields | known
    last = word.split(".")[-1]
    if word not in known and last in known:
        return known[last]
    return known[difflib.get_close_matches(word, known, n=1, cutoff=0)[0]]


def own_flags(values: flags.FlagValues) -> dict[str, flags.Flag]:
    """Those that no library has defined, but for the fields of a config."""
    modules = values.flags_by_module_dict()
    return {
        flag.name: flag
        for module in sorted(modules)
        if not module.startswith(LIBRARIES)
        for flag in modules[module]
        if not flag.name.startswith("config.")
    }


def help_text(values: flags.FlagValues, program: str = "") -> str:
    """The program's docstring, its flags, and the fields of its config."""
    main = sys.modules["__main__"]
    lines = [(main.__doc__ or Path(program).stem).strip(), "", "Flags:", ""]
    for name, flag in own_flags(values).items():
        shown = f"--[no]{name}" if flag.boolean else f"--{name}"
        default = "" if flag.boolean else (flag.default_as_str or "").strip("'")
        lines += _row(shown, f"{flag.help}{f'; {default} if not given' * bool(default)}")
    return "\n".join([*lines, *(["", field_help()] if "config" in values else [])])


def field_help() -> str:
    """Every field in its group: flag, default, type or choices, and the first sentence on it."""
    lines, group = [FIELDS], None
    config = Config()
    for field, value in flatten(config).items():
        section = Config.__annotations__[field.split(".")[0]] if "." in field else Config
        if section is not group:
            lines += ["", _sentence((section.__doc__ or "").strip()), ""]
            group = section
        kind = " | ".join(CHOICES[field]) if field in CHOICES else WORDS[TYPES[field]]
        lines += _row(f"--config.{field}={value}", f"{_sentence(MEANINGS[field])} [{kind}]")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    """The first one."""
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split()))[0]


def _row(flag: str, text: str) -> list[str]:
    """A flag and beside it what it means; below it where the flag is long."""
    width = max(80, min(120, shutil.get_terminal_size((100, 24)).columns))
    wrapped = textwrap.wrap(text, width - COLUMN)
    first = (
        [f"  {flag:{COLUMN - 4}}  {wrapped.pop(0)}"] if len(flag) <= COLUMN - 4 else [f"  {flag}"]
    )
    return first + [" " * COLUMN + line for line in wrapped]


def _check_fields(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Ends the program for a field that there is not, before the file of the config is run."""
    for argument in argv[1:]:
        override = re.match(r"--?(?:no)?(config\.[^=]*)", argument)
        if override and override[1].removeprefix("config.") not in TYPES:
            sys.exit(_unknown(override[1], values))


def _unknown(name: str, values: flags.FlagValues) -> str:
    if name.startswith("config.") and name.removeprefix("config.") in TYPES:
        return f"--{name} is a field of a config: say of which by --config=NAME"
    return f"unknown flag '--{name}'; did you mean {nearest(name, values)!r}? --help lists them all"


def _with_path(argv: list[str]) -> list[str]:
    """The arguments, with the path of a bundled config for its name."""

    def path(before: str, argument: str) -> str:
        flag, equals, value = argument.partition("=")
        if before in ("-config", "--config"):
            flag, equals, value = "", "", argument
        elif flag not in ("-config", "--config") or not equals:
            return argument
        name, colon, rest = value.partition(":")
        try:
            return f"{flag}{equals}{bundled.path(name)}{colon}{rest}"
        except ValueError as error:
            sys.exit(f"--config: {error}")

    return argv[:1] + [path(*pair) for pair in itertools.pairwise(argv)]


def _flag_error(message: str, values: flags.FlagValues) -> str:
    """absl's message as one line, with what the flag or the field of a config may be."""
    given = re.match(r"flag --(config\.([\w.]+)=.*?): ", message, re.DOTALL)
    if given and given[2] in TYPES:
        return f"{_one_line(given[1])}: {allowed(given[2])}"
    if missing := re.match(r"flag --(\w+)=None: ", message):
        return f"--{missing[1]} is missing: {values[missing[1]].help}"
    if early := re.match(r"Found (\S+) in argv before a value for --config", message):
        return f"{early[1]} stands before --config: put that first"
    if "get_config() takes 0 positional arguments" in message:
        return "--config: this config takes no argument after a colon"
    first, *between = message.strip().splitlines()  # of a config file the whole traceback
    if "Error whilst parsing config file" in first:
        first = "--config:"
    return _one_line(" ".join([first, *between[-1:]]))


def _one_line(text: str) -> str:
    return " ".join(text.split())
