"""Files of published weights: arrays in .safetensors, and the JSON beside them.

Nothing here runs what a file contains: pickles (.bin, .pth, .pt) are refused.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

Arrays = dict[str, np.ndarray]
"""float32, by name."""

PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")

CONVERT = (
    "import torch; from safetensors.torch import save_file;"
    " w = torch.load({!r}, weights_only=True);"
    " save_file({{k: v.contiguous() for k, v in w.get('model', w).items()}}, 'model.safetensors')"
)
"""Python that makes a file of safetensors of a trusted pickle."""


def check_form(path: Path) -> None:
    """Raise ValueError, with the conversion, for a file that is not .safetensors."""
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run programs when it is read, and is refused. Use the"
            " model.safetensors that is published beside it, or convert it, with torch installed:"
            f'\n  python -c "{CONVERT.format(path.name)}"'
        )
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is not read: give a file .safetensors, or .npz of google-research"
        )
    if "-of-" in path.stem:
        raise ValueError(
            f"{path} is one part of several: write them as one file with transformers,"
            f" AutoModel.from_pretrained({str(path.parent)!r}).save_pretrained(OUT,"
            " max_shard_size='100GB')"
        )


def read(path: Path, wanted: Callable[[list[str]], list[str]]) -> tuple[Arrays, list[str]]:
    """Return arrays of a file .safetensors in float32, and lines on those that are left out.

    Args:
        path: the file.
        wanted: names of all arrays -> those that are read.

    Raises:
        ValueError: if the file cannot be read, or as `as_float32`.
    """
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            names = sorted(file.keys())
            arrays = {name: np.asarray(file.get_tensor(name)) for name in wanted(names)}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a file of safetensors: {error}") from error
    return as_float32(arrays, path), left_out(names, arrays, ".", 2)


def left_out(names: list[str], read: Collection[str], separator: str, parts: int) -> list[str]:
    """Return a line for each group of arrays that are not read, named by its first parts."""
    groups = (separator.join(x.split(separator)[:parts]) for x in names if x not in read)
    return [f"{group}: {count} arrays left out" for group, count in Counter(groups).items()]


def as_float32(arrays: Arrays, path: Path) -> Arrays:
    """Return the arrays in float32; they may be float16, float64 and bfloat16.

    NumPy stores bfloat16 as two bytes without a type.

    Raises:
        ValueError: if arrays are not finite or of another type; all are listed.
    """
    found, bad, bfloat16 = {}, [], np.dtype(jnp.bfloat16)
    for name, array in arrays.items():
        array = array.view(bfloat16) if array.dtype == "V2" else array
        if array.dtype not in (np.float16, np.float32, np.float64, bfloat16):
            bad.append(f"{name}: of type {array.dtype}")
            continue
        with np.errstate(over="ignore"):  # a float64 too large becomes inf, which is refused
            found[name] = array.astype(np.float32)
        bad += [] if np.isfinite(found[name]).all() else [f"{name}: not finite"]
    if bad:
        raise ValueError(f"arrays of {path} that are no weights:\n  " + "\n  ".join(bad))
    return found


def beside(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in the same folder; empty if there is none.

    Raises:
        ValueError: if it is no JSON object.
    """
    place = path.parent / name
    if not place.exists():
        return {}
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place} is no JSON object")
    return found
