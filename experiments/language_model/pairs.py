"""Multi-query associative recall (Arora et al. 2023): values of keys that were seen long ago.

    k1 v1 k2 v2 ... kp vp  _ _ _ ... _  k5 k2 k2 k7 ...

A sequence of t tokens begins with p = t / 16 different keys, each with a value behind it, and ends
with t / 4 keys, of which the value is asked: more than half of the sequence lies between, of the
one token that is no key and no value. All are drawn uniformly: chance is one over `VALUES`.
"""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from experiments.language_model.model import Decoder, cross_entropy
from vit.data import Batch, Dataset
from vit.task import Sums, Task

KEYS, VALUES = 64, 64
CHARACTERS = 1 + KEYS + VALUES
HELD_OUT = 512
"""Sequences that are evaluated on."""


def example(length: int, seed: int, number: int, *_: Any) -> Batch:
    """Tokens (length,), and the values asked, -1 where nothing is."""
    rng = np.random.default_rng([seed, number])
    count, asked = length // 16, length // 4
    keys = 1 + rng.permutation(KEYS)[:count]
    values = 1 + KEYS + rng.integers(VALUES, size=count)
    tokens, targets = np.zeros(length, np.int32), np.full(length, -1, np.int32)
    tokens[: 2 * count] = np.stack([keys, values], axis=1).reshape(-1)
    chosen = rng.integers(count, size=asked)
    tokens[-asked:], targets[-asked:] = keys[chosen], values[chosen]
    return {"tokens": tokens, "targets": targets}


def dataset(length: int, number: int, seed: int = 0) -> Dataset:
    """So many sequences to train on; those held out are others.

    Raises:
        ValueError: for a length that has no pair, or more than there are keys.
    """
    if not 1 <= length // 16 <= KEYS:
        raise ValueError(f"a length is from 16 to {16 * KEYS + 15}, got {length}")
    return Dataset(
        range(number),
        range(number, number + HELD_OUT),
        tuple(map(str, range(CHARACTERS))),
        decode=partial(_decoded, length, seed),
        blank=partial(_blank, length),
    )


def _decoded(length: int, seed: int, number: int, *_: Any) -> Batch:
    return example(length, seed, number)


def _blank(length: int, *_: Any) -> Batch:
    return {"tokens": np.zeros(length, np.int32), "targets": np.full(length, -1, np.int32)}


def _measured(model: Decoder, batch: Batch) -> tuple[Array, Array]:
    """Loss and share of right answers of each sequence, (b,)."""
    logits, targets = model(batch["tokens"]), batch["targets"]
    asked = targets >= 0
    entropy = cross_entropy(logits, jnp.maximum(targets, 0))
    right = jnp.argmax(logits, axis=-1) == targets
    number = jnp.sum(asked, axis=-1)
    return jnp.sum(entropy * asked, axis=-1) / number, jnp.sum(right & asked, axis=-1) / number


def loss(model: Decoder, batch: Batch) -> tuple[Array, Sums]:
    """Mean cross entropy of the values asked, and right answers."""
    losses, right = _measured(model, batch)
    return jnp.mean(losses), {"accuracy": jnp.sum(right)}


def count(model: Decoder, batch: Batch) -> Sums:
    """Sums over the sequences that are no padding."""
    losses, right = (jnp.where(batch["mask"] > 0, x, 0) for x in _measured(model, batch))
    return {"loss": jnp.sum(losses), "accuracy": jnp.sum(right)}


def create(config, window: int, *, rngs: nnx.Rngs) -> Decoder:
    """A new decoder."""
    return Decoder(config, characters=CHARACTERS, window=window, rngs=rngs)


@cache
def task(window: int) -> Task:
    """Recall with a window of so many tokens; 0 for none."""
    new = partial(create, window=window)
    return Task(new, loss, count, by_device=True, noun="sequence", name="recall")
