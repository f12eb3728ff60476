"""Text from a decoder, a character at a time, and what a character costs after a long text."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.language_model.model import Decoder

PIECE = 32
"""Characters between two returns from the device."""
SECONDS = 4.0
"""For which a character is timed, at least."""
PREFILL = 512
"""Characters of a known text that go through the model at once."""


class Place(NamedTuple):
    """Where a text stands."""

    logits: Float[Array, "1 c"]
    """Of the next character."""
    position: Int[Array, ""]
    states: list[Any]
    key: Array


def begun(model: Decoder, tokens: Int[np.ndarray, " t"], room: int, seed: int) -> Place:
    """After this text; exact attention has room for `room` characters in all."""
    graph, state = nnx.split(model)
    place = Place(jnp.zeros(()), jnp.int32(0), model.empty(room), jax.random.key(seed))
    for start in range(0, len(tokens), PREFILL):
        place = _read(graph, state, jnp.asarray(tokens[None, start : start + PREFILL]), place)
    return place


@partial(jax.jit, static_argnums=0)
def _read(graph, state, tokens, place: Place) -> Place:
    logits, states = nnx.merge(graph, state).stream(tokens, place.position, place.states)
    return Place(logits[:, -1], place.position + tokens.shape[1], states, place.key)


def continued(model: Decoder, place: Place, temperature: float) -> Iterator[tuple[Array, Place]]:
    """`PIECE` characters after another, and where the text stands then; without end.

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
        key, own = jax.random.split(place.key)
        hot = place.logits[0] / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(own, hot)
        token = jnp.where(temperature > 0, drawn, jnp.argmax(place.logits[0])).astype(jnp.int32)
        logits, states = model.stream(token[None, None], place.position, place.states)
        return Place(logits[:, -1], place.position + 1, states, key), token

    return jax.lax.scan(step, place, length=PIECE)


def cost(model: Decoder, place: Place, repeats: int = 3) -> dict[str, float]:
    """Milliseconds for a character here, the least of many pieces, and megabytes of the states."""
    steps = continued(model, place, 1.0)
    times = []
    jax.block_until_ready(next(steps))
    while len(times) < repeats or sum(times) < SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(next(steps))
        times.append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves(place.states))
    return {"ms a character": 1e3 * min(times) / PIECE, "MB": size / 1e6}
