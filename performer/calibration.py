"""Calibration: exact invariances and importance sampling that lower the error of attention.

The variance of an estimate of e^{q.k}, relative to its square, grows like e^{|q + k|^2}. In a
trained model queries and keys are long, off centre and anisotropic. Invariances of softmax
attention are chosen to suit the estimate. With v = q + k over pairs (query, key), transformed:

    shift     k -> k - c leaves softmax attention unchanged; c = E k + M^2 E q makes E v = 0
    scale     q -> M q, k -> M^-1 k leaves q.k unchanged; M^2 = Cov(q)^-1 # Cov(k), with # the
              geometric mean of matrices, makes the two covariances equal
    proposal  frequencies w = mu + L g, where g is the coupling's draw, are N(mu, S), S = L L^T,
              with mu = E v and S a function of Cov v
    tilt      the same with mu = 0, and E v v^T instead of Cov v
    traceless the same, with S divided by its mean eigenvalue

The last three are importance sampling: a feature has the weight N(w; 0, I) / N(w; mu, S), and the
estimate of the kernel is unbiased for any mu and S if the rows of the coupling are N(0, I). For one
pair its second moment, relative to the squared kernel, is in one dimension

    s (2 s - 1)^(-1/2) exp(((2 v - mu / s)^2 s / (2 s - 1) + mu^2 / s) / 2 - v^2)

and the mean of its logarithm over pairs is smallest at mu = E v and, with F = Cov v,
2 S^2 - (3 I + 2 F) S + I = 0: S = (3 I + 2 F + ((2 F + I)^2 + 8 F)^(1/2)) / 4.

If the lengths of the frequencies are fixed, or common to a block, attention's normalisation cancels
the common part of the weights, which corrects a change of the mean length. S must then keep the
mean square length: `traceless`. `couplings.common_lengths` decides, and `traceless` is used if it
is unknown. Beside exact pairs nothing cancels, and `proposal` is used, which is a tilt if keys are
shifted.

Pairs are drawn from softmax attention, whose large entries count most: a uniform query, and a key
with the probability of its attention. All is fitted from the second moment of (1, q, k).

Queries and keys here include the factor sqrt(scale) each, so that attention is softmax(q.k). No
decomposition is used: on CPU, several batched eigenvalue problems or triangular solves in one
compiled program can deadlock.

Sources: Likhosherstov et al. 2022 (FAVOR++, a scalar S) and 2023 (FAVOR#, dense-exponential
features; their A is (I - S) / 4); Bhatia 2007 (the geometric mean).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from performer import couplings
from performer.attention.masks import key_mask, segments, truth
from performer.choices import positive_number, unknown
from performer.typing import Coupling, float32_or_wider

PARTS = ("shift", "scale", "tilt", "traceless", "proposal")
SAMPLING = ("tilt", "traceless", "proposal")
METHODS = {  # names of combinations; others are written out, as "scale+proposal"
    "none": "",
    "shift": "shift",
    "shift+scale": "shift+scale",
    "full": "shift+scale+tilt",
}
RIDGE = 0.05
"""Added to covariances before they are inverted, relative to their mean eigenvalue."""
ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Added to covariances first, relative to the sum of the mean squares in them."""

Moments = Float[Array, "*n z z"]
"""Sum of (1, q, k) (1, q, k)^T over pairs of a query and a key, z = 2 h + 1; [0, 0] counts them.

`fit` divides by the count, so that sums, means and running means serve alike.
"""


class Calibration(NamedTuple):
    """Changes of queries, keys and frequencies before attention; None for no change.

    The leaves are c, M, M^-1, mu, L of this module, all with a first axis of key heads, or none.
    """

    shift: Float[Array, "*n h"] | None = None
    scale: Float[Array, "*n h h"] | None = None
    inverse_scale: Float[Array, "*n h h"] | None = None
    mean: Float[Array, "*n h"] | None = None
    root: Float[Array, "*n h h"] | None = None

    @property
    def changes_tokens(self) -> bool:
        """True if queries or keys change."""
        return self.shift is not None or self.scale is not None

    @property
    def changes_law(self) -> bool:
        """True if a tilt or a proposal changes the distribution of the frequencies."""
        return self.mean is not None or self.root is not None


RANKS = (1, 2, 2, 1, 2)
"""Number of axes of each leaf of a `Calibration`, without that of the heads."""


def calibrate(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    *,
    coupling: str | Coupling | None = None,
    method: str = "full",
    scale: float | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    mixed: bool = False,
) -> Calibration:
    """Fit a calibration to queries and keys, for each key head.

    Args:
        query: (..., t, n, h).
        key: (..., s, k, h), n a multiple of k.
        coupling: coupling of the frequencies. A tilt is traceless for common or fixed lengths (pm,
            fixed) and for unknown ones (None): valid for every coupling, but not always the best.
        method: "none", "shift", "shift+scale" or "full"; or any of shift, scale, and tilt,
            traceless or proposal joined by "+".
        scale: factor on q.k; 1 / sqrt(h) if None.
        mask: keys that exist, as in `performer_attention`.
        is_causal: only pairs whose key is not later than the query.
        segment_ids: only pairs of one segment, as in `performer_attention`.
        mixed: for attention with exact keys or an exact window. A tilt is then never
            traceless.

    Raises:
        ValueError: for an unknown method or coupling, queries or keys that are not finite or above
            1e19, no pair of a query and a key, and as `pair_moments`. Under `jit` the last three
            are not detected: the calibration is then the identity.

    Example:
        >>> fitted = calibrate(query, key, coupling="orf-antithetic")
        >>> features = performer.Features.draw(random_key, "orf-antithetic", 128, 64, 12)
        >>> features = performer.Features(features.frequencies, fitted)
        >>> output = performer.performer_attention(query, key, value, features)

        `features.calibrated(query, key)` does the same.
    """
    parts(method, coupling)
    pairs: Any = dict(mask=mask, is_causal=is_causal, segment_ids=segment_ids)
    moments = pair_moments(query, key, scale=scale, **pairs)
    if not isinstance(moments, Tracer):
        _require_pairs(np.asarray(moments))
    return fit(moments, method=method, coupling=coupling, mixed=mixed)


def _require_pairs(moments: np.ndarray) -> None:
    """Raise ValueError for moments that would make the identity."""
    if not np.isfinite(moments).all():
        raise ValueError(
            "the mean squares of queries and keys are not finite: is there a NaN, an infinity or a"
            " value above 1e19 in the batch?"
        )
    if not (moments[..., 0, 0] > 0).all():
        raise ValueError(
            "no query has a key, so that nothing can be fitted: mask and segment_ids hide all keys"
        )


def pair_moments(
    query: Float[Array, "*b t n h"],
    key: Float[Array, "*b s k h"],
    *,
    scale: float | None = None,
    mask: ArrayLike | None = None,
    is_causal: bool = False,
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    num_queries: int | None = None,
) -> Moments:
    """Second moment of (1, q, k) over the pairs of softmax attention.

    It is a mean over queries, batch entries and the query heads of a key head; `fit` accepts means
    of it over batches or devices. It needs (..., n, num_queries, s) memory.

    Args:
        query: (..., t, n, h).
        key: (..., s, k, h).
        scale: factor on q.k; 1 / sqrt(h) if None.
        mask: keys that exist, as in `performer_attention`, or pairs, bool (..., 1, t, s).
        is_causal: only pairs whose key is not later than the query.
        segment_ids: only pairs of one segment, as in `performer_attention`.
        num_queries: number of queries measured, evenly spaced; all if None.

    Returns:
        (k, 2 h + 1, 2 h + 1), float32 (float64 if the queries or keys are).

    Raises:
        ValueError: for queries and keys that do not fit, or a scale that is not positive.
    """
    lead, (n, h), (k, width) = query.shape[:-3], query.shape[-2:], key.shape[-2:]
    if lead != key.shape[:-3] or h != width or not k or n % k:
        raise ValueError(
            f"query has shape {query.shape} and key has {key.shape}: batch and head_dim must be the"
            " same, and the heads of query must be a multiple of the heads of key"
        )
    factor = h**-0.25 if scale is None else positive_number("scale", scale) ** 0.5
    dtype = float32_or_wider(query, key)
    query, key = (
        jax.lax.stop_gradient(x.reshape(math.prod(lead), *x.shape[-3:]).astype(dtype)) * factor
        for x in (query, key)
    )
    if mask is not None and np.ndim(mask) > 1 and np.shape(mask)[-2] > 1:
        pairs = _of_pairs(mask, (*lead, 1, query.shape[1], key.shape[1]))
        pairs = pairs.reshape(len(query), *pairs.shape[-2:])
    else:
        keys = key_mask(mask, None, lead, key)
        pairs = None if keys is None else keys[:, None]
    ids = segments(segment_ids, lead, query, key)
    return _pair_moments(query, key, pairs, ids, is_causal, num_queries)


def _of_pairs(mask: ArrayLike, want: tuple[int, ...]) -> Array:
    """Return a mask over pairs; ValueError for other shapes, such as (batch, keys)."""
    shape, (*lead, _, _, s) = np.shape(mask), want
    sizes = zip(reversed(shape), reversed(want), strict=False)
    fits = len(shape) <= len(want) and all(size in (1, wanted) for size, wanted in sizes)
    if not fits or (lead and shape == (*lead, s)):  # with t = b it would be taken for pairs
        raise ValueError(
            f"mask has shape {shape}; expected one that broadcasts to keys {(*lead, 1, 1, s)} or to"
            f" pairs {want}: for padding pass valid[:, None, None, :]"
        )
    return jnp.broadcast_to(truth(mask), want)


@partial(jax.jit, static_argnums=(4, 5))
def _pair_moments(
    query: Array,
    key: Array,
    pairs: Array | None,
    ids: tuple[Array, Array | None] | None,
    is_causal: bool,
    num_queries: int | None,
) -> Moments:
    t, s, h, k = query.shape[1], key.shape[1], key.shape[-1], key.shape[-2]
    count = t if num_queries is None else min(num_queries, t)
    position = (2 * np.arange(count, dtype=np.int64) + 1) * t // (2 * count)  # may pass 2^31
    exists = jnp.ones((1, 1, count, s), bool)
    if is_causal:
        exists = (jnp.arange(s)[None] <= position[:, None])[None, None]
    if pairs is not None:
        key = jnp.where(jnp.any(pairs, axis=1)[..., None, None], key, 0)
        exists = exists & (pairs if pairs.shape[1] == 1 else pairs[:, position])[:, None]
    if ids is not None:
        of_query, of_key = ids[0], ids[0] if ids[1] is None else ids[1]
        same = of_query[:, position, None] == of_key[:, None]
        exists = exists & same[:, None]
    query = query[:, position].reshape(len(query), count, k, query.shape[2] // k, h)
    query = query.transpose(2, 0, 3, 1, 4)  # (k, b, g, t, h)
    key = key.transpose(2, 0, 1, 3)  # (k, b, s, h)
    logits = _dot("kbgth,kbsh->kbgts", query, key)
    attention = jnp.where(exists, jax.nn.softmax(jnp.where(exists, logits, -jnp.inf)), 0)
    attention = attention / query[0, ..., 0].size
    query_weights, key_weights = jnp.sum(attention, axis=-1), jnp.sum(attention, axis=(-3, -2))
    # Sums are about the means, and moved to zero at the end: a sum about zero of a thousand equal
    # vectors has a rounding error that `fit` would take for a covariance, or a negative one.
    total = jnp.maximum(jnp.sum(key_weights, axis=(-2, -1)), ROUNDING)[:, None]
    mean_q = _dot("kbgt,kbgtz->kz", query_weights, query) / total
    mean_k = _dot("kbs,kbsz->kz", key_weights, key) / total
    query, key = query - mean_q[:, None, None, None], key - mean_k[:, None, None]
    query = jnp.concatenate([jnp.ones_like(query[..., :1]), query], axis=-1)
    query_query = _dot("kbgt,kbgty,kbgtz->kyz", query_weights, query, query)
    query_key = _dot("kbgts,kbgty,kbsz->kyz", attention, query, key)
    key_key = _dot("kbs,kbsy,kbsz->kyz", key_weights, key, key)
    moments = jnp.block([[query_query, query_key], [query_key.mT, key_key]])
    means = jnp.concatenate([mean_q, mean_k], axis=-1)
    return _transform(_eye(moments).at[:, 1:, 0].set(means), moments)


def fit(
    moments: Moments,
    method: str = "full",
    coupling: str | Coupling | None = None,
    mixed: bool = False,
) -> Calibration:
    """Fit a calibration to moments; the identity where no pair was counted.

    Args:
        moments: result of `pair_moments`, or a mean of several.
        method: as for `calibrate`.
        coupling: as for `calibrate`.
        mixed: as for `calibrate`.

    Raises:
        ValueError: for an unknown method or coupling.
    """
    return _fit(moments, parts(method, coupling, mixed))


@partial(jax.jit, static_argnums=1)
def _fit(moments: Moments, names: tuple[str, ...]) -> Calibration:
    h = (moments.shape[-1] - 1) // 2
    # Without pairs, as if all queries and keys were zero: the identity.
    nothing = jnp.zeros((2 * h + 1, 2 * h + 1), moments.dtype).at[0, 0].set(1)
    moments = jnp.where(moments[..., :1, :1] > 0, moments, nothing)
    moments = moments / moments[..., :1, :1]
    mean = moments[..., 1:, 0]
    queries, keys = mean[..., :h], mean[..., h:]
    covariance = moments[..., 1:, 1:] - mean[..., :, None] * mean[..., None, :]
    # Rounding of moments about zero must not make a covariance indefinite.
    squares = jnp.diagonal(moments, axis1=-2, axis2=-1)[..., 1:]
    size = jnp.sum(squares.reshape(*squares.shape[:-1], 2, h), axis=-1)
    rounding = jnp.repeat(ROUNDING * size, h, axis=-1)
    covariance = covariance + rounding[..., None] * _eye(covariance)
    M = inverse = _eye(covariance[..., :h, :h])
    c = jnp.zeros_like(keys)
    calibration = Calibration()
    if "scale" in names:
        M, inverse = _balance(covariance[..., :h, :h], covariance[..., h:, h:])
        calibration = calibration._replace(scale=M, inverse_scale=inverse)
    if "shift" in names:
        c = keys + _apply(M, _apply(M, queries))
        calibration = calibration._replace(shift=c)
    # v = M q + M^-1 (k - c)
    to_v = jnp.concatenate([M, inverse], axis=-1)
    mean_v = _apply(M, queries) + _apply(inverse, keys - c)
    size = _dot("...xy,...yy,...xy->...", to_v, covariance, to_v)[..., None, None]
    spread = _transform(to_v, covariance)
    spread = spread + ROUNDING * size * _eye(spread)
    if "proposal" in names:
        return calibration._replace(mean=mean_v, root=_best_root(spread))
    if "tilt" not in names and "traceless" not in names:
        return calibration
    root = _best_root(spread + mean_v[..., :, None] * mean_v[..., None, :])
    if "traceless" in names:
        root = root / jnp.sqrt(jnp.sum(root**2, axis=(-2, -1), keepdims=True) / h)
    return calibration._replace(root=root)


def fold(
    calibration: Calibration, frequencies: Float[Array, "*n m h"]
) -> tuple[Float[Array, "*k m h"], Float[Array, "*l m h"], Float[Array, "*l m"] | None]:
    """Frequencies of queries and of keys, and the logarithm of each feature's weight.

    They are for unchanged queries and keys from `transform_keys`: w = mu + L g for the rows g of
    `frequencies`. The weights lack the constant factor det L, which cancels in attention; None is
    weights of 1. All are float64 if an argument is, else float32.
    """
    calibration, frequencies = _of_one_dtype((calibration, frequencies))
    w = frequencies
    if calibration.root is not None:
        w = _dot("...mx,...yx->...my", w, calibration.root)
    if calibration.mean is not None:
        w, mean = jnp.broadcast_arrays(w, calibration.mean[..., None, :])
        w = w + mean
    log_weights = None
    if w is not frequencies:
        log_weights = jnp.sum(jnp.broadcast_to(frequencies, w.shape) ** 2 - w**2, axis=-1) / 2
    w_query = w if calibration.scale is None else _dot("...mx,...xy->...my", w, calibration.scale)
    return w_query, w, log_weights


def for_heads(calibration: Calibration, num_heads: int) -> Calibration:
    """Repeat the leaves for `num_heads` heads; consecutive heads share a key head."""
    leaves = zip(calibration, RANKS, strict=True)
    return Calibration(
        *(x if x is None or x.ndim == rank else _repeated(x, num_heads) for x, rank in leaves)
    )


def of_head(calibration: Calibration, head: int | Array) -> Calibration:
    """The calibration of one of the key heads, whose number may be traced."""
    leaves = zip(calibration, RANKS, strict=True)
    return Calibration(*(x if x is None or x.ndim == rank else x[head] for x, rank in leaves))


def transform_keys(calibration: Calibration, key: Float[Array, "*b k h"]) -> Float[Array, "*b k h"]:
    """M^-1 (k - c), of keys after the factor sqrt(scale)."""
    calibration, key = _of_one_dtype((calibration, key))
    if calibration.shift is not None:
        key = key - jnp.broadcast_to(calibration.shift, key.shape)
    return _of_heads(key, calibration.inverse_scale)


def transform_queries(
    calibration: Calibration, query: Float[Array, "*b n h"]
) -> Float[Array, "*b n h"]:
    """M q, in the dtype of the queries."""
    return _of_heads(*_of_one_dtype((query, calibration.scale))).astype(query.dtype)


def _of_heads(x: Float[Array, "*b n h"], matrix: Array | None) -> Float[Array, "*b n h"]:
    """x M for symmetric M, shared or for each group of heads."""
    if matrix is None:
        return x
    if matrix.ndim == 2:
        return _dot("...nx,xy->...ny", x, matrix)
    return _dot("...nx,nxy->...ny", x, _repeated(matrix, x.shape[-2]))


def _repeated(leaf: Array, num_heads: int) -> Array:
    return jnp.repeat(leaf, num_heads // leaf.shape[0], axis=0)


def log_determinant(root: Float[Array, "*k h h"]) -> Float[Array, "*k"]:
    """log det L of positive definite matrices, by elimination (no LAPACK, see above)."""

    def step(matrix, i):
        pivot = matrix[..., i, i]
        rows, columns = matrix[..., i, :], matrix[..., :, i] / pivot[..., None]
        return matrix - columns[..., :, None] * rows[..., None, :], jnp.log(pivot)

    _, logarithms = jax.lax.scan(step, root, jnp.arange(root.shape[-1]))
    return jnp.sum(logarithms, axis=0)


def parts(
    method: str, coupling: str | Coupling | None = None, mixed: bool = False
) -> tuple[str, ...]:
    """Parts of a method: ("shift", "scale") of "shift+scale".

    A tilt is traceless, or a proposal with exact pairs, unless the coupling declares that lengths
    are not common.

    Raises:
        ValueError: for an unknown part, or more than one distribution of the frequencies.
    """
    if not isinstance(method, str):
        raise ValueError(f"calibration method={method!r}: must be a text, such as 'full' or 'none'")
    names = () if method == "none" else tuple(METHODS.get(method, method).split("+"))
    bad = [name for name in names if name not in PARTS]
    if bad:
        shown = f"{', '.join(METHODS)}, or parts of it ({', '.join(PARTS)}) joined by '+'"
        known = PARTS if len(names) > 1 else (*METHODS, *PARTS)
        raise ValueError(unknown("calibration", bad[0], known, shown))
    if len(set(names) & set(SAMPLING)) > 1:
        raise ValueError(f"calibration {method!r}: use one of {', '.join(SAMPLING)}")
    if coupling is not None and couplings.common_lengths(coupling) is False:
        return names
    tilt = "proposal" if mixed else "traceless"
    return tuple(tilt if name == "tilt" else name for name in names)


def _balance(Cq: Array, Ck: Array) -> tuple[Array, Array]:
    """M and M^-1 with M Cov(q) M = M^-1 Cov(k) M^-1, of regularised covariances."""
    (Cq, a), (Ck, b) = _regularised(Cq), _regularised(Ck)
    # A^-1 # B = A^-1/2 (A^1/2 B A^1/2)^1/2 A^-1/2 (Bhatia 2007, Eq. 4.10)
    root, inverse_root = _square_root(Cq)
    middle, _ = _square_root(_transform(root, Ck))
    M, inverse = _square_root(_transform(inverse_root, middle))
    # One Newton step makes them inverse to each other, up to rounding.
    inverse = 2 * inverse - _dot("...wx,...xy,...yz->...wz", inverse, M, inverse)
    ratio = b**0.25 / a**0.25
    return M * ratio, inverse / ratio


def _regularised(covariance: Array) -> tuple[Array, Array]:
    """The regularised covariance divided by its mean eigenvalue, and that divisor."""
    h = covariance.shape[-1]
    mean_eigenvalue = jnp.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / h
    ridge = RIDGE * mean_eigenvalue + 1e-6
    size = mean_eigenvalue + ridge
    return covariance / size + ridge / size * _eye(covariance), size


def _best_root(F: Array) -> Array:
    """L with L L = S, for S = (3 I + 2 F + ((2 F + I)^2 + 8 F)^(1/2)) / 4.

    As (2 F + I)^2 + 8 F is the product of x = 2 F + (1 + sqrt 2)^2 I and y = 2 F + (1 - sqrt 2)^2 I
    and x + y = 4 F + 6 I, S is (x^(1/2) + y^(1/2))^2 / 8: no square of F is formed.
    """
    eye = _eye(F)
    roots = [_square_root(2 * F + (1 + sign * 2**0.5) ** 2 * eye)[0] for sign in (1, -1)]
    return (roots[0] + roots[1]) / 8**0.5


def _square_root(matrix: Array) -> tuple[Array, Array]:
    """A^1/2 and A^-1/2 of positive definite matrices, by coupled Newton-Schulz iterations.

    Higham 2008, Eq. 6.35. Eigenvalues below 1e-7 of the largest do not converge.
    """
    eye = _eye(matrix)
    # The largest row sum bounds the eigenvalues.
    norm = jnp.max(jnp.sum(jnp.abs(matrix), axis=-1, keepdims=True), axis=-2, keepdims=True)

    def step(_, pair):
        root, inverse = pair
        correction = (3 * eye - inverse @ root) / 2
        return root @ correction, correction @ inverse

    with jax.default_matmul_precision("highest"):
        pair = (matrix / norm, eye)
        root, inverse = jax.lax.fori_loop(0, 24, step, pair)
    return root * jnp.sqrt(norm), inverse / jnp.sqrt(norm)


def _eye(like: Array) -> Array:
    """Identities of this shape."""
    return jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=like.dtype), like.shape)


def _of_one_dtype(arrays: Any) -> Any:
    dtype = float32_or_wider(*jax.tree.leaves(arrays))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), arrays)


def _transform(left: Array, moments: Array) -> Array:
    return _dot("...xy,...yz,...wz->...xw", left, moments, left)


def _apply(matrix: Array, vector: Array) -> Array:
    return _dot("...xy,...y->...x", matrix, vector)


def _dot(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, precision="highest")
