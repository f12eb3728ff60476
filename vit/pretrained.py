"""A new run that starts from published ViT weights, an .npz file of arrays by name.

    python -m vit.pretrained --weights=B_16.npz --config=imagenet \\
        --workdir=runs/augreg --config.attention.kind=softmax

The run stands at step 0, with the attention that the config names: the softmax that the weights
were trained with, or random features over the same parameters. `vit.evaluate`, `vit.convert` (of a
softmax run) and `vit.train --workdir` (which fine-tunes it) take it as any other run.

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
token = cls + pos[0] and position = pos[1:], which is the same function. A file without positions
was trained with fixed ones: --config.model.position=sincos; one without cls averages over patches:
--config.model.pooling=mean. Positions of another image size are resampled by a second run that is
begun from this one (`vit.train --init_from`).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from ml_collections import config_flags

from vit import bounded, data, devices, transfer
from vit import config as configs
from vit.arguments import from_flag, parse_flags
from vit.model import ViT
from vit.task import Task

Arrays = dict[str, np.ndarray]
"""float32, by name."""

PREFIXES = ("", "params/", "opt/target/")
BLOCK_PARTS = {
    "LayerNorm_0": "attention_norm",
    "MultiHeadDotProductAttention_0": "attention",
    "MultiHeadDotProductAttention_1": "attention",
    "LayerNorm_1": "mlp_norm",
    "LayerNorm_2": "mlp_norm",
    "MlpBlock_0/Dense_0": "mlp_in",
    "MlpBlock_3/Dense_0": "mlp_in",
    "MlpBlock_0/Dense_1": "mlp_out",
    "MlpBlock_3/Dense_1": "mlp_out",
}
PARTS = {
    "cls": "token",
    "pos_embedding": "position",
    "Transformer/pos_embedding": "position",
    "Transformer/posembed_input/pos_embedding": "position",
    "Transformer/encoder_norm/scale": "norm/scale",
    "Transformer/encoder_norm/bias": "norm/bias",
    **{f"embedding/{leaf}": f"embed/{leaf}" for leaf in ("kernel", "bias")},
    **{f"head/{leaf}": f"head/{leaf}" for leaf in ("kernel", "bias")},
}
HEAD = ("head/kernel", "head/bias")
NDIM = {"token": 1, "position": 2}
"""Theirs have axes of length 1 before these."""


def pretrained(weights: Path, config: configs.Config, workdir: Path) -> list[str]:
    """Makes the run and returns what was not loaded, one line each; nothing if all was.

    A head for another number of classes is left as it was initialised, and so is one that follows
    layers which this model does not have (`MAPHead_0`; `pre_logits`, where the config has none).

    Args:
        weights: the .npz file; only read, nothing is unpacked to disk.
        config: of the new run. `model` and `data.image_size` must be those of the weights.
        workdir: folder of the new run; it appears in one piece, and after a kill the same call
            begins anew.

    Raises:
        ValueError: for a config that cannot work, a workdir that is not empty, a file that cannot
            be read, or arrays that do not fit the model, all of them in one message. Nothing has
            been written then.
        vit.checkpoint.SaveError: when the run cannot be written.
    """

    def fill(model: ViT, task: Task, dataset: data.Dataset) -> list[str]:
        arrays, report = read(weights)
        return report + load(model, arrays, str(weights))

    return transfer.start(config, workdir, fill, {"weights": str(weights.resolve())})


def read(path: Path) -> tuple[Arrays, list[str]]:
    """The arrays of a checkpoint by their names without prefix, and lines on what is left out.

    float16, float64 and bfloat16 (which NumPy stores as two bytes without a type) become float32.
    What lies beside the parameters, as the moments of an optimiser under "opt/", is not read.

    Raises:
        ValueError: when the file is none, truncated, holds pickled objects or no ViT, would unpack
            to more than `bounded.unpacked` allows, or when arrays are of another type or not
            finite; they are named.
    """
    bounded.check_npz(path)
    stored: dict[str, np.ndarray] = {}
    name = ""
    try:
        with np.load(path, allow_pickle=False) as file:
            prefixes = [prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in file]
            inside = [name for name in file if prefixes and _is_parameter(name, prefixes[0])]
            outside = [name for name in file if name not in inside]
            for name in inside:
                stored[name] = file[name]
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds for broken files
        place = f"{name} in {path}" if name else f"{path}"
        raise ValueError(f"{place} cannot be read as an .npz file: {error}") from error
    if not prefixes:
        raise ValueError(f"{path} holds no ViT: there is no embedding/kernel in it")
    arrays = {name.removeprefix(prefixes[0]): _float32(array) for name, array in stored.items()}
    bad = [
        f"{name}: {'not finite' if array.dtype == np.float32 else f'of type {array.dtype}'}"
        for name, array in arrays.items()
        if array.dtype != np.float32 or not np.isfinite(array).all()
    ]
    if bad:
        raise ValueError(f"arrays of {path} that are no weights:\n  " + "\n  ".join(bad))
    folders = sorted({name.split("/")[0] for name in outside})
    return arrays, [
        f"{folder}: {sum(name.split('/')[0] == folder for name in outside)} arrays left out"
        for folder in folders
    ]


def load(model: ViT, arrays: Mapping[str, np.ndarray], source: str) -> list[str]:
    """Puts the arrays into the model, and returns a line on each that was not loaded.

    Args:
        model: is changed only if all is well.
        arrays: by the names of the file, from `read`.
        source: what messages call the file.

    Raises:
        ValueError: when parameters of the model other than the head are missing or of another
            shape, or when parts of the transformer have no place in it; all are listed.
    """
    params = transfer.parameters(model)
    named, origins = rename(arrays)
    _fold_token_position(named, params)
    surplus = [name for name in named if name not in params]
    ignored = [name for name in surplus if _is_foreign(name)]
    fresh = _fresh_head(named, params, ignored)
    wrong = [
        f"{name}: {params[name].shape} here, "
        + (f"{named[name].shape} in {origins[name]}" if name in named else "not in the file")
        for name in params
        if name not in fresh and (name not in named or named[name].shape != params[name].shape)
    ]
    wrong += [
        f"{origins[name]}: {named[name].shape} in the file, no place here"
        for name in surplus
        if name not in ignored
    ]
    if wrong:
        raise ValueError(f"{source} does not fit the model of the config:\n  " + "\n  ".join(wrong))
    transfer.put(model, {name: named[name] for name in params if name not in fresh})
    return [f"{name}: {named[name].shape} left out, no place here" for name in ignored] + [
        f"{name}: {params[name].shape} left at its initialisation, "
        + (f"{named[name].shape} in the file" if name in named else "not in the file")
        for name in fresh
    ]


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
    match = re.fullmatch(r"Transformer/encoderblock(?:_(\d+))?/(.*)/(\w+)", name)
    if match and match[2] in BLOCK_PARTS:
        return f"blocks/{match[1] or '*'}/{BLOCK_PARTS[match[2]]}/{match[3]}"
    if match and match[2].rpartition("/")[0] in BLOCK_PARTS:  # .../query/kernel
        part, _, projection = match[2].rpartition("/")
        return f"blocks/{match[1] or '*'}/{BLOCK_PARTS[part]}/{projection}/{match[3]}"
    return PARTS.get(name, name)


def _fold_token_position(named: Arrays, params: Mapping[str, nnx.Variable]) -> None:
    """Adds a position of the class token to the token; the rest are those of the patches."""
    if all(name in named and name in params for name in ("token", "position")):
        token, position = named["token"], named["position"]
        if position.shape == (params["position"].shape[0] + 1, *token.shape):
            named["token"], named["position"] = token + position[0], position[1:]


def _fresh_head(
    named: Arrays, params: Mapping[str, nnx.Variable], ignored: Sequence[str]
) -> tuple[str, ...]:
    """The parameters of the head if they stay as initialised."""
    kernel, bias = (named.get(name) for name in HEAD)
    if kernel is None and bias is None:
        return HEAD
    if kernel is None or bias is None:
        return ()
    width, classes = params[HEAD[0]].shape
    another = bias.shape != (classes,) and kernel.shape == (width, *bias.shape)
    return HEAD if another or ignored else ()


def _is_parameter(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and (prefix != "" or not name.startswith("opt/"))


def _is_foreign(name: str) -> bool:
    """Whether it is no part of the transformer, so that it may be left out."""
    return name not in PARTS.values() and not name.startswith(("Transformer/", "blocks/"))


def _float32(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        array = array.view(np.dtype(jnp.bfloat16))
    if array.dtype in (np.float16, np.float32, np.float64, np.dtype(jnp.bfloat16)):
        with np.errstate(over="ignore"):  # a float64 too large becomes inf, which is refused
            return array.astype(np.float32)
    return array


def main(_: list[str]) -> None:
    """The command line."""
    logging.set_verbosity(logging.WARNING)
    workdir = Path(str(_WORKDIR.value))
    try:
        devices.check_alone()
        config = from_flag(_CONFIG)
        report = pretrained(Path(str(_WEIGHTS.value)), config, workdir)
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("\n".join([*report, f"{_WEIGHTS.value} is step 0 of the run in {workdir}"]))


if __name__ == "__main__":
    _WEIGHTS = flags.DEFINE_string("weights", None, ".npz file of a ViT", required=True)
    _CONFIG = config_flags.DEFINE_config_file("config", help_string="file with get_config()")
    _WORKDIR = flags.DEFINE_string("workdir", None, "folder of the new run", required=True)
    flags.mark_flags_as_required(["config"])
    app.run(main, flags_parser=parse_flags)
