"""How the fields of a config are declared, and the fields of the trainer.

A section is a dataclass of fields with slots: an assignment to a field that does not exist raises
AttributeError. A task declares its sections in a subclass of `TrainConfig`:

    @dataclasses.dataclass(slots=True)
    class Model:
        width: int = config.number(64, "Width of a token.", 1, 1024)

    @dataclasses.dataclass(slots=True)
    class Config(config.TrainConfig):
        task: ClassVar[str] = "my_package.regression"
        model: Model = dataclasses.field(default_factory=Model)
"""

import copy
import dataclasses
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

LARGEST = 2**31 - 1
"""Largest integer: seeds, steps and labels are int32 on the devices."""

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def field(default: Any, help: str, allowed: str = "", **metadata: Any) -> Any:
    """Return a field of a section.

    Args:
        default: default, which has the type of the field.
        help: help text.
        allowed: description of the predicate `holds`; by default of the type.
        metadata: `holds`, True for an allowed value (NaN is in no range, because every comparison
            with it is false); `choices`, all allowed values; `is_local`, True for a field that may
            differ between hosts and when a run is resumed; `is_placement`, True for a field that
            may differ when a run is resumed.
    """
    kind = WORDS[type(default)]
    metadata |= {"help": " ".join(help.split()), "allowed": f"must be {allowed or kind}"}
    return dataclasses.field(default=default, metadata=metadata)


def choice(words: str, help: str) -> Any:
    """Return a field that is one of the words; the first is the default."""
    choices = tuple(words.split())
    return field(choices[0], help, f"one of {', '.join(choices)}", choices=choices)


def number(
    default: float, help: str, low: float, high: float, zero: str = "", **metadata: Any
) -> Any:
    """Return a number or integer from `low` to `high`, or 0 if `zero` describes its meaning."""
    style = "g" if isinstance(default, float) else ""
    allowed = f"{WORDS[type(default)]} from {low:{style}} to {high:{style}}"
    allowed = f"0 ({zero}), or {allowed}" if zero else allowed
    metadata["holds"] = lambda x: low <= x <= high or (zero and x == 0)
    return field(default, help, allowed, **metadata)


def count(default: int, help: str, low: int = 0, **metadata: Any) -> Any:
    """Return an integer from `low` on."""
    return number(default, help, low, LARGEST, **metadata)


def share(default: float, help: str) -> Any:
    """Return a number from 0 to below 1."""
    return field(default, help, "a number from 0 to below 1", holds=lambda x: 0 <= x < 1)


def records(kind: Any, help: str) -> Any:
    """Return a field without a flag: a tuple of NamedTuples, whose fields the section has too."""
    allowed = f"must be a tuple of vit.config.{kind.__name__}, one for each block, or ()"
    metadata = {"help": " ".join(help.split()), "allowed": allowed, "records": kind}
    return dataclasses.field(default=(), metadata=metadata)


@dataclasses.dataclass(slots=True)
class Batches:
    """Batches of a data set. A task that has more fields of its data declares a subclass."""

    batch_size: int = count(128, "Examples per step, over all devices and hosts.", 1)
    num_workers: int = number(
        0,
        """Processes per host that read and augment; 0: threads of the main process; -1: all cores
        but one, as many as /dev/shm allows.""",
        *(-1, 1024),
        is_local=True,
    )

    @property
    def split(self) -> str:
        """Name of the examples of evaluation in messages."""
        return "held out"


@dataclasses.dataclass(slots=True)
class Optimizer:
    """The optimiser; its rate has a linear warm-up, a constant stretch and a cosine decay."""

    learning_rate: float = number(1e-3, "Peak learning rate.", 0, 10)
    final_learning_rate: float = number(1e-5, "Learning rate at the end of the run.", 0, 10)
    warmup_steps: float = number(
        0.1, "Linear warm-up from 0: its share of the run if below 1, else its steps.", 0, LARGEST
    )
    constant_steps: float = number(
        0.0, "Peak rate after it: its share of the run if below 1, else its steps.", 0, LARGEST
    )
    weight_decay: float = number(
        1e-4,
        """Decoupled weight decay of the kernels of linear maps, multiplied by the learning rate, as
        in DeiT and AugReg; big_vision's `wd` is this times `lr`.""",
        *(0, 1e3),
    )
    b2: float = share(0.999, "Adam's b2; 0.95 to 0.99 recovers faster from large gradients.")
    clip_norm: float = number(1.0, "Maximum global norm of gradients.", 1e-6, 1e6, "no clipping")
    accumulate: int = count(
        1,
        """Parts of a batch with accumulated gradients, to save memory. The running moments of
        calibrated attention advance with each part.""",
        1,
    )
    ema: float = share(0.0, "Decay of the running mean of the parameters for evaluation; 0: none.")
    layer_decay: float = number(
        1.0,
        """Factor of learning rate and weight decay for each layer between a parameter and the head
        (Bao et al. 2022), for fine-tuning.""",
        *(1e-3, 1),
    )


@dataclasses.dataclass(slots=True)
class TrainConfig:
    """Fields of the trainer. The config of a task is a subclass with further sections."""

    task: ClassVar[str] = ""
    """Name of the task, which `config.json` holds: by convention the module that defines it."""
    data: Batches = dataclasses.field(default_factory=Batches)
    optim: Optimizer = dataclasses.field(default_factory=Optimizer)
    seed: int = count(0, "Seed of parameters, frequencies, data order, augmentation and dropout.")
    num_epochs: float = field(
        10.0,
        """Passes over the training split, each of as many steps as it has whole batches; need not
        be an integer.""",
        "a number above 0 and at most 1e+06",
        holds=lambda epochs: 0 < epochs <= 1e6,
    )
    fsdp: int = count(
        1,
        """Devices that share one copy of the parameters and the optimiser's moments (fully sharded
        data parallelism). The batch is split over all devices, divided by seq.""",
        1,
        is_placement=True,
    )
    seq: int = count(
        1,
        """Devices that share the tokens of an example, for examples of many tokens. Random features
        exchange m (head_dim + 2) numbers for each head, whatever the number of tokens.""",
        1,
        is_placement=True,
    )
    log_every: int = count(10, "Steps between lines of metrics.jsonl.", 1)
    eval_every: int = count(100, "Steps between evaluations.", 1)
    checkpoint_every: int = count(
        100,
        "Steps between checkpoints; the last two and the best are kept.",
        1,
        is_placement=True,
    )
    keep_every: int = count(
        0, "Steps between checkpoints that are never deleted; 0: none.", is_placement=True
    )

    @property
    def size(self) -> Any:
        """Sizes of the model, which a run shares with the run that it is initialised from."""
        return None

    def overridden(self, values: dict[str, Any]) -> Any:
        """Return the config with the values of flags; `recipe.Derived` derives the others again."""
        return with_values(self, values)

    def check(self) -> None:
        """Raise ValueError for fields of the task that cannot be combined."""

    def check_new(self) -> None:
        """Raise ValueError for fields that a new run cannot have."""


Kind = type[TrainConfig]


@cache
def sections(kind: Kind) -> dict[str, Any]:
    """Return the sections of a config by name, those that the task declares first."""
    ordered = dict.fromkeys(name for each in kind.__mro__[:-1] for name in each.__annotations__)
    types = {each.name: each.type for each in dataclasses.fields(kind)}
    return {name: types[name] for name in ordered if dataclasses.is_dataclass(types.get(name))}


@cache
def fields(kind: Kind) -> dict[str, dataclasses.Field]:
    """Return the fields of a config by name, as "optim.b2" or "seed"."""
    own = sections(kind)
    return {
        f"{prefix}{each.name}": each
        for prefix, part in [*((f"{name}.", part) for name, part in own.items()), ("", kind)]
        for each in dataclasses.fields(part)
        if prefix or each.name not in own
    }


@cache
def flag_types(kind: Kind) -> dict[str, Any]:
    """Return the types of the fields that flags set: numbers, words and switches."""
    all_fields = fields(kind)
    return {name: x.type for name, x in all_fields.items() if "records" not in x.metadata}


def local_fields(kind: Kind) -> set[str]:
    """Return the fields that may differ between hosts."""
    return {name for name, x in fields(kind).items() if x.metadata.get("is_local")}


def placement(kind: Kind) -> set[str]:
    """Return the fields that do not change what a run computes: a resumed run may have others."""
    placed = {name for name, x in fields(kind).items() if x.metadata.get("is_placement")}
    return placed | local_fields(kind)


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Return all fields with their values, as {"attention.coupling": "pm", ...}."""
    return {name: operator.attrgetter(name)(config) for name in fields(type(config))}


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a config with other values of fields, as {"attention.coupling": "pm"}."""
    new = copy.deepcopy(config)
    for name, value in values.items():
        part, _, own = name.rpartition(".")
        setattr(getattr(new, part) if part else new, own, value)
    return new
