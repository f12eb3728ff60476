"""float64 NumPy loops written from the equations, beside those of `performer.testing`."""

import itertools
import math

import numpy as np

from performer.testing import reference


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


def key_state(
    key, value, frequencies, heads, log_weights, *, scale, weights, calibration, feature_map
):
    """The state of `performer_attention`, (b, heads, m) and (b, heads, m, v), relative to c.

    c is the largest logarithm of the size of a feature over the keys, which count e^{log_weights}
    times, (b, s, k); -inf without one.
    """
    key, value = np.asarray(key, np.float64), np.asarray(value, np.float64)
    (b, _, k, h), root = key.shape, (key.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    features, leaves = [], reference._leaves(calibration, h)
    for i, head in np.ndindex(b, heads):
        of_key = head * k // heads
        exists = log_weights[i, :, of_key, None] > -np.inf
        _, keys, w, of_features = reference._one_head(
            np.zeros((1, h)),
            np.where(exists, key[i, :, of_key], 0) * root,
            reference._head(frequencies, 2, head, heads),
            None if weights is None else reference._head(weights, 1, head, heads),
            [
                reference._head(x, n, of_key, k)
                for x, n in zip(leaves, (1, 2, 2, 1, 2), strict=True)
            ],
            absolute=False,
        )
        p, half = keys @ w.T, np.sum(keys**2, axis=-1, keepdims=True) / 2
        a = np.exp(np.broadcast_to(of_features, p.shape[-1:]))
        if feature_map in ("positive", "hyperbolic"):
            phi = np.exp((np.hstack([p, -p]) if feature_map == "hyperbolic" else p) - half)
        elif feature_map == "trigonometric":
            phi = np.exp(half) * np.hstack([np.sin(p), np.cos(p)])
        else:
            phi = (reference.OTHERS | {"own": own_features})[feature_map](p, half)
        features.append(phi * np.tile(a, phi.shape[-1] // len(a)))
    phi = np.reshape(features, (b, heads, *features[0].shape))
    of_keys = np.repeat(log_weights, heads // k, axis=2).swapaxes(1, 2)[..., None]
    with np.errstate(divide="ignore"):
        c = np.max(np.log(np.abs(phi)) + of_keys, axis=2)
    phi = phi * np.exp(of_keys - np.where(np.isinf(c), 0, c)[:, :, None])
    values = np.repeat(value, heads // k, axis=2).swapaxes(1, 2)
    values = np.where(of_keys > -np.inf, values, 0)
    return c, phi.sum(axis=2), np.einsum("bhsm,bhsv->bhmv", phi, values)


def own_features(p, half):
    """phi of `attention_inputs.OWN`."""
    powers = np.exp(np.hstack([p / 2 - half, -p / 2]))
    return powers * np.hstack([p**2, 1 + np.abs(p)])


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
