"""The replacements of a function in one file, without the function and without pickle.

An .npz file has the arrays of each place, by "number/name", and the entry "structure": JSON with
the static facts of the places and the operations that tell the function from others.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from performer.attention import Exact, Features
from performer.calibration import Calibration
from performer.linearization.compare import Setting
from performer.refinement import LEARNED

STRUCTURE = "structure"
MAPS = {"positive": "positive", "learned": LEARNED}
"""Feature maps of replacements by name."""
ARRAYS = "frequencies", "weights", "query_frequencies"
"""Arrays of `Features`."""


class Replacement(NamedTuple):
    """Arrays of one place; in a scan with an axis of its steps before all others."""

    attention: Features
    scale: Float[Array, "*l n"]
    slopes: Float[Array, "*l n"] | None


class Replacements(NamedTuple):
    """Arrays and facts that replace attention in a function."""

    arrays: dict[int, Replacement]
    settings: dict[int, Setting]
    words: tuple[tuple[str, ...], ...]
    """Operations of each place of attention in the function."""


def write(path: str | os.PathLike, given: Replacements) -> None:
    """Write a file, in the place of an earlier one only when it is whole."""
    arrays, places = {}, {}
    for number, (features, scale, slopes) in given.arrays.items():
        named = {name: getattr(features, name) for name in ARRAYS}
        named |= dict(scale=scale, slopes=slopes)
        fitted = {} if features.calibration is None else features.calibration._asdict()
        named |= {f"calibration.{name}": x for name, x in fitted.items()}
        arrays |= {f"{number}/{name}": np.asarray(x) for name, x in named.items() if x is not None}
        setting = given.settings[number]._asdict()
        places[number] = {
            "feature_map": next(name for name, x in MAPS.items() if x == features.feature_map),
            "coupling": features.coupling if isinstance(features.coupling, str) else None,
            "exact": list(features.exact),
            "setting": {
                k: x.tolist() if isinstance(x, np.ndarray) else x for k, x in setting.items()
            },
        }
    arrays[STRUCTURE] = np.array(json.dumps({"words": given.words, "places": places}))
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def read(path: str | os.PathLike) -> Replacements:
    """Read what `write` has written.

    Raises:
        ValueError: for another file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            entries = dict(file.items())
        structure = json.loads(str(entries.pop(STRUCTURE)))
    except (ValueError, KeyError, EOFError, AttributeError) as error:
        raise ValueError(
            f"{os.fspath(path)} is no linearized function: `linear.save(path)` writes one, where"
            " `linear` is the result of performer.linearize"
        ) from error
    by_place: dict[int, dict[str, Any]] = {}
    for key, x in entries.items():
        number, name = key.split("/")
        by_place.setdefault(int(number), {})[name] = jnp.asarray(x)
    arrays, settings = {}, {}
    for number, found in by_place.items():
        place: dict[str, Any] = structure["places"][str(number)]
        fitted = {x: found.get(f"calibration.{x}") for x in Calibration._fields}
        has_one = any(x is not None for x in fitted.values())
        own: Any = {name: found.get(name) for name in ARRAYS}
        features = Features(
            **own,
            calibration=Calibration(**fitted) if has_one else None,
            feature_map=MAPS[place["feature_map"]],
            coupling=place["coupling"],
            exact=Exact(*place["exact"]),
        )
        arrays[number] = Replacement(features, found["scale"], found.get("slopes"))
        settings[number] = _setting(**place["setting"])
    return Replacements(arrays, settings, _tuples(structure["words"]))


def _setting(**given: Any) -> Setting:
    values: Any = {name: _tuples(x) for name, x in given.items()}
    for name in ("scale", "slopes"):
        values[name] = None if given[name] is None else np.asarray(given[name], np.float32)
    return Setting(**values)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, Sequence) and not isinstance(x, str) else x
