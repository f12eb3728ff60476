"""The values of a call of `performer_attention`.

    Tokens     queries, keys and values
    Estimate   the estimate of e^{q.k}: frequencies, weights, calibration, feature map, scale
    Exact      pairs that have e^{q.k} itself
    Pairs      weights of pairs that depend on their positions
    Plan       how the sums are computed: it changes only rounding

They are made once and passed on whole. A new option is a field of one of them.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from performer import features
from performer.calibration import Calibration
from performer.features import FeatureMap
from performer.typing import Size

STATIC: Any = {"static": True}
"""Metadata of a field that belongs to the structure."""


class Tokens(NamedTuple):
    """Queries, keys and values."""

    query: Float[Array, "*b t n h"]
    key: Float[Array, "*b s k h"]
    value: Float[Array, "*b s k v"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Estimate:
    """The estimate of e^{scale q.k}. Fields are keywords of `performer_attention`."""

    frequencies: Float[Array, "..."]
    """(m, h), or one draw for each key head or each query head."""
    query_frequencies: Float[Array, "..."] | None = None
    """The same shape."""
    weights: Float[Array, "..."] | None = None
    """(m,), or one row for each draw."""
    calibration: Calibration | None = None
    feature_map: FeatureMap = field(default=features.positive, metadata=STATIC)
    scale: float = field(default=1.0, metadata=STATIC)
    stabilizer: str = field(default="exact", metadata=STATIC)
    absolute: bool = field(default=False, metadata=STATIC)
    """True if the estimate must be exp(scale q.k) itself, not a multiple (needed with exact
    pairs)."""

    @property
    def num_features(self) -> Size:
        """Number of features of a token."""
        return self.frequencies.shape[-2] * self.feature_map.features_per_frequency


class Exact(NamedTuple):
    """Pairs that are computed exactly, as numbers of tokens; 0 for none.

    The fields are the keywords `exact_window`, ... of `performer.performer_attention`.
    """

    window: int = 0
    """Tokens of a window; keys of the same and of neighbouring windows are exact."""
    first: int = 0
    """First keys, for all queries."""
    keys: int = 0
    """Keys of a head with the largest estimated weights, for all queries."""
    rows: int = 0
    """First queries, against all keys."""

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `performer_attention`: {"exact_window": 0, ...}."""
        return {f"exact_{name}": number for name, number in self._asdict().items()}

    @property
    def is_mixed(self) -> bool:
        """True if rows have both exact pairs and features."""
        return self.window > 0 or self.keys > 0

    def __str__(self) -> str:
        """The options that are not 0, for example exact_window=8, exact_first=1."""
        return ", ".join(f"{name}={number}" for name, number in self.options.items() if number)


NOT_EXACT = Exact()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Weights of pairs of a query and a key that depend on their positions."""

    log_weights: Float[Array, "b s #k"] | None = None
    """Log-weights of keys; -inf for no key, None for 0 everywhere."""
    exists: Bool[Array, "b s"] | None = None
    """Mask and lengths of keys; None if all exist. The others get the log-weight -inf within the
    compiled program: between programs JAX's `jax_debug_infs` would report it."""
    log_decay: Float[Array, "b t n"] | None = None
    """Log-decay of tokens, for each key head or each query head."""
    segments: tuple[Int[Array, "b t"], Int[Array, "b s"] | None] | None = None
    """Segments of queries and of keys; None for keys in self attention."""
    is_causal: bool = field(default=False, metadata=STATIC)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Plan:
    """How the sums of a call are computed."""

    axis_name: str | None = None
    return_state: bool = False
    robust: bool = False
    chunk: Size = 0
    """Tokens of a causal chunk."""
    block: Size = 0
    """Tokens whose features exist at a time."""
    kernel: Any = None
    """`kernels.which.Kernel`; None computes without kernels."""


def state_heads(n: Size, k: Size, estimate: Estimate, pairs: Pairs) -> Size:
    """Return the number of heads with separate sums.

    These are the n query heads where each has its own frequencies or decay, else the k key
    heads.
    """
    per_query_head = estimate.frequencies.shape[:-2] == (n,)
    decay = pairs.log_decay
    return n if per_query_head or (decay is not None and decay.shape[-1] == n) else k
