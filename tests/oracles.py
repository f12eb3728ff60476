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
