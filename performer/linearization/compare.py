"""Comparison of masks, slopes and scales in the code of a call with the measured ones."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from performer.linearization.layout import Size
from performer.linearization.program import Place
from performer.linearization.reading import Reading


class Setting(NamedTuple):
    """Static facts of a place that is replaced."""

    kind: str
    padded: bool
    square: bool
    """True if it requires as many queries as keys."""
    roles: tuple[tuple[str, ...], ...]
    """`Layout.roles`."""
    lengths: tuple[Size, Size]
    """Numbers of queries and keys."""
    scale: Float[np.ndarray, " n"]
    slopes: Float[np.ndarray, " n"] | None
    has_key_bias: bool = False
    """True if numbers of each key are added to the scores."""


def require_constants(place: Place, setting: Setting, found: Reading) -> None:
    """Raise ValueError for a mask, bias or scale in the code that is not as it was measured."""
    scale, agrees = found.constant_scale, dict(found.agrees)
    if scale is not None and (scale.ndim < 3 or scale.shape[2:] == (1, 1)):
        expected = setting.scale.reshape(1, -1, 1, 1)
        agrees["scale"] = np.allclose(scale, expected, rtol=1e-3, atol=0)
    for name, same in agrees.items():
        if same:
            continue
        (t, s), (before, keys_before) = place.layout.lengths, setting.lengths
        if (t, s) == (before, keys_before):
            raise ValueError(
                f"{place.line}: its {name} is another one with these arguments than with those"
                " it was measured with: make what differs an array, or linearize for each"
            )
        raise ValueError(
            f"{place.line}: its {name} is of another kind with {t} queries and {s} keys than"
            f" with the {before} and {keys_before} it was measured with: linearize on batches"
            " of the lengths that occur"
        )
