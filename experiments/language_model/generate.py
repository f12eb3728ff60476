"""Text from a language model, character by character.

    python -m experiments.language_model generate --workdir=runs/lm --prompt="To be" --seed=1

With a Performer's attention the state has a constant size; exact attention keeps all keys and
values. --measure reports the cost of a character after 1,000 and after 100,000 of them, for the run
and, in the same process, for exact attention with its cache, filled at once.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.common import launch
from experiments.language_model import text
from experiments.language_model.attention import Softmax
from experiments.language_model.model import Decoder
from experiments.language_model.task import NAME
from vit.reports import report
from vit.run import runs
from vit.task import of_folder
from vit.weights import conversion

LENGTHS = (1_000, 100_000)
PIECE = 32
"""Characters between two returns from the device."""
SECONDS = 4.0
"""Least time for which a character is timed."""
PREFILL = 512
"""Characters of a known text that go through the model at once."""


class Place(NamedTuple):
    """State of a text so far."""

    logits: Float[Array, "1 c"]
    """Logits of the next character."""
    position: Int[Array, ""]
    states: list[Any]
    key: Array


def begun(model: Decoder, tokens: Int[np.ndarray, " t"], room: int, seed: int) -> Place:
    """Return the state after a text; exact attention has room for `room` characters in all."""
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
        key, own = jax.random.split(place.key)
        hot = place.logits[0] / jnp.where(temperature > 0, temperature, 1)
        drawn = jax.random.categorical(own, hot)
        token = jnp.where(temperature > 0, drawn, jnp.argmax(place.logits[0])).astype(jnp.int32)
        logits, states = model.stream(token[None, None], place.position, place.states)
        return Place(logits[:, -1], place.position + 1, states, key), token

    return jax.lax.scan(step, place, length=PIECE)


def cost(model: Decoder, place: Place, repeats: int = 3) -> dict[str, float]:
    """Return ms a character here, the least of many pieces, and megabytes of the states."""
    steps, times = continued(model, place, 1.0), []
    jax.block_until_ready(next(steps))
    while len(times) < repeats or sum(times) < SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(next(steps))
        times.append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves(place.states))
    return {"ms a character": 1e3 * min(times) / PIECE, "MB": size / 1e6}


def costs(run: runs.Restored, out: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """Return the cost of a character with the attention of the run and with exact attention."""
    model, rng, rows = run.model(), np.random.default_rng(0), []
    exact = conversion.exchanged(run.task, model, [Softmax() for _ in model.blocks])
    for length in lengths:
        tokens = rng.integers(model.head.out_features, size=length).astype(np.int32)
        place = begun(model, tokens, length + 500, 0)
        rows.append({"attention": "of the run", "characters": length} | cost(model, place))
    for length in lengths:
        place = begun(exact, tokens[:1], length + 500, 0)
        caches = [state._replace(position=jnp.int32(length)) for state in place.states]
        place = place._replace(states=caches, position=jnp.int32(length))
        rows.append({"attention": "exact", "characters": length} | cost(exact, place))
    return report.table(rows, out)


def main(
    workdir: Path,
    prompt: str = "\n",
    length: int = 500,
    temperature: float = 0.8,
    seed: int = 0,
    measure: bool = False,
    lengths: Sequence[int] = LENGTHS,
    out: Path = Path("results/language_model/generate"),
) -> None:
    """Print a text, or the table of costs.

    Args:
        prompt: beginning of the text.
        length: characters that follow.
        temperature: 0 for the likeliest ones.
        seed: seed of the draws.
        measure: a table of time and memory in place of text.
        lengths: characters so far, of the table.
    """
    launch.at_least(1, length=length, lengths=min(lengths))
    launch.at_least(0, temperature=temperature)
    of_folder(workdir, NAME)
    run = runs.restore(workdir)
    if measure:
        if run.config.attention.kind == "softmax":
            raise ValueError(f"--measure: {workdir} has softmax attention; use a converted run")
        print(costs(run, out / "generate", lengths))
        return
    if not prompt:
        raise ValueError("--prompt must have at least one character")
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
    launch.run(main, quick={"lengths": (100, 1_000), "length": 50})
