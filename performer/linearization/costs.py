"""Costs of recipes on a platform that is not at hand, from coefficients.

A query costs as much as so many keys of exact attention: `features` for having features, `feature`
for each, `choice` for each feature again where exact keys are chosen by them, `pairs` for having
exact pairs, and `pair` for each exact key, or key of the windows that the query sees.

The coefficients have the least squares of relative errors (`fitted`): for a CPU of times by
`performer-vit benchmark recipes`, for a GPU and a TPU of times counted from compiled programs,
which no device has confirmed (docs, "Speed"). They order recipes, and are no times: at another
length the same recipe can cost twice as much.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from performer.linearization.report import Recipe


class Cost(NamedTuple):
    """Coefficients, in keys of exact attention for each query."""

    features: float
    feature: float
    choice: float
    pairs: float
    pair: float


COSTS = {
    "cpu": (Cost(21.1, 0.849, 0.103, 2.45, 0.562), Cost(80.8, 1.64, 0, 116, 0.222)),
    "gpu": (Cost(52.4, 0.315, 3.94, 305, 1.61), Cost(88.1, 0.108, 0, 1178, 0)),
    "tpu": (Cost(37.8, 1.26, 1.63, 25.1, 3), Cost(402, 4.82, 0, 955, 0)),
}
"""Platform -> coefficients of attention to all keys, and of causal attention."""


def terms(recipe: Recipe, is_causal: bool) -> tuple[int, ...]:
    """The numbers that the coefficients multiply."""
    m, (window, first, keys, _) = recipe
    pairs = (2 if is_causal else 3) * window + first + keys
    return min(m, 1), m, m * min(keys, 1), min(pairs, 1), pairs


def cost(recipe: Recipe, platform: str, is_causal: bool) -> float:
    """The cost of a recipe on a platform, one of `COSTS`."""
    by_position = is_causal or recipe.exact.window > 0
    return float(np.dot(COSTS[platform][by_position], terms(recipe, is_causal)))


def fitted(recipes: Sequence[Recipe], costs: ArrayLike, is_causal: bool) -> Cost:
    """Coefficients of these costs: at least 0, with the least squares of relative errors."""
    numbers = np.array([terms(recipe, is_causal) for recipe in recipes]) / np.c_[costs]
    return Cost(*(float(x) for x in nnls(numbers, np.ones(len(recipes)))[0]))
