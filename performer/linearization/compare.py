"""Masks, biases and scales of a call, compared with the measured ones.

A mask that is no argument may depend on the length: a local window of 16 tokens is causal at 12.
Some queries are compared, so that the time stays linear in the length. Constants of the program are
evaluated while it is traced, and a ValueError names the place. If the inputs have a part in the
mask, the output becomes NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from performer.linearization.measure import flat, unfolded
from performer.linearization.program import FILL, MASKED, Constants, Place, Traced, Values
from performer.typing import float32_or_wider

QUERIES = 16
"""Queries that are compared, evenly spaced, and the ones next to the first and the last."""


class Setting(NamedTuple):
    """Static facts of a place that is replaced."""

    kind: str
    padded: bool
    square: bool
    """True if it requires as many queries as keys."""
    roles: tuple[tuple[str, ...], ...]
    """`Layout.roles`."""
    lengths: tuple[int, int]
    """Numbers of queries and keys."""
    scale: Float[np.ndarray, " n"]
    slopes: Float[np.ndarray, " n"] | None


class Agreement(NamedTuple):
    """Which parts of a place are as they were measured, and the keys that exist."""

    mask: Bool[Array, ""]
    bias: Bool[Array, ""]
    scale: Bool[Array, ""]
    keys: Bool[Array, "b s"]


def agreement(values: Values, place: Place, setting: Setting) -> Agreement:
    """Compare a place with the measured one, at some queries."""
    t, s = lengths(place)
    even = np.linspace(0, t - 1, min(t, QUERIES)).astype(int)
    rows = np.unique([*even, min(1, t - 1), max(t - 2, 0)])

    def scores(fill: float) -> Array:
        x = values.scores(place, unfolded(fill))
        return x[:, :, rows]  # fused: other pairs are not computed

    bias = scores(0.0)
    tolerance = 1e-3 if bias.dtype in (jnp.float32, jnp.float64) else 0.01
    bias = bias.astype(float32_or_wider(bias))
    allowed = bias > MASKED
    visible = jnp.any(allowed, axis=1)
    keys = jnp.any(visible, axis=1)
    if "causal" in setting.kind:  # keys of the last query, or of their own: the last may be padding
        diagonal = jnp.diagonal(values.scores(place, unfolded(0.0)), axis1=2, axis2=3)
        keys = visible[:, -1] | jnp.any(diagonal > MASKED, axis=1)
    pairs = jnp.broadcast_to(keys[:, None], visible.shape)
    if "causal" in setting.kind:
        pairs &= jnp.asarray(np.arange(s) <= rows[:, None])[None]
    same = (visible == pairs) | ~jnp.any(visible, axis=-1, keepdims=True)
    distance = jnp.abs(rows[:, None] - np.arange(s)).astype(bias.dtype)
    slopes = jnp.zeros(bias.shape[1]) if setting.slopes is None else setting.slopes
    slope = (scores(FILL).astype(bias.dtype) - bias) / FILL
    scale = jnp.asarray(setting.scale, bias.dtype)[None, :, None, None]
    apart = jnp.where(allowed, jnp.abs(slope - scale), 0) > tolerance * jnp.abs(scale)
    return Agreement(
        mask=jnp.all(same) & jnp.all(allowed == visible[:, None]),
        bias=flat(bias, allowed, jnp.asarray(slopes, bias.dtype), distance),
        scale=~jnp.any(apart),
        keys=keys,
    )


def lengths(place: Place) -> tuple[int, int]:
    """Numbers of queries and keys of a place."""
    sizes = place.layout.sizes
    return sizes[place.layout.time], sizes[place.layout.keys]


def constant_agreement(values: Values, place: Place, setting: Setting) -> Agreement | None:
    """Compare constants of the program while it is traced; None if their values are not known.

    Raises:
        ValueError: if one is not as it was measured.
    """
    if any(map(is_symbolic_dim, place.layout.sizes.values())):
        return None
    try:
        compare = jax.jit(lambda: agreement(Constants(values.program), place, setting))
        with jax.disable_jit(False):
            result = compare.lower().compile()()  # not staged by what is traced around it
    except Traced:
        return None
    agreed = {name: bool(getattr(result, name)) for name in ("mask", "bias", "scale")}
    if "segments" in setting.kind:  # all pairs are compared where they are read
        del agreed["mask"]
    for name, same in agreed.items():
        if not same:
            (t, s), (before, keys_before) = lengths(place), setting.lengths
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
    return result
