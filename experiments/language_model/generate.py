"""Text from a language model, character by character.

    python -m experiments.language_model generate --workdir=runs/lm --prompt="To be" --seed=1

With a Performer's attention the state has one size however long the text; exact attention keeps all
keys and values. --measure says what a character costs after 1,000 and after 100,000 of them, of the
run and, in the same process, of exact attention with its cache, filled up at once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.common import launch
from experiments.language_model import generation, text
from experiments.language_model.attention import Softmax
from experiments.language_model.conversion import exchanged
from experiments.language_model.task import NAME
from vit import report, runs
from vit.task import of_folder

LENGTHS = (1_000, 100_000)


def written(model, characters: tuple[str, ...], prompt: str, length: int, heat: float, seed: int):
    """Writes the prompt and what follows it."""
    tokens = np.asarray(text.encoded(prompt, characters), np.int32)
    room = len(tokens) + length + generation.PIECE
    place, left = generation.begun(model, tokens, room, seed), length
    sys.stdout.write(prompt)
    for piece, _ in generation.continued(model, place, heat):
        sys.stdout.write("".join(characters[i] for i in piece.tolist()[:left]))
        sys.stdout.flush()
        left -= len(piece)
        if left <= 0:
            break
    print()


def measured(model, out: Path, lengths: Sequence[int] = LENGTHS) -> str:
    """The table of what a character costs."""
    rng, rows = np.random.default_rng(0), []
    exact = exchanged(model, [Softmax() for _ in model.blocks])
    for length in lengths:
        tokens = rng.integers(model.head.out_features, size=length).astype(np.int32)
        place = generation.begun(model, tokens, length + 500, 0)
        rows.append(
            {"attention": "of the run", "characters": length} | generation.cost(model, place)
        )
    for length in lengths:
        place = generation.begun(exact, tokens[:1], length + 500, 0)
        caches = [state._replace(position=jnp.int32(length)) for state in place.states]
        place = place._replace(states=caches, position=jnp.int32(length))
        rows.append({"attention": "exact", "characters": length} | generation.cost(exact, place))
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
    """Text, or the table.

    Args:
        workdir: folder of the run.
        prompt: what the text begins with.
        length: characters that follow.
        temperature: 0 for the likeliest ones.
        seed: of what is drawn.
        measure: a table of time and memory in place of text.
        lengths: characters so far, of the table.
        out: folder for the table.
    """
    launch.at_least(1, length=length, lengths=min(lengths))
    launch.at_least(0, temperature=temperature)
    of_folder(workdir, NAME)
    run = runs.restore(workdir)
    if measure and run.config.attention.kind == "softmax":
        raise ValueError(f"--measure: {workdir} has softmax attention; take a converted run")
    if not prompt:
        raise ValueError("--prompt= is empty: give at least one character")
    model = run.model()
    if measure:
        print(measured(model, out / "generate", lengths))
        return
    written(model, run.dataset.class_names, prompt, length, temperature, seed)


if __name__ == "__main__":
    launch.run(main, quick={"lengths": (100, 1_000), "length": 50})
