"""Task: the model, loss and measures of a run as one value.

A task is declared by the class of its config (`vit.config.TrainConfig`), whose sections are its
fields, and by a function that opens its data and returns a `Task` of functions:

    vit.config.define(Config, opened)       # opened(config, described, dataset=None)
    vit.run.loop.train(Config(), workdir)

`vit.model.classification` classifies images. Use functions of a module, or results of a cached
function: tasks are then equal, and their programs are compiled once in a process.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from vit import config as configs
from vit.config import TrainConfig
from vit.data import Batch, Dataset
from vit.storage import files

Model = Any
"""An `nnx.Module`."""

Sums = dict[str, Array]
"""Sums over the examples of a batch, by name."""

Triple = tuple[Float[Array, "b s n h"], Float[Array, "b s n h"], Float[Array, "b s n h"]]
"""Queries, keys and values of an attention layer."""


def whole_batch(config: TrainConfig, key: Array, batch: Batch) -> Batch:
    """Return the batch."""
    return batch


def means(totals: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the mean of each total over the examples."""
    return {name: x / totals["examples"] for name, x in totals.items() if name != "examples"}


def no_attention(*_: Any) -> Any:
    """Raise ValueError: reports require the attention layers."""
    raise ValueError(
        "the model of this run has no attention layers, or its task does not define them: give its"
        " vit.task.Task the functions `layers` and `projections`"
    )


def no_distances(*_: Any) -> Any:
    """Raise ValueError: layer-wise decay requires distances."""
    raise ValueError(
        "config.optim.layer_decay must be 1.0: the task of this run does not define the distances"
        " of its parameters from the output (vit.task.Task.distances)"
    )


class Task(NamedTuple):
    """Model, loss and measures."""

    create: Callable[..., Model]
    """(config, rngs=`random_streams`) -> a new model, in evaluation mode."""
    loss: Callable[[Model, Any], tuple[Array, Sums]]
    """(model in training mode, examples) -> mean loss, and sums: "train_NAME" in the log."""
    count: Callable[[Model, Batch], Sums]
    """(model in evaluation mode, batch) -> sums over the examples whose `mask` is 1."""
    results: Callable[[Mapping[str, np.ndarray]], dict[str, Any]] = means
    """Totals of `count` over a split, and `examples`, their number -> "eval_NAME" in the log; one
    must be "loss"."""
    examples: Callable[[Any, Array, Batch], Any] = whole_batch
    """(config, key of the step, batch) -> arrays of as many rows, the input of `loss`. It receives
    the whole batch, before `config.optim.accumulate` splits it."""
    operations: Callable[[Any], float] | None = None
    """Operations of the forward pass for one example; None if not known."""
    layers: Callable[[Model], Sequence[Any]] = no_attention
    """Attention layers of the model in order, as `nnx.MultiHeadAttention`: their `attention_fn` can
    be read and replaced."""
    projections: Callable[[Model, Batch], list[Triple]] = no_attention
    """(model, batch) -> the inputs of the `attention_fn` of each attention layer."""
    is_causal: bool = False
    """True if a query attends only to keys up to its own position."""
    distances: Callable[[Any], Any] = no_distances
    """Tree of parameters -> number of layers between each parameter and the output, the exponent of
    `config.optim.layer_decay`."""
    noun: str = "example"
    """Noun for a row of a batch."""

    @property
    def rate(self) -> str:
        """Name of the training throughput in the log, as "images_per_second"."""
        return f"{self.noun}s_per_second"


def opened(
    config: TrainConfig, workdir: Path | None = None, dataset: Dataset | None = None
) -> tuple[Dataset, Task]:
    """Return the data set and the task of a run.

    Args:
        config: config of the run.
        workdir: folder of the run; None for a new one.
        dataset: data set that is not opened; None for the config's.

    Raises:
        ValueError: if the task is not defined, or as its function.
    """
    described = description_of(workdir, config) if workdir else {}
    return configs.definition(config.task).open(config, described, dataset)


class Described(dict[str, Any]):
    """Content of a `task.json`: a missing name raises ValueError."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"task.json lacks {name!r}: it was changed, or is of another version")


def description_of(workdir: Path, config: TrainConfig) -> Described:
    """Return the content of the folder's `task.json`; {} for none.

    Args:
        workdir: folder of a run.
        config: its config.

    Raises:
        ValueError: if the folder is of another task than the config, or for values of other types.
    """
    described = Described(files.read_json(workdir / "task.json") or {})
    for key, kind in {"class_names": list, "channels": int}.items():
        if not isinstance(described.get(key, kind()), kind):
            raise ValueError(f"{workdir / 'task.json'}: {key!r} must be a {kind.__name__}")
    if described and described.get("task") != config.task:
        raise ValueError(
            f"{workdir} holds a run of the task {described.get('task')!r}, and the config is of"
            f" {config.task!r}: choose another --workdir"
        )
    return described


def random_streams(seed: int | Integer[Array, ""]) -> nnx.Rngs:
    """Return the random streams of a run: params, dropout, frequencies, mixup."""
    streams = nnx.Rngs()
    names = ("params", "dropout", "frequencies", "mixup")
    for name, key in zip(names, jax.random.split(jax.random.key(seed), 4), strict=True):
        setattr(streams, name, Stream(key, tag=name))
    return streams


class Stream(nnx.RngStream):
    """Flax's stream of keys, traced in constant time.

    Flax's `count[...] += 1` reads the sharding of a traced count. JAX 0.10 then walks all equations
    so far, for the text of an error: tracing becomes quadratic in the depth of the model.
    """

    def __call__(self) -> Array:
        """Return the next key."""
        key = jax.random.fold_in(self.key[...], self.count[...])
        self.count.set_value(self.count[...] + 1)
        return key
