"""Encoder of PyTorch as fields of `config.model` and arrays by our names.

The part that `hugging_face` and `timm` share: the layout of PyTorch's arrays, tokens and positions,
the normalisation of pictures, and the sizes, which are read from the shapes. Ours and theirs:

    kernel (in, out)             weight (out, in)
    kernel (height, width, in, out)   weight (out, in, height, width) of a convolution
    query kernel (in, heads, h)  rows of weight (heads h, in), which may be one array for q, k and v
    token                        the class token and its position, added
    registers                    the other tokens without a place in the picture, likewise
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit.config import SIZES, Size
from vit.weights import transfer
from vit.weights.files import Arrays

LEAVES = ("kernel", "bias")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5,) * 3, (0.5,) * 3
"""Means and deviations of the colours, 0 to 1, by which pictures are normalised."""


class Said(NamedTuple):
    """Everything that the arrays do not show: from config.json and preprocessor_config.json."""

    origin: str
    """Library and family: "Hugging Face's DINOv2"."""
    width: int
    """Width of the blocks, which must be that of the arrays."""
    num_heads: int
    epsilon: float
    activation: str
    """Value of `config.model.activation`."""
    mean: Sequence[float]
    std: Sequence[float]
    image_size: int = 0
    """Image size of the positions; 0: computed from their number."""
    pooling: str = "token"
    final_norm: str = "before"
    input_size: int = 0
    """Size of the pictures in evaluation; 0: the image size."""
    antialias: bool = True
    """Antialiasing of positions that are resampled to another grid, as the library does it."""
    resize: int = 0
    """Size of the shorter side of a picture before the crop; 0: the image size."""
    class_names: tuple[str, ...] = ()


class Encoder(NamedTuple):
    """Published encoder: its architecture, its weights, and how its pictures are read."""

    model: dict[str, Any]
    """Fields of `config.model`."""
    arrays: Arrays
    """Weights by the names of our parameters, for pictures from -1 to 1."""
    image_size: int
    """Image size of the positions."""
    said: Said
    lines: list[str]
    """Report to print."""


def built(arrays: Arrays, names: Mapping[str, str], said: Said) -> Encoder:
    """Build the encoder from its arrays.

    Args:
        arrays: by their names, without a prefix.
        names: theirs -> ours, a number of a block as "*"; of modules, or of single arrays.
        said: what the arrays do not show.

    Raises:
        ValueError: when arrays have no place here, are missing, or contradict one another or what
            is said; all arrays without a place are listed.
    """
    places = {name: place(name, names) for name in arrays}
    strange = [f"{name}: {arrays[name].shape}" for name, (ours, _) in places.items() if not ours]
    if strange:
        raise ValueError(
            f"{said.origin} has parts that have no place in this ViT:\n  " + "\n  ".join(strange)
        )
    size, patch_size = _size(arrays, places, said)
    named: Arrays = {}
    for name, (ours, leaf) in places.items():
        try:
            parts = layout(ours, leaf, arrays[name], size.num_heads)
        except ValueError as error:
            raise ValueError(f"{name}: {arrays[name].shape} does not fit: {error}") from error
        if parts.keys() & named.keys():
            raise ValueError(f"{name} is one of two arrays in the place of {ours}")
        named |= parts
    lines = _zero_biases(named)
    image_size = _fold_tokens(named, said, patch_size)
    _fold_heads(named)
    _fold_pixels(named, said.mean, said.std)
    letter = next((name for name, known in SIZES.items() if known == size), "")
    model = {
        "variant": f"{letter or 'B'}/{patch_size}",
        **(dict.fromkeys(Size._fields, 0) if letter else size._asdict()),
        "pooling": said.pooling,
        "registers": len(named.get("registers", ())),
        "position": "learned",
        "layer_scale": float("blocks/0/attention_scale" in named),
        "activation": said.activation,
        "epsilon": said.epsilon,
        "embed_norm": "embed_norm/scale" in named,
        "final_norm": said.final_norm if "norm/scale" in named else "none",
        "pre_logits": False,
    }
    told = [
        f"{said.origin}: width {size.width}, {size.depth} blocks, {size.num_heads} heads, MLP"
        f" {size.mlp_dim}, {said.activation}, patches of {patch_size}, pictures of {image_size}",
        f"pictures are normalised by mean {tuple(said.mean)} and deviation {tuple(said.std)},"
        " which the patch embedding has taken up",
        *lines,
    ]
    return Encoder(model, named, image_size, said, told)


def place(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return our name of an array ("" for one without a place) and its leaf: weight, bias, none."""
    name = name.replace("in_proj_", "in_proj.")
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    starred = name.replace(f".{number[0]}.", ".*.", 1) if number else name
    module, _, leaf = starred.rpartition(".")
    ours, leaf = (names[starred], "") if starred in names else (names.get(module, ""), leaf)
    if leaf not in ("weight", "bias", ""):
        return "", leaf
    return ours.replace("*", number[0] if number else ""), leaf


def layout(ours: str, leaf: str, x: np.ndarray, heads: int) -> Arrays:
    """Return an array of PyTorch as ours: by the name of its module, and weight or bias."""
    above, _, part = ours.rpartition("/")
    parts = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}.get(part)
    if parts:
        pieces = zip(parts, np.split(x, len(parts)), strict=True)
        split = [layout(f"{above}/{name}", leaf, piece, heads) for name, piece in pieces]
        return {name: piece for pieces in split for name, piece in pieces.items()}
    if not leaf:
        return {ours: x.reshape(-1) if part.endswith("_scale") else x.reshape(-1, x.shape[-1])}
    if "norm" in part:
        return {f"{ours}/{'scale' if leaf == 'weight' else 'bias'}": x}
    if part in ("query", "key", "value"):
        shape = (heads, -1) if leaf == "bias" else (x.shape[-1], heads, -1)
        return {f"{ours}/{'bias' if leaf == 'bias' else 'kernel'}": x.T.reshape(shape)}
    if leaf == "bias":
        return {f"{ours}/bias": x}
    if part == "out":
        return {f"{ours}/kernel": x.T.reshape(heads, -1, x.shape[0])}
    return {f"{ours}/kernel": x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T}


def _size(arrays: Arrays, places: Mapping[str, tuple[str, str]], said: Said) -> tuple[Size, int]:
    """Return width, depth, heads and MLP, and the patch size."""
    by_place = {ours + "/" + leaf: arrays[name] for name, (ours, leaf) in places.items()}
    needed = ("embed/weight", "blocks/0/mlp_out/weight", "position/")
    missing = [name for name in needed if name not in by_place]
    if missing or by_place["embed/weight"].ndim != 4:
        raise ValueError(f"the file holds no ViT: there is no {(missing or ['embed/weight'])[0]}")
    width, _, height, patch_size = by_place["embed/weight"].shape
    if height != patch_size:
        raise ValueError(f"patches of {height} x {patch_size} pixels: only square ones are read")
    if width != said.width or not said.num_heads or width % said.num_heads:
        raise ValueError(
            f"config.json says {said.num_heads} heads on a width of {said.width}, the arrays have"
            f" a width of {width}: take the config.json of this file"
        )
    blocks = {int(name.split("/")[1]) for name in by_place if name.startswith("blocks/")}
    mlp_dim = by_place["blocks/0/mlp_out/weight"].shape[-1]
    return Size(width, 1 + max(blocks), said.num_heads, mlp_dim), patch_size


def _zero_biases(named: Arrays) -> list[str]:
    """Add biases of zeros where some encoders have none: in the embedding and in attention."""
    added = []
    for name in list(named):
        bias, shape = name.replace("kernel", "bias"), named[name].shape
        needed = re.fullmatch(r"(embed|.*attention/(query|key|value))/kernel", name)
        if needed and bias not in named:
            named[bias] = np.zeros(shape[-1:] if "embed" in name else shape[1:], "f4")
            added.append(bias)
    return [f"{len(added)} biases are not in the file: zeros"] if added else []


def _fold_tokens(named: Arrays, said: Said, patch_size: int) -> int:
    """Fold the positions of tokens into token and registers; return the image size."""
    position, kinds = named["position"], ("token", "distillation", "registers")
    tokens = np.concatenate([position[:0], *(named.pop(x) for x in kinds if x in named)])
    side = said.image_size // patch_size or math.isqrt(len(position))
    count = len(position) - side**2  # positions of tokens: none, the class token's, or all
    if count not in (0, min(1, len(tokens)), len(tokens)):
        raise ValueError(
            f"{len(position)} positions, with {len(tokens)} tokens, are not those of square"
            f" pictures of {side} x {side} patches"
        )
    tokens = tokens + np.pad(position[:count], [(0, len(tokens) - count), (0, 0)])
    named["position"] = position[count:]
    if "token" in said.pooling:
        named["token"], tokens = tokens[0], tokens[1:]
    if len(tokens):
        named["registers"] = tokens
    return side * patch_size


def resampled(position: np.ndarray, side: int, *, antialias: bool) -> np.ndarray:
    """Positions (n, width) of a square grid, row by row, on one of another side: bicubic.

    With antialiasing the cubic has a = -1/2, and is wider where the grid becomes smaller (Pillow,
    timm, `jax.image.resize`); without, a = -3/4 and four neighbours (torch's interpolate).
    """
    old = math.isqrt(len(position))
    if antialias:
        return np.asarray(transfer.resampled(jnp.asarray(position), side))
    weights = _cubic(old, side)
    grid = position.reshape(old, old, -1).astype(np.float64)
    new = np.einsum("yi,xj,ijw->yxw", weights, weights, grid)
    return new.reshape(side**2, -1).astype(np.float32)


def _cubic(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """(new, old): weights of the four nearest, those beyond the edge on the edge."""
    place = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for neighbour in range(-1, 3):
        index = np.floor(place) + neighbour
        x = abs(place - index)
        near = ((a + 2) * x - (a + 3)) * x**2 + 1
        far = a * (((x - 5) * x + 8) * x - 4)
        column = np.clip(index, 0, old - 1).astype(int)
        np.add.at(weights, (np.arange(new), column), np.where(x <= 1, near, far))
    return weights


def _fold_heads(named: Arrays) -> None:
    """Join two heads, on class token and distillation token, to one on both tokens: their mean."""
    if "head_distillation/kernel" in named:
        heads = ("head", "head_distillation")
        kernels, biases = ([named.pop(f"{x}/{leaf}") / 2 for x in heads] for leaf in LEAVES)
        named |= {"head/kernel": np.concatenate(kernels), "head/bias": np.add(*biases)}


def _fold_pixels(named: Arrays, mean: Sequence[float], std: Sequence[float]) -> None:
    """Make the embedding of (x - mean) / std, x from 0 to 1, one of 2 x - 1, the ViT's pixels."""
    kernel = named["embed/kernel"].astype(np.float64)
    usable = len(mean) == len(std) == kernel.shape[2] and all(0 <= x <= 1 for x in mean)
    if not (usable and all(1e-3 <= x <= 1 for x in std)):
        raise ValueError(
            f"{kernel.shape[2]} colours from 0 to 1 cannot be normalised by image_mean={mean},"
            f" image_std={std}: set in a preprocessor_config.json beside the file a mean from 0 to"
            " 1 and a standard deviation from 0.001 to 1 of each colour"
        )
    shift = np.einsum("ijcw,c->w", kernel, (0.5 - np.array(mean)) / np.array(std))
    named["embed/bias"] = (named["embed/bias"] + shift).astype(np.float32)
    scaled = kernel / (2 * np.array(std))[:, None]
    named["embed/kernel"] = scaled.astype(np.float32)


def side(size: Any) -> int:
    """Length of 224, [224, 224], {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height") or 0
    return int(size[-1] if isinstance(size, list | tuple) else size)
