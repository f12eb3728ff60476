"""Text from a language model, character by character.

    python -m experiments.language_model generate --workdir=runs/lm --prompt="To be" --seed=1

With a Performer's attention the state has a constant size; exact attention keeps all keys and
values.
"""

import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.language_model import text
from experiments.language_model.model import Decoder
from experiments.language_model.task import Config
from vit import config as configs
from vit.config import LARGEST
from vit.run import runs
from vit.study import launch

PIECE = 32
"""Characters between two returns from the device."""
PREFILL = 512
"""Characters of a known text that go through the model at once."""


class Place(NamedTuple):
    """State of a text so far."""

    logits: Float[Array, "1 c"]
    """Logits of the next character."""
    position: Int[Array, ""]
    states: list[Any]
    key: Array


def begun(model: Decoder, tokens: Int[np.ndarray, " t"], capacity: int, seed: int) -> Place:
    """Return the state after a text; exact attention has room for `room` characters in all."""
    graph, state = nnx.split(model)
    place = Place(jnp.zeros(()), jnp.int32(0), model.empty(capacity), jax.random.key(seed))
    for start in range(0, len(tokens), PREFILL):
        place = _read(graph, state, jnp.asarray(tokens[None, start : start + PREFILL]), place)
    return place


@partial(jax.jit, static_argnums=0)
def _read(graph, state, tokens, place: Place) -> Place:
    logits, states = nnx.merge(graph, state).stream(tokens, place.position, place.states)
    return Place(logits[:, -1], place.position + tokens.shape[1], states, place.key)


def continued(model: Decoder, place: Place, temperature: float) -> Iterator[tuple[Array, Place]]:
    """Yield `PIECE` characters after another, and the state after them, without end.

    Each is drawn from softmax(logits / temperature), or is the likeliest with temperature 0.
    """
    graph, state = nnx.split(model)
    while True:
        place, tokens = _piece(graph, state, jnp.float32(temperature), place)
        yield tokens, place


@partial(jax.jit, static_argnums=0)
def _piece(graph, state, temperature, place: Place):
    model = nnx.merge(graph, state)

    def step(place: Place, _):
        key, draw_key = jax.random.split(place.key)
        hot = place.logits[0] / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(draw_key, hot)
        token = jnp.where(temperature > 0, drawn, jnp.argmax(place.logits[0])).astype(jnp.int32)
        logits, states = model.stream(token[None, None], place.position, place.states)
        return Place(logits[:, -1], place.position + 1, states, key), token

    return jax.lax.scan(step, place, length=PIECE)


def check(workdir: Path) -> None:
    """Raise ValueError for a run that is not of a language model."""
    config = configs.of_run(workdir)
    if not isinstance(config, Config):
        raise ValueError(f"{workdir} holds a run of {config.task!r}, not of a language model")


def main(
    workdir: Path,
    prompt: str = "\n",
    length: int = 500,
    temperature: float = 0.8,
    seed: int = 0,
) -> None:
    """Print a text.

    Args:
        prompt: beginning of the text.
        length: characters that follow.
        temperature: 0 for the likeliest ones.
        seed: seed of the draws.
    """
    if not prompt:
        raise ValueError("--prompt must have at least one character")
    for name, x in dict(length=length, seed=seed).items():
        if not 0 <= x <= LARGEST:
            raise ValueError(f"--{name}={x} must be from 0 to {LARGEST}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature={temperature} must be a finite number from 0 on")
    check(workdir)
    run = runs.restore(workdir)
    model, characters = run.model(), run.dataset.class_names
    tokens = np.asarray(text.encoded(prompt, characters), np.int32)
    sys.stdout.write(prompt)
    place = begun(model, tokens, len(tokens) + length + PIECE, seed)
    for piece, _ in continued(model, place, temperature):
        sys.stdout.write("".join(characters[i] for i in piece.tolist()[:length]))
        sys.stdout.flush()
        length -= len(piece)
        if length <= 0:
            break
    print()


if __name__ == "__main__":
    launch.run(main)
