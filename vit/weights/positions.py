"""Learned positions of a square grid on another grid, as each library resamples its own."""

import math

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

ANTIALIASED = "bicubic with antialiasing"
BICUBIC = "bicubic without antialiasing"
LINEAR = "linear with aligned corners"


def resampled(
    position: Float[ArrayLike, "positions width"], side: int, *, how: str = ANTIALIASED
) -> Float[np.ndarray, "new_positions width"]:
    """Return positions of a square grid on one of another side, resampled as a library does it.

    Args:
        position: the positions, row by row.
        side: side of the new grid.
        how: `ANTIALIASED`, a cubic with a = -1/2 that is wider where the grid becomes smaller
            (Pillow, timm, `jax.image.resize`); `BICUBIC`, a = -3/4 and four neighbours (torch's
            interpolate); or `LINEAR` between the two neighbours, where the corners of both grids
            coincide (`scipy.ndimage.zoom` of order 1: vision_transformer, big_vision).
    """
    grid = np.asarray(position)
    grid = grid.reshape(math.isqrt(len(grid)), -1, grid.shape[-1])
    if how == ANTIALIASED:
        shape = (side, side, grid.shape[-1])
        new = np.asarray(jax.image.resize(grid, shape, "bicubic", antialias=True))
    else:
        weights = {BICUBIC: _cubic, LINEAR: _linear}[how](len(grid), side)
        new = np.einsum("yi,xj,ijw->yxw", weights, weights, grid.astype(np.float64))
    return new.reshape(side**2, -1).astype(np.float32)


def _linear(old: int, new: int) -> np.ndarray:
    """Return weights (new, old) of the two nearest, the first and the last point unmoved."""
    place = np.linspace(0, old - 1, new)
    return np.maximum(0, 1 - abs(place[:, None] - np.arange(old)))


def _cubic(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """Return weights (new, old) of the four nearest; those beyond the edge are on the edge."""
    place = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for neighbour in range(-1, 3):
        index = np.floor(place) + neighbour
        x = abs(place - index)
        near = ((a + 2) * x - (a + 3)) * x**2 + 1
        far = a * (((x - 5) * x + 8) * x - 4)
        column = np.clip(index, 0, old - 1).astype(int)
        np.add.at(weights, (np.arange(new), column), np.where(x <= 1, near, far))
    return weights
