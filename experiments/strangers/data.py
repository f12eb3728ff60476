"""Examples for the models of `models`, read from files that the user has: `--data=FOLDER`."""

import csv
import functools
import gzip
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy import signal
from scipy.io import wavfile
from sklearn.model_selection import train_test_split

IGNORED = -1
"""Label of a position that does not count."""


class Examples(NamedTuple):
    """Inputs and labels, (b,) or (b, t)."""

    inputs: np.ndarray
    labels: np.ndarray


class Data(NamedTuple):
    """Examples for `linearize`, and those that models are measured on."""

    calibration: np.ndarray
    held_out: Examples


def merged(text: str, ranks: Mapping[str, float]) -> list[str]:
    """Byte-pair encoding: join the neighbours of the lowest rank until none have one."""
    pieces = list(text)
    while len(pieces) > 1:
        pairs = [ranks.get(a + b, np.inf) for a, b in itertools.pairwise(pieces)]
        i = int(np.argmin(pairs))
        if pairs[i] == np.inf:
            break
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def windows(tokens: np.ndarray, length: int) -> Examples:
    """Cut tokens into pieces; the labels are the next tokens."""
    count = (len(tokens) - 1) // length
    return Examples(*(tokens[i : i + count * length].reshape(count, length) for i in (0, 1)))


def vocabulary(path: Path) -> dict[str, float]:
    """Return the pieces of a tokenizer of llama2.c, in order, with their scores."""
    content, at, scores = path.read_bytes(), 4, {}
    while at < len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        piece = content[at + 8 : at + 8 + size].decode()
        scores[piece] = float(np.frombuffer(content, np.float32, 1, at)[0])
        at += 8 + size
    return scores


def stories(folder: Path, length: int = 512, calibrated: int = 32, held_out: int = 32) -> Data:
    """TinyStories in ASCII, in pieces of tok512.bin, each story after a token of its own.

    The folder has tok512.bin of llama2.c and tiny_stories.txt, stories separated by line breaks,
    paragraphs by empty lines.
    """
    scores = vocabulary(folder / "tok512.bin")
    numbers = {piece: i for i, piece in enumerate(scores)}
    ranks = {piece: -score for piece, score in scores.items()}

    @functools.cache
    def encoded(word: str) -> list[int]:
        pieces = (
            [x] if x in numbers else [f"<0x{y:02X}>" for y in x.encode()]
            for x in merged(word, ranks)
        )
        return [numbers[x] for piece in pieces for x in piece]

    text = (folder / "tiny_stories.txt").read_text(encoding="utf-8")
    tokens: list[int] = []
    for story in filter(str.isascii, re.split(r"(?<=[.!?\"])\n(?!\n)", text)):
        words = re.findall(r" ?[^ ]+| ", f" {story.strip()}")
        tokens += [1, *itertools.chain(*map(encoded, words))]
        if len(tokens) > (calibrated + held_out) * length:
            break
    examples = windows(np.array(tokens, np.int32), length)
    held = Examples(*(x[calibrated : calibrated + held_out] for x in examples))
    return Data(examples.inputs[:calibrated], held)


def shakespeare(folder: Path, length: int = 64, calibrated: int = 256, held_out: int = 512) -> Data:
    """Characters of tinyshakespeare.txt: calibrated on the first 90%, measured on the rest."""
    text = (folder / "tinyshakespeare.txt").read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens, first = np.array([letters[x] for x in text], np.int32), len(text) * 9 // 10
    first_windows, held = windows(tokens[:first], length), windows(tokens[first:], length)
    rng = np.random.default_rng(0)
    calibration = np.sort(rng.choice(len(first_windows.inputs), calibrated, replace=False))
    chosen = np.sort(rng.choice(len(held.inputs), held_out, replace=False))
    return Data(first_windows.inputs[calibration], Examples(*(x[chosen] for x in held)))


def sums(folder: Path | None = None, calibrated: int = 512, held_out: int = 2000) -> Data:
    """Sums of two numbers of up to six digits as "12+34=64$....", the result from its end."""
    del folder  # drawn as the model's program draws them
    rng, count = np.random.default_rng(0), calibrated + held_out
    limits = 10 ** (1 + rng.choice(6, (count, 2), p=(0.02, 0.04, 0.05, 0.05, 0.04, 0.8)))
    symbols = {x: i for i, x in enumerate("0123456789+=$.")}
    tokens, labels = np.zeros((2, count, 22), np.int32)
    for row, targets, (a, b) in zip(tokens, labels, rng.integers(0, limits).tolist(), strict=True):
        question = f"{a}+{b}="
        text = f"{question}{str(a + b)[::-1]}$".ljust(22, ".")
        row[:] = [symbols[x] for x in text]
        targets[:] = np.where(row == symbols["."], IGNORED, row)
        targets[: len(question)] = IGNORED
    held = Examples(tokens[calibrated:, :-1], labels[calibrated:, 1:])
    return Data(tokens[:calibrated, :-1], held)


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
    first_tokens, held = tokens[:calibrated], tokens[len(tokens) // 2 :][:held_out]
    return Data(first_tokens[:, :-1], Examples(held[:, :-1], held[:, 1:]))


COMMANDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]
"""Words of Speech Commands with labels 2, 3, ...; other words have 1, silence has 0."""


def commands(folder: Path, calibrated: int = 3) -> Data:
    """Speech Commands as WORD/*.wav, one second at 16 kHz: the first files of a word calibrate."""
    calibrating, held, labels = [], [], []
    for word in sorted(path for path in folder.iterdir() if path.is_dir()):
        sounds = [sound(path) for path in sorted(word.glob("*.wav"))]
        calibrating += sounds[:calibrated]
        held += sounds[calibrated:]
        label = 2 + COMMANDS.index(word.name) if word.name in COMMANDS else 1
        labels += [label] * len(sounds[calibrated:])
    return Data(np.stack(calibrating), Examples(np.stack(held), np.array(labels, np.int32)))


def sound(path: Path, samples: int = 16000) -> np.ndarray:
    """Return a wav file in [-1, 1], padded with silence."""
    _, numbers = wavfile.read(path)
    numbers = (numbers[:samples] / 32768).astype(np.float32)
    return np.pad(numbers, (0, samples - len(numbers)))


def sms(folder: Path, length: int = 64, calibrated: int = 512) -> Data:
    """SMSSpamCollection in words of vocab.json, split as the model's program splits it."""
    numbers = json.loads((folder / "vocab.json").read_text())
    with (folder / "SMSSpamCollection").open(newline="", encoding="utf-8") as file:
        kinds, texts = zip(*csv.reader(file, delimiter="\t"), strict=True)
    tokens = np.zeros((len(texts), length), np.int32)  # padded with 0
    for row, text in zip(tokens, texts, strict=True):
        words = [numbers.get(word, 1) for word in text.lower().split()][:length]
        row[: len(words)] = words
    spam = np.array([kind == "spam" for kind in kinds], np.int32)
    train, rest = train_test_split(
        np.arange(len(texts)), test_size=0.3, random_state=42, stratify=spam
    )
    _, held = train_test_split(rest, test_size=0.5, random_state=42, stratify=spam[rest])
    return Data(tokens[train[:calibrated]], Examples(tokens[held], spam[held]))


def families(folder: Path, length: int = 210, calibrated: int = 256, held_out: int = 512) -> Data:
    """Proteins of proteins.json, {family: sequences}, in tokens of tokenizer-aa.json, shuffled.

    Labels are `IGNORED`: which family has which number stands in no file of the model.
    """
    tokenizer = json.loads((folder / "tokenizer-aa.json").read_text())["model"]
    ranks = {merge.replace(" ", ""): float(i) for i, merge in enumerate(tokenizer["merges"])}
    numbers = tokenizer["vocab"]
    by_family = json.loads((folder / "proteins.json").read_text())
    sequences = list(dict.fromkeys(itertools.chain(*by_family.values())))
    order = np.random.default_rng(0).permutation(len(sequences))[: calibrated + held_out]
    tokens = np.zeros((len(order), length), np.int32)  # padded with 0
    for row, i in zip(tokens, order, strict=True):
        pieces = merged(re.sub("[OXUZB]", "#", sequences[i])[: 4 * length], ranks)
        symbols = [numbers["[CLS]"], *(numbers[piece] for piece in pieces)][:length]
        row[: len(symbols)] = symbols
    labels = np.full(len(tokens) - calibrated, IGNORED, np.int32)
    return Data(tokens[:calibrated], Examples(tokens[calibrated:], labels))


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
    """CIFAR-10 as JPEG files, train/CLASS/*.jpg and test/CLASS/*.jpg: the first of each."""

    def images(part: str, count: int) -> Examples:
        classes = sorted(path for path in (folder / part).iterdir() if path.is_dir())
        each = -(-count // len(classes))
        files = [(p, n) for n, c in enumerate(classes) for p in sorted(c.glob("*.jpg"))[:each]]
        pixels = np.stack([np.asarray(Image.open(path), np.float32) / 255 for path, _ in files])
        return Examples(pixels, np.array([n for _, n in files], np.int32))

    return Data(images("train", calibrated).inputs, images("test", held_out))


READERS: dict[str, Callable[[Path], Data]] = {
    f.__name__: f
    for f in (stories, shakespeare, sums, ecg, commands, sms, families, mnist, cifar10)
}
