"""Random queries and keys of one head, on which the attention error is measured.

The squared norm is the mean of |q|^2 and of |k|^2; clustered queries have 0.8 of it, for they lack
the mean of the keys. An entry of `DATA` is (squared_norm, seed, tokens=197) -> queries and keys
(tokens, 1, 64).
"""

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, HEAD_DIM = 197, 64
DATA_SETS = 4


def isotropic(squared_norm: float, seed: int, tokens: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return independent rows N(0, squared_norm / d I)."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2, tokens or TOKENS, HEAD_DIM))
    return _pair(np.sqrt(squared_norm / HEAD_DIM) * rows)


def anisotropic(squared_norm: float, seed: int, tokens: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return rows with half of the squared norm in a mean, half in a spectrum 1 / l."""
    rng = np.random.default_rng(seed)
    spectrum = 1 / np.arange(1, HEAD_DIM + 1)
    spectrum /= spectrum.sum()
    first, turn = (np.linalg.qr(x)[0] for x in rng.normal(size=(2, HEAD_DIM, HEAD_DIM)))
    bases = first, np.linalg.qr(first + turn / 2)[0]
    means = rng.normal(size=(2, 1, HEAD_DIM))
    means *= np.sqrt(squared_norm / 2) / np.linalg.norm(means, axis=-1, keepdims=True)
    scales = np.sqrt(squared_norm / 2 * spectrum)
    noise = rng.normal(size=(2, tokens or TOKENS, HEAD_DIM)) * scales
    return _pair([m + x @ basis.T for m, x, basis in zip(means, noise, bases, strict=True)])


def clustered(squared_norm: float, seed: int, tokens: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys around the same ten centres; the keys also have a common mean."""
    rng = np.random.default_rng(seed)
    centres, common = rng.normal(size=(10, HEAD_DIM)), rng.normal(size=HEAD_DIM)
    labels = rng.integers(10, size=(2, tokens or TOKENS))
    noise = rng.normal(size=(*labels.shape, HEAD_DIM))
    rows = np.sqrt(0.6) * centres[labels] + np.sqrt(0.2) * noise
    rows[1] += np.sqrt(0.2) * common
    return _pair(np.sqrt(squared_norm / HEAD_DIM) * rows)


def _pair(rows) -> tuple[jax.Array, jax.Array]:
    query, key = (jnp.asarray(x, jnp.float32)[:, None] for x in rows)
    return query, key


DATA = {"isotropic": isotropic, "anisotropic": anisotropic, "clustered": clustered}
