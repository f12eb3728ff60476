"""Points of low discrepancy as frequencies: baselines beside `performer.couplings.halton`.

SciPy makes the points. Both are couplings, (key, m, d) -> (m, d) through the normal quantile.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import qmc

from performer.typing import Frequencies, Key

_BITS = 23  # (2^23 - 1/2) / 2^23 is below 1 in float32


def plain_halton(key: Key, m: int, d: int) -> Frequencies:
    """The Halton points 1 to m, the same for every key: no row is Gaussian."""
    del key
    return jax.scipy.special.ndtri(jnp.asarray(_halton(m, d)))


def sobol(key: Key, m: int, d: int) -> Frequencies:
    """Scrambled Sobol points with a digital shift of each draw, which makes every row N(0, I_d).

    The linear scramble is the same in all draws. The base is 2, of as many points as the next power
    of two, the first m.
    """
    shift = jax.random.bits(key, (1, d), jnp.uint32) >> (32 - _BITS)
    digits = jnp.asarray(_sobol(m, d)) ^ shift
    return jax.scipy.special.ndtri((digits.astype(jnp.float32) + 0.5) / 2**_BITS)


@lru_cache(maxsize=16)
def _halton(m: int, d: int) -> np.ndarray:
    """Without the first point, which is 0."""
    return qmc.Halton(d, scramble=False).random(m + 1)[1:].astype(np.float32)


@lru_cache(maxsize=16)
def _sobol(m: int, d: int) -> np.ndarray:
    """The first binary digits of the points, as integers."""
    points = qmc.Sobol(d, rng=np.random.default_rng(0)).random_base2((m - 1).bit_length())
    return (points[:m] * 2**_BITS).astype(np.uint32)
