"""What may be meant by a folder that follows no convention, as a command.

These are guesses. They stand in messages, never in a data set: each is read first, and the first
that can be read is shown.
"""

import contextlib
import itertools
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from vit.config.cli import command
from vit.data.sources import arrays, parquet, table_hints
from vit.data.sources.folders import folders, has_pictures, is_part
from vit.data.sources.source import Source, is_picture
from vit.data.sources.table_hints import part_of
from vit.data.sources.words import NONE, Words

Guess = tuple[Path, Words] | str
"""A folder and words that may be meant, or a sentence on why none can be."""

FEW = 4
"""Folders that are looked into."""
FOREIGN = {
    "*.tfrecord*": "TFRecords are not read: prepare the data set with TFDS, tfds build"
    " --file_format=array_record, and train on it with --config.data.name and --config.data.dir",
    "data_batch_*": "pickled files may run code and are not read: store the arrays with"
    " numpy.savez('cifar.npz', x_train=..., y_train=..., x_test=..., y_test=...)",
    "*.pkl": "pickled files may run code and are not read: store arrays x_train, y_train, ... with"
    " numpy.savez",
    "*.h5": "HDF5 is not read: store arrays x_train, y_train, ... with numpy.savez",
    "*.mat": "MATLAB's files are not read: write a table with the file and the class of each"
    " picture for --table",
    "*.tar": "tar files, as WebDataset's, are not read: unpack them, and write a table with the"
    " file and the class of each picture for --table",
}
"""Files of other formats, and what to do with them."""
DIGITS = (
    "import numpy as n; r = lambda p: n.loadtxt(p, n.uint8, delimiter=',', skiprows=1); n.savez({})"
)
FLOWERS = (
    "import scipy.io as s; d = {folder!r}; y = s.loadmat(d + '/imagelabels')['labels'][0];"
    " p = s.loadmat(d + '/setid'); rows = [(f'{{i:05}}', str(y[i - 1]), k) for k in ('trnid',"
    " 'valid', 'tstid') for i in p[k][0]]; open(d + '/labels.csv', 'w').write(chr(10).join("
    "map(','.join, [('id', 'label', 'part'), *rows])))"
)
"""Programs that write what is not read as a file that is read."""


def hint(folder: Path, read: Callable[[Path, Words], Source]) -> str:
    """Return the end of a message: the command that is probably meant, or what to do.

    Args:
        folder: folder of the source.
        read: the reader, which raises ValueError if a guess cannot be read.
    """
    if written := _written(folder):
        return written
    reasons = []
    for guess in guesses(folder):
        try:
            if isinstance(guess, str):
                raise ValueError(guess)
            read(*guess)
            source, words = guess
            return f". Probably meant: {command('prepare', source=source, **words.flags())}"
        except ValueError as error:
            reasons += [str(error)] * ("a picture has one class" in str(error))
    places = (folder, *folders(folder))
    for pattern, what in FOREIGN.items():
        reasons += [what] * any(any(place.glob(pattern)) for place in places)
    reasons += filter(None, [unpack(folder)])
    if has_pictures(folder):
        reasons.append("Put the pictures of each class into a folder, or write a table for --table")
    return f". {reasons[0]}" if reasons else ""


def unpack(path: Path) -> str:
    """Return how the archives at a path or in it are unpacked; "" if there are none."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if re.search(r"\.(zip|tgz|tar\.\w+|7z|rar)$", file.name.lower()):
            program = "unzip" if file.suffix.lower() == ".zip" else "tar xf"
            return f"Archives are not read: unpack {file.name} first, as with {program} {file}"
    return ""


def _written(folder: Path) -> str:
    """Return two commands for what a short program must write in another form."""
    program, words = _digits(folder), NONE
    if (folder / "imagelabels.mat").exists() and (folder / "setid.mat").exists():  # flowers-102
        program = FLOWERS.format(folder=str(folder))
        splits = ("trnid:train", "valid:validation", "tstid:test")
        words = Words(("labels.csv",), "jpg/image_{id}.jpg", "{label}", "{part}", splits)
    then = command("prepare", source=folder, **words.flags())
    return f". Probably meant: python -c {shlex.quote(program)} && {then}" * bool(program)


def _digits(folder: Path) -> str:
    """Return a program for tables of a label and the pixels of a square, as Kaggle's digits."""
    given = {}
    for path in filter(Path.is_file, sorted(folder.glob("*.csv"))):
        with path.open(errors="replace") as file:
            head = file.readline().split(",")
        side, part = round((len(head) - 1) ** 0.5), part_of(path.stem).replace("validation", "val")
        if head[0] == "label" and side > 1 and side**2 == len(head) - 1:
            rows, part = f"r({str(path)!r})", part or "train"
            given[f"x_{part}"] = f"{rows}[:, 1:].reshape(-1, {side}, {side})"
            given[f"y_{part}"] = f"{rows}[:, 0]"
    arrays = [repr(str(folder / "pixels.npz")), *(f"{name}={x}" for name, x in given.items())]
    return DIGITS.format(", ".join(arrays)) * bool(given)


def guesses(folder: Path) -> Iterator[Guess]:
    """Yield what may be meant, the likeliest first."""
    yield from ((folder, words) for words in (*_PUBLISHED, *_arrays(folder)))
    described = [*table_hints.described(folder)]
    yield from (x for x in described if isinstance(x, str))
    ranked = [(table_hints.rank(x), x) for x in described if isinstance(x, Words)]
    for rank in (0, 1):  # columns of a usual name, then folders in the names of pictures
        yield from ((folder, words) for each, words in ranked if each == rank)
    yield from _folders(folder)
    yield from ((folder, words) for _, words in ranked)
    if not all(is_part(path.name) for path in _below(folder)):
        yield folder, Words(classes=(".",))


_JOINED = {"split": "{2}", "splits": ("1:train", "0:test"), "no_header": True}
_PUBLISHED = (
    Words(("images.txt+train_test_split.txt",), "images/{1}", "{1:folder}", **_JOINED),
    Words(
        ("val/val_annotations.txt:validation",),
        "val/images/{0}",
        "{1}",
        no_header=True,
        classes=("train",),
    ),
    Words(
        ("list_attr_celeba.csv+list_eval_partition.csv",),
        "img_align_celeba/img_align_celeba/{image_id}",
        "{Smiling}",
        "{partition}",
        ("0:train", "1:validation", "2:test"),
    ),
)
"""CUB-200-2011, Tiny ImageNet, and CelebA with one of its attributes."""


def _arrays(folder: Path) -> Iterator[Words]:
    """Yield arrays of pictures in npz files, and columns of parquet files."""
    with contextlib.suppress(ValueError):
        pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
        paths = sorted(folder.glob("*.npz"))
        for path in paths:
            place = f"{path.name}/" * (len(paths) > 1)
            members = arrays.loaded(path)
            for (image, x), (label, y) in itertools.product(members.items(), repeat=2):
                if x.ndim > 2 and x.dtype == np.uint8 and y.shape == x.shape[:1]:
                    part = part_of(image) or part_of(path.stem) or "train"
                    pairs[part].append((place + image, place + label))
        for each in zip(*pairs.values(), strict=False):  # the first pair of each split, ...
            parts = [f":{part}" * (len(pairs) > 1) for part in pairs]
            images, labels = ([x[i] + y for x, y in zip(each, parts, strict=True)] for i in (0, 1))
            yield Words(images=images, labels=labels)
        for path in parquet.paths(folder)[:1]:
            images, labels = parquet.fitting(path)
            labels = sorted(labels, key=lambda x: x.lower() not in table_hints.LABELS)
            yield from (Words(images=(x,), labels=(y,)) for x in images for y in labels)


def _folders(folder: Path) -> Iterator[Guess]:
    """Yield the levels of folders that may be classes."""
    tops = _below(folder)
    levels = [_level(path) for path in tops]
    inner = [(top, x) for top, x in zip(tops, levels, strict=True) if len(_below(x)) > 1]
    names = [str(level.relative_to(folder)) for _, level in inner]
    parts = [part_of(top.name) for top, _ in inner]
    if "train" in parts and len({*parts} - {""}) == len(parts) > 1:
        yield folder, Words(classes=[f"{x}:{part}" for x, part in zip(names, parts, strict=True)])
    if len(inner) > 1 and len({re.sub(r"\d+", "", top.name) for top, _ in inner}) == 1:
        yield folder, Words(classes=names)
    if len(inner) > 1:
        yield from ((folder, Words(classes=(name,))) for name in names)
    pairs = sorted(zip(tops, levels, strict=True), key=lambda x: len(_below(x[1])) < 2)
    for top, level in pairs[:FEW]:
        yield from ((path, NONE) for path in dict.fromkeys((level, level.parent, top)))
        yield from _folders(level)


def _below(folder: Path) -> list[Path]:
    return [path for path in folders(folder) if has_pictures(path)]


def _level(folder: Path) -> Path:
    """Return the first folder, this one or below it, that has not one folder of pictures alone."""
    below = _below(folder)
    is_passed = len(below) == 1 and not any(map(is_picture, folder.iterdir()))
    return _level(below[0]) if is_passed else folder
