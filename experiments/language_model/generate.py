"""Text from a language model, character by character.

    python -m experiments.language_model generate --workdir=runs/lm --prompt="To be" --seed=1

With a Performer's attention the state has one size however long the text; exact attention keeps all
keys and values. --measure says what a character costs after 1,000 and after 100,000 of them, of the
run and, in the same process, of exact attention with its cache, filled up at once.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import launch
from experiments.language_model import generation, runs, text
from experiments.language_model.attention import Softmax
from experiments.language_model.conversion import exchanged
from vit import report

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


def measured(model, out: Path, lengths: tuple[int, ...] = LENGTHS) -> str:
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


def main() -> None:
    """Text, or the table."""
    workdir = Path(str(_WORKDIR.value))
    run, _ = runs.restore(workdir)
    if _MEASURE.value and run.config.attention.kind == "softmax":
        raise ValueError(f"--measure: {workdir} has softmax attention; take a converted run")
    model, prompt = run.model(), str(_PROMPT.value)
    if not prompt:
        raise ValueError("--prompt= is empty: give at least one character")
    if _MEASURE.value:
        lengths = (100, 1_000) if _QUICK.value else LENGTHS
        print(measured(model, Path(str(_OUT.value)), lengths))
        return
    characters, heat = run.dataset.class_names, float(_TEMPERATURE.value)
    written(model, characters, prompt, int(_LENGTH.value), heat, int(_SEED.value))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _PROMPT = flags.DEFINE_string("prompt", "\n", "what the text begins with")
    _LENGTH = flags.DEFINE_integer("length", 500, "characters that follow", lower_bound=1)
    _TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0: the likeliest", lower_bound=0)
    _SEED = flags.DEFINE_integer("seed", 0, "of what is drawn", lower_bound=0)
    _MEASURE = flags.DEFINE_bool("measure", False, "a table of time and memory in place of text")
    _OUT = flags.DEFINE_string("out", "results/generate", "of the table, without suffix")
    _QUICK = flags.DEFINE_bool("quick", False, "shorter texts")
    launch.run(main)
