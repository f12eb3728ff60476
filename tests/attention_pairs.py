"""The oracle of attention with exact near keys, in float64 and pair by pair; which are exact."""

import math

import numpy as np


def near(t, w, first=0, is_causal=True, place=None):
    """Which pairs are exact: chunks side by side, and the first keys."""
    i = np.arange(t) if place is None else place
    apart = i[:, None] // w - i // w
    exact = (apart <= 1) & (apart >= -1) | (i < first)
    return exact & (np.arange(t) <= np.arange(t)[:, None]) if is_causal else exact


def allowed(t, is_causal):
    return np.tril(np.ones((t, t), bool)) if is_causal else np.ones((t, t), bool)


def oracle(query, key, value, frequencies, exact, seen, **options):
    """Pairs one by one: e^{q.k}, or the mean over features of ratios of densities.

    exact, seen: (t, t), or (b, t, t). Options: log_weights (b, t, k) of keys, bias (b, n, t, t) of
    pairs, the leaves of a calibration, scale.
    """
    log_weights, of_pairs = options.get("log_weights"), options.get("bias", 0.0)
    c, m, inverse, _, root = options.get("calibration") or [None] * 5
    query, key, value, frequencies = (
        np.asarray(x, np.float64) for x in (query, key, value, frequencies)
    )
    (b, t, n, h), k = query.shape, key.shape[2]
    exact, seen = (np.broadcast_to(x, (b, t, t)) for x in (exact, seen))
    scale = options.get("scale") or h**-0.5
    of_pairs = np.broadcast_to(of_pairs, (b, n, t, t))
    out = np.zeros((b, t, n, value.shape[-1]))
    for i, head in np.ndindex(b, n):
        kv = head * k // n
        w = frequencies if frequencies.ndim == 2 else frequencies[head * len(frequencies) // n]
        q, keys = query[i, :, head] * scale**0.5, key[i, :, kv] * scale**0.5
        bias = np.zeros(t) if log_weights is None else np.asarray(log_weights)[i, :, kv]
        ratio = np.zeros(len(w))
        if c is not None:
            keys = keys - c[kv]
        true = q @ keys.T
        if root is not None:
            drawn, w = w, w @ root[kv].T
            ratio = -np.sum(w**2, -1) / 2 + np.sum(drawn**2, -1) / 2
            ratio = ratio + np.linalg.slogdet(root[kv])[1]
        if m is not None:
            q, keys = q @ m[kv], keys @ inverse[kv]
        half = [np.sum(x**2, axis=-1) / 2 for x in (q, keys)]
        terms = (q @ w.T)[:, None] + (keys @ w.T)[None] + ratio
        terms = terms - half[0][:, None, None] - half[1][None, :, None]
        estimate = np.logaddexp.reduce(terms, axis=-1) - math.log(len(w))
        logits = np.where(exact[i], true, estimate) + bias
        logits = logits + of_pairs[i, head]
        logits = np.where(seen[i], logits, -np.inf)
        weights = np.exp(logits - np.max(logits, axis=-1, initial=-1e9, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        out[i, :, head] = weights @ value[i, :, kv] / np.where(total == 0, 1, total)
    return out
