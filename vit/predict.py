"""Predict the classes of pictures by a trained run; the data set of the run is not needed.

    performer-vit predict --workdir=runs/photos cat.jpg folder_of_pictures
    performer-vit predict --workdir=runs/photos --csv=predictions.csv folder_of_pictures
    performer-vit predict --workdir=runs/photos --attention=maps cat.jpg

Folders are searched recursively for pictures. Unreadable files are reported and skipped. The most
likely classes are printed; with --csv they are written to that file, batch by batch. With
--attention that folder receives a figure for each picture: the attention to each patch, estimated
and exact (`vit.reports.rollout`).
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from csv import writer
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit import config as configs
from vit import use
from vit.config import arguments, cli
from vit.data.sources import folders
from vit.data.sources.source import READ
from vit.data.sources.words import check_bits
from vit.reports import attention_report, rollout
from vit.run import devices
from vit.storage import buckets, files, streams

READERS = 8
"""Threads that decode pictures."""


class Predicted(NamedTuple):
    """A picture and its most likely classes."""

    path: Path
    pixels: Any
    """Input of the model, an array (size, size, c) of uint8."""
    top: list[tuple[str, float]]
    """Most likely classes with their probabilities."""


def pictures(paths: Iterable[Path]) -> list[Path]:
    """Return the files, and the pictures in the folders, in order.

    Raises:
        ValueError: for a path that does not exist, or without any picture.
    """
    files = []
    for path in paths:
        buckets.check_local(path)
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        files += folders.pictures(path) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no pictures: give files, or folders with {', '.join(READ)} in them")
    return files


def predict(
    model: use.Trained,
    paths: Sequence[Path],
    top: int = 5,
    unreadable: Callable[[Path, Exception], Any] = lambda path, error: None,
    bits: int = 16,
) -> Iterator[list[Predicted]]:
    """Yield batches of pictures with their most likely classes.

    Args:
        model: as returned by `vit.load`.
        paths: files.
        top: number of classes per picture.
        unreadable: called with the path and the error of a file that cannot be read.
        bits: as in `Trained.pixels`.
    """

    def read(path: Path) -> tuple[Path, np.ndarray] | None:
        try:
            return path, model.pixels(path, bits)
        except ValueError as error:
            unreadable(path, error)

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(paths), use.LARGEST):
            readable = list(filter(None, pool.map(read, paths[start : start + use.LARGEST])))
            tops = []
            if readable:
                logits, _ = model.forward(np.stack([pixels for _, pixels in readable]))
                tops = model.prediction(logits).top(top)
            yield [Predicted(*each, names) for each, names in zip(readable, tops, strict=True)]


def draw_attention(
    model: use.Trained, batch: Sequence[Predicted], folder: Path, start: int
) -> None:
    """Write a figure of the attention to each picture, numbered from `start`."""
    same = model.config.attention.kind == "softmax"
    for number, (path, pixels, top) in enumerate(batch, start):
        maps = jax.tree.map(lambda x: x[0], rollout.maps(model.model, pixels[None]))
        title = f"{path.name}: {top[0][0]} {top[0][1]:.2f}"
        rollout.draw(pixels, title, maps, folder / f"{number:05d}_{path.stem}", same=same)


def line(predicted: Predicted) -> str:
    """Return the printed line of a picture."""
    return f"{predicted.path}  " + "  ".join(f"{name} {p:.3f}" for name, p in predicted.top)


@contextlib.contextmanager
def table(path: Path, top: int) -> Iterator[Callable[[Sequence[Predicted]], None]]:
    """Create a csv file and yield a function that appends the rows of a batch.

    A row is the file, then classes and probabilities in turn, the most likely class first.

    Raises:
        OSError: when the file exists or cannot be written; the message names it.
    """
    head = ["file", *(f"{x} {k + 1}" for k in range(top) for x in ("class", "probability"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.naming(path), path.open("x", newline="", errors="surrogateescape") as file:
        lines = writer(file)

        def add(batch: Sequence[Predicted]) -> None:
            lines.writerows([each.path, *itertools.chain(*each.top)] for each in batch)
            file.flush()

        lines.writerow(head)
        yield add


def main(
    *paths: Path,
    workdir: Path,
    task: str = "",
    step: str | None = None,
    top: int = 5,
    csv: Path | None = None,
    attention: Path | None = None,
    bits: int = 16,
) -> None:
    """Run the command.

    Args:
        top: number of classes per picture.
        csv: file for the predictions, which are then not printed.
        attention: folder for figures of the attention.
        bits: bits of grey values that files store in 16, as --bits of `vit.prepare`.
    """
    number, bad = 0, []
    devices.check_alone()
    configs.use(task)
    check_bits(bits)
    if top < 1:
        raise ValueError(f"--top={top} must be at least 1")
    if csv:
        buckets.check_local(csv, "--csv=")
    if csv and csv.exists():
        raise ValueError(f"--csv={csv} exists already: remove it or choose another name")
    if attention:
        attention_report.check_attention(workdir, configs.of_run(workdir))
    files = pictures(paths)
    print(f"loading {workdir} and compiling the model", file=sys.stderr)
    model = use.load(workdir, step)
    top = min(top, len(model.class_names))

    def unreadable(path: Path, error: Exception) -> None:
        bad.append(path)
        print(error, file=sys.stderr)

    def show(batch: Sequence[Predicted]) -> None:
        print("".join(f"{line(each)}\n" for each in batch), end="", flush=True)

    with (
        table(csv, top) if csv else contextlib.nullcontext(show) as add,
        Progress(console=Console(stderr=True), disable=not csv) as progress,
    ):
        bar = progress.add_task("pictures", total=len(files))
        for batch in predict(model, files, top, unreadable, bits):
            if attention:
                draw_attention(model, batch, attention, number)
            add(batch)
            number += len(batch)
            progress.update(bar, completed=number + len(bad))
            if streams.is_broken() and not (csv or attention):
                break
    places = " and ".join(map(str, filter(None, [csv, attention])))
    written = f" -> {places}" if places and number else ""
    print(f"{number} pictures{written}; {len(bad)} could not be read", file=sys.stderr)
    if not number:
        sys.exit(1)
    command = cli.command("export", workdir=workdir, out=f"{workdir.name}.stablehlo")
    print(f"to serve it elsewhere: {command}", file=sys.stderr)


if __name__ == "__main__":
    arguments.run(main)
