"""Gives every field of a config values that cannot be meant, and looks how that is told.

    python -m experiments.training.fault_injection --parts=configs

Each value is given as a user gives it, `--config.FIELD=TEXT` after the config of scikit-learn's
digits, and goes through all that comes before the first step of `vit.train`: the flags, the checks,
devices, data and rate, and the model and its optimiser, of which only the shapes are made.

    told clearly   refused in one line that names the flag and what it may be
    harmless       accepted, and `MEANT` says that it can be meant
    traceback      ended in another exception, or in a message that is not clear
    silent         accepted, though `MEANT` says that it cannot be meant
"""

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from absl import flags
from ml_collections import config_flags

from vit import bundled, devices, report, runs
from vit import config as configs
from vit.arguments import from_flag, parse_flags

CONFIG = bundled.path("digits")
SECTIONS = ("model", "attention", "data", "optim")
SHAPING = ("model.", "attention.", "optim.", "data.image_size", "seed")
"""What the shapes of the model and its optimiser, or their first values, depend on."""
KINDS = ("told clearly", "harmless", "traceback", "silent")

IMAGES, PIXELS, STEPS_PER_EPOCH, STEPS = 1437, 8, 44, 1760
"""Of the digits' training split, of a side, and of the run that the config describes."""

EXTREMES = ("0", "-1", "inf", "nan", "1e20", "9" * 30, "many")
"""What every number is set to; with `quick` nothing else is."""
NUMBERS = ("-inf", "1e400", "1e-40", "-0.0", "0.5", "1", "", " ", "1,2", "0x10", "True", "None")
SWITCHES = ("maybe", "2", "-1", "", "None", "inf", "yes", "TRUE", "0")
WORDS = ("", " ", "none", "0", "-1", "../..", "a\nb", "[", "*", "=", "ü", "x" * 300, "B/0", "Ti/-1")


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


# What each field may mean in this config, by its docstring and the papers: written without a look
# at `vit.config.validate`. Where these are wider than the checks, the check has the last word.
MEANT: dict[str, Callable[[Any], object]] = {
    "model.variant": re.compile(r"(XS|Ti|S|B|L)/0*[1248]").fullmatch,  # patches that tile 8 pixels
    "model.width": lambda width: 0 <= width <= 1e5 and width % 4 == 0,  # of four heads
    "model.depth": range(1000).__contains__,
    "model.num_heads": lambda heads: heads > -1 and (heads == 0 or 64 % heads == 0),
    "model.mlp_dim": range(100_000).__contains__,
    "model.pooling": {"token", "mean", "attention", "token+mean"}.__contains__,
    "model.registers": range(10_000).__contains__,
    "model.layer_scale": lambda factor: 0 <= factor < 1e3,
    "model.activation": {"gelu_tanh", "gelu", "quick_gelu", "swiglu"}.__contains__,
    "model.epsilon": lambda epsilon: 0 < epsilon <= 1,
    "model.embed_norm": lambda _: True,
    "model.final_norm": {"before", "after", "none"}.__contains__,
    "model.position": {"learned", "sincos"}.__contains__,
    "model.dropout": lambda p: p == 0 or 0 < p < 1,
    "model.drop_path": lambda p: p == 0 or 0 < p < 1,
    "model.dtype": {"float32", "bfloat16"}.__contains__,
    "model.mlp_init": {"lecun_normal", "xavier_uniform"}.__contains__,
    "model.pre_logits": lambda _: True,
    "model.head_bias": _between(-1e3, 1e3),
    "model.remat": lambda _: True,
    "attention.kind": {"performer", "softmax"}.__contains__,
    "attention.coupling": re.compile(
        r"(iid|orf|pnc|pm|simrf|simrf\+|fast-simrf|sorf|halton|fixed|[a-z_]+\*[a-z]+)(-antithetic)?"
    ).fullmatch,
    "attention.num_features": range(1, 100_000).__contains__,
    "attention.share_heads": lambda _: True,
    "attention.calibration": {"none", "shift", "shift+scale", "full"}.__contains__,
    "attention.redraw_every": range(2**31).__contains__,
    "attention.exact_window": range(2**31).__contains__,
    "attention.exact_layers": re.compile(r"|[0-3](,[0-3])*").fullmatch,  # of four
    "data.name": {"digits"}.__contains__,
    "data.dir": {""}.__contains__,
    "data.train_split": {"train"}.__contains__,
    "data.eval_split": {"test"}.__contains__,
    "data.image_size": lambda side: side % 2 == 0 and 2 <= side <= 2048,  # in patches of 2 x 2
    "data.eval_resize": lambda side: side == 0 or PIXELS <= side <= 4 * PIXELS,
    "data.crop": {"center", "inception"}.__contains__,
    "data.max_shift": range(PIXELS).__contains__,
    "data.flip": lambda _: True,
    "data.randaugment_layers": range(30).__contains__,
    "data.randaugment_magnitude": _between(0, 30),
    "data.mixup": lambda alpha: alpha == 0 or 1e-4 < alpha < 1e4,
    "data.cutmix": lambda alpha: alpha == 0 or 1e-4 < alpha < 1e4,
    "data.erase": _between(0, 1),
    "data.batch_size": range(1, IMAGES + 1).__contains__,
    "data.num_workers": range(-1, 2000).__contains__,
    "data.max_bad_records": range(2**31).__contains__,
    "optim.loss": {"softmax", "sigmoid"}.__contains__,
    "optim.skip_nonfinite": range(2**31).__contains__,
    "optim.learning_rate": _between(1e-5, 10),  # the final rate is 1e-5
    "optim.final_learning_rate": _between(0, 4e-3),
    "optim.warmup_steps": range(STEPS).__contains__,
    "optim.constant_steps": range(STEPS - 132).__contains__,
    "optim.weight_decay": _between(0, 1 / 4e-3),  # a step must not take more than the whole weight
    "optim.clip_norm": lambda norm: norm == 0 or 1e-8 < norm < 1e8,
    "optim.b2": lambda p: p == 0 or 0 < p < 1,
    "optim.label_smoothing": lambda p: p == 0 or 0 < p < 1,
    "optim.accumulate": lambda parts: 1 <= parts <= 32 and 32 % parts == 0,
    "optim.ema": lambda p: p == 0 or 0 < p < 1,
    "optim.layer_decay": lambda decay: 0 < decay <= 1,
    "seed": range(2**31).__contains__,
    "num_epochs": lambda epochs: 132.5 / STEPS_PER_EPOCH < epochs <= 1e6,  # longer than the warm-up
    "restarts": {""}.__contains__,  # any other number: below the warm-up, or after the end
    "fsdp": lambda parts: parts >= 1 and jax.device_count() % parts == 0,
    "log_every": lambda every: every >= 1 and 220 % every == 0,
    "eval_every": lambda every: 1 <= every < 2**31 and every % 20 == 0,
    "checkpoint_every": lambda every: 1 <= every < 2**31 and every % 20 == 0,
    "keep_every": lambda every: 0 <= every < 2**31 and every % 100 == 0,
}


class Outcome(NamedTuple):
    """What became of one value."""

    field: str
    text: str
    kind: str
    """One of `KINDS`."""
    message: str
    """What was told; empty where the value was accepted."""


def outcomes(seed: int, quick: bool = False) -> list[Outcome]:
    """Every field with every value.

    Args:
        seed: of the random values.
        quick: `EXTREMES` alone, and no shapes of the model.
    """
    chance = random.Random(seed)
    tried = [
        (field, text)
        for field, value in configs.flatten(given()).items()
        for text in dict.fromkeys(texts(value, chance, quick))
    ]
    if not quick:
        tried += [(name, text) for name in SECTIONS for text in ("none", "build", "{}", "0")]
    shallow = {name: size._replace(depth=1) for name, size in configs.SIZES.items()}
    with mock.patch.dict(configs.SIZES, shallow):  # one layer fails as twelve do
        return [outcome(field, text, quick) for field, text in tried]


def texts(value: Any, chance: random.Random, quick: bool = False) -> Iterator[str]:
    """What a field is set to, which has that value now."""
    if isinstance(value, bool):
        yield from SWITCHES
    elif isinstance(value, int | float):
        yield from EXTREMES
        if quick:
            return
        yield from NUMBERS
        yield from (str(value + 1), str(value - 1), str(-value), str(value * 2), str(value / 3))
        for _ in range(5):
            size = chance.choice((-1, 1, 1, 1)) * 10 ** chance.uniform(-3, 22)
            yield str(round(size) if isinstance(value, int) else size)
    else:
        yield from WORDS[:8] if quick else WORDS
        for _ in range(0 if quick or not value else 5):
            place = chance.randrange(len(value))
            letter = chance.choice(("", value[place] * 2, value[place].upper(), " ", "é"))
            yield value[:place] + letter + value[place + 1 :]


def given(*arguments: str) -> configs.Config:
    """The config of a command line."""
    argv = ["vit.train", f"--config={CONFIG}", *arguments]
    values = flags.FlagValues()
    flag = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    parse_flags(argv, values)
    return from_flag(flag)


def begin(config: configs.Config, quick: bool = False) -> None:
    """All that a run does before its first step, but for memory and compilation.

    `quick` leaves out the shapes of the model and its optimiser.
    """
    configs.validate(config)
    mesh = devices.mesh(config)
    dataset, task = runs.subject(config)
    runs.rate(config, dataset)
    if not quick:
        runs.program(config, dataset, task, mesh)


def outcome(field: str, text: str, quick: bool = False) -> Outcome:
    """What becomes of `--config.FIELD=TEXT`."""
    try:
        config = given(f"--config.{field}={text}")
        begin(config, quick or not field.startswith(SHAPING))
    except (SystemExit, ValueError) as error:
        message = str(error)
        return Outcome(
            field, text, "told clearly" if clear(message, field) else "traceback", message
        )
    except Exception as error:
        return Outcome(field, text, "traceback", f"{type(error).__name__}: {error}")
    value = configs.flatten(config).get(field)
    harmless = field in MEANT and bool(MEANT[field](value))
    return Outcome(field, text, "harmless" if harmless else "silent", "")


def clear(message: str, field: str) -> bool:
    """Whether it is one line that names the flag and what it may be."""
    bounds = (
        r"must|hoices|did you mean|divisible|divide|multiple|larger than|lower them|has 1 to|always"
    )
    return "\n" not in message and f"config.{field}" in message and bool(re.search(bounds, message))


def table(tried: Sequence[Outcome], path: Path | None = None) -> str:
    """How many values of each kind of field came to what; written to `path`.csv and .md, too."""
    types = {bool: "true or false", str: "text"}
    groups: dict[str, list[str]] = {}
    for each in tried:
        kind = configs.TYPES.get(each.field)
        name = types.get(kind, "numbers") if kind else "whole sections"
        groups.setdefault(name, []).append(each.kind)
    groups["all"] = [each.kind for each in tried]
    rows = [
        {"fields of": name, "tried": len(kinds)} | {kind: kinds.count(kind) for kind in KINDS}
        for name, kinds in groups.items()
    ]
    return report.table(rows, path) if path else "\n".join(map(str, rows))


def show(tried: Sequence[Outcome], path: Path) -> None:
    """Prints and writes the table; exits where a value was taken, or refused without a word."""
    print(table(tried, path))
    bad = [each for each in tried if each.kind in KINDS[2:]]
    if bad:
        sys.exit("\n".join(f"{e.kind}: --config.{e.field}={e.text!r} {e.message}" for e in bad))
