"""The values of a call of `performer_attention`.

    Tokens     queries, keys and values
    Features   how e^{q.k} is estimated, and which pairs have e^{q.k} itself
    Bias       what is added to the logarithms of pairs (`bias`)
    Pairs      masks, bias and segments as arrays of one shape
    Call       sizes, dtypes and static options: all that refusals and plans depend on
    Plan       how the sums are computed

They are made once and passed on whole. A new option is a field of one of them.
"""

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from performer import calibration as calibrations
from performer import couplings, features
from performer.calibration import Calibration
from performer.features import FeatureMap
from performer.typing import Coupling, Size

STATIC: Any = {"static": True}
"""Metadata of a field that belongs to the structure."""
if TYPE_CHECKING:
    Leaf = Any
else:
    Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""An array, or its shape and dtype for `explain` and `jax.eval_shape`."""


class Tokens(NamedTuple):
    """Queries, keys and values."""

    query: Float[Array, "*b t n h"]
    key: Float[Array, "*b s k h"]
    value: Float[Array, "*b s k v"]


class Exact(NamedTuple):
    """Pairs that are computed by e^{q.k} itself, as numbers of tokens; 0 for none.

    Near, first and heavy keys share one normaliser with the estimate of the others. All require a
    feature map that estimates softmax, and `weights` of the kernel itself (1 / m if None).

    Example:
        >>> features = Features(w, exact=Exact(window=16, first=1))
    """

    window: int = 0
    """w: tokens form windows of w; keys of the same and the previous window are near, and keys of
    the next if not causal. These are blocks: in a sliding window each query would have as many near
    keys. Packed sequences are cut one after another, in the order of their numbers, so their near
    keys depend on the lengths before them unless w divides these. Masked tokens count as positions:
    put padding at the end. Requires t = s."""
    first: int = 0
    """Number of first keys (of each segment) that are exact for all queries, among those that
    exist. Requires a window."""
    keys: int = 0
    """f: the f keys of each head with the largest weights, for all queries. Weights are estimated
    sums over all queries of the attention to a key, in O((t + s) m). The choice has no gradient;
    f >= s is softmax attention. A head is a key head, or a query head with its own frequencies.
    Cannot be combined with causal attention, segments, decay or states."""
    rows: int = 0
    """Number of first queries, such as class token and registers, with softmax attention, at the
    cost of O(s) each. Cannot be combined with causal attention, segments, decay or states."""

    @property
    def mixed(self) -> bool:
        """True if rows have both exact pairs and features."""
        return self.window > 0 or self.keys > 0

    def __str__(self) -> str:
        """The fields that are not 0, for example Exact(window=8, first=1)."""
        given = ", ".join(f"{name}={x}" for name, x in self._asdict().items() if x)
        return f"Exact({given})"


NOT_EXACT = Exact()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """How e^{scale q.k} is estimated: what a layer keeps and a checkpoint stores.

    A pytree: arrays are leaves, the other fields belong to its structure. An array of frequencies
    alone may stand for `Features(frequencies)` in every call.

    Example:
        >>> features = Features.draw(random_key, "pm-antithetic", 128, 64, num_heads=12)
        >>> features = features.calibrated(query, key)
        >>> output = performer_attention(query, key, value, features)
    """

    frequencies: Float[Leaf, "*n m h"] | None
    """N(0, I_h) rows drawn by a coupling, rounded to the dtype of queries: (m, h) for all heads,
    (k, m, h) for key heads, or (n, m, h) for query heads at the cost of n key heads. None has no
    features: only the pairs of a window are attended to."""
    calibration: Calibration | None = None
    """Result of `performer.calibration`, for each key head or for all. Shift and scale can be
    combined with every map that estimates softmax, a tilt or a proposal only with "positive". It
    changes the variance of the estimate, not softmax attention."""
    weights: Float[Leaf, "*w m"] | None = None
    """(m,), or a row for each draw: non-negative weights of the frequencies in the kernel
    (importance sampling). They are added to exponents, which float32 resolves to 6e-8 of the sum of
    |w.q|, |w.k|, |k|^2 / 2 and |log weight|."""
    query_frequencies: Float[Leaf, "*n m h"] | None = None
    """Frequencies of the queries where learned features differ from the keys'
    (`performer.refinement`), in the same shape. The estimate is biased. A calibration may then have
    shift and scale alone."""
    feature_map: str | FeatureMap = field(default="positive", metadata=STATIC)
    """"positive", "hyperbolic" (pairs [W, -W] for half the projections; with a coupling that has
    the pairs already, such as "pm-antithetic", it repeats features), "trigonometric" (attention may
    be negative, sums may vanish), "relu", "elu+1", or a `features.FeatureMap`. The last two words
    are kernels of their own; with frequencies `jnp.eye(h)` and scale 1 they give linear attention
    (Katharopoulos et al. 2020), where a query whose features are all 0 returns 0."""
    coupling: str | Coupling | None = field(default=None, metadata=STATIC)
    """Coupling of the frequencies, for `calibrated` and `redrawn`; None if unknown."""
    exact: Exact = field(default=NOT_EXACT, metadata=STATIC)
    """Pairs that have e^{q.k} itself."""
    trainable: bool = field(default=False, metadata=STATIC)
    """True to differentiate attention with respect to the arrays here. They are constants by
    default, so that an optimiser that sees them as parameters has no gradient for them. Weight
    decay shrinks them nevertheless: mask it."""

    @classmethod
    def draw(
        cls,
        key: PRNGKeyArray,
        coupling: str | Coupling,
        num_features: int,
        head_dim: int,
        num_heads: int | None = None,
        *,
        feature_map: str | FeatureMap = "positive",
        exact: Exact = NOT_EXACT,
        trainable: bool = False,
    ) -> "Features":
        """Draw frequencies from a coupling.

        Args:
            key: random key.
            coupling: name of a coupling, as of `performer.couplings.get`, or a coupling.
            num_features: m; 0 for the pairs of a window alone.
            head_dim: h.
            num_heads: heads with a draw of their own, in shape (num_heads, m, h); None for one.
            feature_map: as the field.
            exact: as the field.
            trainable: as the field.

        Raises:
            ValueError: for an unknown coupling, or sizes that it does not admit.
        """
        drawn = None
        if num_features:
            drawn = couplings.draw(key, coupling, num_features, head_dim, num_heads)
        static: Any = dict(feature_map=feature_map, exact=exact, trainable=trainable)
        return cls(drawn, coupling=coupling, **static)

    def redrawn(self, key: PRNGKeyArray) -> "Features":
        """Return the same with a new draw of the frequencies.

        Raises:
            ValueError: without a coupling or frequencies, or for learned features.
        """
        w = self.frequencies
        if self.coupling is None or w is None or self.query_frequencies is not None:
            raise ValueError(
                f"these features cannot be drawn again: coupling={self.coupling!r},"
                f" {'no' if w is None else 'given'} frequencies,"
                f" {'no' if self.query_frequencies is None else 'learned'} query_frequencies;"
                " make them by Features.draw"
            )
        heads = w.shape[0] if w.ndim == 3 else None
        drawn = couplings.draw(key, self.coupling, w.shape[-2], w.shape[-1], heads)
        return replace(self, frequencies=drawn.astype(w.dtype))

    def calibrated(
        self,
        query: Float[Array, "*b t n h"],
        key: Float[Array, "*b s k h"],
        method: str = "full",
        *,
        scale: float | None = None,
        mask: ArrayLike | None = None,
        is_causal: bool = False,
        segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    ) -> "Features":
        """Return the same with a calibration to queries and keys (`performer.calibration`).

        Arguments and errors as of `performer.calibration.calibrate`; it is told the coupling, and
        whether exact pairs stand beside the features.
        """
        pairs: Any = dict(scale=scale, mask=mask, is_causal=is_causal, segment_ids=segment_ids)
        how: Any = dict(coupling=self.coupling, method=method, mixed=self.exact.mixed)
        return replace(self, calibration=calibrations.calibrate(query, key, **how, **pairs))

    def refined(
        self,
        query: Float[Array, "b t n h"],
        key: Float[Array, "b s k h"],
        *,
        steps: int,
        is_causal: bool = False,
    ) -> "Features":
        """Return the same with frequencies moved towards softmax attention.

        As `performer.refinement.refined`, which documents arguments and errors.
        """
        refinement = import_module("performer.refinement")  # it calls attention, with these values
        sample = refinement.Sample.of(query, key)
        return refinement.refined(self, sample, steps=steps, is_causal=is_causal)

    @property
    def constant(self) -> "Features":
        """The same, as constants of differentiation unless `trainable`."""
        return self if self.trainable else jax.lax.stop_gradient(self)

    @property
    def map(self) -> FeatureMap:
        """The feature map; ValueError for an unknown name."""
        return features.get(self.feature_map)

    @property
    def num_features(self) -> Size:
        """Number of features of a token; 0 without frequencies."""
        if self.frequencies is None:
            return 0
        return self.frequencies.shape[-2] * self.map.features_per_frequency


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


class Call(NamedTuple):
    """A call without its arrays: all that refusals and plans depend on."""

    batch: Size = 1
    t: Size = 1
    """Queries."""
    s: Size = 1
    """Keys."""
    n: Size = 1
    """Query heads."""
    k: Size = 1
    """Key heads."""
    h: Size = 16
    """Width of queries and keys."""
    v: Size = 16
    """Width of values."""
    m: Size = 16
    """Frequencies; 0 for none."""
    per_query_head: bool = False
    """True if each query head has frequencies of its own."""
    dtypes: tuple[str, ...] = ("float32",) * 3
    """Names of the dtypes of query, key and value."""
    feature_map: FeatureMap = features.positive
    exact: Exact = NOT_EXACT
    calibrated: bool = False
    sampled: bool = False
    """True if the calibration has a tilt or a proposal."""
    learned: bool = False
    """True with frequencies of queries."""
    weighted: bool = False
    """True with weights of frequencies."""
    scale: float = 1.0
    is_causal: bool = False
    lengths: bool = False
    """True with lengths of keys."""
    packed: bool = False
    """True with segment_ids."""
    cross_packed: bool = False
    """True with a pair of segment_ids."""
    decayed: bool = False
    """True with a decay."""
    streams: bool = False
    """True with a state before or after the call."""
    residual: bool = False
    """True if the logarithm of each normaliser is returned."""
    axis_name: str | None = None
    implementation: str | None = None

    @property
    def absolute(self) -> bool:
        """True if the estimate must be exp(scale q.k) itself, not a multiple for each query."""
        return any(self.exact) or self.residual


@jax.tree_util.register_static
@dataclass(frozen=True)
class Plan:
    """How the sums of a call are computed."""

    scale: float = 1.0
    absolute: bool = False
    """As of `Call`."""
    residual: bool = False
    """As of `Call`."""
    axis_name: str | None = None
    return_state: bool = False
    robust: bool = False
    heads: Size = 0
    """Heads with separate sums that are computed at a time; 0 for all."""
    chunk: Size = 0
    """Tokens of a causal chunk."""
    block: Size = 0
    """Tokens whose features exist at a time."""
    kernel: Any = None
    """`kernels.which.Kernel`; None computes without kernels."""


def state_heads(n: Size, k: Size, features: Features, pairs: Pairs) -> Size:
    """Return the number of heads with separate sums.

    These are the n query heads where each has its own frequencies or decay, else the k key heads.
    """
    w, decay = features.frequencies, pairs.log_decay
    per_query_head = w is not None and w.shape[:-2] == (n,)
    return n if per_query_head or (decay is not None and decay.shape[-1] == n) else k


def as_features(given: Any) -> Features:
    """An array of frequencies as `Features`; ValueError for what is neither."""
    if isinstance(given, Features):
        return given
    if isinstance(given, str):
        raise ValueError(
            f"features={given!r} is a name; draw them: performer.Features.draw(jax.random.key(0),"
            f" {given!r}, num_features, head_dim)"
        )
    if given is None or not hasattr(given, "dtype"):
        raise ValueError(
            f"features is a {type(given).__name__}; expected performer.Features, drawn by"
            " performer.Features.draw(key, 'pm-antithetic', num_features, head_dim), or an array of"
            " frequencies (num_features, head_dim)"
        )
    return Features(given)
