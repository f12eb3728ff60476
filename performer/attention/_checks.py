"""The values that a call of `performer_attention` is made of, and what it refuses.

    Estimate   the estimate of e^{q.k}
    Window     pairs that have e^{q.k} itself (`performer.typing`)
    Pairs      weights of pairs by their places (`_masks`)

They are made once and passed on whole: a new option is a field of one of them. `Plan` is how the
sums are computed, which changes nothing but rounding.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from performer import features
from performer.attention import _masks
from performer.attention._masks import Pairs
from performer.attention.calibration import Calibration
from performer.attention.state import State, WindowState
from performer.features import FeatureMap
from performer.typing import Size, Window

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
    """The estimate of e^{scale q.k}, by the keywords of `performer_attention`."""

    frequencies: Float[Array, "..."]
    """(m, h), or one draw for each key head or each query head."""
    query_frequencies: Float[Array, "..."] | None = None
    """The same shape."""
    weights: Float[Array, "..."] | None = None
    """(m,), or one row for each draw."""
    calibration: Calibration | None = None
    """Calibration, which may be a shift alone."""
    feature_map: FeatureMap = field(default=features.positive, metadata=STATIC)
    scale: float = field(default=1.0, metadata=STATIC)
    google: bool = field(default=False, metadata=STATIC)
    """Stabiliser of Choromanski et al. 2021 instead of the exact one."""
    itself: bool = field(default=False, metadata=STATIC)
    """The estimate is of the kernel itself, not of a multiple, as beside exact pairs."""

    @property
    def num_features(self) -> Size:
        """Number of features of a token."""
        return self.frequencies.shape[-2] * self.feature_map.features_per_frequency


class Operands(NamedTuple):
    """Arrays of a kernel, or gradients, blocks or references of them; None for none."""

    query: Any = None
    key: Any = None
    value: Any = None
    w_query: Any = None
    w_key: Any = None
    feature_bias: Any = None
    log_weights: Any = None


class Kernel(NamedTuple):
    """Static options of the kernels for TPU and GPU."""

    scale: float
    is_causal: bool
    heads: int
    """Key heads of a block, on a TPU."""
    block: int
    """Tokens of a block, on a TPU."""
    platform: str
    """"tpu" or "cuda"."""
    interpret: bool = False


@jax.tree_util.register_static
@dataclass(frozen=True)
class Plan:
    """Plan of the computation of a call."""

    axis_name: str | None = None
    return_state: bool = False
    robust: bool = False
    chunk: Size = 0
    """Tokens of a causal chunk."""
    block: Size = 0
    """Tokens whose features exist at a time."""
    kernel: Kernel | None = None
    """Options of the kernels; None computes without them."""


def with_one_batch_axis(tokens: Tokens) -> Tokens:
    """Queries, keys and values as (b, t, n, h); raises ValueError where they do not fit."""
    for name, x in tokens._asdict().items():
        check_dtype(name, x)
    shapes, axes = [x.shape for x in tokens], tokens.query.ndim - 3
    (*lead, _, n, h), (*also, s, k, width), (*rest, _) = shapes
    if not (lead == also and h == width and rest == [*lead, s, k]) or not k or n % k:
        raise ValueError(
            f"query has shape {shapes[0]}, key has {shapes[1]} and value has {shapes[2]}: batch and"
            " head_dim must be the same, lengths and heads those of key for value, and the heads of"
            " query a multiple of those of key"
        )
    return Tokens(*(one_axis(x, axes) for x in tokens))


def one_axis(x: Array, axes: int) -> Array:
    """The first `axes` axes as one."""
    return x if axes == 1 else x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:])


def check_dtype(name: str, x: Array) -> None:
    """Raise ValueError for a dtype that attention does not compute in."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
        raise ValueError(
            f"{name} has dtype {x.dtype}; attention takes float32, bfloat16, float16 and"
            " float64: cast it"
        )


def check_estimate(estimate: Estimate, tokens: Tokens) -> None:
    """Raise ValueError for shapes that do not fit, and for options that exclude each other."""
    if not estimate.scale > 0:
        raise ValueError(f"scale must be positive, got {estimate.scale}")
    (n, h), k = tokens.query.shape[2:], tokens.key.shape[2]
    frequencies, feature_map = estimate.frequencies, estimate.feature_map
    own, weights = estimate.query_frequencies, estimate.weights
    calibration = estimate.calibration or Calibration()
    check_dtype("frequencies", frequencies)
    if frequencies.shape[-1] != h or frequencies.shape[:-2] not in ((), (k,), (n,)):
        heads = sorted({k, n})
        raise ValueError(
            f"frequencies have shape {frequencies.shape}; expected (m, {h}) for the head_dim {h},"
            f" or {' or '.join(f'({x}, m, {h})' for x in heads)} with one draw for each of the"
            f" {' key or '.join(map(str, heads))} heads"
        )
    if own is not None and own.shape != frequencies.shape:
        raise ValueError(
            f"query_frequencies have shape {own.shape} but frequencies have {frequencies.shape}:"
            " they must be the same"
        )
    if own is not None and calibration.changes_law:
        raise ValueError(
            "query_frequencies go with a calibration of shift and scale: its root and mean are a"
            " law that frequencies are drawn from, and these are learned"
        )
    for name, leaf in calibration._asdict().items():
        want = (h,) if name in ("shift", "mean") else (h, h)
        if leaf is not None and leaf.shape not in (want, (k, *want)):
            raise ValueError(
                f"calibration.{name} has shape {leaf.shape}; expected {want}, or {(k, *want)} with"
                f" one for each of the {k} key heads"
            )
    if weights is not None:
        m = frequencies.shape[-2]
        if weights.shape not in ((m,), frequencies.shape[:-1]):
            raise ValueError(
                f"weights have shape {weights.shape}; expected ({m},), or one row for each head of"
                f" the frequencies, which have shape {frequencies.shape}"
            )
        if (bad := _masks.first(weights, lambda x: ~(x >= 0))) is not None:
            raise ValueError(f"weights must not be negative, got {bad}")
    if estimate.google and not feature_map.exponential:
        raise ValueError(
            f"stabilizer='google' is for feature_map={features.positive}, not {feature_map}"
        )
    if estimate.calibration is None:
        return
    got = f"got {_given(estimate)}"
    more = any(leaf is not None for leaf in calibration[1:])
    if (estimate.google and more) or not feature_map.estimates_softmax:
        raise ValueError(
            "a shift or a calibration needs a feature_map that estimates softmax, as"
            f" {features.positive}, and a calibration stabilizer='exact', {got}"
        )
    if calibration.changes_law and not feature_map.exponential:
        raise ValueError(
            f"a calibration with a tilt or a proposal needs feature_map={features.positive}, {got};"
            " one of shift and scale alone serves every map that estimates softmax (the pairs of"
            f" {features.hyperbolic} are the frequencies of an '-antithetic' coupling)"
        )


def check_together(
    tokens: Tokens, estimate: Estimate, exact: Window, pairs: Pairs, streams: bool, plan: Plan
) -> None:
    """Raise ValueError for options that exclude each other: exact pairs, decay, states, devices.

    `streams` is True if the call has a state before or after it.
    """
    (t, s), is_causal, split = (x.shape[1] for x in tokens[:2]), pairs.is_causal, plan.axis_name
    w, f, chosen, rows = exact
    packed, decays = pairs.segments is not None, pairs.log_decay is not None
    apart = pairs.segments is not None and pairs.segments[1] is not None
    given = ", ".join(f"{name}={x}" for name, x in exact._asdict().items() if x)
    reasons = {
        f"{given} must not be negative": min(exact) < 0,
        f"exact_first={f} goes with an exact_window; give that one, too": f and not w,
        f"{given} needs an estimate of softmax beside it: a feature_map such as"
        f" {features.positive} and stabilizer='exact', got {_given(estimate)}": (
            any(exact) and (not estimate.feature_map.estimates_softmax or estimate.google)
        ),
        f"exact_keys={chosen} does not go with is_causal=True: the weight of a key is a sum"
        " over all queries, so the choice would depend on the future; use exact_window and"
        " exact_first": chosen and is_causal,
        f"exact_keys={chosen} does not go with segment_ids, alibi_slopes or log_decay: keys"
        " are chosen for a whole sequence, by their content": chosen and (packed or decays),
        f"exact_window={w} needs one key for each query, got {t} and {s}": w and t != s,
        f"exact_window={w} needs the same segment_ids for queries and keys": w and apart,
        f"alibi_slopes and log_decay need one key for each query, got {t} queries and {s} keys"
        " (or segments of their own); for other keys there is key_log_weights": (
            decays and (t != s or apart)
        ),
        "alibi_slopes and log_decay need stabilizer='exact', got 'google'": (
            decays and estimate.google
        ),
        "causal segments and a causal state need one key for each query, got"
        f" {t} queries and {s} keys": is_causal and t != s and (streams or packed),
        "segment_ids and states do not go together: a segment ends with its call": (
            streams and packed
        ),
        f"exact_keys={chosen} and exact_rows={rows} need all queries and keys at once: leave"
        " out initial_state and return_state": streams and (chosen or rows),
        f"exact_window={w}, alibi_slopes and log_decay have a state in causal attention alone:"
        " pass is_causal=True": streams and not is_causal and (w or decays),
        "stabilizer='google' needs the maximum over all keys at once: it has no state to keep,"
        " or to exchange over an axis_name; use stabilizer='exact' for streaming": (
            estimate.google and (streams or split)
        ),
        f"exact_window={w} does not divide the {t} tokens of a device: choose one that does": (
            split and w and t % w
        ),
        f"exact_rows={rows} must be on the first device of axis_name, which has {t} queries": (
            split and rows > t
        ),
        "segment_ids do not go with axis_name: a segment stays on its device": (split and packed),
        "a causal state is that of one device; leave it out with axis_name": (
            split and is_causal and streams
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def _given(estimate: Estimate) -> str:
    """The feature map and the stabiliser of a call."""
    return f"{estimate.feature_map} and {'google' if estimate.google else 'exact'!r}"


def check_state(
    state: State | WindowState, tokens: Tokens, estimate: Estimate, exact: Window, pairs: Pairs
) -> None:
    """Raise ValueError for a state of calls with other frequencies, heads or exact keys.

    State and tokens have the batch axes of the call.
    """
    (*lead, _, n, _), k = tokens.query.shape, tokens.key.shape[-2]
    far = state.far if isinstance(state, WindowState) else state
    sizes = 0, 0
    if isinstance(state, WindowState):
        sizes = state.near.key.shape[-3] // 2, state.first.key.shape[-3]
        if (state.near.log_decay is None) != (pairs.log_decay is None):
            raise ValueError(
                "initial_state and this call must both have alibi_slopes or log_decay, or neither:"
                " the state holds the decay of near keys"
            )
    if sizes != exact[:2]:
        raise ValueError(
            "initial_state comes from a call with exact_window, exact_first ="
            f" {sizes}, this one has {exact[:2]}: they must be the same"
        )
    heads = heads_of_keys(n, k, estimate, pairs)
    want = (*lead, heads, estimate.num_features, tokens.value.shape[-1])
    if far.numerator.shape != want or far.maximum.shape != want[:-1]:
        raise ValueError(
            f"initial_state holds arrays of shape {far.maximum.shape} and"
            f" {far.numerator.shape}; these inputs need {want[:-1]} and {want}. A state serves"
            " calls with the same frequencies, batch and heads"
        )


def heads_of_keys(n: Size, k: Size, estimate: Estimate, pairs: Pairs) -> Size:
    """Heads with sums of their own: n where each query head has frequencies or decay, else k."""
    own = estimate.frequencies.shape[:-2] == (n,)
    return n if own or (pairs.log_decay is not None and pairs.log_decay.shape[-1] == n) else k
