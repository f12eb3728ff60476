"""Task: the model, loss and measures of a run, as one value.

`vit.model.classification.task` is the first one, and the only module that knows pictures. Another
is a `Task` of functions, handed with its data set to `vit.run.loop.train`:

    train(config, workdir, data.in_memory(records, held_out), Task(create, loss, count))

Its functions are those of a module, or what a cached function returned: equal tasks are then one,
and their programs are compiled once in a process.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from vit.config import Config
from vit.data import Batch, Dataset
from vit.run import files

Model = Any
"""An `nnx.Module`: only its task knows which."""

Sums = dict[str, Array]
"""Sums over the examples of a batch, by name."""

Triple = tuple[Float[Array, "b s n h"], Float[Array, "b s n h"], Float[Array, "b s n h"]]
"""Queries, keys and values of a layer of attention."""


def all_of_it(config: Config, key: Array, batch: Batch) -> Batch:
    """Return the batch without `bad`."""
    return {name: x for name, x in batch.items() if name != "bad"}


def means(totals: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return each total over the number of examples."""
    return {name: x / totals["examples"] for name, x in totals.items() if name != "examples"}


def no_attention(*_: Any) -> Any:
    """Raise ValueError: reports need to know."""
    raise ValueError(
        "the task of this run does not say where its attention is: give its vit.task.Task the"
        " functions `layers` and `projections`"
    )


def no_distances(*_: Any) -> Any:
    """Raise ValueError: the rate of layers needs to know."""
    raise ValueError(
        "config.optim.layer_decay must be 1.0: the task of this run does not say how far its"
        " parameters are from the output (vit.task.Task.distances)"
    )


class NoSettings(NamedTuple):
    """Settings of a task whose runs are described by their config alone."""


class Task(NamedTuple):
    """A model, its loss, and what is measured and reported of it."""

    create: Callable[..., Model]
    """(config, rngs=`random_streams`) -> a new model, in evaluation mode."""
    loss: Callable[[Model, Any], tuple[Array, Sums]]
    """(model in training mode, examples) -> their mean loss and sums: "train_NAME" of the log."""
    count: Callable[[Model, Batch], Sums]
    """(model in evaluation mode, batch) -> sums over the examples whose `mask` is 1."""
    results: Callable[[Mapping[str, np.ndarray]], dict[str, Any]] = means
    """Totals of `count` over a split, and `examples`, their number -> "eval_NAME" of the log; one
    is "loss"."""
    examples: Callable[[Config, Array, Batch], Any] = all_of_it
    """(config, key of the step, batch) -> arrays of as many rows, which `loss` reads: where what
    belongs to a whole batch is done, before `config.optim.accumulate` parts it."""
    operations: Callable[[Config], float] | None = None
    """Operations of the forward pass for one example; None where nobody has counted them."""
    layers: Callable[[Model], Sequence[Any]] = no_attention
    """The model's layers of attention in order, as `nnx.MultiHeadAttention`: their `attention_fn`
    can be read and exchanged."""
    projections: Callable[[Model, Batch], list[Triple]] = no_attention
    """(model, batch) -> what goes into the `attention_fn` of each of them."""
    replacement: Callable[..., Callable[..., Any]] | None = None
    """(task, config, model, batches) -> (`vit.weights.conversion.Case`) ->
    `vit.weights.conversion.Replaced`, for `vit.convert`; None for
    `vit.weights.conversion.linearized`."""
    is_causal: bool = False
    """True if a query attends only to the keys up to its own place."""
    distances: Callable[[Any], Any] = no_distances
    """Tree of parameters -> for each the number of layers between it and the output, to whose power
    `config.optim.layer_decay` is raised."""
    by_device: bool = False
    """True if each device may compute `loss` of its own rows: nothing in the model draws for the
    rows of a batch, or averages over them, but `vit.model.dropout.Dropout`, `PerformerAttention`
    and `nnx.BatchNorm`. Then `config.optim.accumulate` adds up gradients on each device, and those
    of all devices once."""
    noun: str = "example"
    """Name of a row of a batch."""
    name: str = ""
    """Name in the `task.json` of its runs, by which `SUBJECTS` finds it again."""
    settings: Any = NoSettings()
    """NamedTuple of numbers and words that no field of the config holds; they are in `task.json`,
    and a run is not resumed with others."""
    command: str = ""
    """Command that serves its runs; commands that do not serve them name it."""

    @property
    def rate(self) -> str:
        """Name in the log of how many examples a second are trained on: "images_per_second"."""
        return f"{self.noun}s_per_second"


SUBJECTS: dict[str, Callable[[Config, dict[str, Any]], tuple[Dataset, Task]]] = {}
"""Functions (config of a run, content of its `task.json`) -> its data set and task, by task name.

The content is {} for a new run. The module of a task adds its own function when it is imported; no
module is imported because a folder names it."""


def of_folder(workdir: Path, *names: str) -> dict[str, Any]:
    """Return the content of the folder's `task.json`; {} where there is none.

    Args:
        workdir: folder of a run.
        names: tasks that can be served.

    Raises:
        ValueError: for a run of another task; it names the command that serves the run.
    """
    found = files.noted(workdir / "task.json") or {}
    name = found.get("task")
    if found and name not in names:
        held = f"the task {name!r}" if name else "a task without a name"
        serves = found.get("command") or "vit.run.runs.restore(workdir, dataset, task)"
        raise ValueError(
            f"{workdir} holds a run of {held}, not of {' or '.join(map(repr, names))}:"
            f" {serves} serves it"
        )
    return found


def random_streams(seed: int | Integer[Array, ""]) -> nnx.Rngs:
    """Return the independent streams of a run: params, dropout, frequencies, mixup."""
    streams = nnx.Rngs()
    names = ("params", "dropout", "frequencies", "mixup")
    for name, key in zip(names, jax.random.split(jax.random.key(seed), 4), strict=True):
        setattr(streams, name, Stream(key, tag=name))
    return streams


class Stream(nnx.RngStream):
    """Flax's stream of keys, traced in constant time.

    `count[...] += 1` asks the traced count for its sharding; for the text of that error JAX 0.10
    walks all equations so far, and tracing a model takes time quadratic in its depth.
    """

    def __call__(self) -> Array:
        """Return the next key."""
        key = jax.random.fold_in(self.key[...], self.count[...])
        self.count.set_value(self.count[...] + 1)
        return key
