"""Turn raw pictures into a TFDS data set in array_record form, without tensorflow.

    performer-vit prepare --source=DIR [--out=data] [--name=NAME] [--max_side=320]

Read are these published conventions:

    class folders <split>/<class>/* with the splits train, validation (or val) and test; or
                  <class>/* (ImageFolder of torchvision and TFDS)
    metadata.csv  or .jsonl or .parquet, with file_name and label (Hugging Face's image folder)
    parquet files whose metadata name an Image and a ClassLabel (Hugging Face): train-*.parquet, ...
    npz files     with the names of Keras (x_train, y_train, ...) or MedMNIST (train_images, ...)
    IDX files     train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-... (MNIST and its family),
                  each plain or as .gz
    ILSVRC2012    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, which are never unpacked

Anything else is described by flags:

    --table=labels.csv --picture='train/{id}.jpg' --label='{breed}'
    --classes=color                 the folder whose folders are the classes
    --images=imgs --labels=targets  arrays of npz files, or columns of parquet files

A source that follows no convention and is not described is refused, with the command that is
probably meant. A table of the classes with the counts of each split is printed first; --dry_run
stops there.

If there is nothing to evaluate on, a share of every class is held out as "validation". The command
that trains on the result is printed. JPEG and PNG files are stored unchanged; other formats, colour
models other than grey or RGB, and rotations noted in EXIF are converted: WebP to JPEG of quality
95, others to PNG, transparent pixels on white. With --max_side=320 a
picture whose shorter side is longer is resized to it, a JPEG again at quality 95: training then
decodes fewer pixels. Lines at the end count the files that were read, and the others with the
reason. Files that are no images, or truncated ones, are named and left out; more than
`max_bad_files` of them are an error, and nothing is written then. Nor is it if the run is stopped,
or the disk full; SIGKILL leaves `OUT/NAME/incomplete.*`. Nothing in the source is executed.
"""

import collections
import contextlib
import functools
import io
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging
from PIL import Image, ImageOps

from vit.config import arguments
from vit.config.cli import command
from vit.data import augment
from vit.data.sources import folders, forms, ilsvrc2012
from vit.data.sources.source import Example, Source, with_validation
from vit.data.sources.words import NONE, Words
from vit.storage import buckets, machine

VERSION = "1.0.0"
VALIDATION = 0.1
"""Share that is held out if there is nothing to evaluate on."""
FEW = 30
"""Pictures to evaluate on below which `prepare` warns."""
INSPECTED = 200
"""Pictures by which a grey data set is detected."""
GREY = {"1", "L", "LA"}
"""Pillow's modes of grey pictures."""
END_OF_JPEG = b"\xff\xd9"
AHEAD = 4
"""Pictures for each core that are read before they are written."""


def prepare(
    source: Path,
    out: Path = Path("data"),
    name: str = "",
    max_bad_files: int = 10,
    words: Words = NONE,
    *,
    validation: float | None = None,
    seed: int = 0,
    max_side: int = 0,
    files: int = 0,
    channels: int = 0,
    dry_run: bool = False,
) -> dict[str, int]:
    """Write the data set `out/name/1.0.0`.

    Args:
        source: folder with raw pictures.
        out: folder of TFDS data sets; made if it does not exist. For gs://... the data set is
            written to the folder of temporary files and uploaded.
        name: name of the data set, lower case letters, digits and underscores; the folder's
            if empty.
        max_bad_files: number of unreadable files that are tolerated.
        words: description of a source that follows no convention.
        validation: share of training that is held out; None: 0.1 if there is no other split, else
            nothing.
        seed: seed of the held-out part.
        max_side: largest shorter side of a picture in pixels; 0: no limit.
        files: files of each split, at most as many as it has pictures; 0: by their bytes, as TFDS.
        channels: 1 converts pictures to grey, 3 to colour. 0: the data set is grey if a sample of
            its pictures is; one in colour is then an error.
        dry_run: print the table of classes and stop; nothing is written.

    Returns:
        The number of examples of each split, and under "skipped" the number of files left out.

    Raises:
        ValueError: if the source follows no convention and is not described, files are
            inconsistent, the name is taken, or too many files are bad.
        OSError: if the data set cannot be written; nothing stays then.
    """
    if min(max_bad_files, seed, max_side, files) < 0:
        raise ValueError("--max_bad_files, --seed, --max_side and --files must not be negative")
    if channels not in (0, 1, 3):
        raise ValueError(f"--channels={channels} must be 1 (grey), 3 (colour) or 0 (as they are)")
    buckets.check_local(source, "--source=")
    opened = forms.read(source, words)
    name = name or default_name(source)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"--name={name!r} must be lower case letters, digits and underscores, a letter first"
        )
    target = out / name / VERSION
    if target.exists() and not dry_run:
        raise ValueError(f"{target} exists already; remove it or take another --name or --out")
    if validation is not None or list(opened.splits) == ["train"]:
        opened = with_validation(opened, VALIDATION if validation is None else validation, seed)
    print("\n".join(folders.table(opened)), flush=True)
    if dry_run:
        print("\n".join(folders.account(source, opened)))
        return {split: number.total() for split, number in opened.counts.items()}
    opened = opened._replace(channels=channels) if channels else _with_channels(opened)
    skipped: list[str] = []

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        written = 0
        options = dict(max_side=max_side, bits=words.bits, is_grey=not channels)
        whole = partial(encode, channels=opened.channels, **options)
        for number, (example, result) in enumerate(encoded(opened.splits[split](), whole)):
            try:
                image = result()
            except InColour as error:
                raise ValueError(f"{example.name}: {error}") from error
            except Exception as error:  # PIL raises many kinds for broken files
                skipped.append(example.name)
                print(f"skipped {example.name}: {error}", file=sys.stderr)
                if len(skipped) > max_bad_files:
                    raise ValueError(
                        f"more than --max_bad_files={max_bad_files} files are no readable images;"
                        f" the last one was {example.name}: {error}"
                    ) from error
                continue
            name = os.fsencode(Path(example.name).name).decode(errors="replace")
            yield f"{number:09d}", {"image": image, "label": example.label, "file_name": name}
            written += 1
        if written < max(1, files):
            more = f", fewer than --files={files}" * bool(files)
            raise ValueError(f"{source} has {written} readable images of split {split!r}{more}")

    with buckets.filled(out, "dataset_info.json") as folder, _removed_if_empty(folder, name):
        builder = _Builder(name, opened, examples, folder)
        parted = tfds.download.DownloadConfig(num_shards=files or None)
        silent = contextlib.redirect_stdout(io.StringIO())  # TFDS announces a download
        with tempfile.TemporaryDirectory() as downloads, silent:
            try:
                builder.download_and_prepare(download_dir=downloads, download_config=parted)
            except RuntimeError as error:  # array_record's, as on a full disk
                raise OSError(f"{target} cannot be written: {error}") from error
    print("\n".join(folders.account(source, opened, {*skipped})))
    counts = {split: info.num_examples for split, info in builder.info.splits.items()}
    few = counts.get("validation", counts.get("test", FEW))
    if few < FEW:
        print(
            f"pictures to evaluate on: {few}, so that an accuracy has a standard error of up to"
            f" {0.5 / few**0.5:.2f}; --validation holds out more",
            file=sys.stderr,
        )
    return counts | {"skipped": len(skipped)}


def default_name(source: Path) -> str:
    """Return the name of the folder as that of a data set; "imagenet2012" for ILSVRC2012."""
    if ilsvrc2012.has_archives(source):
        return "imagenet2012"
    name = re.sub(r"[^a-z0-9]+", "_", source.resolve().name.lower()).strip("_")
    return name if name[:1].isalpha() else f"images_{name}".strip("_")


def _with_channels(source: Source) -> Source:
    """Return the source with its channels, detected from some pictures if not known."""
    if source.channels:
        return source
    train = source.splits["train"]
    step = max(1, source.counts["train"].total() // INSPECTED)
    modes = set()
    for example in itertools.islice(train(), None, None, step):
        with contextlib.suppress(Exception):  # the file is named when it is written
            modes.add(augment.open_image(example.read()).mode)
    return source._replace(channels=1 if modes and modes <= GREY else 3)


@contextlib.contextmanager
def _removed_if_empty(out: Path, name: str) -> Iterator[None]:
    """Make the folder `out/name`; remove both if the block fails and leaves nothing in them."""
    (out / name).mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for folder in (out / name, out):
                folder.rmdir()
        raise


def encoded(
    examples: Iterable[Example], encode: Callable[[bytes], bytes]
) -> Iterator[tuple[Example, Callable[[], bytes]]]:
    """Yield each example in order, and a function that returns its encoded picture or raises.

    Examples are read one after another, as archives must be, and encoded by a thread for each core,
    a few ahead.
    """
    waiting: collections.deque[tuple[Example, Callable[[], bytes]]] = collections.deque()
    cores = machine.cores()
    with ThreadPoolExecutor(cores) as pool:
        for example in examples:
            try:
                encoded = pool.submit(encode, example.read())
            except Exception as error:  # raised when the picture is requested
                (encoded := Future()).set_exception(error)
            waiting.append((example, encoded.result))
            if len(waiting) > AHEAD * cores:
                yield waiting.popleft()
        yield from waiting


class InColour(ValueError):
    """A picture in colour of a data set that seems to be grey."""


def encode(
    image: bytes, channels: int, max_side: int = 0, bits: int = 16, *, is_grey: bool = False
) -> bytes:
    """Return a whole, upright grey or RGB image as JPEG or PNG; unchanged if it is one already.

    WebP becomes JPEG. Of a file with several JPEG images (MPO, of phones) the first is kept. A
    shorter side above `max_side`, if that is not 0, becomes as long (bicubic, antialiased). Grey
    values that are stored in 16 bits have `bits`, of which the higher 8 are kept.

    Raises:
        InColour: with `is_grey`, for a picture in colour where channels = 1.
        OSError, SyntaxError, ...: as PIL, if the bytes are no image or a truncated one.
    """
    with augment.open_image(image, bits) as opened:
        opened.load()
        if is_grey and channels == 1 and opened.mode not in GREY:
            raise InColour(
                "it is in colour, but the pictures that were looked at first are grey: give"
                " --channels=3, or --channels=1 to make all grey"
            )
        form, first = _form(opened, image)
        kind = "JPEG" if form in ("JPEG", "WEBP") else "PNG"
        modes = ("L",) if channels == 1 else ("L", "RGB")
        upright = opened.getexif().get(0x0112) not in range(2, 9)  # the EXIF tag "Orientation"
        scale = max_side / min(opened.size) if max_side else 1
        if opened.format and form == kind and opened.mode in modes and upright and scale >= 1:
            return first
        mode = opened.mode if opened.mode in modes else modes[-1]
        converted = ImageOps.exif_transpose(opened).convert(mode)
        if scale < 1:
            converted = ImageOps.scale(converted, scale, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    converted.save(buffer, kind, quality=95)
    return buffer.getvalue()


def _form(opened: Image.Image, image: bytes) -> tuple[str | None, bytes]:
    """Return the format of an image and its bytes, of an MPO file the bytes of the first image."""
    if opened.format == "MPO":
        size = opened.mpinfo[0xB002][0]["Size"]  # pyright: ignore[reportAttributeAccessIssue]
        return "JPEG", image[:size] if image[size - 2 : size] == END_OF_JPEG else image
    return opened.format or ("WEBP" if image[8:12] == b"WEBP" else None), image


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A TFDS data set of any name."""

    VERSION = tfds.core.Version(VERSION)
    code_path = None  # TFDS would look for checksums of downloads there

    def __init__(self, name: str, source: Source, examples: Callable[[str], Any], out: Path):
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]
        self._source, self._examples = source, examples
        super().__init__(data_dir=out, file_format=tfds.core.FileFormat.ARRAY_RECORD)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(None, None, self._source.channels)),
            "label": tfds.features.ClassLabel(names=list(self._source.class_names)),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {split: self._examples(split) for split in self._source.splits}

    def _generate_examples(self) -> Any:
        """Abstract in TFDS; `_split_generators` does its work."""


@functools.wraps(prepare)
def main(source: Path, out: Path, name: str, **options: Any) -> None:
    """Run the command."""
    logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # cleans up, as Ctrl-C does
    name = name or default_name(source)
    counts = prepare(source, out, name, **options)
    if options["dry_run"]:
        return
    print(", ".join(f"{count} {split}" for split, count in counts.items()))
    config, softmax = f"my_images:{out / name}", {"config.attention.kind": "softmax"}
    run = f"runs/{name}"
    print("train on it with softmax attention, the faster and more accurate one at these sizes:")
    print("  " + command("train", config=config, workdir=f"{run}_softmax", **softmax))
    print("then convert it to random features, or train with them from the start:")
    print("  " + command("convert", workdir=f"{run}_softmax", out=run))
    print("  " + command("train", config=config, workdir=run))


if __name__ == "__main__":
    arguments.run(main)
