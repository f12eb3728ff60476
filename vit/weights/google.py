"""Weights of google-research in .npz files: names, and the arrays by ours.

Two layouts are read, told apart by their names: that of google-research/vision_transformer
(Dosovitskiy et al. 2021, and "augreg", Steiner et al. 2022; LayerNorm_0 and 2, MlpBlock_3) and that
of google-research/big_vision (LayerNorm_0 and 1, MlpBlock_0), with blocks one by one or stacked
along a leading axis, under no prefix, "params/" or "opt/target/". Theirs and ours:

    embedding                                    embed
    cls, Transformer/posembed_input | pos_embedding          token, position
    Transformer/encoderblock_i/LayerNorm_0 | MultiHead...    blocks/i/attention_norm | attention
    Transformer/encoderblock_i/LayerNorm_1 or 2              blocks/i/mlp_norm
    Transformer/encoderblock_i/MlpBlock_0 or 3/Dense_0 | 1   blocks/i/mlp_in | mlp_out
    Transformer/encoder_norm, pre_logits, head   norm, pre_logits, head

The older layout adds a position to the class token, too. Here positions belong to patches alone, so
token = cls + pos[0] and position = pos[1:], which is the same function.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vit.run import bounded
from vit.weights.files import Arrays, weights

PREFIXES = ("", "params/", "opt/target/")
BLOCK = {
    "LayerNorm_0": "attention_norm",
    "LayerNorm_[12]": "mlp_norm",
    "MultiHeadDotProductAttention_[01]/(query|key|value|out)": r"attention/\1",
    "MlpBlock_[03]/Dense_0": "mlp_in",
    "MlpBlock_[03]/Dense_1": "mlp_out",
}
PARTS = {
    "cls": "token",
    "(?:Transformer/(?:posembed_input/)?)?pos_embedding": "position",
    "Transformer/encoder_norm/(scale|bias)": r"norm/\1",
    "embedding/(kernel|bias)": r"embed/\1",
    **{
        rf"Transformer/encoderblock(?:_\d+)?/{theirs}/(?P<leaf>\w+)": rf"blocks/*/{ours}/\g<leaf>"
        for theirs, ours in BLOCK.items()
    },
}
"""Patterns of their names -> ours, the number of a block as "*"."""
NDIM = {"token": 1, "position": 2}
"""Theirs have axes of length 1 before these."""


def read(path: Path) -> tuple[Arrays, list[str]]:
    """The arrays of a checkpoint by their names without prefix, and lines on what is left out.

    float16, float64 and bfloat16 (which NumPy stores as two bytes without a type) become float32.
    What lies beside the parameters, as the moments of an optimiser under "opt/", is not read.

    Raises:
        ValueError: when the file is none, truncated, holds pickled objects or no ViT, or when
            arrays are of another type or not finite; they are named.
    """
    bounded.check_npz(path)
    arrays: Arrays = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as file:
            prefixes = [prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in file]
            inside = [name for name in file if prefixes and _is_parameter(name, prefixes[0])]
            left = Counter(name.split("/")[0] for name in sorted(set(file) - set(inside)))
            for name in inside:
                arrays[name.removeprefix(prefixes[0])] = file[name]
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds for broken files
        place = f"{name} in {path}" if name else f"{path}"
        raise ValueError(f"{place} cannot be read as an .npz file: {error}") from error
    if not prefixes:
        raise ValueError(f"{path} holds no ViT: there is no embedding/kernel in it")
    lines = [f"{folder}: {count} arrays left out" for folder, count in left.items()]
    return weights(arrays, path), lines


def rename(arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, dict[str, str]]:
    """Arrays by the names of our parameters, stacked blocks taken apart, and where each is from.

    A name that stands for nothing in our model stays as it is.

    Raises:
        ValueError: when two arrays have the same place.
    """
    named: Arrays = {}
    origins: dict[str, str] = {}
    for name, array in arrays.items():
        place = _place(name)
        stacked = "*" in place and array.ndim > 0
        for i, part in enumerate(array if stacked else [array]):
            target = place.replace("*", str(i)) if stacked else place
            if target in named:
                raise ValueError(f"{origins[target]} and {name} are both {target}")
            while part.ndim > NDIM.get(target, part.ndim) and part.shape[0] == 1:
                part = part[0]
            named[target], origins[target] = part, name
    return named, origins


def _place(name: str) -> str:
    for pattern, ours in PARTS.items():
        if match := re.fullmatch(pattern, name):
            number = re.search(r"encoderblock_(\d+)", name)
            return match.expand(ours).replace("*", number[1] if number else "*")
    return name


def fold_token(named: Arrays, params: Mapping[str, Any]) -> None:
    """Adds a position of the class token to the token; the rest are those of the patches."""
    if all(name in named and name in params for name in ("token", "position")):
        token, position = named["token"], named["position"]
        if position.shape == (params["position"].shape[0] + 1, *token.shape):
            named["token"], named["position"] = token + position[0], position[1:]


def _is_parameter(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and (prefix != "" or not name.startswith("opt/"))


OWN = ("Transformer", "blocks", "embed", "token", "position", "norm", "head")


def is_foreign(name: str) -> bool:
    """Return true if it is no part of the transformer, so that it may be left out."""
    return name.split("/")[0] not in OWN
