"""float64 NumPy loops written from the equations. They share no code with the package."""

import math

import numpy as np


def softmax_attention(query, key, value, mask=None):
    """softmax(q.k / sqrt(h)) v with heads in the second last axis; masked keys left out."""
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b in range(query.shape[0]):
        for n in range(query.shape[2]):
            for t in range(query.shape[1]):
                seen = [s for s in range(key.shape[1]) if mask is None or mask[b, s]]
                logits = [query[b, t, n] @ key[b, s, n] / math.sqrt(query.shape[-1]) for s in seen]
                top = max(logits, default=0.0)
                weights = [math.exp(x - top) for x in logits]
                for weight, s in zip(weights, seen, strict=True):
                    out[b, t, n] += weight / sum(weights) * value[b, s, n]
    return out


def performer_attention(query, key, value, frequencies, mask=None, scale=None):
    """Ratio of kernel estimates, k(q, k) = mean_j e^{w.q - q^2/2} e^{w.k - k^2/2}, in float64.

    The estimates are formed for every pair (q, k), stabilised by nothing but a common factor of the
    row, which the ratio does not see.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    frequencies = np.asarray(frequencies, np.float64)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(scale)
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b in range(query.shape[0]):
        for n in range(query.shape[2]):
            w = frequencies if frequencies.ndim == 2 else frequencies[n]
            for t in range(query.shape[1]):
                seen = [s for s in range(key.shape[1]) if mask is None or mask[b, s]]
                exponents = np.array(
                    [
                        w @ (root * (query[b, t, n] + key[b, s, n]))
                        - scale * (key[b, s, n] @ key[b, s, n]) / 2
                        for s in seen
                    ]
                )
                if not seen:
                    continue
                kernel = np.exp(exponents - exponents.max()).mean(axis=1)
                for weight, s in zip(kernel / kernel.sum(), seen, strict=True):
                    out[b, t, n] += weight * value[b, s, n]
    return out


def kernel_matrix(
    query, key, frequencies, *, allowed=None, feature_map="positive", scale=None, weights=None
):
    """Estimated kernels k(q_t, k_s) up to a factor of each row, (b, n, t, s), in float64.

    0 where the pair is not allowed, (b | 1, t, s).

    Every pair and every feature on its own: for the exponential maps
    sum_j a_j exp(w_j.q + w_j.k - k^2 / 2) with the largest exponent of the row taken out.
    """
    query, key, frequencies = (np.asarray(x, np.float64) for x in (query, key, frequencies))
    heads = query.shape[2]
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    weights = np.ones(frequencies.shape[-2]) if weights is None else np.asarray(weights, np.float64)

    def per_head(x, ndim):
        return np.stack([x[n * len(x) // heads] if x.ndim == ndim else x for n in range(heads)])

    w, a = per_head(frequencies, 3), per_head(weights, 2)
    key = np.repeat(key, heads // key.shape[2], axis=2)
    q = np.einsum("btnh,nmh->bntm", root * query, w)
    k = np.einsum("bsnh,nmh->bnsm", root * key, w)
    half = np.sum((root * key) ** 2, axis=-1).swapaxes(1, 2)[..., None] / 2
    a = a[:, None, None]
    allowed = np.ones((1, 1, 1, 1), bool) if allowed is None else np.asarray(allowed)[:, None]
    if feature_map in ("positive", "hyperbolic"):
        signs = [1, -1] if feature_map == "hyperbolic" else [1]
        exponents = np.concatenate(
            [sign * (q[:, :, :, None] + k[:, :, None]) - half[:, :, None] for sign in signs], -1
        )
        factors = np.concatenate([np.broadcast_to(a, (heads, 1, 1, a.shape[-1]))] * len(signs), -1)
        exponents = np.where(allowed[..., None], exponents, -np.inf)
        top = exponents.max(axis=(-1, -2), keepdims=True)
        return np.sum(factors * np.exp(exponents - np.where(np.isinf(top), 0, top)), axis=-1)
    if feature_map == "trigonometric":
        top = half.max(axis=2, keepdims=True)
        angles = q[:, :, :, None] - k[:, :, None]
        return allowed * np.sum(a * np.cos(angles), -1) * np.exp(half - top)[:, :, None, :, 0]
    function = {
        "relu": lambda x: np.maximum(x, 0),
        "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    }[feature_map]
    return allowed * np.sum(a * function(q)[:, :, :, None] * function(k)[:, :, None], axis=-1)


def kernel_attention(query, key, value, frequencies, **options):
    """The rows of `kernel_matrix`, normalised, times v."""
    kernel = kernel_matrix(query, key, frequencies, **options)
    total = kernel.sum(axis=-1, keepdims=True)
    value = np.repeat(np.asarray(value, np.float64), kernel.shape[1] // value.shape[2], axis=2)
    return np.einsum("bnts,bsnv->btnv", kernel / np.where(total == 0, 1, total), value)


def public_attention(query, key, value, frequencies, is_causal=False, epsilon=1e-6):
    """FAVOR+ with the public code's stabiliser, after its description:

    features e^{w.x - x^2/2 - max} + epsilon, the maximum of w.q over the features for a query, of
    w.k over features and keys for all keys of a batch entry and head; float64.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    root = query.shape[-1] ** -0.25
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, n in np.ndindex(query.shape[0], query.shape[2]):
        w = np.asarray(frequencies if frequencies.ndim == 2 else frequencies[n], np.float64)
        q, k = root * query[b, :, n], root * key[b, :, n]
        top = (k @ w.T).max()
        phi_k = [np.exp(w @ y - y @ y / 2 - top) + epsilon for y in k]
        for t, x in enumerate(q):
            phi_q = np.exp(w @ x - x @ x / 2 - (w @ x).max()) + epsilon
            seen = range(t + 1) if is_causal else range(len(k))
            kernel = np.array([phi_q @ phi_k[s] for s in seen])
            out[b, t, n] = kernel @ value[b, list(seen), n] / kernel.sum()
    return out


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


def pair_moments(query, key, allowed=None):
    """Mean of (1, q, k) (1, q, k)^T over the pairs of one head, (b, t, h) and (b, s, h), scaled.

    Query by query, whose weight is spread over the keys as softmax attention spreads it, over those
    alone that it may see, `allowed` (t, s).
    """
    h = query.shape[-1]
    total = np.zeros((2 * h + 1, 2 * h + 1))
    for queries, keys in zip(np.asarray(query, float), np.asarray(key, float), strict=True):
        for i, q in enumerate(queries):
            seen = [j for j in range(len(keys)) if allowed is None or allowed[i, j]]
            attention = np.exp([q @ keys[j] for j in seen])
            weights = attention / attention.sum()
            for weight, j in zip(weights, seen, strict=True):
                z = np.concatenate([[1], q, keys[j]])
                total += weight * np.outer(z, z)
    return total / total[0, 0]


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
