"""float64 NumPy loops written from the equations. They share no code with the package."""

import itertools
import math

import numpy as np


def positive_features(x, frequencies, kernel):
    """sqrt(1/m) exp(w.x - c |x|^2), c = 1/2 (softmax) or 1 (gaussian)."""
    factor = {"softmax": 0.5, "gaussian": 1.0}[kernel]
    m = len(frequencies)
    return np.array(
        [[math.exp(w @ p - factor * (p @ p)) / math.sqrt(m) for w in frequencies] for p in x]
    )


def simplex_rows(d):
    """The rows s_i of SimRF Eq. 9."""
    rows = []
    for i in range(1, d):
        row = np.zeros(d)
        row[i - 1] = math.sqrt(d / (d - 1))
        row[: d - 1] -= (math.sqrt(d) + 1) / (d - 1) ** 1.5
        rows.append(row)
    rows.append(np.append(np.ones(d - 1), 0) / math.sqrt(d - 1))
    return np.array(rows)


def calibration(moments, parts, ridge=0.05):
    """c, M, mu, S of `performer.calibration` from moments, by eigenvectors."""
    h = len(moments) // 2
    mean_q, mean_k = moments[0, 1 : h + 1], moments[0, h + 1 :]
    covariance = moments[1:, 1:] - np.outer(moments[0, 1:], moments[0, 1:])

    def function(f, matrix):
        values, vectors = np.linalg.eigh(matrix)
        return vectors @ np.diag(f(np.maximum(values, 0))) @ vectors.T

    m, c, mu, s = np.eye(h), np.zeros(h), np.zeros(h), np.eye(h)
    if "scale" in parts:
        a, b = covariance[:h, :h], covariance[h:, h:]
        a, b = (x + (ridge * np.trace(x) / h + 1e-6) * np.eye(h) for x in (a, b))
        # The geometric mean of a^-1 and b: the g with g a g = b.
        root = function(np.sqrt, a)
        inverse = np.linalg.inv(root)
        m = function(np.sqrt, inverse @ function(np.sqrt, root @ b @ root) @ inverse)
    inverse = np.linalg.inv(m)
    if "shift" in parts:
        c = mean_k + m @ m @ mean_q
    mean_v = m @ mean_q + inverse @ (mean_k - c)
    both = np.hstack([m, inverse])
    spread = both @ covariance @ both.T
    if {"tilt", "traceless"} & set(parts):
        spread = spread + np.outer(mean_v, mean_v)
    if "proposal" in parts:
        mu = mean_v
    if {"tilt", "traceless", "proposal"} & set(parts):
        s = function(lambda f: (3 + 2 * f + np.sqrt((2 * f + 3) ** 2 - 8)) / 4, spread)
    if "traceless" in parts:
        s = s * h / np.trace(s)
    return c, m, mu, s


def leaves(fitted, h):
    """c, M, M^-1, mu, L of a `Calibration` in float64, identities for None."""
    pairs = zip(fitted, (np.zeros(h), np.eye(h), np.eye(h), np.zeros(h), np.eye(h)), strict=True)
    return [default if x is None else np.asarray(x, np.float64) for x, default in pairs]


def _head(x, ndim, head, heads):
    """The entry of a head in an array that has one for each head, for groups of them, or one."""
    x = np.asarray(x, np.float64)
    return x[head * len(x) // heads] if x.ndim > ndim else x


def _one_head(query, key, frequencies, head, n, root, weights, calibration):
    """Query, key, frequencies and log-weights of a query head, after calibration."""
    k = key.shape[1]
    of_key = head * k // n
    keys, w, log_weights = key[:, of_key], _head(frequencies, 2, head, n), np.zeros(1)
    if weights is not None:
        with np.errstate(divide="ignore"):
            log_weights = np.log(_head(weights, 1, head, n))
    keys = keys * root
    if calibration is not None:
        c, m, inverse, mu, spread = (
            _head(x, rank, of_key, k) for x, rank in zip(calibration, (1, 2, 2, 1, 2), strict=True)
        )
        drawn, w = w, w @ spread.T + mu
        log_weights = log_weights + np.sum(drawn**2 - w**2, axis=-1) / 2
        query, keys = query @ m, (keys - c) @ inverse
    return query, keys, w, log_weights


def other_features(feature_map, p, half):
    """phi(x) of the maps that are none of softmax, (t, m) -> (t, f m), and its slope in p at most.

    "own" is that of `attention_inputs.OWN`.
    """
    if feature_map == "relu":
        return np.maximum(p, 0), np.ones_like(p)
    if feature_map == "elu+1":
        values = np.where(p > 0, p + 1, np.exp(np.minimum(p, 0)))
        return values, np.minimum(1, values)
    assert feature_map == "own"
    powers = np.exp(np.hstack([p / 2 - half, -p / 2]))
    factor = np.hstack([p**2, 1 + np.abs(p)])
    slope = np.hstack([2 * np.abs(p), np.ones_like(p)])
    return powers * factor, powers * (slope + factor * (0.5 + half))


def key_state(
    key, value, frequencies, heads, log_weights, *, scale, weights, calibration, feature_map
):
    """The state of `performer_attention`, (b, heads, m) and (b, heads, m, v), relative to c.

    c is the largest logarithm of the size of a feature over the keys, which count e^{log_weights}
    times, (b, s, k); -inf without one.
    """
    key, value = np.asarray(key, np.float64), np.asarray(value, np.float64)
    (b, _, k, h), root = key.shape, (key.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    features = []
    for i, head in np.ndindex(b, heads):
        exists = log_weights[i, :, head * k // heads, None] > -np.inf
        tokens = np.zeros((1, h)), np.where(exists[..., None], key[i], 0)
        _, keys, w, of_features = _one_head(
            *tokens, frequencies, head, heads, root, weights, calibration
        )
        p, half = keys @ w.T, np.sum(keys**2, axis=-1, keepdims=True) / 2
        a = np.exp(np.broadcast_to(of_features, p.shape[-1:]))
        if feature_map in ("positive", "hyperbolic"):
            phi = np.exp((np.hstack([p, -p]) if feature_map == "hyperbolic" else p) - half)
        elif feature_map == "trigonometric":
            phi = np.exp(half) * np.hstack([np.sin(p), np.cos(p)])
        else:
            phi, _ = other_features(feature_map, p, half)
        features.append(phi * np.tile(a, phi.shape[-1] // len(a)))
    phi = np.reshape(features, (b, heads, *features[0].shape))
    of_keys = np.repeat(log_weights, heads // k, axis=2).swapaxes(1, 2)[..., None]
    with np.errstate(divide="ignore"):
        c = np.max(np.log(np.abs(phi)) + of_keys, axis=2)
    phi = phi * np.exp(of_keys - np.where(np.isinf(c), 0, c)[:, :, None])
    values = np.repeat(value, heads // k, axis=2).swapaxes(1, 2)
    values = np.where(of_keys > -np.inf, values, 0)
    return c, phi.sum(axis=2), np.einsum("bhsm,bhsv->bhmv", phi, values)


def feature_terms(
    query, key, frequencies, log_weights, feature_map, stabilizer, of_keys, query_frequencies=None
):
    """The terms T[t, s, j] = phi_j(q_t) phi_j(k_s) of one head as sign e^{exponent}, in float64.

    log_weights are of the frequencies, of_keys (s,) of the keys. Estimates of e^{q.k} are up to the
    factor e^{-|q|^2 / 2} of a row, and to the mean over the features.

    Returns:
        The exponents (t, s, m); the signs or None; and the logarithms of what the terms are off by,
        at most, where products and sums have relative errors of 1.
    """
    own = frequencies if query_frequencies is None else query_frequencies
    p, r = query @ own.T, key @ frequencies.T
    size = np.abs(query) @ np.abs(own).T, np.abs(key) @ np.abs(frequencies).T
    half = np.sum(key**2, axis=-1, keepdims=True) / 2
    half_q = np.sum(query**2, axis=-1, keepdims=True) / 2
    log_weights = np.broadcast_to(log_weights, p.shape[-1:])
    known = np.where(np.isinf(log_weights), 0, np.abs(log_weights))
    of_keys, exists = of_keys[:, None], of_keys > -np.inf
    signs, known_of_keys = None, np.where(exists[:, None], np.abs(of_keys), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        if stabilizer == "google":
            top = r[exists].max(initial=-np.inf)
            of_q = np.log(np.exp(p - half_q - p.max(axis=-1, keepdims=True)) + 1e-6)
            of_k = np.log(np.exp(r - half - (0 if np.isinf(top) else top)) + 1e-6)
            off_q, off_k = size[0] + half_q, size[1] + half
        elif feature_map in ("positive", "hyperbolic"):
            off_q, off_k, of_q, of_k = size[0], size[1] + half, p, r - half
            if feature_map == "hyperbolic":
                of_q, of_k = np.hstack([p, -p]), np.hstack([r, -r]) - half
        elif feature_map == "trigonometric":
            of_q, of_k = 0 * p, half + 0 * r
            signs, (off_q, off_k) = np.cos(p[:, None] - r), (size[0], size[1] + half)
        else:
            f, slope = (x[:, None] for x in other_features(feature_map, p, half_q))
            g, slope_of_key = other_features(feature_map, r, half)
            each = g.shape[-1] // len(log_weights)
            log_weights, of_query, of_key = (
                np.tile(x, each) for x in (log_weights, size[0][:, None], size[1])
            )
            off = f * g * (1 + known_of_keys) + slope * of_query * g + f * slope_of_key * of_key
            log_weights = log_weights + of_keys
            return np.log(f * g) + log_weights, None, np.log(off) + log_weights
        if feature_map == "hyperbolic":
            log_weights, known = np.tile(log_weights, 2), np.tile(known, 2)
            off_q, off_k = np.tile(off_q, 2), np.tile(off_k, 2)
        exponents = of_q[:, None] + of_k + log_weights + of_keys
        known = known + known_of_keys
        return exponents, signs, exponents + np.log(1 + off_q[:, None] + off_k + known)


def _with_exact_pairs(query, key, of_keys, exact, feature_map, exponents, off):
    """The terms of `feature_terms` on the scale of e^{q.k}, and one term for each exact pair."""
    half = np.sum(query**2, axis=-1)[:, None, None] / 2
    half = -half if feature_map == "trigonometric" else half
    if feature_map == "hyperbolic":  # a pair of features for each frequency
        exponents, off = exponents - np.log(2), off - np.log(2)
    estimated = exponents - half, np.logaddexp(off, exponents + np.log(abs(half) + 1e-300)) - half
    known = np.where(np.isinf(of_keys), 0, np.abs(of_keys))
    true = query @ key.T + of_keys
    of_true = true + np.log(1 + np.abs(query) @ np.abs(key).T + known)
    first = np.arange(exponents.shape[-1]) == 0
    return tuple(
        np.where(exact[..., None], np.where(first, one[..., None], -np.inf), x)
        for one, x in zip((true, of_true), estimated, strict=True)
    )


def full_attention(
    query,
    key,
    value,
    frequencies,
    *,
    mask=None,
    lengths=None,
    log_weights=None,
    segments=None,
    is_causal=False,
    scale=None,
    weights=None,
    calibration=None,
    feature_map="positive",
    stabilizer="exact",
    earlier=None,
    query_frequencies=None,
    exact=None,
    bias=None,
):
    """`performer_attention` with all its options, pair by pair, and how exact it can be.

    Args:
        query: (b, t, n, h), like the others with one batch axis. frequencies and weights with or
            without an axis of heads.
        key, value, frequencies, scale, weights, feature_map, stabilizer, is_causal: as there.
        mask: (b, s).
        lengths: (b,).
        log_weights: of the keys, what broadcasts to (b, s, k).
        segments: (b, t) and (b, s).
        calibration: c, M, M^-1, mu, L, each for all heads or for each key head.
        earlier: (key, value) that all queries see before the others, as they are.
        query_frequencies: as frequencies.
        exact: (b, t, s) or (b, n, t, s), the pairs that count e^{q.k}.
        bias: (b, n, t, s), added to the logarithms of the pairs.

    Returns:
        (b, t, n, v), and the first-order bound (b, t, n) of its error in a computation whose
        operations have a relative error of 1.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (b, t, n, h), s, k = query.shape, key.shape[1], key.shape[2]
    root = (h**-0.5 if scale is None else scale) ** 0.5
    before = 0 if earlier is None else earlier[0].shape[1]
    exists = np.ones((b, s), bool) & (np.arange(s) < (t if is_causal else s))
    if mask is not None:
        exists &= np.asarray(mask) != 0
    if lengths is not None:
        exists &= np.arange(s) < np.asarray(lengths)[:, None]
    of_keys = np.broadcast_to(0.0 if log_weights is None else log_weights, (b, s, k))
    of_keys = np.where(exists[..., None], of_keys, -np.inf).astype(np.float64)
    key, value = (np.where(of_keys[..., None] > -np.inf, x, 0) for x in (key, value))
    if earlier is not None:
        pairs = zip((*earlier, np.zeros((b, before, k))), (key, value, of_keys), strict=True)
        key, value, of_keys = (np.concatenate(pair, axis=1, dtype=np.float64) for pair in pairs)
    out, bound = np.zeros((b, t, n, value.shape[-1])), np.zeros((b, t, n))
    if exact is not None:
        exact = np.broadcast_to(exact if exact.ndim == 4 else exact[:, None], (b, n, t, s))
    for i, head in np.ndindex(b, n):
        q, values = query[i, :, head] * root, value[i, :, head * k // n]
        q, keys, w, of_features = _one_head(
            q, key[i], frequencies, head, n, root, weights, calibration
        )
        of_head = of_keys[i, :, head * k // n]
        allowed = np.broadcast_to(of_head > -np.inf, (t, before + s)).copy()
        later = allowed[:, before:]
        if is_causal:
            later &= np.arange(s) <= np.arange(t)[:, None]
        if segments is not None:
            later &= np.asarray(segments[0])[i][:, None] == np.asarray(segments[1])[i]
        if exact is not None and weights is None:
            of_features = of_features - np.log(len(w))
        if exact is not None and calibration is not None:
            root_of_law = _head(calibration[4], 2, head * k // n, k)
            of_features = of_features + np.linalg.slogdet(root_of_law)[1]
        own = None if query_frequencies is None else _head(query_frequencies, 2, head, n)
        terms = feature_terms(q, keys, w, of_features, feature_map, stabilizer, of_head, own)
        exponents, signs, off = terms
        if exact is not None:
            exponents, off = _with_exact_pairs(
                q, keys, of_head, exact[i, head], feature_map, exponents, off
            )
            signs = None if signs is None else np.where(exact[i, head][..., None], 1, signs)
        if bias is not None:
            of_pairs = bias[i, head][..., None]
            size = np.where(np.isinf(of_pairs), 0, np.abs(of_pairs))
            with np.errstate(divide="ignore"):
                off = np.logaddexp(off, exponents + np.log(size)) + of_pairs
            exponents = exponents + of_pairs
        exponents, off = (np.where(allowed[..., None], x, -np.inf) for x in (exponents, off))
        top = exponents.max(axis=(-1, -2), initial=-np.inf, keepdims=True)
        top = np.where(np.isinf(top), 0, top)
        sizes = np.exp(exponents - top)
        kernel = np.sum(sizes if signs is None else sizes * signs, axis=-1)
        total = kernel.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            out[i, :, head] = np.where(total == 0, 0, kernel @ values / total)
            error = np.exp(off - top).sum(axis=(-1, -2))
            error = np.where(error == 0, 0, error / np.abs(total[:, 0]))
        bound[i, :, head] = 2 * error * np.abs(values).max(initial=0)
    return out, bound


def heaviest(matrix, off, heads):
    """The keys with the largest columns of an attention matrix (b, t, n, s), for each head.

    Its rows are off by (b, t, n). Returns a number f of keys, a third of all or near it, and their
    mask (b, n, 1, s): rounding decides nowhere which they are.
    """
    b, _, n, s = matrix.shape
    groups = n // heads
    weights = matrix.sum(axis=1).reshape(b, heads, groups, s).sum(axis=2)
    off = off.sum(axis=1).reshape(b, heads, groups).sum(axis=2)
    ranked = -np.sort(-weights, axis=-1)
    gaps = ranked[..., :-1] - ranked[..., 1:] - 2 * off[..., None]
    sure = [f for f in range(1, s) if np.all(gaps[..., f - 1] > 0)]
    f = min([*sure, s], key=lambda f: abs(f - s // 3))
    chosen = np.argsort(np.argsort(-weights, axis=-1), axis=-1) < f
    return f, np.repeat(chosen, groups, axis=1)[:, :, None]


def exact_pairs(ids, window, first=0):
    """Which pairs a window counts exactly, (b, t, t): chunks side by side, and the first keys.

    ids: (b, t), the numbers of the segments; chunks are those of the tokens sorted by them.
    """
    chunk = np.argsort(np.argsort(ids, axis=1, kind="stable"), axis=1) // window
    near = abs(chunk[:, :, None] - chunk[:, None]) <= 1
    return near | (_ranks(ids) < first)[:, None]


def _ranks(ids):
    """The number of earlier tokens of the same segment, (b, t)."""
    t = ids.shape[1]
    return np.sum(np.tril(np.ones((t, t), bool), -1) & (ids[:, :, None] == ids[:, None]), axis=2)


def alibi(ids, slopes):
    """Press et al. 2022: -slope |i - j| of each pair, (b, n, t, t)."""
    rank, slopes = _ranks(ids)[:, None], np.asarray(slopes, np.float64)[:, None, None]
    return -slopes * abs(rank[..., None] - rank[..., None, :])


def decay(ids, log_decay, heads):
    """a_(j+1) + ... + a_i of each pair, over the tokens of its segment; (b, heads, t, t)."""
    log_decay = np.repeat(np.asarray(log_decay, np.float64), heads // log_decay.shape[2], axis=2)
    t = np.arange(ids.shape[1])
    low, high = np.minimum(t[:, None], t), np.maximum(t[:, None], t)
    between = (t > low[..., None]) & (t <= high[..., None])
    between = between & (ids[:, None, None] == ids[:, high][..., None])
    of_tokens = log_decay.swapaxes(1, 2)[:, :, None, None]
    return np.where(between[:, None], of_tokens, 0).sum(axis=-1)


def pair_moments(query, key, *, mask=None, is_causal=False, positions=None, scale=None):
    """Sum over pairs of (1, q, k) (1, q, k)^T as softmax attention weighs them, over the queries.

    Query by query, in float64: (b, t, n, h), (b, s, k, h), mask (b, s), the positions of the
    queries that count, or all. The result, (k, 2 h + 1, 2 h + 1), is divided by the number of
    queries of each key head, those without any key among them.
    """
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    (b, t, n, h), s, k = query.shape, key.shape[1], key.shape[2]
    root = (h**-0.5 if scale is None else scale) ** 0.5
    positions = range(t) if positions is None else positions
    total = np.zeros((k, 2 * h + 1, 2 * h + 1))
    for i, position, head in itertools.product(range(b), positions, range(n)):
        seen = [
            j for j in range(s) if (mask is None or mask[i, j]) and (not is_causal or j <= position)
        ]
        if not seen:
            continue
        q = root * query[i, position, head]
        keys = root * key[i, seen, head * k // n]
        logits = keys @ q
        attention = np.exp(logits - logits.max())
        z = np.hstack([np.ones((len(seen), 1)), np.tile(q, (len(seen), 1)), keys])
        pairs = (z * (attention / attention.sum())[:, None]).T @ z
        total[head * k // n] += pairs / (b * len(positions) * n // k)
    return total
