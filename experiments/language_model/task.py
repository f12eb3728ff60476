"""The task of predicting the next character: the second `Task` of the one trainer."""

from functools import cache, partial

import jax.numpy as jnp
from jaxtyping import Array

from experiments.language_model.model import Attention, Decoder, Triple, cross_entropy
from performer.features import FeatureMap, positive
from vit.data import Batch
from vit.task import Sums, Task

NAME = "language model"


@cache
def task(
    characters: int, window: int = 0, first: int = 0, feature_map: FeatureMap = positive
) -> Task:
    """Cross entropy of each next character, in nats.

    Args:
        characters: how many there are.
        window: of exact attention, see `Decoder`; it means nothing to softmax attention.
        first: likewise.
        feature_map: likewise.
    """
    return Task(
        create=partial(
            Decoder, characters=characters, window=window, first=first, feature_map=feature_map
        ),
        loss=loss,
        count=count,
        layers=layers,
        projections=projections,
        by_device=True,
        noun="window",
        name=NAME,
    )


def losses(model: Decoder, batch: Batch) -> Array:
    """The mean over each window, (b,)."""
    tokens = batch["tokens"]
    return jnp.mean(cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]), axis=-1)


def loss(model: Decoder, batch: Batch) -> tuple[Array, Sums]:
    """Their mean."""
    return jnp.mean(losses(model, batch)), {}


def count(model: Decoder, batch: Batch) -> Sums:
    """Their sum over the windows that are no padding."""
    return {"loss": jnp.sum(batch["mask"] * losses(model, batch))}


def layers(model: Decoder) -> list[Attention]:
    """The layers of attention, in order."""
    return [block.attention for block in model.blocks]


def projections(model: Decoder, batch: Batch) -> list[Triple]:
    """What goes into each of them."""
    return model.projections(batch["tokens"][:, :-1])
