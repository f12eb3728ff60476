"""The matrix of estimated attention, pair by pair: what the sums of `op` compute without it.

For queries q and keys k after the factor sqrt(scale), features phi and weights a_j,

    log k^(q, k) = log sum_j a_j phi_j(q) phi_j(k)                 an estimate of q.k
    L(q, k)      = q.k of an exact pair, else log k^(q, k); plus the bias of the pair
    A^(q, k)     = e^{L(q, k)} / sum over the keys k' that q sees of e^{L(q, k')}

Time and memory are quadratic. `attention_weights` returns A^, `performer.refinement` lowers its
error, and `performer.analysis` measures it, by blocks of rows. In logarithms no pair is lost to
those with much larger kernels.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from performer.attention import decay
from performer.attention.maps import Arguments, arguments, feature_maps, logarithm
from performer.attention.state import heads_first
from performer.attention.values import Exact, Features, Pairs, Plan, Tokens
from performer.features import Split
from performer.numerics import anywhere, finite
from performer.typing import float32_or_wider

LOST = 1e-23
"""Sums of features below this, relative to the largest of query and key, lost terms."""


class Logs(NamedTuple):
    """A kernel of pairs, in logarithms."""

    size: Float[Array, "*b t s"]
    """log |k^|; -inf for 0."""
    sign: Float[Array, "*b t s"] | None = None
    """None for 1 everywhere."""


def attention_matrix(
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    features: Features,
    pairs: Pairs,
    scale: float,
) -> Float[Array, "b n t s"]:
    """A^ in float32 or wider; 0 for a query without keys. The numbers of exact pairs may be traced.

    Args:
        query: as in `performer_attention`, with one batch axis.
        key: as there.
        features: as there.
        pairs: of a call that `performer_attention` accepts.
        scale: factor on q.k.
    """
    x, exact = moved(query, key, features, pairs, scale), features.exact
    logs = log_kernel(x, features, scale)
    seen, weights = seen_pairs(pairs, x), _weights_of_keys(x)
    if not is_none(exact):
        exists = jnp.any(seen_keys(x), axis=(1, 2))
        chosen = near(exact, x.query.shape[1], exists, pairs.segments)
        heads = x.keys.key.shape[2]
        sums = column_sums(Logs(jnp.where(seen_keys(x), logs.size + weights, -jnp.inf), logs.sign))
        chosen |= heaviest(sums, heads, exact.keys)[:, :, None]
        logs = with_exact(logs, logits(x, scale), chosen)
    bias = weights
    if pairs.log_decay is not None:
        bias = bias + _fading(pairs.log_decay, pairs.segments, x.query.shape[2])
    return normalised(Logs(jnp.where(seen, logs.size + bias, -jnp.inf), logs.sign))[0]


def moved(query: Array, key: Array, features: Features, pairs: Pairs, scale: float) -> Arguments:
    """Tokens and frequencies after the calibration; keys that do not exist are 0."""
    wide = float32_or_wider(query, key)
    query, key = query.astype(wide), key.astype(wide)
    if features.frequencies is None:  # one feature of weight 0
        none = jnp.zeros((1, key.shape[-1]), wide), jnp.zeros(1, wide)
        features = replace(features, frequencies=none[0], weights=none[1])
    pairs = replace(pairs, log_decay=None, segments=None, is_causal=False)
    plan = Plan(scale=scale, absolute=True)
    return arguments(Tokens(query, key, key[..., :0]), features, pairs, plan)


# The kernel


def log_kernel(x: Arguments, features: Features, scale: float) -> Logs:
    """log k^ (b, n, t, s) of all pairs, whatever the other keys."""
    query_map, key_map = feature_maps(x, features, Plan(scale=scale, absolute=True))
    (b, t, n, h), k = x.query.shape, x.keys.key.shape[2]
    # (b, t, n, h) -> (k, b, n / k, t, h)
    query = x.query.reshape(b, t, k, n // k, h).transpose(2, 0, 3, 1, 4)
    logs = log_products(query_map(query), key_map(heads_first(x.keys.key)))
    return jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(b, n, t, y.shape[-1]), logs)


def log_products(queries: Split, keys: Split) -> Logs:
    """log |phi(q).phi(k)| (k, b, g, t, s) from features (k, b, g, t, m) and (k, b, s, m)."""
    (a, f), (b, g) = queries, keys
    if f is None or g is None:
        return Logs(_log_sums(a, b))
    if a.shape[-1] > 1:  # factors of a sign
        return Logs(_log_sums(a + logarithm(f), b + logarithm(g)))
    sums = _products(f, g)
    return Logs(logarithm(jnp.abs(sums)) + a + _of_keys(b), jnp.sign(sums))


def _log_sums(a: Float[Array, "k b g t m"], b: Float[Array, "k b s m"]) -> Array:
    """log sum_j e^{a_j + b_j}.

    The maxima over the features of each query and of each key are taken out. Pairs whose sum
    underflows all the same are computed again in logarithms, key by key.
    """
    nu, mu = (jax.lax.stop_gradient(finite(jnp.max(x, axis=-1, keepdims=True))) for x in (a, b))
    sums = _products(jnp.exp(a - nu), jnp.exp(b - mu))
    exists = _of_keys(jnp.any(b > -jnp.inf, axis=-1, keepdims=True))  # not of weight 0
    lost = exists & (sums < LOST)
    kernel = jnp.where(exists, jnp.log(jnp.maximum(sums, LOST)) + nu + _of_keys(mu), -jnp.inf)

    def again(kernel):
        @partial(jax.checkpoint, prevent_cse=False)
        def of_key(exponents):  # (k, b, m)
            return jax.nn.logsumexp(a + exponents[:, :, None, None], axis=-1)

        every = jax.lax.map(of_key, jnp.moveaxis(b, -2, 0))  # (s, k, b, g, t)
        return jnp.where(lost, jnp.moveaxis(every, 0, -1), kernel)

    return jax.lax.cond(anywhere(lost), again, lambda kernel: kernel, kernel)


def _products(f: Float[Array, "k b g t m"], g: Float[Array, "k b s m"]) -> Array:
    return jnp.einsum("kbgtm,kbsm->kbgts", f, g, precision="highest")


def _of_keys(x: Array) -> Array:
    """(k, b, s, 1) -> (k, b, 1, 1, s)."""
    return jnp.swapaxes(x, -1, -2)[:, :, None]


# Pairs


def seen_keys(x: Arguments) -> Bool[Array, "*b #n #t s"]:
    """Keys that exist for a head."""
    return _weights_of_keys(x) > -jnp.inf


def _weights_of_keys(x: Arguments) -> Float[Array, "*b #n #t s"]:
    """Log-weights of keys; -inf for those that do not exist."""
    weights, (b, s, *_) = x.keys.log_weights, x.keys.key.shape
    if weights is None:
        return jnp.zeros((b, 1, 1, s), x.query.dtype)
    groups = 1 if weights.shape[2] == 1 else x.query.shape[2] // weights.shape[2]
    return jnp.repeat(jnp.moveaxis(weights, 2, 1), groups, axis=1)[:, :, None]


def seen_pairs(pairs: Pairs, x: Arguments) -> Bool[Array, "*b #n t s"]:
    """Pairs of a query and a key that it attends to."""
    t, s, seen = x.query.shape[1], x.keys.key.shape[1], seen_keys(x)
    if pairs.segments is not None:
        ids, key_ids = pairs.segments
        key_ids = ids if key_ids is None else key_ids
        seen = seen & (ids[:, None, :, None] == key_ids[:, None, None])
    if pairs.is_causal:
        seen = seen & jnp.tri(t, s, dtype=bool)[None, None]
    return jnp.broadcast_to(seen, (*seen.shape[:2], t, s))


def _fading(log_decay: Array, segments: Any, n: int) -> Float[Array, "b n t s"]:
    """The decay of pairs, over the tokens of their segment between them."""
    log_decay = jnp.moveaxis(log_decay, 2, 1)  # (b, t, k) -> (b, k, t)
    if segments is None:
        fading = decay.between(log_decay)
    else:
        order = jnp.argsort(segments[0], axis=1, stable=True)[:, None]
        fading = decay.between(jnp.take_along_axis(log_decay, order, axis=2))
        back = jnp.argsort(order, axis=2)
        fading = jnp.take_along_axis(fading, back[..., None], axis=2)
        fading = jnp.take_along_axis(fading, back[:, :, None], axis=3)
    return jnp.repeat(fading, n // fading.shape[1], axis=1)


# Exact pairs


def is_none(exact: Exact) -> bool:
    """True without exact pairs; False if their numbers are traced."""
    return all(isinstance(x, int) and x == 0 for x in exact)


def logits(x: Arguments, scale: float) -> Float[Array, "b n t s"]:
    """scale q.k of tokens as given."""
    query, key = x.query if x.given is None else x.given, x.keys.exact
    b, t, n, h = query.shape
    query = query.reshape(b, t, key.shape[2], -1, h)
    products = jnp.einsum("btkgh,bskh->bkgts", query, key, precision="highest")
    return scale * products.reshape(b, n, t, key.shape[1])


def with_exact(logs: Logs, logits: Array, chosen: Bool[Array, "*#b t s"]) -> Logs:
    """The kernel with e^{q.k} itself for the chosen pairs."""
    sign = None if logs.sign is None else jnp.where(chosen, 1.0, logs.sign)
    return Logs(jnp.where(chosen, logits, logs.size), sign)


def near(
    exact: Exact,
    t: int,
    exists: Bool[Array, "b s"],
    segments: tuple[Int[Array, "b t"], Int[Array, "b s"] | None] | None = None,
) -> Bool[Array, "#b 1 t s"]:
    """Pairs of a window, of first keys, and of first queries, if both exist and see one another.

    Packed sequences form windows one after another, in the order of their numbers, and each has
    its own first keys. Keys that do not exist are not counted.
    """
    query, key = (jnp.arange(x, dtype=jnp.int32)[None] for x in (t, exists.shape[1]))
    before = jnp.cumsum(exists, axis=1, dtype=jnp.int32) - exists.astype(jnp.int32)
    if segments is not None and t == exists.shape[1]:
        ids = segments[0]
        same = ids[:, :, None] == ids[:, None]
        earlier = jnp.tri(t, k=-1, dtype=bool)[None] & same & exists[:, None]
        before = jnp.sum(earlier, axis=-1, dtype=jnp.int32)
        order = jnp.argsort(jnp.argsort(ids, stable=True), stable=True)
        query = key = order.astype(jnp.int32)
    return is_near(query, key, before, exact)[:, None]


def is_near(query: Array, key: Array, before: Array, exact: Exact) -> Bool[Array, "*b t s"]:
    """Pairs, as `near` has them, of queries (..., t) and keys (..., s) at these positions.

    `before` is the number of keys that exist before each key, in its own sequence.
    """
    is_row = (query < exact.rows)[..., :, None]
    query, key = (x // jnp.maximum(exact.window, 1) for x in (query, key))
    close = abs(query[..., :, None] - key[..., None, :]) <= 1
    return is_row | ((close | (before < exact.first)[..., None, :]) & (exact.window > 0))


def column_sums(logs: Logs) -> Float[Array, "*b s"]:
    """Sums over queries of the attention to a key, by features alone; no gradient.

    Rows whose sum is not positive, as features with signs may have, do not count.
    """
    rows, total, _ = normalised(jax.lax.stop_gradient(logs))
    return jnp.sum(jnp.where(total > 0, rows, 0.0), axis=-2)


def heaviest(sums: Float[Array, "b n s"], heads: int, f: int | Array) -> Bool[Array, "b n s"]:
    """The f keys of each of so many heads with the largest sums over their query heads."""
    b, n, s = sums.shape
    sums = jnp.sum(sums.reshape(b, heads, n // heads, s), axis=2)
    rank = jnp.argsort(jnp.argsort(-sums, axis=-1), axis=-1).astype(jnp.int32)
    return jnp.repeat(rank < f, n // heads, axis=1)


# Rows


def normalised(
    logs: Logs,
) -> tuple[Float[Array, "*b t s"], Float[Array, "*b t 1"], Float[Array, "*b t 1"]]:
    """Rows that sum to 1, or 0 without pairs; their sums before that, over e^top; and top."""
    top = jax.lax.stop_gradient(
        finite(jnp.max(logs.size, axis=-1, keepdims=True, initial=-jnp.inf))
    )
    kernel = jnp.exp(logs.size - top)
    if logs.sign is not None:
        kernel = kernel * logs.sign
    total = jnp.sum(kernel, axis=-1, keepdims=True)
    return kernel / jnp.where(total == 0, 1.0, total), total, top
