"""Predicts the classes of pictures by a trained run; the data set of the run is not needed.

    python -m vit.predict --workdir=runs/photos cat.jpg folder_of_pictures
    python -m vit.predict --workdir=runs/photos --csv=predictions.csv folder_of_pictures
    python -m vit.predict --workdir=runs/photos --attention=maps cat.jpg

Of a folder all files that look like pictures are taken, those in folders within it, too. A file
that cannot be read is named and counted. With --csv the likeliest classes of every picture go into
that file, batch by batch: a stopped run leaves what is done. Without, they are printed. With
--attention the folder receives a picture for each: where the model looks, by its estimated
attention and by exact attention (`vit.reports.rollout`).
"""

import contextlib
import csv
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import Progress

from vit import use
from vit.config import cli
from vit.config.arguments import launch
from vit.data.sources.source import READ, is_picture
from vit.reports import rollout
from vit.run import devices, files, safety

READERS = 8
"""Threads that decode."""


class Seen(NamedTuple):
    """A picture and its likeliest classes."""

    path: Path
    pixels: Any
    """Input of the model, an array (size, size, c) of uint8."""
    top: list[tuple[str, float]]
    """The likeliest classes with their probabilities."""


def pictures(paths: Iterable[Path]) -> list[Path]:
    """The files, and those in the folders that look like pictures, in order.

    Raises:
        ValueError: for a path that there is not, or when nothing is left.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        inside = sorted(p for p in path.rglob("*") if is_picture(p))
        found += inside if path.is_dir() else [path]
    if not found:
        raise ValueError(f"no pictures: give files, or folders with {', '.join(READ)} in them")
    return found


def predict(
    model: use.Trained,
    paths: Sequence[Path],
    top: int = 5,
    unreadable: Callable[[Path, Exception], Any] = lambda path, error: None,
) -> Iterator[list[Seen]]:
    """Return an iterator over batches of pictures with their likeliest classes.

    Args:
        model: of `vit.load`.
        paths: of files.
        top: how many classes of each.
        unreadable: called for a file that cannot be read, which is left out.
    """

    def read(path: Path) -> tuple[Path, np.ndarray] | None:
        try:
            return path, model.pixels(path)
        except ValueError as error:
            unreadable(path, error)

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(paths), use.LARGEST):
            readable = list(filter(None, pool.map(read, paths[start : start + use.LARGEST])))
            said = []
            if readable:
                logits, _ = model.forward(np.stack([pixels for _, pixels in readable]))
                said = model.prediction(logits).top(top)
            yield [Seen(*each, names) for each, names in zip(readable, said, strict=True)]


def draw_attention(model: use.Trained, seen: Sequence[Seen], folder: Path, start: int) -> None:
    """Writes a picture for each, numbered from `start`: where the model looks."""
    same = model.config.attention.kind == "softmax"
    for number, (path, pixels, top) in enumerate(seen, start):
        maps = jax.tree.map(lambda x: x[0], rollout.maps(model.model, pixels[None]))
        title = f"{path.name}: {top[0][0]} {top[0][1]:.2f}"
        rollout.draw(pixels, title, maps, folder / f"{number:05d}_{path.stem}", same=same)


def line(seen: Seen) -> str:
    """The line that is printed of a picture."""
    return f"{seen.path}  " + "  ".join(f"{name} {p:.3f}" for name, p in seen.top)


@contextlib.contextmanager
def table(path: Path, top: int) -> Iterator[Callable[[Sequence[Seen]], None]]:
    """Make a csv file, and give a function that adds the rows of a batch to it.

    A row is the file, then class and probability in turn, the likeliest first. Rows are on disk
    when the function returns.

    Raises:
        OSError: when the file exists or cannot be written; the message names it.
    """
    head = ["file", *(f"{x} {k + 1}" for k in range(top) for x in ("class", "probability"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.naming(path), path.open("x", newline="", errors="surrogateescape") as file:
        lines = csv.writer(file)

        def add(seen: Sequence[Seen]) -> None:
            lines.writerows([each.path, *itertools.chain(*each.top)] for each in seen)
            file.flush()

        lines.writerow(head)
        yield add


def main(words: list[str]) -> None:
    """The command line."""
    path, number, bad = _CSV.value and Path(_CSV.value), 0, []
    devices.check_alone()
    if path and path.exists():
        raise ValueError(f"--csv={path} exists already: remove it or take another name")
    paths = pictures(map(Path, words[1:]))
    model = use.load(str(_WORKDIR.value), _STEP.value)
    top = min(_TOP.value, len(model.class_names))

    def unreadable(path: Path, error: Exception) -> None:
        bad.append(path)
        print(error, file=sys.stderr)

    def show(seen: Sequence[Seen]) -> None:
        print("".join(f"{line(each)}\n" for each in seen), end="", flush=True)

    with (
        table(path, top) if path else contextlib.nullcontext(show) as add,
        Progress(console=Console(stderr=True), disable=not path) as progress,
    ):
        bar = progress.add_task("pictures", total=len(paths))
        for seen in predict(model, paths, top, unreadable):
            if _ATTENTION.value:
                draw_attention(model, seen, Path(_ATTENTION.value), number)
            add(seen)
            number += len(seen)
            progress.update(bar, completed=number + len(bad))
            if safety.unread() and not (path or _ATTENTION.value):
                break
    places = " and ".join(filter(None, [_CSV.value, _ATTENTION.value]))
    written = f" -> {places}" if places and number else ""
    print(f"{number} pictures{written}; {len(bad)} could not be read", file=sys.stderr)
    if not number:
        sys.exit(1)
    name = f"{Path(_WORKDIR.value).name}.stablehlo"
    print(f"a file for other programs: {cli.command('export', workdir=_WORKDIR.value, out=name)}")


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the run", required=True)
    _STEP = flags.DEFINE_string("step", None, "of the checkpoint, or best; else the newest")
    _TOP = flags.DEFINE_integer("top", 5, "how many classes of each picture", 1)
    _CSV = flags.DEFINE_string("csv", None, "file of the predictions, instead of printing them")
    _ATTENTION = flags.DEFINE_string("attention", None, "folder of pictures of the attention")
    launch(main, words=True)
