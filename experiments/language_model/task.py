"""The task of predicting the next character: the second `Task` of the one trainer."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from experiments.language_model import text
from experiments.language_model.model import Attention, Decoder, cross_entropies, losses
from vit.config import Config
from vit.data import Batch, Dataset
from vit.task import SUBJECTS, Sums, Task, Triple

NAME, COMMAND = "language model", "python -m experiments.language_model"


class Settings(NamedTuple):
    """Settings of a run, in its `task.json`."""

    length: int = 512
    """Characters of a window of the text."""


@cache
def task(characters: int, settings: Settings) -> Task:
    """Return the task: cross entropy of each next character, in nats.

    Args:
        characters: number of characters.
        settings: settings of the run.
    """
    return Task(
        create=partial(Decoder, characters=characters),
        loss=loss,
        count=count,
        layers=layers,
        projections=projections,
        is_causal=True,
        noun="window",
        name=NAME,
        settings=settings,
        command=COMMAND,
    )


def of_run(config: Config, described: dict[str, Any]) -> tuple[Dataset, Task]:
    """Read the text and the task of a run.

    Args:
        config: config of the run.
        described: content of its `task.json`.

    Raises:
        ValueError: for a text that cannot be read, or has other characters than it had.
    """
    source = config.data.dir
    try:
        settings = Settings(**described["settings"])
    except TypeError as error:
        raise ValueError(f"the settings in task.json are of another version: {error}") from error
    corpus = text.read(source)
    if list(corpus.characters) != described["class_names"]:
        raise ValueError(f"{source or 'the text'} has other characters than when it was learned")
    dataset = text.dataset(corpus, settings.length)
    return dataset, task(dataset.num_classes, settings)


SUBJECTS[NAME] = of_run


def loss(model: Decoder, batch: Batch) -> tuple[Array, Sums]:
    """Return the mean loss of the windows."""
    return jnp.mean(losses(model, batch)), {}


def count(model: Decoder, batch: Batch) -> Sums:
    """Return sums over windows that are not padding: mean loss, and that of the second half."""
    values = cross_entropies(model, batch)
    halves = {"loss": values, "loss_second_half": values[:, values.shape[1] // 2 :]}
    return {name: jnp.sum(batch["mask"] * jnp.mean(x, axis=-1)) for name, x in halves.items()}


def layers(model: Decoder) -> list[Attention]:
    """Return the layers of attention, in order."""
    return [block.attention for block in model.blocks]


def projections(model: Decoder, batch: Batch) -> list[Triple]:
    """Return queries, keys and values of each layer."""
    return model.projections(batch["tokens"][:, :-1])
