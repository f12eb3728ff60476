"""Sixty calls of `performer_attention`, whose outputs and gradients `recorded.npz` holds.

They were recorded on an x86 processor before `Features` and `Bias` replaced single keywords. Tokens
follow from a seed by NumPy; frequencies are stored, so that a coupling may change its draws.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SEED = 7
KEPT = 23
"""Tokens of an output that are stored, evenly spaced."""


@dataclass(frozen=True)
class Recorded:
    """A call: sizes, and what is not the default."""

    t: int = 12
    s: int | None = None
    """Keys; None for t."""
    batch: tuple[int, ...] = (2,)
    n: int = 2
    k: int = 2
    h: int = 4
    v: int = 3
    m: int = 8
    draws: int | None = 2
    """Heads with frequencies of their own; None for one draw."""
    size: float = 1.0
    """Factor on queries and keys."""
    dtype: str = "float32"
    feature_map: str = "positive"
    calibration: str = "none"
    learned: bool = False
    """Other frequencies for queries, and weights."""
    weighted: bool = False
    exact: dict[str, int] = field(default_factory=dict)
    causal: bool = False
    scale: float | None = None
    masked: bool = False
    lengths: bool = False
    log_weights: str = ""
    """"", "keys" or "heads"."""
    alibi: bool = False
    decay: bool = False
    packed: str = ""
    """"", "self" or "cross"."""
    streamed: bool = False
    """In two calls, the second from the state of the first."""
    implementation: str | None = None

    def tokens(self) -> list[np.ndarray]:
        """Queries, keys and values."""
        draw, s = np.random.default_rng(SEED), self.s or self.t
        shapes = (self.t, self.n, self.h), (s, self.k, self.h), (s, self.k, self.v)
        tokens = [draw.standard_normal((*self.batch, *x)).astype(np.float32) for x in shapes]
        return [self.size * tokens[0], self.size * tokens[1], tokens[2]]

    def others(self) -> dict[str, Any]:
        """The arrays that weigh pairs, by name."""
        draw, s = np.random.default_rng(SEED + 1), self.s or self.t
        arrays: dict[str, Any] = {}
        exists = draw.random((*self.batch, 1, 1, s)) < 0.8
        weights = draw.standard_normal((*self.batch, s, self.k)).astype(np.float32)
        decay = -np.abs(draw.standard_normal((*self.batch, self.t, self.k))).astype(np.float32)
        ids = np.sort(draw.integers(0, 3, (*self.batch, s)), axis=-1)
        if self.masked:
            arrays["mask"] = exists
        if self.lengths:
            arrays["key_value_seq_lengths"] = np.array([s - 3, s])
        if self.log_weights:
            arrays["keys"] = weights if self.log_weights == "heads" else weights[..., 0]
        if self.alibi:
            arrays["slopes"] = np.float32(2.0) ** -np.arange(1, self.n + 1, dtype=np.float32)
        if self.decay:
            arrays["decay"] = decay / 4
        if self.packed == "self":
            arrays["segment_ids"] = ids
        if self.packed == "cross":
            arrays["segment_ids"] = (ids[..., : self.t], ids)
        return arrays


LONG, SHORT = dict(t=150, batch=(1,)), dict(size=0.5)
CALLS = {
    "plain": Recorded(),
    "one draw": Recorded(draws=None),
    "cross": Recorded(s=17),
    "one query": Recorded(t=1, s=17),
    "grouped": Recorded(n=4, k=2),
    "grouped, each head": Recorded(n=4, k=2, draws=4),
    "two batch axes": Recorded(batch=(2, 2)),
    "no batch axis": Recorded(batch=()),
    "scale": Recorded(scale=0.2),
    "long": Recorded(**LONG, size=2.0),
    "large norms": Recorded(size=6.0),
    "bfloat16": Recorded(dtype="bfloat16"),
    "bfloat16 causal": Recorded(dtype="bfloat16", causal=True),
    "mask": Recorded(masked=True),
    "lengths": Recorded(lengths=True),
    "mask and lengths": Recorded(masked=True, lengths=True),
    "log-weights": Recorded(log_weights="keys"),
    "log-weights of heads": Recorded(log_weights="heads", masked=True),
    "causal": Recorded(causal=True),
    "causal long": Recorded(**LONG, causal=True),
    "causal masked": Recorded(causal=True, masked=True),
    "causal cross": Recorded(causal=True, s=17),
    "causal one draw": Recorded(causal=True, draws=None, n=4, k=2),
    "causal robust": Recorded(causal=True, size=8.0, implementation="robust"),
    "causal blocked": Recorded(**LONG, causal=True, implementation="blocked"),
    "alibi": Recorded(alibi=True),
    "alibi causal": Recorded(alibi=True, causal=True),
    "alibi long": Recorded(**LONG, alibi=True, causal=True),
    "alibi of query heads": Recorded(alibi=True, causal=True, n=4, k=2),
    "decay": Recorded(decay=True),
    "decay causal": Recorded(decay=True, causal=True, masked=True),
    "alibi and log-weights": Recorded(alibi=True, causal=True, log_weights="heads"),
    "segments": Recorded(packed="self"),
    "segments causal": Recorded(packed="self", causal=True, masked=True),
    "segments cross": Recorded(packed="cross", s=17),
    "segments alibi": Recorded(packed="self", causal=True, alibi=True),
    "shift": Recorded(calibration="shift"),
    "shift and scale": Recorded(calibration="shift+scale", size=2.0),
    "full": Recorded(calibration="full"),
    "full causal": Recorded(calibration="full", causal=True),
    "proposal": Recorded(calibration="shift+proposal"),
    "weights": Recorded(weighted=True),
    "learned": Recorded(learned=True),
    "learned window": Recorded(learned=True, exact=dict(window=3), causal=True),
    "hyperbolic": Recorded(feature_map="hyperbolic"),
    "trigonometric": Recorded(feature_map="trigonometric", **SHORT),
    "relu": Recorded(feature_map="relu", log_weights="keys"),
    "elu+1 causal": Recorded(feature_map="elu+1", causal=True),
    "window": Recorded(exact=dict(window=3)),
    "window causal": Recorded(exact=dict(window=3, first=2), causal=True),
    "window long": Recorded(**LONG, exact=dict(window=8, first=1), causal=True),
    "window calibrated": Recorded(exact=dict(window=3, first=1), calibration="full", causal=True),
    "window alibi": Recorded(exact=dict(window=3, first=1), alibi=True, causal=True),
    "window segments": Recorded(exact=dict(window=3, first=1), packed="self", causal=True),
    "exact keys": Recorded(exact=dict(keys=4), size=2.0),
    "exact keys calibrated": Recorded(exact=dict(keys=4), calibration="full", masked=True),
    "exact keys and rows": Recorded(exact=dict(keys=4, rows=1), s=17, n=4, k=2),
    "exact rows": Recorded(exact=dict(rows=2), masked=True, log_weights="keys"),
    "stream": Recorded(streamed=True, causal=True, decay=True),
    "stream of a window": Recorded(streamed=True, causal=True, exact=dict(window=3, first=1)),
}
