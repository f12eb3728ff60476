"""Attention as the equations state it: float64, pair by pair, in NumPy.

`reference_attention` estimates attention with random features, `softmax_attention` computes it.
Both take the keywords of `performer.performer_attention` and share no code with it. Time and memory
are quadratic: they are for tests on a few dozen tokens.

Notation: of one head, query q_t and key k_s after the factor sqrt(scale) and the calibration; the
kernel of a pair is the sum over features j of the terms

    T[t, s, j] = a_j phi_j(q_t) phi_j(k_s) e^{bias[t, s]},

or e^{q_t.k_s + bias[t, s]} for an exact pair; A^ = kernel / its row sums; output = A^ v.

Each output has a bound of its error: the sum over terms of the size of what a rounded computation
makes of them, to first order, if each operation has a relative error of 1. Times the unit roundoff
of a dtype (2^-24 for float32) it is how far a correct implementation may be away.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from performer.attention.bias import Bias
from performer.attention.values import as_features
from performer.calibration import Calibration
from performer.features import FeatureMap

Function = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(W x, |x|^2 / 2) -> phi(x), (t, m), (t, 1) -> (t, f m), in float64."""

SOFTMAX = ("positive", "hyperbolic", "trigonometric")
"""Maps that estimate e^{q.k}."""
OTHERS: dict[str, Function] = {
    "relu": lambda p, half: np.maximum(p, 0),
    "elu+1": lambda p, half: np.where(p > 0, p + 1, np.exp(np.minimum(p, 0))),
}


def reference_attention(
    query: Any,
    key: Any,
    value: Any,
    features: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    feature_map: Function | None = None,
    exact_pairs: Any = None,
    earlier: tuple[Any, Any] | None = None,
    with_epsilon: bool = False,
    with_residual: bool = False,
    with_bound: bool = False,
) -> Any:
    """Estimate attention with random features, as the equations state it.

    Args:
        query: (..., t, n, h), with any number of batch axes.
        key: (..., s, k, h); k divides n.
        value: (..., s, k, v).
        features: `performer.Features`, or frequencies (m, h), (k, m, h) or (n, m, h). Their
            `FeatureMap`, if they have one, is evaluated by its `split` in float64.
        bias, mask, is_causal, scale, key_value_seq_lengths, segment_ids: as in
            `performer_attention`.
        feature_map: function of (W x, |x|^2 / 2) in NumPy, in the place of the map of the features.
        exact_pairs: further exact pairs, bool, broadcasting to (b, n, t, s).
        earlier: keys and values (b, r, k, .) that all queries see before the others, unmasked.
        with_epsilon: one maximum over all keys and features, and 1e-6 added to every feature, as in
            the public code of Choromanski et al. 2021.
        with_residual: also return the logarithm of the normaliser of each query.
        with_bound: also return the bound of the error.

    Returns:
        (..., t, n, v) in float64, then with `with_residual` the logarithms (..., t, n), then with
        `with_bound` the bound (..., t, n).

    Example:
        >>> want = performer.testing.reference_attention(query, key, value, w, is_causal=True)
    """
    features, bias = as_features(features), bias or Bias()
    frequencies, weights, calibration = features.frequencies, features.weights, features.calibration
    query_frequencies, pairs = features.query_frequencies, features.exact
    chosen_map = feature_map or features.feature_map
    lead, (query, key, value) = _tokens(query, key, value)
    (b, t, n, h), k, s = query.shape, key.shape[2], key.shape[1]
    root = (h**-0.5 if scale is None else scale) ** 0.5
    allowed, pair_bias, key_bias, key, value = _pairs(
        (query, key, value),
        (lead, is_causal),
        (mask, key_value_seq_lengths, segment_ids),
        bias,
    )
    exact = np.zeros((b, n, t, s), bool)
    ids = _segments(segment_ids, b, t, s)
    if pairs.window:
        exact |= _window(ids[0], key_bias > -np.inf, pairs.window, pairs.first)[:, None]
    exact[:, :, : pairs.rows] = True
    if exact_pairs is not None:
        exact |= np.asarray(exact_pairs)
    if earlier is not None:
        before = earlier[0].shape[1]
        key, value = (
            np.concatenate([np.asarray(x, np.float64), y], axis=1)
            for x, y in zip(earlier, (key, value), strict=True)
        )
        wide = (0, 0), (0, 0), (0, 0), (before, 0)
        allowed, pair_bias = np.pad(allowed, wide, constant_values=True), np.pad(pair_bias, wide)
        exact, key_bias = np.pad(exact, wide), np.pad(key_bias, ((0, 0), (before, 0), (0, 0)))
    absolute = any(pairs) or exact_pairs is not None or with_residual
    leaves = _leaves(calibration, h)
    out, residual = np.zeros((b, t, n, value.shape[-1])), np.zeros((b, t, n))
    bound = np.zeros((b, t, n))
    heads = n if np.ndim(frequencies) == 3 and len(frequencies) == n else k
    for i, group in np.ndindex(len(query), heads):
        members = [head for head in range(n) if head * heads // n == group]
        terms = []
        for head in members:
            key_head = head * k // n
            given = query[i, :, head] * root, key[i, :, key_head] * root
            q, keys, w, log_a = _one_head(
                *given,
                _head(frequencies, 2, head, n),
                None if weights is None else _head(weights, 1, head, n),
                [_head(x, rank, key_head, k) for x, rank in zip(leaves, _RANKS, strict=True)],
                absolute=absolute,
            )
            w_query = w if query_frequencies is None else _head(query_frequencies, 2, head, n)
            head_terms = _terms(
                q, keys, w_query, w, log_a, chosen_map, with_epsilon,
                key_bias[i, :, key_head], absolute,
            )  # fmt: skip
            # Terms are e^{q.(k - c)}; M q and M^-1 (k - c) have that product up to rounding.
            c = _head(leaves[0], 1, key_head, k)
            size = np.abs(given[0]) @ (np.abs(given[1]) + np.abs(c)).T
            terms.append((*head_terms, given[0] @ (given[1] - c).T, size))
        if pairs.keys:
            chosen = _heaviest(terms, allowed[i, members], key_bias[i, :, key_head], pairs.keys)
            exact[i, members] |= chosen
        for head, (logs, signs, off, logits, size) in zip(members, terms, strict=True):
            pair = exact[i, head][..., None]
            first = np.arange(logs.shape[-1]) == 0
            known = key_bias[i, :, head * k // n]
            exactly = (logits + known)[..., None]
            spread = np.log(1 + size + np.where(np.isinf(known), 0, np.abs(known)))[..., None]
            logs = np.where(pair, np.where(first, exactly, -np.inf), logs)
            off = np.where(pair, np.where(first, exactly + spread, -np.inf), off)
            signs = signs if signs is None else np.where(pair, 1, signs)
            out[i, :, head], residual[i, :, head], bound[i, :, head] = _normalised(
                logs, signs, off, allowed[i, head], pair_bias[i, head], value[i, :, head * k // n]
            )
            shift = _head(leaves[0], 1, head * k // n, k)  # terms are e^{q.(k - c)}
            residual[i, :, head] += root * query[i, :, head] @ shift
    results = [out, *[residual] * with_residual, *[bound] * with_bound]
    results = [x.reshape(*lead, *x.shape[1:]) for x in results]
    return tuple(results) if len(results) > 1 else results[0]


def softmax_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
) -> np.ndarray:
    """Return softmax attention in float64; arguments as of `reference_attention`.

    A query without any key returns 0.

    Example:
        >>> exact = performer.testing.softmax_attention(query, key, value, is_causal=True)
    """
    lead, tokens = _tokens(query, key, value)
    bias = bias or Bias()
    allowed, pair_bias, key_bias, key, value = _pairs(
        tokens,
        (lead, is_causal),
        (mask, key_value_seq_lengths, segment_ids),
        bias,
    )
    (n, h), k = tokens[0].shape[2:], key.shape[2]
    key, value, key_bias = (x.repeat(n // k, axis=2) for x in (key, value, key_bias))
    scale = h**-0.5 if scale is None else scale
    logits = scale * np.einsum("btnh,bsnh->bnts", tokens[0], key) + pair_bias
    logits = np.where(allowed, logits + key_bias.swapaxes(1, 2)[:, :, None], -np.inf)
    top = logits.max(axis=-1, initial=-np.inf, keepdims=True)
    kernel = np.exp(logits - np.where(np.isinf(top), 0, top))
    total = kernel.sum(axis=-1, keepdims=True)
    out = np.einsum("bnts,bsnv->btnv", kernel / np.where(total == 0, 1, total), value)
    return out.reshape(*lead, *out.shape[1:])


# Tokens and pairs


def _tokens(query: Any, key: Any, value: Any) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """The batch axes, and queries, keys and values with one of them."""
    lead = np.shape(query)[:-3]
    arrays = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    return lead, [x.reshape(int(np.prod(lead)), *x.shape[-3:]) for x in arrays]


def _pairs(tokens, kind, key_options, bias: Bias):
    """Pairs (b, n, t, s) that are allowed and their log-weights; log-weights of keys (b, s, k)."""
    (query, key, value), (lead, is_causal) = tokens, kind
    mask, lengths, segment_ids = key_options
    (b, t, n, _), (_, s, k, _) = query.shape, key.shape
    exists = np.ones((b, s), bool)
    if mask is not None:
        exists &= np.broadcast_to(np.asarray(mask) != 0, (*(lead or (1,)), 1, 1, s)).reshape(b, s)
    if lengths is not None:
        exists &= np.arange(s) < np.broadcast_to(lengths, lead).reshape(b, 1)
    key_bias = np.zeros((b, s, k))
    if bias.keys is not None:
        given = np.asarray(bias.keys).astype(np.float64)
        given = given if given.ndim > len(lead) + 1 else given[..., None]
        heads = given.shape[-1]
        key_bias = key_bias + np.broadcast_to(given, (*lead, s, heads)).reshape(b, s, heads)
    key_bias = np.where(exists[..., None], key_bias, -np.inf)
    if is_causal:  # keys after the last query, which no query sees: not in a maximum either
        key_bias[:, t:] = -np.inf
    exists_at = key_bias > -np.inf
    key, value = (np.where(exists_at[..., None], x, 0) for x in (key, value))
    ids, key_ids = _segments(segment_ids, b, t, s)
    allowed = np.ones((b, t, s), bool) & (ids[:, :, None] == key_ids[:, None])
    if is_causal:
        allowed &= np.arange(s) <= np.arange(t)[:, None]
    allowed = allowed[:, None] & np.repeat(exists_at, n // k, axis=2).swapaxes(1, 2)[:, :, None]
    decay, pair_bias = bias.decay, np.zeros((b, n, t, s))
    if decay is not None and np.ndim(decay) == 1:
        pair_bias = pair_bias + _per_head(np.asarray(decay), n) * _distance(ids)
    elif decay is not None:
        pair_bias = pair_bias + _decay(ids, np.asarray(decay).astype(np.float64), lead, n)
    return allowed, pair_bias, key_bias, key, value


def _segments(segment_ids: Any, b: int, t: int, s: int) -> tuple[np.ndarray, np.ndarray]:
    if segment_ids is None:
        return np.zeros((b, t), int), np.zeros((b, s), int)
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    query_ids, key_ids = (np.asarray(x).reshape(b, -1) for x in pair)
    return query_ids, key_ids


def _ranks(ids: np.ndarray) -> np.ndarray:
    """Number of earlier tokens of the same segment (b, t)."""
    t = ids.shape[1]
    return np.sum(np.tril(np.ones((t, t), bool), -1) & (ids[:, :, None] == ids[:, None]), axis=2)


def _distance(ids: np.ndarray) -> np.ndarray:
    """|i - j| of tokens in their segments (b, 1, t, t)."""
    rank = _ranks(ids)[:, None]
    return abs(rank[..., None] - rank[..., None, :])


def _per_head(x: np.ndarray, n: int) -> np.ndarray:
    """(k,) or (n,) -> (n, 1, 1)."""
    return np.repeat(np.asarray(x, np.float64), n // len(x))[:, None, None]


def _decay(ids: np.ndarray, log_decay: np.ndarray, lead, n: int) -> np.ndarray:
    """a_(j+1) + ... + a_i of each pair, over the tokens of its segment (b, n, t, t)."""
    b, t = ids.shape
    log_decay = np.broadcast_to(log_decay, (*lead, t, log_decay.shape[-1])).reshape(b, t, -1)
    log_decay = np.repeat(log_decay, n // log_decay.shape[2], axis=2)
    index = np.arange(t)
    low, high = np.minimum(index[:, None], index), np.maximum(index[:, None], index)
    between = (index > low[..., None]) & (index <= high[..., None])
    between = between & (ids[:, None, None] == ids[:, high][..., None])
    per_token = log_decay.swapaxes(1, 2)[:, :, None, None]
    return np.where(between[:, None], per_token, 0).sum(axis=-1)


def _window(ids: np.ndarray, exists: np.ndarray, window: int, first: int) -> np.ndarray:
    """Exact pairs (b, t, t): chunks next to one another, and the first keys that exist.

    Chunks are those of the tokens sorted by segment.
    """
    chunk = np.argsort(np.argsort(ids, axis=1, kind="stable"), axis=1) // window
    near = abs(chunk[:, :, None] - chunk[:, None]) <= 1
    same = ids[:, :, None] == ids[:, None]
    earlier = np.tril(same, -1) & np.any(exists, axis=-1)[:, None]  # existing keys before each key
    return near | (earlier.sum(axis=-1) < first)[:, None]


# One head


_RANKS = (1, 2, 2, 1, 2)


def _leaves(calibration: Any, h: int) -> list[np.ndarray]:
    """c, M, M^-1, mu, L of a calibration, identities for None."""
    identities = np.zeros(h), np.eye(h), np.eye(h), np.zeros(h), np.eye(h)
    given = Calibration() if calibration is None else calibration
    pairs = zip(given, identities, strict=True)
    return [y if x is None else np.asarray(x).astype(np.float64) for x, y in pairs]


def _head(x: Any, ndim: int, head: int, heads: int) -> np.ndarray:
    """The entry of a head in an array that has one for each head, for groups of them, or one."""
    x = np.asarray(x).astype(np.float64)
    return x[head * len(x) // heads] if x.ndim > ndim else x


def _one_head(query, key, frequencies, weights, leaves, absolute: bool):
    """Query, key, frequencies and log a_j of a query head, after calibration."""
    c, scale, inverse, mean, root = leaves
    drawn, w = frequencies, frequencies @ root.T + mean
    with np.errstate(divide="ignore"):
        log_a = np.zeros(len(w)) if weights is None else np.log(weights)
    # The proposal N(mean, root root^T) instead of N(0, I).
    log_a = log_a + np.sum(drawn**2 - w**2, axis=-1) / 2
    if absolute:  # the kernel itself, not a multiple
        log_a = log_a + np.linalg.slogdet(root)[1] - (np.log(len(w)) if weights is None else 0)
    return query @ scale, (key - c) @ inverse, w, log_a


def _function(feature_map: str | Function | FeatureMap) -> Function:
    """phi as a function in NumPy."""
    if isinstance(feature_map, str):
        return OTHERS[feature_map]
    if not isinstance(feature_map, FeatureMap):
        return feature_map

    def split(p: np.ndarray, half: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            exponent, factor = feature_map.split(jax.numpy.asarray(p), jax.numpy.asarray(half))
            values = jax.numpy.exp(exponent) * (1 if factor is None else factor)
        return np.asarray(values, np.float64) * feature_map.weight**0.5

    return split


def _terms(query, key, w_query, w_key, log_a, feature_map, epsilon, key_bias, absolute: bool):
    """log |T|, the signs of T or None, and the logarithm of what T is off by at most.

    T is (t, s, f m). Without `absolute` it lacks a factor of the row.
    """
    p, r = query @ w_query.T, key @ w_key.T
    size = np.abs(query) @ np.abs(w_query).T, np.abs(key) @ np.abs(w_key).T
    half_q, half = (np.sum(x**2, axis=-1, keepdims=True) / 2 for x in (query, key))
    exists, known = key_bias > -np.inf, np.where(np.isinf(log_a), 0, np.abs(log_a))
    known_key = np.where(exists, np.abs(np.where(exists, key_bias, 0)), 0)[:, None]
    signs, key_bias = None, key_bias[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        if epsilon:
            top = r[exists].max(initial=-np.inf)
            query_logs = np.log(np.exp(p - half_q - p.max(axis=-1, keepdims=True)) + 1e-6)
            key_logs = np.log(np.exp(r - half - (0 if np.isinf(top) else top)) + 1e-6)
            off_q, off_k = size[0] + half_q, size[1] + half
        elif feature_map == "positive":
            query_logs, key_logs, off_q, off_k = p, r - half, size[0], size[1] + half
        elif feature_map == "hyperbolic":
            query_logs, key_logs = np.hstack([p, -p]), np.hstack([r, -r]) - half
            off_q, off_k = np.hstack([size[0]] * 2), np.hstack([size[1]] * 2) + half
            log_a, known = np.tile(log_a, 2) - np.log(2) * absolute, np.tile(known, 2)
        elif feature_map == "trigonometric":
            query_logs, key_logs, off_q, off_k = 0 * p, half + 0 * r, size[0], size[1] + half
            signs = np.cos(p[:, None] - r)  # sin sin + cos cos
        else:
            return _other_terms(
                _function(feature_map), (p, half_q), (r, half), size, log_a, key_bias, known_key
            )
        logs = query_logs[:, None] + key_logs + log_a + key_bias
        off = logs + np.log(1 + off_q[:, None] + off_k + known + known_key)
        if absolute:  # the half norm of the query, with the sign that the map has
            shift = (half_q if feature_map == "trigonometric" else -half_q)[:, None]
            off = np.logaddexp(off, logs + np.log(abs(shift) + 1e-300)) + shift
            logs = logs + shift
        return logs, signs, off


def _other_terms(phi: Function, at_query, at_key, size, log_a, key_bias, known_key):
    """The terms of a map that is a function; its slopes are differences."""

    def value_and_slope(p, half):
        step = 1e-6 * (1 + abs(p))
        slope = abs(phi(p + step, half) - phi(p - step, half))
        each = slope.shape[-1] // p.shape[-1]
        return phi(p, half), slope / np.tile(2 * step, each), each

    (f, slope_f, each), (g, slope_g, _) = value_and_slope(*at_query), value_and_slope(*at_key)
    half_q, half = at_query[1], at_key[1]
    size_q, size_k = (np.tile(x, each) for x in size)
    log_a = np.tile(log_a, each)
    f, slope_f, size_q, half_q = (x[:, None] for x in (f, slope_f, size_q, half_q))
    off = abs(f * g) * (1 + half_q + half + known_key) + slope_f * size_q * g + f * slope_g * size_k
    with np.errstate(divide="ignore"):
        logs = np.log(abs(f * g)) + log_a + key_bias
        signs = np.sign(f * g) if np.any(f * g < 0) else None
        return logs, signs, np.log(abs(off)) + log_a + key_bias


def _normalised(logs, signs, off, allowed, bias, value):
    """Output (t, v), log normaliser and bound (t,) from the terms (t, s, m) of one head."""
    pair_bias = np.where(allowed, bias, -np.inf)[..., None]
    size = np.where(np.isinf(pair_bias), 0, np.abs(pair_bias))
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.where(
            allowed[..., None], np.logaddexp(off, logs + np.log(size)) + pair_bias, -np.inf
        )
        logs = np.where(allowed[..., None], logs + pair_bias, -np.inf)
        top = logs.max(axis=(-1, -2), initial=-np.inf, keepdims=True)
        top = np.where(np.isinf(top), 0, top)
        sizes = np.exp(logs - top)
        kernel = np.sum(sizes if signs is None else sizes * signs, axis=-1)
        total = kernel.sum(axis=-1, keepdims=True)
        out = np.where(total == 0, 0, kernel @ value / total)
        error = np.exp(off - top).sum(axis=(-1, -2))
        error = np.where(error == 0, 0, error / np.abs(total[:, 0]))
    # d(N / D) = (dN - out dD) / D; an output is above the values only if terms cancel in D.
    size, largest = np.abs(value).max(initial=0), np.abs(out).max(axis=-1, initial=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        residual = np.log(total[:, 0]) + top[:, 0, 0]
    return out, residual, error * (size + np.maximum(size, largest))


def _heaviest(terms, allowed, key_bias, f: int) -> np.ndarray:
    """Mask (s,) of the f keys with the largest columns of A^, summed over the heads of a group."""
    weights = 0
    for (logs, signs, *_), allowed_pairs in zip(terms, allowed, strict=True):
        logs = np.where(allowed_pairs[..., None], logs, -np.inf)
        top = logs.max(axis=(-1, -2), initial=-np.inf, keepdims=True)
        sizes = np.exp(logs - np.where(np.isinf(top), 0, top))
        kernel = np.sum(sizes if signs is None else sizes * signs, axis=-1)
        total = kernel.sum(axis=-1, keepdims=True)
        weights = weights + (kernel / np.where(total == 0, 1, total)).sum(axis=0)
    order = np.argsort(-np.where(key_bias > -np.inf, weights, -np.inf), kind="stable")
    return np.isin(np.arange(len(order)), order[:f])
