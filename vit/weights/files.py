"""Files of published weights, opened safely: arrays in .safetensors, and the JSON beside them.

Nothing here runs what a file says: pickles (.bin, .pth, .pt) are refused.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from vit.run import bounded

Arrays = dict[str, np.ndarray]
"""float32, by name."""

PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")

CONVERT = (
    "import torch; from safetensors.torch import save_file;"
    " w = torch.load({!r}, weights_only=True);"
    " save_file({{k: v.contiguous() for k, v in w.get('model', w).items()}}, 'model.safetensors')"
)
"""Python that makes a file of safetensors of a pickle, where one trusts it."""


def check_form(path: Path) -> None:
    """Raises ValueError, which says how to convert it, for a file that is not .safetensors."""
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run programs when it is read, and is refused. Take the"
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


def names(path: Path) -> list[str]:
    """Names of the arrays in a file.

    Raises:
        ValueError: for a file that `check_form` refuses, or that cannot be read.
    """
    check_form(path)
    with _opened(path) as file:
        return sorted(file.keys())


def read(path: Path, wanted: Sequence[str]) -> Arrays:
    """The arrays of those names, in float32.

    Raises:
        ValueError: as `names`, or with the names of arrays that are no finite numbers.
    """
    with _opened(path) as file:
        return weights({name: np.asarray(file.get_tensor(name)) for name in wanted}, path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        bounded.regular(path).close()
        with safetensors.safe_open(path, framework="flax") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as a file of safetensors: {error}") from error


def weights(arrays: Arrays, path: Path) -> Arrays:
    """The arrays in float32: float16, float64 and bfloat16, too.

    NumPy stores bfloat16 as two bytes without a type.

    Raises:
        ValueError: with the names of all arrays that are not finite, or of another type.
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
    """A JSON file in the same folder; empty where there is none.

    Raises:
        ValueError: when it is no JSON object.
    """
    place = path.parent / name
    if not place.exists():
        return {}
    try:
        found = json.loads(bounded.content(place))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{place} is no JSON object")
    return found
