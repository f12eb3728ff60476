"""Published encoders: files of weights and the JSON next to them.

A .safetensors file is of transformers (`hugging_face`) or timm; an .npz file is of `google`.
Nothing here runs what a file contains: pickles (.bin, .pth, .pt) are refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from vit.storage import files
from vit.weights import google, hugging_face, timm
from vit.weights.encoder import Encoder, as_float32, left_out

PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")

CONVERT = (
    "import torch; from safetensors.torch import save_file;"
    " w = torch.load({!r}, weights_only=True);"
    " save_file({{k: v.contiguous() for k, v in w.get('model', w).items()}}, 'model.safetensors')"
)
"""Python that makes a file of safetensors of a trusted pickle."""


def read(path: Path) -> Encoder:
    """Read the encoder in a file .npz, or .safetensors with the JSON next to it.

    Args:
        path: the file. Beside .safetensors config.json is required, which names the network, and
            preprocessor_config.json is read if it exists.

    Raises:
        ValueError: if the file has another format or cannot be read, the network is not supported,
            or arrays and JSON contradict one another.
    """
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run programs when it is read, and is refused. Use the"
            " model.safetensors that is published with it, or convert it, with torch installed:"
            f'\n  python -c "{CONVERT.format(path.name)}"'
        )
    if not path.is_file():
        is_now = (
            "is a folder: give a file in it" if path.is_dir() else "does not exist: give a file"
        )
        raise ValueError(f"{path} {is_now}, as model.safetensors, or OWNER/NAME of a repository")
    if path.suffix == ".npz":
        return google.read(path)
    if path.suffix != ".safetensors" or "-of-" in path.stem:
        raise ValueError(
            f"{path} is not read: give a file .safetensors, or .npz of google-research."
            f" {joined(str(path.parent))}"
        )
    config, preprocessor = (_beside(path, x) for x in ("config.json", "preprocessor_config.json"))
    if "model_type" not in config and "architecture" not in config:
        raise ValueError(
            f"{path.parent / 'config.json'} must name the network, for arrays alone do not, by its"
            f" model_type ({', '.join(hugging_face.FAMILIES)}) or by timm's architecture: use the"
            " one that is published with the file; or, if there is none, write the name that"
            ' timm gives it, as {"architecture": "vit_small_patch14_dinov2", "global_pool":'
            ' "token", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
        )
    library = hugging_face if "model_type" in config else timm
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            names = sorted(file.keys())
            arrays = {name: np.asarray(file.get_tensor(name)) for name in library.to_read(names)}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a file of safetensors: {error}") from error
    lines = left_out(names, arrays, ".", 2)
    try:
        encoder = library.read(as_float32(arrays), config, preprocessor)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        message = error if isinstance(error, ValueError) else f"the JSON next to it: {error!r}"
        raise ValueError(f"{path}: {message}") from error
    return encoder._replace(lines=[*encoder.lines, *lines])


def joined(source: str) -> str:
    """Return how to join weights in several parts, in a folder or a repository of the Hub."""
    return (
        f"Parts are joined by transformers, AutoModel.from_pretrained({source!r})"
        ".save_pretrained(OUT, max_shard_size='100GB')"
    )


def _beside(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the same folder; empty if there is none."""
    place = path.parent / name
    try:
        content = files.parse_json(place.read_bytes()) if place.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place} is no JSON object")
    return content
