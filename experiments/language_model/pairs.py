"""Multi-query associative recall (Arora et al. 2023): values of keys that were seen long ago.

    k1 v1 k2 v2 ... kp vp  _ _ _ ... _  k5 k2 k2 k7 ...

A sequence of t tokens begins with eight different keys, each with a value behind it, and ends with
t / 4 keys, of which the value is asked. Between lies one token that is no key and no value: the
distance grows with t, the task does not. Chance is one over `VALUES`, and 1 / 8 for a model that
knows the values of the sequence and not whose they are.

Each token is embedded together with the one before it, as the convolutions of models of recall do:
one layer of attention then can recall.
"""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.language_model.model import Decoder, cross_entropy
from experiments.language_model.task import COMMAND
from vit.config import Config
from vit.data import Batch, Dataset
from vit.task import Sums, Task

KEYS, VALUES, PAIRS = 16, 16, 8
CHARACTERS = 1 + KEYS + VALUES
HELD_OUT = 512
"""Sequences that are evaluated on."""


def example(length: int, seed: int, number: int, *_: Any) -> Batch:
    """Tokens (length,), and the values asked, -1 where nothing is."""
    rng = np.random.default_rng([seed, number])
    asked = length // 4
    keys = 1 + rng.permutation(KEYS)[:PAIRS]
    values = 1 + KEYS + rng.integers(VALUES, size=PAIRS)
    tokens, targets = np.zeros(length, np.int32), np.full(length, -1, np.int32)
    tokens[: 2 * PAIRS] = np.stack([keys, values], axis=1).reshape(-1)
    chosen = rng.integers(PAIRS, size=asked)
    tokens[-asked:], targets[-asked:] = keys[chosen], values[chosen]
    return {"tokens": tokens, "targets": targets}


def dataset(length: int, number: int, seed: int = 0) -> Dataset:
    """So many sequences to train on; those held out are others.

    Raises:
        ValueError: for a length that the pairs and the keys asked do not fit in.
    """
    if length < 4 * PAIRS:
        raise ValueError(f"a length is at least {4 * PAIRS}, got {length}")
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


class Bigrams(nnx.Module):
    """Tokens (b, t) -> the sum of the embeddings of each and of the one before, (b, t, width)."""

    def __init__(self, tokens: int, width: int, *, rngs: nnx.Rngs):
        self.own, self.before = (nnx.Embed(tokens, width, rngs=rngs) for _ in range(2))

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
        """The first token has itself before it."""
        before = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
        return self.own(tokens) + self.before(before)


def create(config: Config, window: int, *, rngs: nnx.Rngs) -> Decoder:
    """A new decoder."""
    model = Decoder(config, characters=CHARACTERS, window=window, rngs=rngs)
    model.embed = Bigrams(CHARACTERS, config.model.size.width, rngs=rngs)
    return model


@cache
def task(window: int) -> Task:
    """Recall with a window of so many tokens; 0 for none."""
    new = partial(create, window=window)
    return Task(new, loss, count, by_device=True, noun="sequence", name="recall", command=COMMAND)
