"""Examples for the models of `models`, read from files that the user has: `--data=FOLDER`."""

import functools
import gzip
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy import signal

IGNORED = -1
"""Label of a position that does not count."""


class Examples(NamedTuple):
    """Inputs and labels, (b,) or (b, t)."""

    inputs: np.ndarray
    labels: np.ndarray


class Data(NamedTuple):
    """What `linearize` sees, and what the models are measured on."""

    calibration: np.ndarray
    held_out: Examples


Ranks = Mapping[str, float]


def merged(symbols: Iterable[str], ranks: Ranks) -> list[str]:
    """Byte-pair encoding: join the neighbours of the lowest rank until none have one."""
    symbols = list(symbols)
    while True:
        pairs = [
            (ranks.get(a + b, np.inf), i) for i, (a, b) in enumerate(zip(symbols, symbols[1:]))
        ]
        rank, i = min(pairs, default=(np.inf, 0))
        if rank == np.inf:
            return symbols
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def windows(tokens: np.ndarray, length: int) -> Examples:
    """Cut tokens into pieces; the labels are the next tokens."""
    count = (len(tokens) - 1) // length
    return Examples(*(tokens[i : i + count * length].reshape(count, length) for i in (0, 1)))


def stories(folder: Path, length: int = 512, calibrated: int = 32, held_out: int = 32) -> Data:
    """TinyStories in ASCII, in tokens of tok512.bin, each story after a token of its own.

    The folder has tok512.bin of llama2.c and tiny_stories.txt, one story after another.
    """
    content, at, vocabulary = (folder / "tok512.bin").read_bytes(), 4, []
    while at < len(content):
        score, size = (
            np.frombuffer(content, np.float32, 1, at)[0],
            int.from_bytes(content[at + 4 : at + 8], "little"),
        )
        vocabulary.append((content[at + 8 : at + 8 + size].decode(errors="replace"), float(score)))
        at += 8 + size
    ranks = {word: -score for word, score in vocabulary}
    numbers = {word: i for i, (word, _) in enumerate(vocabulary)}

    @functools.cache
    def encoded(word: str) -> list[int]:
        return [x for piece in merged(word, ranks) for x in pieces(piece)]

    def pieces(piece: str) -> list[int]:
        return [numbers[piece]] if piece in numbers else [byte + 3 for byte in piece.encode()]

    text = (folder / "tiny_stories.txt").read_text(encoding="utf-8")
    parts, tokens = re.split(r"(?<=[.!?\"])\n(?!\n)", text), []
    wanted = (calibrated + held_out) * length + 1
    for story in filter(str.isascii, parts):
        tokens += [
            1,
            *(x for word in re.findall(r" ?[^ ]+| ", f" {story.strip()}") for x in encoded(word)),
        ]
        if len(tokens) >= wanted:
            break
    examples = windows(np.array(tokens[:wanted], np.int32), length)
    return Data(examples.inputs[:calibrated], Examples(*(x[calibrated:] for x in examples)))


def shakespeare(folder: Path, length: int = 64, calibrated: int = 256, held_out: int = 512) -> Data:
    """Characters of tinyshakespeare.txt: calibrated on the first 90%, measured on the rest."""
    text = (folder / "tinyshakespeare.txt").read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = np.array([letters[x] for x in text], np.int32)
    first = len(tokens) * 9 // 10
    seen, held = windows(tokens[:first], length), windows(tokens[first:], length)
    rng = np.random.default_rng(0)
    chosen = [
        np.sort(rng.choice(len(x.inputs), n, replace=False))
        for x, n in ((seen, calibrated), (held, held_out))
    ]
    return Data(seen.inputs[chosen[0]], Examples(*(x[chosen[1]] for x in held)))


def sums(folder: Path | None = None, calibrated: int = 512, held_out: int = 2000) -> Data:
    """Sums of two numbers of up to six digits as "12+34=64$....", the result from its end."""
    rng, symbols = np.random.default_rng(0), {x: i for i, x in enumerate("0123456789+=$.")}

    def sum_of(a: int, b: int) -> tuple[list[int], list[int]]:
        question = f"{a}+{b}="
        text = f"{question}{str(a + b)[::-1]}$".ljust(22, ".")
        tokens = [symbols[x] for x in text]
        asked = [i < len(question) or x == "." for i, x in enumerate(text)]
        return tokens[:-1], [IGNORED if q else x for q, x in zip(asked, tokens, strict=True)][1:]

    largest = (
        10 ** rng.choice(6, (calibrated + held_out, 2), p=(0.02, 0.04, 0.05, 0.05, 0.04, 0.8)) * 10
    )
    pairs = rng.integers(0, largest)
    inputs, labels = (
        np.array(x, np.int32) for x in zip(*(sum_of(*p) for p in pairs.tolist()), strict=True)
    )
    return Data(inputs[:calibrated], Examples(inputs[calibrated:], labels[calibrated:]))


def ecg(folder: Path, length: int = 500, calibrated: int = 32, held_out: int = 64) -> Data:
    """Task1_ECG.npy of the package systole: 100 Hz, each window rounded to 0, 1, ..., 100.

    Frequencies below 0.5 Hz are filtered out. The first minutes calibrate, the later ones measure.
    """
    raw = np.load(folder / "Task1_ECG.npy")  # 1,000 Hz
    pass_band = signal.butter(2, 0.5, "highpass", fs=100, output="sos")
    slow = signal.sosfiltfilt(pass_band, signal.decimate(raw, 10, ftype="fir"))
    cut = slow[: len(slow) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    low, high = cut.min(axis=1, keepdims=True), cut.max(axis=1, keepdims=True)
    tokens = np.round(100 * (cut - low) / (high - low)).astype(np.int32)
    seen, held = tokens[:calibrated], tokens[len(tokens) // 2 :][:held_out]
    return Data(seen[:, :-1], Examples(held[:, :-1], held[:, 1:]))


def idx(path: Path) -> np.ndarray:
    """Return an array of MNIST's format, gzipped."""
    content = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(content[3])]
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def mnist(folder: Path, calibrated: int = 512, held_out: int = 2000) -> Data:
    """MNIST's test set: calibrated on its last images, measured on its first ones."""
    images = idx(folder / "t10k-images-idx3-ubyte.gz").astype(np.float32) / 255
    labels = idx(folder / "t10k-labels-idx1-ubyte.gz").astype(np.int32)
    return Data(images[-calibrated:], Examples(images[:held_out], labels[:held_out]))


def cifar10(folder: Path, calibrated: int = 512, held_out: int = 2000) -> Data:
    """CIFAR-10 as JPEG files, train/CLASS/*.jpg and test/CLASS/*.jpg: equally many of each class."""

    def images(part: str, count: int) -> Examples:
        classes = sorted(path for path in (folder / part).iterdir() if path.is_dir())
        each = -(-count // len(classes))
        files = [(p, n) for n, c in enumerate(classes) for p in sorted(c.glob("*.jpg"))[:each]]
        pixels = np.stack([np.asarray(Image.open(path), np.float32) / 255 for path, _ in files])
        return Examples(pixels, np.array([n for _, n in files], np.int32))

    return Data(images("train", calibrated).inputs, images("test", held_out))


READERS: dict[str, Callable[[Path], Data]] = {
    f.__name__: f for f in (stories, shakespeare, sums, ecg, mnist, cifar10)
}
