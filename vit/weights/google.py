"""Encoders of google-research in .npz files.

Two layouts are read, which differ in their names: that of google-research/vision_transformer
(Dosovitskiy et al. 2021, and "augreg", Steiner et al. 2022; LayerNorm_0 and 2, MlpBlock_3) and that
of google-research/big_vision (LayerNorm_0 and 1, MlpBlock_0). Blocks are single or stacked along a
leading axis, under no prefix, "params/" or "opt/target/". Theirs and ours:

    embedding                                    embed
    cls, Transformer/posembed_input | pos_embedding          token, position
    MAPHead_0 (probe, attention, LayerNorm_0, MlpBlock_0)    pool
    Transformer/encoderblock_i/LayerNorm_0 | MultiHead...    blocks/i/attention_norm | attention
    Transformer/encoderblock_i/LayerNorm_1 or 2              blocks/i/mlp_norm
    Transformer/encoderblock_i/MlpBlock_0 or 3/Dense_0 | 1   blocks/i/mlp_in | mlp_out
    Transformer/encoder_norm, pre_logits, head   norm, pre_logits, head

A file without positions was trained with fixed ones ("sincos"). Without cls and MAPHead_0 it
averages over patches. Both libraries resample positions by `scipy.ndimage.zoom(order=1)`. The older
layout also adds a position to the class token: see `encoder`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vit.weights.encoder import (
    HALF,
    Arrays,
    Encoder,
    Metadata,
    as_float32,
    built,
    check_places,
    left_out,
    put,
)
from vit.weights.positions import LINEAR

ORIGIN = "google-research's ViT"
PREFIXES = ("", "params/", "opt/target/")
ATTENTION = "MultiHeadDotProductAttention_[01]/(query|key|value|out)"
BLOCK = {
    "LayerNorm_0": "attention_norm",
    "LayerNorm_[12]": "mlp_norm",
    ATTENTION: r"attention/\1",
    "MlpBlock_[03]/Dense_0": "mlp_in",
    "MlpBlock_[03]/Dense_1": "mlp_out",
}
PARTS = {
    "cls": "token",
    "(?:Transformer/(?:posembed_input/)?)?pos_embedding": "position",
    "Transformer/encoder_norm/(scale|bias)": r"norm/\1",
    "embedding/(kernel|bias)": r"embed/\1",
    "MAPHead_0/probe": "pool/query",
    rf"MAPHead_0/{ATTENTION}/(\w+)": r"pool/attention/\1/\2",
    r"MAPHead_0/LayerNorm_0/(\w+)": r"pool/norm/\1",
    r"MAPHead_0/MlpBlock_0/Dense_0/(\w+)": r"pool/mlp_in/\1",
    r"MAPHead_0/MlpBlock_0/Dense_1/(\w+)": r"pool/mlp_out/\1",
    **{
        rf"Transformer/encoderblock(?:_\d+)?/{theirs}/(?P<leaf>\w+)": rf"blocks/*/{ours}/\g<leaf>"
        for theirs, ours in BLOCK.items()
    },
}
"""Patterns of their names -> ours, the number of a block as "*"; other names stay."""


def read(path: Path) -> Encoder:
    """Read an encoder. Other arrays, such as the moments of an optimiser, are left out.

    Raises:
        ValueError: if the file cannot be read, holds pickled objects or no ViT, or arrays have no
            place, are not finite or of another type; they are named.
    """
    arrays: Arrays = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(file)
            prefixes = [prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in file]
            for name in file if prefixes else ():
                inside = name.startswith(prefixes[0])
                if inside and (prefixes[0] or not name.startswith("opt/")):
                    arrays[name.removeprefix(prefixes[0])] = np.asarray(file[name])
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds for broken files
        place = f"{name} in {path}" if name else f"{path}"
        raise ValueError(f"{place} cannot be read as an .npz file: {error}") from error
    if not prefixes:
        raise ValueError(f"{path} holds no ViT: there is no embedding/kernel in it")
    lines = left_out(names, [prefixes[0] + name for name in arrays], "/", 1)
    try:
        encoder = _encoder(renamed(as_float32(arrays)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return encoder._replace(lines=[*encoder.lines, *lines])


def _encoder(named: Arrays) -> Encoder:
    query = named.get("blocks/0/attention/query/kernel", np.empty(0))
    if query.ndim != 3:
        raise ValueError("the file holds no ViT: there is no encoderblock_0 with a query")
    (width, heads, _), channels = query.shape, named["embed/kernel"].shape[-2]
    mean, std = (values[:channels] for values in HALF)
    pooler = named.get("pool/attention/query/kernel", query)
    if pooler.shape != query.shape:
        raise ValueError(
            f"MAPHead_0 has queries {pooler.shape}, the blocks have {query.shape}: only a pooling"
            " with as many heads is read"
        )
    by_parts = {"pool/query": "attention", "token": "token"}
    pooling = next((value for part, value in by_parts.items() if part in named), "mean")
    metadata = Metadata(
        ORIGIN,
        width,
        heads,
        1e-6,
        "gelu_tanh",
        mean,
        std,
        pooling=pooling,
        position="learned" if "position" in named else "sincos",
        resample=LINEAR,
    )
    return built(named, metadata)


def renamed(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return the arrays by the names of our parameters, stacked blocks taken apart.

    Raises:
        ValueError: if parts of the transformer have no place here, or two arrays the same.
    """
    named: Arrays = {}
    for name, array in arrays.items():
        place = _place(name)
        pieces = {place: array}
        if place in ("token", "position", "pool/query"):  # theirs have leading axes of length 1
            pieces = {place: array.reshape(-1, array.shape[-1])}
        elif "*" in place:
            pieces = {place.replace("*", str(i)): piece for i, piece in enumerate(array)}
        put(named, pieces, name)
    check_places(ORIGIN, {x: named[x] for x in named if x.startswith("Transformer/")})
    return named


def _place(name: str) -> str:
    for pattern, ours in PARTS.items():
        if match := re.fullmatch(pattern, name):
            number = re.search(r"encoderblock_(\d+)", name)
            return match.expand(ours).replace("*", number[1] if number else "*")
    return name
