"""Loss, speed and generation of runs on the same text: a softmax run and its conversions.

    python -m experiments.language_model converted --runs=runs/softmax,runs/window,runs/both

Each run is evaluated on all held-out windows, of its own length or of `length` characters. The nats
that it loses against the first run of the same length, which has softmax attention, are paired,
window by window. Then a forward pass and a pass with gradients of one window take turns, and a text
is continued after the first `after` held-out characters; the best of `repeats` counts.

    converted.csv    loss, nats lost, milliseconds, memory; characters/s and state in generation
"""

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from experiments.language_model import generate, text
from experiments.language_model.model import cross_entropies
from vit import config as configs
from vit.run import runs as run_folders
from vit.speed import converted
from vit.study import harness, launch, statistics, timing

Row = harness.Row
PIECES = 8
"""Pieces of `generate.PIECE` characters in a timed continuation."""


def opened(folder: Path, length: int) -> run_folders.Restored:
    """Return a run, with windows of another length if it is not 0."""
    run = run_folders.restore(folder)
    if not length:
        return run
    dataset = text.dataset(text.read(run.config.data.text), length)
    config = configs.with_values(run.config, {"data.length": length})
    return dataclasses.replace(run, config=config, dataset=dataset)


def beginning(run: run_folders.Restored, after: int) -> np.ndarray:
    """Return the first held-out characters; ValueError if there are fewer."""
    data = run.dataset
    windows = [data.decode(i, None, None, data)["tokens"][:-1] for i in data.evaluation]
    tokens = np.concatenate(windows)[:after]
    if len(tokens) < after:
        raise ValueError(f"--after={after}, but {len(tokens)} characters are held out")
    return tokens


def losses(run: run_folders.Restored, windows: int = 0) -> np.ndarray:
    """Return losses (windows, 2) in nats a character: of all characters, and of the second half.

    Args:
        run: a run of the language model.
        windows: held-out windows that are evaluated, 0 for all.
    """
    graph, state = nnx.split(run.model())
    entropies = jax.jit(lambda state, batch: cross_entropies(nnx.merge(graph, state), batch))
    found, batches = [], -(-windows // run.config.data.batch_size) or None
    for batch in islice(run.eval_batches(), batches):
        values = np.asarray(entropies(state, batch), np.float64)
        halves = [values.mean(axis=1), values[:, values.shape[1] // 2 :].mean(axis=1)]
        found.append(np.stack(halves, axis=1)[np.asarray(batch["mask"]) > 0])
    return np.concatenate(found)[: windows or None]


def continuation(run: run_folders.Restored, after: int, repeats: int) -> Row:
    """Return characters/s and memory of the state in a continuation after held-out characters."""
    tokens = beginning(run, after)
    model, room = run.model(), after + (PIECES + 1) * generate.PIECE
    place = generate.begun(model, tokens, room, seed=0)
    place = next(generate.continued(model, place, 0.8))[1]  # compiled by it

    def pieces() -> jax.Array:
        steps = generate.continued(model, place, 0.8)
        return [next(steps)[0] for _ in range(PIECES)][-1]

    best = timing.race({"pieces": pieces}, repeats)["pieces"].wall
    size = sum(x.nbytes for x in jax.tree.leaves(place.states))
    return {"characters/s": PIECES * generate.PIECE / best, "state, MiB": size / 2**20}


def compared(
    folders: Sequence[Path], length: int, windows: int, after: int, repeats: int
) -> list[Row]:
    """Return the rows of runs of one length, the first of which has softmax attention."""
    restored = [opened(folder, length) for folder in folders]
    beginning(restored[0], after)  # before any work
    found = [losses(run, windows) for run in restored]
    inputs = [next(run.eval_batches())["tokens"][:1, :-1] for run in restored]
    models = [run.model() for run in restored]
    times = converted.timed(models, inputs, lambda model, tokens: model(tokens), repeats)
    rows = []
    for folder, run, each, costs in zip(folders, restored, found, times, strict=True):
        row = {"run": folder.name, "length": run.config.data.length, "windows": len(each)}
        row |= {"attention": converted.attention(run.config)}
        for i, name in enumerate(("loss", "second half")):
            lost = statistics.paired(each[:, i], found[0][:, i])
            row |= {name: each[:, i].mean(), f"{name}, lost": lost.mean}
            row |= {f"{name}, lost ±": lost.standard_error}
        rows.append(row | costs | continuation(run, after, repeats))
    return rows


def main(
    runs: Sequence[str],
    length: int = 0,
    windows: int = 0,
    after: int = 8000,
    repeats: int = 5,
    out: Path = Path("results/language_model"),
) -> None:
    """Print the table and write it.

    Args:
        runs: folders of runs. The first of each length has softmax attention; those after it are
            compared with it.
        length: characters of a window, 0 for the length of the run.
        windows: held-out windows that are evaluated, 0 for all.
        after: characters before the continuation that is timed.
        repeats: timed passes of each run, in turn.
        out: folder of the table.

    Raises:
        ValueError: without runs, for a run of another task, if the first run of a length has no
            softmax attention, or if fewer than `after` characters are held out.
    """
    for folder in runs:
        generate.check(Path(folder))
    groups = converted.by_size(runs, lambda config: length or config.data.length)
    rows = [row for group in groups for row in compared(group, length, windows, after, repeats)]
    harness.show(rows, out / "converted", text=timing.hardware())


if __name__ == "__main__":
    launch.run(main)
