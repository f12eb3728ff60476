"""A published encoder of PyTorch, as fields of `config.model` and arrays by our names.

What both of `hugging_face` and `timm` need: the layout of PyTorch's arrays, tokens and positions,
normalisation of pictures, and the architecture that shapes tell. Ours and theirs:

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

from vit import transfer
from vit.config import SIZES, Size
from vit.published.files import Arrays

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5,) * 3, (0.5,) * 3
"""Means and deviations of the colours, 0 to 1, by which pictures are normalised."""

HEAD_WIDTHS = {1152: 72, 1280: 80, 1408: 88, 1664: 104}
"""Of So400m, H, g and G: sixteen heads; all else that is published has heads of 64."""


class Said(NamedTuple):
    """What the arrays do not tell: from the JSON beside the file, or the habit of the family."""

    origin: str
    """Whose encoder: "Hugging Face's DINOv2"."""
    epsilon: float
    activation: str
    """Of `config.model.activation`."""
    num_heads: int = 0
    """0: not said."""
    pooling: str = "token"
    final_norm: str = "before"
    image_size: int = 0
    """Of the positions; 0: as their number says."""
    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]
    input_size: int = 0
    """Of the pictures that it is evaluated on; 0: the image size."""
    antialias: bool = True
    """Of positions for another grid, as the library resamples them."""
    resize: int = 0
    """To which the shorter side of a picture is resized before; 0: the image size."""
    class_names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """On where these come from."""


class Encoder(NamedTuple):
    """A published encoder: what it is, its weights, and how its pictures are read."""

    model: dict[str, Any]
    """Fields of `config.model`."""
    arrays: Arrays
    """By the names of our parameters, for pictures from -1 to 1."""
    image_size: int
    """Of the positions."""
    said: Said
    lines: list[str]
    """What was found, to print."""


def built(arrays: Arrays, names: Mapping[str, str], said: Said, num_heads: int = 0) -> Encoder:
    """The encoder that these arrays are.

    Args:
        arrays: by their names, without a prefix.
        names: theirs -> ours, a number of a block as "*"; of modules, or of single arrays.
        said: what else is known.
        num_heads: of the user, before what is said.

    Raises:
        ValueError: when arrays have no place here, are missing, or contradict one another; all of
            them are listed.
    """
    places = {name: place(name, names) for name in arrays}
    strange = [f"{name}: {arrays[name].shape}" for name, (ours, _) in places.items() if not ours]
    if strange:
        raise ValueError(
            f"{said.origin} has parts that have no place in this ViT:\n  " + "\n  ".join(strange)
        )
    size, patch_size, heads_line = _size(arrays, places, num_heads or said.num_heads)
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
    gated = named["blocks/0/mlp_in/kernel"].shape[-1] == 2 * size.mlp_dim
    model = {
        **_as_variant(size, patch_size),
        "pooling": said.pooling,
        "registers": len(named.get("registers", ())),
        "position": "learned",
        "layer_scale": float("blocks/0/attention_scale" in named),
        "activation": "swiglu" if gated else said.activation,
        "epsilon": said.epsilon,
        "embed_norm": "embed_norm/scale" in named,
        "final_norm": said.final_norm if "norm/scale" in named else "none",
        "pre_logits": False,
    }
    told = [
        f"{said.origin}: width {size.width}, {size.depth} blocks, MLP {size.mlp_dim}, patches of"
        f" {patch_size}, pictures of {image_size}",
        heads_line,
        *said.lines,
        f"pictures are normalised by mean {_plain(said.mean)} and deviation {_plain(said.std)},"
        " which the patch embedding has taken up",
        *lines,
    ]
    return Encoder(model, named, image_size, said, told)


def place(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Our name for an array, and its leaf (weight, bias or none); "" for one without a place."""
    name = name.replace("in_proj_", "in_proj.")
    starred = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    number = next(iter(re.findall(r"(?<=\.)\d+(?=\.)", name)), "")
    module, _, leaf = starred.rpartition(".")
    if starred in names:
        return names[starred].replace("*", number), ""
    if module in names and leaf in ("weight", "bias"):
        return names[module].replace("*", number), leaf
    return "", leaf


def layout(ours: str, leaf: str, x: np.ndarray, heads: int) -> Arrays:
    """An array of PyTorch as ours: by the name of its module, and weight or bias."""
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


def _size(
    arrays: Arrays, places: Mapping[str, tuple[str, str]], num_heads: int
) -> tuple[Size, int, str]:
    """Width, depth, heads and MLP; the patch size; and a line on where the heads come from."""
    by_place = {ours + "/" + leaf: arrays[name] for name, (ours, leaf) in places.items()}
    needed = ("embed/weight", "blocks/0/mlp_in/weight", "blocks/0/mlp_out/weight", "position/")
    missing = [name for name in needed if name not in by_place]
    if missing or by_place["embed/weight"].ndim != 4:
        raise ValueError(f"the file holds no ViT: there is no {(missing or ['embed/weight'])[0]}")
    width, _, height, patch_size = by_place["embed/weight"].shape
    if height != patch_size:
        raise ValueError(f"patches of {height} x {patch_size} pixels: only square ones are read")
    blocks = {int(name.split("/")[1]) for name in by_place if name.startswith("blocks/")}
    line = f"{num_heads} heads, as config.json or the flag says"
    if not num_heads:
        num_heads = max(1, width // HEAD_WIDTHS.get(width, 64))
        line = f"{num_heads} heads, as a width of {width} has"
        line += (
            ": num_attention_heads in a config.json, or --config.model.num_heads, says otherwise"
        )
    if width % num_heads:
        raise ValueError(
            f"a width of {width} is not divided by {num_heads} heads: set --config.model.num_heads"
        )
    size = Size(width, 1 + max(blocks), num_heads, by_place["blocks/0/mlp_out/weight"].shape[-1])
    return size, patch_size, line


def _as_variant(size: Size, patch_size: int) -> dict[str, Any]:
    """The variant of that size, or one with all numbers in the place of its own."""
    letters = [name for name, known in SIZES.items() if known == size]
    if letters:
        return {"variant": f"{letters[0]}/{patch_size}", **dict.fromkeys(Size._fields, 0)}
    return {"variant": f"B/{patch_size}", **size._asdict()}


def _zero_biases(named: Arrays) -> list[str]:
    """Biases that some encoders lack in the embedding and in attention become zeros."""
    lacking = [
        name.replace("kernel", "bias")
        for name in named
        if re.fullmatch(r"(embed|.*attention/(query|key|value))/kernel", name)
        and name.replace("kernel", "bias") not in named
    ]
    for name in lacking:
        kernel = named[name.replace("bias", "kernel")]
        named[name] = np.zeros(kernel.shape[-1:] if "embed" in name else kernel.shape[1:], "f4")
    return [f"{len(lacking)} biases are not in the file: zeros"] if lacking else []


def _fold_tokens(named: Arrays, said: Said, patch_size: int) -> int:
    """Tokens with their positions as token and registers; positions of patches; the image size."""
    names = ("token", "distillation", "registers")
    position = named["position"]
    tokens = [named.pop(name) for name in names if name in named]
    tokens = np.concatenate([position[:0], *tokens])
    count = _positioned(len(position), len(tokens), said.image_size // patch_size)
    tokens = tokens + np.pad(position[:count], [(0, len(tokens) - count), (0, 0)])
    named["position"] = position[count:]
    if "token" in said.pooling:
        named["token"], tokens = tokens[0], tokens[1:]
    if len(tokens):
        named["registers"] = tokens
    return math.isqrt(len(named["position"])) * patch_size


def _positioned(positions: int, tokens: int, side: int) -> int:
    """How many of the positions belong to tokens: all, the class token's, or none."""
    found = [
        count
        for count in (tokens, min(tokens, 1), 0)
        for patches in [positions - count]
        if patches > 0 and math.isqrt(patches) ** 2 == patches
    ]
    of_said = [count for count in found if positions - count == side**2]
    if not found:
        raise ValueError(f"{positions} positions, with {tokens} tokens, are of no square image")
    return (of_said or found)[0]


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
    """The mean of two heads, of class token and distillation token, is one on both side by side."""
    kernels = [named.get(f"{name}/kernel") for name in ("head", "head_distillation")]
    if kernels[1] is not None:
        named["head/kernel"] = np.concatenate([x / 2 for x in kernels if x is not None])
        named["head/bias"] = (named["head/bias"] + named["head_distillation/bias"]) / 2
        del named["head_distillation/kernel"], named["head_distillation/bias"]


def _fold_pixels(named: Arrays, mean: Sequence[float], std: Sequence[float]) -> None:
    """The embedding of (x - mean) / std, x from 0 to 1, as one of 2 x - 1, which this ViT sees."""
    kernel = named["embed/kernel"].astype(np.float64)
    usable = len(mean) == len(std) == kernel.shape[2] and min(std) > 0
    if not (usable and np.isfinite([*mean, *std]).all()):
        raise ValueError(
            f"mean {_plain(mean)} and deviation {_plain(std)} of pictures with {kernel.shape[2]}"
            " colours: set image_mean and image_std in a preprocessor_config.json beside the file"
        )
    shift = np.einsum("ijcw,c->w", kernel, (0.5 - np.array(mean)) / np.array(std))
    named["embed/bias"] = (named["embed/bias"] + shift).astype(np.float32)
    scaled = kernel / (2 * np.array(std))[:, None]
    named["embed/kernel"] = scaled.astype(np.float32)


def _plain(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(f"{x:g}" for x in numbers) + ")"
