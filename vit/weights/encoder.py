"""Encoder of a file as fields of `config.model` and arrays by our names.

The part that `hugging_face`, `timm` and `google` share: tokens and positions, the normalisation of
pictures, and the sizes, which are read from the shapes. The layouts of PyTorch's arrays and ours:

    kernel (in, out)             weight (out, in)
    kernel (height, width, in, out)   weight (out, in, height, width) of a convolution
    query kernel (in, heads, h)  rows of weight (heads h, in), which may be one array for q, k and v
    token                        the class token and its position, added
    registers                    the other tokens that are no patches, likewise
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit.config import SIZES, Size
from vit.weights.positions import ANTIALIASED

Arrays = dict[str, np.ndarray]
"""float32, by name."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5,) * 3, (0.5,) * 3
"""Means and deviations of the colours, 0 to 1, by which pictures are normalised."""


class Metadata(NamedTuple):
    """Properties that the arrays do not show: from config.json and preprocessor_config.json."""

    origin: str
    """Library and family: "Hugging Face's DINOv2"."""
    width: int
    """Width of the blocks, which must fit the arrays."""
    num_heads: int
    epsilon: float
    activation: str
    """Value of `config.model.activation`."""
    mean: Sequence[float]
    std: Sequence[float]
    image_size: int = 0
    """Image size of the positions; 0: computed from their number."""
    pooling: str = "token"
    position: str = "learned"
    final_norm: str = "before"
    input_size: int = 0
    """Size of the pictures in evaluation; 0: the image size."""
    resample: str = ANTIALIASED
    """How the library of the file resamples positions to another grid (`positions.resampled`)."""
    resize: int = 0
    """Size of the shorter side, or both, of a picture before the crop; 0: the image size."""
    crop: str = "center"
    """Value of `config.data.eval_crop`, or another way of timm."""
    filter: str = "bicubic"
    """Interpolation of pictures that are resized."""
    class_names: tuple[str, ...] = ()


class Encoder(NamedTuple):
    """Published encoder: its architecture, its weights, and how its pictures are read."""

    model: dict[str, Any]
    """Fields of `config.model`."""
    arrays: Arrays
    """Weights by the names of our parameters, for pictures from -1 to 1."""
    image_size: int
    """Image size of the positions; 0 if they are computed."""
    metadata: Metadata
    lines: list[str]
    """Report to print."""


def left_out(names: list[str], read: Collection[str], separator: str, parts: int) -> list[str]:
    """Return a line for each group of arrays that are not read, named by its first parts."""
    groups = (separator.join(x.split(separator)[:parts]) for x in names if x not in read)
    return [f"{group}: {count} arrays left out" for group, count in Counter(groups).items()]


def as_float32(arrays: Arrays) -> Arrays:
    """Return the arrays in float32; they may be float16, float64 and bfloat16.

    NumPy stores bfloat16 as two bytes without a type.

    Raises:
        ValueError: if arrays are not finite or of another type; all are listed.
    """
    weights, bad = {}, []
    for name, array in arrays.items():
        array = array.view(jnp.bfloat16) if array.dtype == "V2" else array
        if not jnp.issubdtype(array.dtype, jnp.floating):
            bad.append(f"{name}: of type {array.dtype}")
            continue
        with np.errstate(over="ignore"):  # a float64 too large becomes inf, which is refused
            weights[name] = array.astype(np.float32)
        bad += [] if np.isfinite(weights[name]).all() else [f"{name}: not finite"]
    if bad:
        raise ValueError("arrays that are no weights:\n  " + "\n  ".join(bad))
    return weights


def from_pytorch(arrays: Arrays, names: Mapping[str, str], metadata: Metadata) -> Encoder:
    """Build the encoder from arrays of PyTorch.

    Args:
        arrays: by their names, without a prefix.
        names: theirs -> ours, of modules or single arrays; the number of a block is "*".
        metadata: properties that the arrays do not show.

    Raises:
        ValueError: if arrays have no place here (all are listed), or as `built`.
    """
    places = {name: place(name, names) for name in arrays}
    check_places(metadata.origin, {x: arrays[x] for x, (ours, _) in places.items() if not ours})
    named: Arrays = {}
    for name, (ours, leaf) in places.items():
        put(named, layout(ours, leaf, arrays[name]), name)
    return built(named, metadata)


def check_places(origin: str, strange: Arrays) -> None:
    """Raise ValueError that lists the arrays without a place."""
    if strange:
        lines = "\n  ".join(f"{name}: {array.shape}" for name, array in strange.items())
        raise ValueError(f"{origin} has parts that have no place in this ViT:\n  {lines}")


def put(named: Arrays, pieces: Arrays, name: str) -> None:
    """Add the parts of the array `name`; ValueError if a place is taken."""
    if taken := pieces.keys() & named.keys():
        raise ValueError(f"{name} is one of two arrays in the place of {', '.join(taken)}")
    named |= pieces


def built(named: Arrays, metadata: Metadata) -> Encoder:
    """Build the encoder from arrays by our names, (in, out) or with the heads apart.

    Raises:
        ValueError: if arrays are missing, or contradict one another or the metadata.
    """
    size, patch_size = _size(named, metadata)
    _split_heads(named, size.num_heads)
    lines = _zero_biases(named)
    image_size = _fold_tokens(named, metadata, patch_size) if "position" in named else 0
    _join_classifiers(named)
    _fold_pixels(named, metadata.mean, metadata.std)
    letter = next((name for name, known in SIZES.items() if known == size), "")
    model = {
        "variant": f"{letter or 'B'}/{patch_size}",
        **(dict.fromkeys(Size._fields, 0) if letter else size._asdict()),
        "pooling": metadata.pooling,
        "registers": len(named.get("registers", ())),
        "position": metadata.position,
        "layer_scale": float("blocks/0/attention_scale" in named),
        "activation": metadata.activation,
        "epsilon": metadata.epsilon,
        "embed_norm": "embed_norm/scale" in named,
        "final_norm": metadata.final_norm if "norm/scale" in named else "none",
        **({} if "pre_logits/kernel" in named else {"pre_logits": False}),
    }
    pictures = f"pictures of {image_size}" if image_size else "positions computed"
    report = [
        f"{metadata.origin}: width {size.width}, {size.depth} blocks, {size.num_heads} heads, MLP"
        f" {size.mlp_dim}, {metadata.activation}, patches of {patch_size}, {pictures}",
        f"normalisation of pictures by mean {tuple(metadata.mean)} and deviation"
        f" {tuple(metadata.std)}: contained in the patch embedding",
        *lines,
    ]
    return Encoder(model, named, image_size, metadata, report)


def place(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return our name of an array ("" if it has no place) and its leaf: weight, bias, none."""
    name = name.replace("in_proj_", "in_proj.")
    number = re.search(r"(?<=\.)\d+(?=\.)", name)
    starred = name.replace(f".{number[0]}.", ".*.", 1) if number else name
    module, _, leaf = starred.rpartition(".")
    ours, leaf = (names[starred], "") if starred in names else (names.get(module, ""), leaf)
    if leaf not in ("weight", "bias", ""):
        return "", leaf
    return ours.replace("*", number[0] if number else ""), leaf


def layout(ours: str, leaf: str, x: np.ndarray) -> Arrays:
    """Return an array of PyTorch in our layout: by the name of its module, and weight or bias."""
    above, _, part = ours.rpartition("/")
    parts = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}.get(part, ())
    if parts:
        pieces = zip(parts, np.split(x, len(parts)), strict=True)
        return {k: y for p, z in pieces for k, y in layout(f"{above}/{p}", leaf, z).items()}
    if not leaf:
        return {ours: x.reshape(-1) if part.endswith("_scale") else x.reshape(-1, x.shape[-1])}
    if leaf == "bias" or "norm" in part:
        return {f"{ours}/{'bias' if leaf == 'bias' else 'scale'}": x}
    # A convolution (out, in, height, width) -> (height, width, in, out).
    return {f"{ours}/kernel": x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T}


def _size(named: Arrays, metadata: Metadata) -> tuple[Size, int]:
    """Return width, depth, heads and MLP, and the patch size."""
    needed = ["embed/kernel", "blocks/0/mlp_out/kernel"]
    needed += ["position"] if metadata.position == "learned" else []
    missing = [name for name in needed if name not in named]
    if missing or named["embed/kernel"].ndim != 4:
        raise ValueError(f"the file holds no ViT: there is no {(missing or needed)[0]}")
    height, patch_size, _, width = named["embed/kernel"].shape
    if height != patch_size:
        raise ValueError(f"patches of {height} x {patch_size} pixels: only square ones are read")
    heads = metadata.num_heads
    if width != metadata.width or not heads or width % heads:
        raise ValueError(
            f"config.json says {heads} heads on a width of {metadata.width}, the arrays have"
            f" a width of {width}: take the config.json of this file"
        )
    blocks = {int(name.split("/")[1]) for name in named if name.startswith("blocks/")}
    return Size(width, 1 + max(blocks), heads, len(named["blocks/0/mlp_out/kernel"])), patch_size


def _split_heads(named: Arrays, heads: int) -> None:
    """Give the projections of attention their axis of heads."""
    for name, x in named.items():
        if re.search("attention/(query|key|value)/", name):  # (in, heads h) or (heads h,)
            named[name] = x.reshape(*x.shape[: "kernel" in name], heads, -1)
        elif name.endswith("attention/out/kernel"):  # (heads h, out)
            named[name] = x.reshape(heads, -1, x.shape[-1])


def _zero_biases(named: Arrays) -> list[str]:
    """Add biases of zeros where some encoders have none: in the embedding and in attention.

    A bias that other blocks have is missing, and is listed with what else is.
    """
    added, given = [], {re.sub(r"\d+", "*", name) for name in named}
    for name in list(named):
        bias, shape = name.replace("kernel", "bias"), named[name].shape
        needed = re.fullmatch(r"(embed|.*attention/(query|key|value))/kernel", name)
        if needed and re.sub(r"\d+", "*", bias) not in given:
            named[bias] = np.zeros(shape[-1:] if "embed" in name else shape[1:], "f4")
            added.append(bias)
    return [f"{len(added)} biases are not in the file: zeros"] if added else []


def _fold_tokens(named: Arrays, metadata: Metadata, patch_size: int) -> int:
    """Fold the positions of tokens into token and registers; return the image size."""
    position, kinds = named["position"], ("token", "distillation", "registers")
    tokens = np.concatenate([position[:0], *(named.pop(x) for x in kinds if x in named)])
    side = metadata.image_size // patch_size or math.isqrt(len(position))
    count = len(position) - side**2  # positions of tokens: none, the class token's, or all
    if count not in (0, min(1, len(tokens)), len(tokens)):
        raise ValueError(
            f"{len(position)} positions, with {len(tokens)} tokens, are not those of square"
            f" pictures of {side} x {side} patches"
        )
    tokens = tokens + np.pad(position[:count], [(0, len(tokens) - count), (0, 0)])
    named["position"] = position[count:]
    if "token" in metadata.pooling:
        named["token"], tokens = tokens[0], tokens[1:]
    if len(tokens):
        named["registers"] = tokens
    return side * patch_size


def _join_classifiers(named: Arrays) -> None:
    """Join two heads, on class token and distillation token, to one on both tokens: their mean."""
    if "head_distillation/kernel" in named:
        heads = ("head", "head_distillation")
        kernels, biases = ([named.pop(f"{x}/{y}") / 2 for x in heads] for y in ("kernel", "bias"))
        named |= {"head/kernel": np.concatenate(kernels), "head/bias": np.add(*biases)}


def _fold_pixels(named: Arrays, mean: Sequence[float], std: Sequence[float]) -> None:
    """Make the embedding of (x - mean) / std, x from 0 to 1, one of 2 x - 1, the ViT's pixels."""
    kernel = named["embed/kernel"].astype(np.float64)
    usable = len(mean) == len(std) == kernel.shape[2] and all(0 <= x <= 1 for x in mean)
    if not (usable and all(1e-3 <= x <= 1 for x in std)):
        raise ValueError(
            f"{kernel.shape[2]} colours from 0 to 1 cannot be normalised by image_mean={mean},"
            f" image_std={std}: set in a preprocessor_config.json next to the file a mean from 0 to"
            " 1 and a standard deviation from 0.001 to 1 of each colour"
        )
    shift = np.einsum("ijcw,c->w", kernel, (0.5 - np.array(mean)) / np.array(std))
    named["embed/bias"] = (named["embed/bias"] + shift).astype(np.float32)
    scaled = kernel / (2 * np.array(std))[:, None]
    named["embed/kernel"] = scaled.astype(np.float32)


def side(size: Any) -> int:
    """Return the length of 224, [224, 224], {"height": 224, ...} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height") or 0
    return int(size[-1] if isinstance(size, list | tuple) else size)
